// y = Final(Post(Norm(x))) for every element, norms being known: the second step of a pooled chain.
#pragma once

#include "tensor_piece.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

constexpr int kPointwiseThreads = 256;
constexpr int kPointwiseValues = 4;  // of a thread

// Divides numbers that are not negative; most fit in 32 bits, where that takes a fraction of the time.
__device__ inline int64_t divide(int64_t n, int64_t by) {
  return (n | by) >> 32 == 0 ? int64_t(uint32_t(n) / uint32_t(by)) : n / by;
}

// Places of a plane's pixels.
struct Plane {
  int64_t cols;
  int64_t row_stride;
  int64_t col_stride;

  __host__ __device__ explicit Plane(const Tensor& tensor)
      : cols(tensor.size[3]), row_stride(tensor.stride[2]), col_stride(tensor.stride[3]) {}

  __device__ int64_t offset(int64_t pixel) const {
    if (row_stride == cols * col_stride) return pixel * col_stride;  // spares a division
    const int64_t row = divide(pixel, cols);
    return row * row_stride + (pixel - row * cols) * col_stride;
  }
};

template <class T>
__device__ void store_value(const Tensor& tensor, int64_t offset, T y) {
  switch (tensor.dtype) {
    case DType::kFloat32:
      static_cast<float*>(tensor.data)[offset] = narrow<float>(y);
      break;
    case DType::kFloat64:
      static_cast<double*>(tensor.data)[offset] = narrow<double>(y);
      break;
    case DType::kBFloat16:
      static_cast<__nv_bfloat16*>(tensor.data)[offset] = narrow<__nv_bfloat16>(y);
      break;
    case DType::kFloat16:
      static_cast<__half*>(tensor.data)[offset] = narrow<__half>(y);
      break;
  }
}

// A block has some pixels of one channel of one sample.
template <class Chain, class T>
__global__ void __launch_bounds__(kPointwiseThreads)
    tensor_pointwise(const __grid_constant__ Tensor x, const __grid_constant__ Tensor output,
                     const Norm<T>* norms, const __grid_constant__ Arguments arguments,
                     int64_t blocks_per_plane) {
  static_assert(!Chain::Post::kReadsConv, "the conv's output is not here");
  const int64_t plane = divide(block_index(), blocks_per_plane);
  const int64_t channels = x.size[1];
  if (plane >= x.size[0] * channels) return;
  const int64_t sample = divide(plane, channels);
  const int64_t c = plane - sample * channels;
  Channel<T> channel = make_channel<T>(arguments, c);
  if (norms != nullptr) set_norm(channel, norms[plane]);

  const int64_t pixels = x.size[2] * x.size[3];
  const T* from = static_cast<const T*>(x.data) + sample * x.stride[0] + c * x.stride[1];
  const int64_t to = sample * output.stride[0] + c * output.stride[1];
  const int64_t first =
      (block_index() - plane * blocks_per_plane) * kPointwiseThreads * kPointwiseValues + threadIdx.x;
  T values[kPointwiseValues];  // all loads are on their way before the first store
#pragma unroll
  for (int i = 0; i < kPointwiseValues; ++i) {
    const int64_t p = first + i * kPointwiseThreads;
    if (p < pixels) values[i] = from[Plane(x).offset(p)];
  }
#pragma unroll
  for (int i = 0; i < kPointwiseValues; ++i) {
    const int64_t p = first + i * kPointwiseThreads;
    if (p >= pixels) continue;
    const T post = Chain::Post::value(Chain::Norm::value(values[i], channel), values[i], channel);
    store_value(output, to + Plane(output).offset(p), Chain::Final::value(post, post, channel));
  }
}

// norms: [N][C], or null where the chain has none. x has T's dtype, the output any.
template <class Chain, class T>
cudaError_t launch_pointwise(const Tensor& x, const Tensor& output, const Norm<T>* norms,
                             const Arguments& arguments, cudaStream_t stream) {
  if (element_count(x) == 0) return cudaSuccess;
  const int64_t blocks = cuda::divide_up(x.size[2] * x.size[3], kPointwiseThreads * kPointwiseValues);
  tensor_pointwise<Chain, T><<<grid_of(x.size[0] * x.size[1] * blocks, 1), kPointwiseThreads, 0, stream>>>(
      x, output, norms, arguments, blocks);
  return cudaGetLastError();
}

// Loads its kernel onto the current device.
template <class Chain, class T>
cudaError_t load_pointwise() {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, tensor_pointwise<Chain, T>);
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

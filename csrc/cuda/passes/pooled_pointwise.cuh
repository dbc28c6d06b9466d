// y = Final(Post(Norm(x))) for every pooled value, when the norm is known: the second step of a pooled chain.
#pragma once

#include "core/chain.h"
#include "cuda/conv/problem.cuh"
#include "cuda/device/launch.cuh"
#include "cuda/device/packs.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

constexpr int kPointwiseThreads = 64;
constexpr int kPointwiseValues = 16;  // of a thread: many, for its channel's parameters to be found for

// Of one channel of one sample: a thread's values, from `first` in steps of kPointwiseThreads.
template <class Chain, class Out>
__device__ void apply_norm(const float* from, const Tensor& output, int64_t sample, int c, int first,
                           const Channel<float>& channel) {
  const int cols = int(output.size[3]);
  const int pixels = int(output.size[2]) * cols;
  // Within a sample offsets fit in ints.
  const int row_stride = int(output.stride[2]);
  const int col_stride = int(output.stride[3]);
  const bool is_run = row_stride == cols * col_stride;  // spares a division
  Out* to = static_cast<Out*>(output.data) + sample * output.stride[0] + c * output.stride[1];
  float x[kPointwiseValues];  // all loads are on their way before the first store
#pragma unroll
  for (int i = 0; i < kPointwiseValues; ++i)
    if (first + i * kPointwiseThreads < pixels) x[i] = from[first + i * kPointwiseThreads];
#pragma unroll
  for (int i = 0; i < kPointwiseValues; ++i) {
    const int pixel = first + i * kPointwiseThreads;
    if (pixel >= pixels) break;
    const float y = Chain::Post::value(Chain::Norm::value(x[i], channel), x[i], channel);
    const int row = is_run ? 0 : pixel / cols;
    to[row * row_stride + (pixel - row * cols) * col_stride] =
        narrow<Out>(Chain::Final::value(y, y, channel));
  }
}

// A block has some values of one channel of one sample. p.pooled is [N][C][height][width] of the output.
template <class Chain>
__global__ void __launch_bounds__(kPointwiseThreads)
    pooled_pointwise(const __grid_constant__ ConvProblem p, int blocks_per_plane) {
  static_assert(!Chain::Post::kReadsConv, "the conv's output is not here");
  wait_for_earlier_kernels();
  const Tensor& output = p.output;
  const int c = blockIdx.y;
  const int64_t sample = blockIdx.x / blocks_per_plane;
  const int block = blockIdx.x - int(sample) * blocks_per_plane;
  const int first = block * kPointwiseThreads * kPointwiseValues + threadIdx.x;
  const int64_t plane = sample * output.size[1] + c;
  Channel<float> channel = make_channel<float>(p.arguments, c);
  set_norm(channel, p.norms[plane]);
  const float* from = p.pooled + plane * output.size[2] * output.size[3];
  switch (output.dtype) {
    case DType::kBFloat16:
      return apply_norm<Chain, __nv_bfloat16>(from, output, sample, c, first, channel);
    case DType::kFloat16:
      return apply_norm<Chain, __half>(from, output, sample, c, first, channel);
    default:
      return apply_norm<Chain, float>(from, output, sample, c, first, channel);
  }
}

template <class Chain>
cudaError_t launch_pointwise(const ConvProblem& p, bool overlaps, cudaStream_t stream) {
  constexpr int kBlockValues = kPointwiseThreads * kPointwiseValues;
  const int64_t* size = p.output.size;
  const int blocks_per_plane = int((size[2] * size[3] + kBlockValues - 1) / kBlockValues);
  const dim3 grid(unsigned(size[0]) * blocks_per_plane, unsigned(size[1]));
  return launch_kernel(pooled_pointwise<Chain>, {grid, kPointwiseThreads, 0, overlaps}, stream, p,
                       blocks_per_plane);
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

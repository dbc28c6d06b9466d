// Chains without a norm that store every value: one pass over a given tensor.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../core/chains.h"
#include "kernels.h"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

constexpr int kThreads = 256;
constexpr int kVectorBytes = 16;  // the widest load

template <class T, class Element>
__device__ T widen(Element x) {
  return static_cast<T>(x);
}

template <class Element, class T>
__device__ Element narrow(T x) {
  return static_cast<Element>(x);
}

// So many elements as the wider of both types puts into one load or store.
template <class In, class Out>
constexpr int kVectorElements = kVectorBytes / int(sizeof(In) > sizeof(Out) ? sizeof(In) : sizeof(Out));

template <class Element, int kCount>
struct alignas(sizeof(Element) * kCount) Pack {
  Element element[kCount];
};

template <class Chain, class T>
__device__ T apply(T v, const Arguments& arguments, int64_t channel) {
  const Channel<T> parameters =
      Chain::Pre::kReadsChannel || Chain::Post::kReadsChannel || Chain::Final::kReadsChannel
          ? make_channel<T>(arguments, channel)
          : Channel<T>{};
  const T y = Chain::Post::value(Chain::Pre::value(v, v, parameters), v, parameters);
  return Chain::Final::value(y, y, parameters);
}

// Input and output are dense and have the same strides: whole vectors, wherever in the tensor they stand.
template <class Chain, class T, class In, class Out>
__global__ void __launch_bounds__(kThreads) apply_dense(Problem problem, int64_t count) {
  constexpr int kCount = kVectorElements<In, Out>;
  const In* in = static_cast<const In*>(problem.input.data);
  Out* out = static_cast<Out*>(problem.output.data);
  const int64_t channel_stride = problem.input.stride[1];
  const int64_t channels = problem.input.size[1];
  const auto apply_at = [&](In x, int64_t i) {
    return narrow<Out>(apply<Chain, T>(widen<T>(x), problem.arguments, i / channel_stride % channels));
  };
  const int64_t step = int64_t(gridDim.x) * kThreads;
  const int64_t thread = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t vectors = count / kCount;
  for (int64_t i = thread; i < vectors; i += step) {
    const auto x = reinterpret_cast<const Pack<In, kCount>*>(in)[i];
    Pack<Out, kCount> y;
#pragma unroll
    for (int k = 0; k < kCount; ++k) y.element[k] = apply_at(x.element[k], i * kCount + k);
    reinterpret_cast<Pack<Out, kCount>*>(out)[i] = y;
  }
  for (int64_t i = vectors * kCount + thread; i < count; i += step) out[i] = apply_at(in[i], i);
}

template <class Chain, class T, class In, class Out>
__global__ void __launch_bounds__(kThreads) apply_strided(Problem problem, int64_t count) {
  const Tensor& in = problem.input;
  const Tensor& out = problem.output;
  const int64_t step = int64_t(gridDim.x) * kThreads;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < count; i += step) {
    int64_t rest = i;
    const int64_t w = rest % in.size[3];
    rest /= in.size[3];
    const int64_t h = rest % in.size[2];
    rest /= in.size[2];
    const int64_t c = rest % in.size[1];
    const int64_t n = rest / in.size[1];
    const In x = static_cast<const In*>(
        in.data)[n * in.stride[0] + c * in.stride[1] + h * in.stride[2] + w * in.stride[3]];
    static_cast<Out*>(
        out.data)[n * out.stride[0] + c * out.stride[1] + h * out.stride[2] + w * out.stride[3]] =
        narrow<Out>(apply<Chain, T>(widen<T>(x), problem.arguments, c));
  }
}

// NCHW or channels_last without gaps.
inline bool is_dense(const Tensor& tensor) {
  const int64_t* size = tensor.size;
  const int64_t* stride = tensor.stride;
  const bool contiguous = stride[3] == 1 && stride[2] == size[3] && stride[1] == size[2] * size[3];
  const bool channels_last = stride[1] == 1 && stride[3] == size[1] && stride[2] == size[3] * size[1];
  return (contiguous || channels_last) && stride[0] == size[1] * size[2] * size[3];
}

inline bool is_aligned(const void* data) { return reinterpret_cast<uintptr_t>(data) % kVectorBytes == 0; }

inline bool runs_dense(const Problem& problem) {
  const Tensor& in = problem.input;
  const Tensor& out = problem.output;
  bool same_strides = true;
  for (int d = 0; d < 4; ++d) same_strides &= in.stride[d] == out.stride[d];
  return same_strides && is_dense(in) && is_aligned(in.data) && is_aligned(out.data);
}

// Enough blocks for every multiprocessor of the largest card several times over; each strides through the
// rest.
inline int grid_of(int64_t items) {
  constexpr int64_t kMostBlocks = 16384;
  const int64_t blocks = (items + kThreads - 1) / kThreads;
  return int(blocks < kMostBlocks ? blocks : kMostBlocks);
}

template <class Chain, class T, class In, class Out>
struct OnePass {
  static cudaError_t launch(const Problem& problem, cudaStream_t stream) {
    const int64_t count = element_count(problem.input);
    if (runs_dense(problem)) {
      const int64_t vectors = (count + kVectorElements<In, Out> - 1) / kVectorElements<In, Out>;
      apply_dense<Chain, T, In, Out><<<grid_of(vectors), kThreads, 0, stream>>>(problem, count);
    } else {
      apply_strided<Chain, T, In, Out><<<grid_of(count), kThreads, 0, stream>>>(problem, count);
    }
    return cudaGetLastError();
  }

  static cudaError_t load() {
    cudaFuncAttributes attributes;
    const cudaError_t status = cudaFuncGetAttributes(&attributes, apply_dense<Chain, T, In, Out>);
    if (status != cudaSuccess) return status;
    return cudaFuncGetAttributes(&attributes, apply_strided<Chain, T, In, Out>);
  }
};

// Calls visit with the OnePass for the input's and the output's dtype: the output has the input's, or float.
template <class Chain, class Visit>
cudaError_t visit_dtypes(DType in, DType out, const Visit& visit) {
  if (in != out && (out != DType::kFloat32 || in == DType::kFloat64)) return cudaErrorInvalidValue;
  const bool widens = in != out;
  switch (in) {
    case DType::kFloat32:
      return visit(OnePass<Chain, float, float, float>{});
    case DType::kFloat64:
      return visit(OnePass<Chain, double, double, double>{});
    case DType::kBFloat16:
      if (widens) return visit(OnePass<Chain, float, __nv_bfloat16, float>{});
      return visit(OnePass<Chain, float, __nv_bfloat16, __nv_bfloat16>{});
    case DType::kFloat16:
      if (widens) return visit(OnePass<Chain, float, __half, float>{});
      return visit(OnePass<Chain, float, __half, __half>{});
  }
  return cudaErrorInvalidValue;
}

template <class Chain>
cudaError_t launch_one_pass(const Problem& problem, cudaStream_t stream) {
  static_assert(!Chain::kNeedsStatistics && !Chain::Reduce::kPools && !Chain::Reduce::kReducesChannels,
                "one pass stores every value and knows no statistics");
  if (element_count(problem.input) == 0) return cudaSuccess;
  return visit_dtypes<Chain>(problem.input.dtype, problem.output.dtype,
                             [&](auto pass) { return pass.launch(problem, stream); });
}

template <class Chain>
cudaError_t load_one_pass() {
  for (const DType in : {DType::kFloat32, DType::kFloat64, DType::kBFloat16, DType::kFloat16}) {
    for (const DType out : {in, in == DType::kFloat64 ? in : DType::kFloat32}) {
      const cudaError_t status = visit_dtypes<Chain>(in, out, [](auto pass) { return pass.load(); });
      if (status != cudaSuccess) return status;
    }
  }
  return cudaSuccess;
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

#define FUSEDCONV_CUDA_ONE_PASS_CHAIN(name, Composition)                       \
  namespace fusedconv {                                                        \
  namespace cuda {                                                             \
  const Kernel name{launch_one_pass<Composition>, load_one_pass<Composition>}; \
  }                                                                            \
  }

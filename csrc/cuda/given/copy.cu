#include "copy.h"

#include <cstdint>

#include "cuda/device/launch.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {
namespace {

constexpr int kThreads = 256;

template <class Word>
__device__ void copy_word(const Tensor& from, int64_t from_offset, const Tensor& to, int64_t to_offset) {
  static_cast<Word*>(to.data)[to_offset] = static_cast<const Word*>(from.data)[from_offset];
}

// Neighbouring threads have places that are neighbours in the last dimension.
__global__ void __launch_bounds__(kThreads)
    copy_strided(const __grid_constant__ Tensor from, const __grid_constant__ Tensor to, int64_t count) {
  const int64_t step = int64_t(gridDim.x) * kThreads;
  for (int64_t i = int64_t(blockIdx.x) * kThreads + threadIdx.x; i < count; i += step) {
    int64_t rest = i;
    int64_t from_offset = 0;
    int64_t to_offset = 0;
#pragma unroll
    for (int d = 3; d >= 0; --d) {
      const int64_t at = rest % from.size[d];
      rest /= from.size[d];
      from_offset += at * from.stride[d];
      to_offset += at * to.stride[d];
    }
    if (from.dtype == DType::kFloat32) {
      copy_word<uint32_t>(from, from_offset, to, to_offset);
    } else if (from.dtype == DType::kFloat64) {
      copy_word<uint64_t>(from, from_offset, to, to_offset);
    } else {
      copy_word<uint16_t>(from, from_offset, to, to_offset);
    }
  }
}

}  // namespace

cudaError_t launch_copy(const Tensor& from, const Tensor& to, cudaStream_t stream) {
  constexpr int64_t kMostBlocks = 16384;
  const int64_t count = element_count(from);
  const int64_t blocks = (count + kThreads - 1) / kThreads;
  const LaunchShape shape{dim3(unsigned(std::min(blocks, kMostBlocks))), kThreads, 0, false};
  return launch_kernel(copy_strided, shape, stream, from, to, count);
}

cudaError_t load_copy() { return load_kernel(copy_strided); }

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

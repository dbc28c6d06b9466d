#include "copy.h"

#include <cstdint>

#include "cuda/device/launch.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {
namespace {

constexpr int kThreads = 256;

// Neighbouring threads have places that are neighbours in the last dimension.
template <class Word>
__global__ void __launch_bounds__(kThreads) copy_strided(Tensor from, Tensor to, int64_t count) {
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
    static_cast<Word*>(to.data)[to_offset] = static_cast<const Word*>(from.data)[from_offset];
  }
}

template <class Word>
cudaError_t launch(const Tensor& from, const Tensor& to, cudaStream_t stream) {
  constexpr int64_t kMostBlocks = 16384;
  const int64_t count = element_count(from);
  const int64_t blocks = (count + kThreads - 1) / kThreads;
  copy_strided<Word>
      <<<int(blocks < kMostBlocks ? blocks : kMostBlocks), kThreads, 0, stream>>>(from, to, count);
  return cudaGetLastError();
}

}  // namespace

cudaError_t launch_copy(const Tensor& from, const Tensor& to, cudaStream_t stream) {
  switch (from.dtype) {
    case DType::kFloat64:
      return launch<uint64_t>(from, to, stream);
    case DType::kFloat32:
      return launch<uint32_t>(from, to, stream);
    case DType::kBFloat16:
    case DType::kFloat16:
      return launch<uint16_t>(from, to, stream);
  }
  return cudaErrorInvalidValue;
}

cudaError_t load_copy() {
  if (const cudaError_t status = load_kernel(copy_strided<uint64_t>)) return status;
  if (const cudaError_t status = load_kernel(copy_strided<uint32_t>)) return status;
  return load_kernel(copy_strided<uint16_t>);
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

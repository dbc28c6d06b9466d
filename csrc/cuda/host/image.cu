// What this image is, and its table of chains.
#include "image.h"

#include <limits>

#include "chain_kernels.h"
#include "core/chain_list.h"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {
namespace {

__global__ void any_kernel() {}

cudaError_t find_architecture(int& architecture) {
  cudaFuncAttributes attributes{};
  const cudaError_t status = cudaFuncGetAttributes(&attributes, any_kernel);
  architecture = attributes.ptxVersion;
  return status;
}

const cuda::Kernel* find_kernel(const std::string& chain) {
#define FUSEDCONV_MATCH(name) \
  if (chain == #name) return &chain_kernels::name;
  FUSEDCONV_FOR_EACH_CHAIN(FUSEDCONV_MATCH)
#undef FUSEDCONV_MATCH
  return nullptr;
}

[[maybe_unused]] constexpr int kAnyLater = std::numeric_limits<int>::max();

}  // namespace

extern const cuda::Image image;
#if defined(FUSEDCONV_SM90A)
const cuda::Image image{Instructions::kSm90a, 90, 90, find_architecture, find_kernel};
#elif defined(FUSEDCONV_GIVEN_ONLY)
const cuda::Image image{Instructions::kNone, 75, kAnyLater, find_architecture, find_kernel};
#else
const cuda::Image image{Instructions::kSm80, 80, kAnyLater, find_architecture, find_kernel};
#endif

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

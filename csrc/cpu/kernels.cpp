#include "kernels.h"

#include <cstring>

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

Kernel find_kernel(const char* chain) {
#define FUSEDCONV_MATCH(name) \
  if (std::strcmp(chain, #name) == 0) return {name, name##_backward};
  FUSEDCONV_FOR_EACH_CHAIN(FUSEDCONV_MATCH)
#undef FUSEDCONV_MATCH
  return {nullptr, nullptr};
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

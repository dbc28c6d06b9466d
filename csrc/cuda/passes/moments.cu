#include "moments.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

FUSEDCONV_MOMENTS_OF_V(, SplitHalves)
FUSEDCONV_MOMENTS_OF_V(, Halves)
FUSEDCONV_MOMENTS_OF_V(, BFloat16s)

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

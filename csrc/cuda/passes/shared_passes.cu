// Passes that several chains take, compiled once.
#include "conv_chain.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

FUSEDCONV_SHARED_PASS(, MomentsOfV)
FUSEDCONV_SHARED_PASS(, StoreV)

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

#include "moments.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

template cudaError_t launch_pass<MomentsPass<Sequence<>>>(const ConvProblem&, const Card&, cudaStream_t);
template cudaError_t load_pass<MomentsPass<Sequence<>>>(const Card&);

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

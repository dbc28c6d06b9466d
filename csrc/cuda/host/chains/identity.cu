// No operator's: backward computes a conv's output again by it.
#include "cuda/host/chain_kernels.h"
#ifndef FUSEDCONV_GIVEN_ONLY
#include "cuda/passes/conv_chain.cuh"
#endif

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

#ifdef FUSEDCONV_GIVEN_ONLY
// Plans say that PyTorch's conv runs.
const cuda::Kernel chain_kernels::identity{{},      nullptr, nullptr,
                                           nullptr, nullptr, [](const cuda::Card&) { return cudaSuccess; }};
#else
const cuda::Kernel chain_kernels::identity{{},      ConvOutput::workspace, ConvOutput::launch, nullptr,
                                           nullptr, ConvOutput::load};
#endif

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

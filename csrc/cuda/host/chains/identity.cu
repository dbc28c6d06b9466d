// No operator's: backward computes a conv's output again by it.
#include "cuda/host/chain_kernels.h"
#ifndef FUSEDCONV_GIVEN_ONLY
#include "cuda/passes/conv_output.cuh"
#endif

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

#ifdef FUSEDCONV_GIVEN_ONLY
namespace {

// The plan says that PyTorch's conv runs.
cuda::ConvPlan plan_conv_output(const Problem& problem, const cuda::Card& card) {
  return cuda::plan_conv(problem, {}, card);
}
size_t conv_output_workspace(const Problem&, const cuda::ConvPlan&, const cuda::Card&) { return 0; }
cudaError_t launch_conv_output(const Problem&, const cuda::ConvPlan&, void*, const cuda::Card&,
                               cudaStream_t) {
  return cudaErrorInvalidValue;
}
cudaError_t load_conv_output(const cuda::Card&) { return cudaSuccess; }

}  // namespace
#endif

const cuda::Kernel chain_kernels::identity{
    plan_conv_output, conv_output_workspace, launch_conv_output, nullptr, nullptr, load_conv_output};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

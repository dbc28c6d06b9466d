#include "conv_output.cuh"

#include "conv_chain.cuh"
#include "core/chains.h"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

ConvPlan plan_conv_output(const Problem& problem, const Card& card) {
  return ConvChain<Identity>::plan(problem, card);
}

size_t conv_output_workspace(const Problem& problem, const ConvPlan& plan, const Card& card) {
  return ConvChain<Identity>::workspace(problem, plan, card);
}

cudaError_t launch_conv_output(const Problem& problem, const ConvPlan& plan, void* workspace,
                               const Card& card, cudaStream_t stream) {
  return ConvChain<Identity>::launch(problem, plan, workspace, card, stream);
}

cudaError_t load_conv_output(const Card& card) { return ConvChain<Identity>::load(card); }

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

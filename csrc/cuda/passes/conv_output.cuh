// A conv's output by itself, with the bits that a chain's forward saw: for backward, which computes it again.
#pragma once

#include <cuda_runtime.h>

#include "core/target.h"
#include "plan/conv_plan.h"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// As those of a chain: see ConvChain.
cuda::ConvPlan plan_conv_output(const Problem& problem, const cuda::Card& card);
size_t conv_output_workspace(const Problem& problem, const cuda::ConvPlan& plan, const cuda::Card& card);
cudaError_t launch_conv_output(const Problem& problem, const cuda::ConvPlan& plan, void* workspace,
                               const cuda::Card& card, cudaStream_t stream);
cudaError_t load_conv_output(const cuda::Card& card);

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

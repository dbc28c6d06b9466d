// The kernels of the chains.
#pragma once

#include <cuda_runtime_api.h>

#include "core/problem.h"
#include "plan/backward_plan.h"
#include "plan/card.h"
#include "plan/conv_plan.h"

namespace fusedconv {
namespace cuda {

struct Kernel {
  ChainShape shape;  // by which a problem with a conv is planned
  // Bytes of memory that a launch wants; its address must be a multiple of 256. The plan is for a conv.
  size_t (*workspace)(const Problem& problem, const ConvPlan& plan, const Card& card);
  // Queues the chain on a stream of the current device; the status is the launch's.
  cudaError_t (*launch)(const Problem& problem, const ConvPlan& plan, void* workspace, const Card& card,
                        cudaStream_t stream);
  // The same for backward; null where there is none.
  BackwardPlan (*plan_backward)(const BackwardProblem& problem, const Card& card);
  cudaError_t (*launch_backward)(const BackwardProblem& problem, const BackwardPlan& plan, void* workspace,
                                 const Card& card, cudaStream_t stream);
  // Loads the chain's code onto the current device, which a stream capture would not allow.
  cudaError_t (*load)(const Card& card);
};

}  // namespace cuda
}  // namespace fusedconv

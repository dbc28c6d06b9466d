// How a chain's backward runs on a card.
#pragma once

#include <cstddef>
#include <cstdint>

#include "conv_plan.h"
#include "gradient_plan.h"
#include "step_plan.h"

namespace fusedconv {
namespace cuda {

struct BackwardPlan {
  Path path = Path::kTwoStep;          // kChain: v is given; kPlain: it is, and no kernel serves
  Reason reason = Reason::kNoKernels;  // for which the path is none of ours
  ConvPlan conv{};                     // of v, which is computed again
  StepPlan steps{};                    // of the chain
  int64_t findings_samples = 0;        // in strips: for so many at a time is found what gradients depend on
  ConvGradientsPlan gradients{};       // where steps give packed rows
  StripPlan strips{};                  // where they give strips
  size_t workspace = 0;

  bool runs_in_strips() const { return steps.kind == StepKind::kStrips; }
};

// The conv of some samples, as a problem of its own. The output's memory is for the caller to set.
Problem conv_problem(const BackwardProblem& problem, int64_t first, int64_t samples);

// The same, with an output as the chain's.
Problem chain_problem(const BackwardProblem& problem, const BackwardTraits& traits, int64_t first,
                      int64_t samples);

// All but the workspace and findings_samples. Throws std::overflow_error where sizes are beyond what can be
// computed: the conv's part is PyTorch's then.
BackwardPlan plan_backward(const BackwardProblem& problem, const BackwardTraits& traits, const Card& card);

// Of those of a batch, by what a step keeps of each.
int64_t samples_of_step(int64_t bytes_of_sample, int64_t samples);

// What there is to tell of it.
Plan told(const BackwardPlan& plan);

}  // namespace cuda
}  // namespace fusedconv

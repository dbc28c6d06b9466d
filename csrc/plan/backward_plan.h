// How a chain's backward runs on a card.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "conv_plan.h"

namespace fusedconv {
namespace cuda {

struct BackwardPlan {
  Path path = Path::kTwoStep;          // kChain: v is given; kPlain: it is, and no kernel serves
  Reason reason = Reason::kNoKernels;  // for which the path is none of ours
  ConvPlan conv{};                     // of v, which is computed again
  int64_t step_samples = 0;            // of each step that computes v again
  int strip_pixels = 0;                // of a row, where it runs in strips
  size_t workspace = 0;
};

// The conv's part is PyTorch's.
inline BackwardPlan leave_to_pytorch(Reason reason) { return {Path::kTwoStep, reason}; }

// By our conv if that runs.
inline BackwardPlan recompute(const ConvPlan& conv) {
  return {conv.source == ConvSource::kNone ? Path::kTwoStep : Path::kDirect, conv.reason, conv};
}

// Why the kernels of a conv's gradients do not serve; empty if they do.
std::optional<Reason> reason_against_gradients(const BackwardProblem& problem, const Card& card);

// Where strips need tables of a pool's windows in the whole batch: of small ones they would have the size of
// v.
bool has_large_windows(const Arguments& arguments);

// Of those of a batch, by what a step keeps of each.
int64_t samples_of_step(int64_t bytes_of_sample, int64_t samples);

// What there is to tell of it.
Plan told(const BackwardPlan& plan);

}  // namespace cuda
}  // namespace fusedconv

#include "backward_plan.h"

#include <algorithm>

#include "gradient_plan.h"

namespace fusedconv {
namespace cuda {

std::optional<Reason> reason_against_gradients(const BackwardProblem& problem, const Card& card) {
  constexpr int kMostKernel = 7;
  constexpr int kMostPadding = 24;  // zeros stand beside a row: see kZeroGuardUnits in cuda/gradients
  const DType dtype = problem.conv->input.dtype;
  const Conv& conv = problem.conv->conv;
  if (conv.groups != 1) return Reason::kGroups;
  if (dtype == DType::kFloat64) return Reason::kFloat64;
  if (card.source == ConvSource::kNone) return Reason::kNoKernels;
  for (int d = 0; d < 2; ++d) {
    const int64_t kernel = conv.weight.size[2 + d];
    if (conv.stride[d] != 1) return Reason::kStride;
    if (conv.dilation[d] != 1) return Reason::kDilation;
    if (kernel > kMostKernel) return Reason::kLargeKernel;
    if (kernel > kTaps && dtype != DType::kFloat32)
      return Reason::kLargeHalfKernel;  // sums of windows would be rounded in between
    if (conv.padding[d] > kMostPadding) return Reason::kPadding;
  }
  return std::nullopt;
}

bool has_large_windows(const Arguments& arguments) {
  constexpr int64_t kLeast = 8;
  return arguments.pool[0] * arguments.pool[1] >= kLeast;
}

int64_t samples_of_step(int64_t bytes_of_sample, int64_t samples) {
  // Enough for each kernel to fill the card for a while. Steps that stay in the L2 cache are slower, see
  // bench/NOTES.md.
  constexpr int64_t kStepBytes = int64_t(128) << 20;
  return std::clamp<int64_t>(kStepBytes / bytes_of_sample, 1, samples);
}

Plan told(const BackwardPlan& plan) {
  if (plan.path != Path::kDirect) {
    Plan told{plan.path, Instructions::kNone, {}, plan.workspace};
    if (!told.is_ours()) told.remarks.push_back({plan.reason});
    return told;
  }
  Plan told = cuda::told(plan.conv);
  told.workspace = plan.workspace;
  told.remarks.push_back(plan.strip_pixels > 0 ? Remark{Reason::kStrips, {plan.strip_pixels}}
                                               : Remark{Reason::kSteps, {plan.step_samples}});
  return told;
}

}  // namespace cuda
}  // namespace fusedconv

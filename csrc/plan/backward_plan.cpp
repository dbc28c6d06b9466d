#include "backward_plan.h"

#include <algorithm>
#include <optional>

namespace fusedconv {
namespace cuda {
namespace {

// The conv's part is PyTorch's.
BackwardPlan leave_to_pytorch(Reason reason) { return {Path::kTwoStep, reason}; }

// By our conv if that runs.
BackwardPlan recompute(const ConvPlan& conv) {
  return {conv.instructions == Instructions::kNone ? Path::kTwoStep : Path::kDirect, conv.reason, conv};
}

// Why the kernels of a conv's gradients do not serve; empty if they do.
std::optional<Reason> reason_against_gradients(const BackwardProblem& problem, const Card& card) {
  constexpr int kMostKernel = 7;
  constexpr int kMostPadding = 24;  // zeros stand beside a row: see kZeroGuardUnits in cuda/gradients
  const DType dtype = problem.conv->input.dtype;
  const Conv& conv = problem.conv->conv;
  if (conv.groups != 1) return Reason::kGroups;
  if (dtype == DType::kFloat64) return Reason::kFloat64;
  if (card.instructions == Instructions::kNone) return Reason::kNoKernels;
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

// In strips tables of a pool's windows are of the whole batch: of small ones they would have the size of v.
bool has_large_windows(const Arguments& arguments) {
  constexpr int64_t kLeast = 8;
  return window_pixels(arguments) >= kLeast;
}

bool serves_strips(const BackwardProblem& problem, const BackwardTraits& traits, const Card& card) {
  return fits_strips(conv_shape(problem), problem.v.size[0], card) &&
         (!traits.pools || has_large_windows(problem.arguments));
}

BackwardPlan plan_strips(const BackwardProblem& problem, const BackwardTraits& traits, const Card& card) {
  const int64_t samples = problem.v.size[0];
  // Without a norm there is nothing to find: this only tells whether forward's conv is ours.
  BackwardPlan plan = recompute(
      plan_conv(chain_problem(problem, traits, 0, samples), {traits.pools, false, traits.pools}, card));
  if (plan.path != Path::kDirect) return plan;
  plan.steps = plan_steps(problem, traits, StepKind::kStrips, samples);
  plan.strips = cut_strips(conv_shape(problem), samples, card);
  if (!traits.pools) plan.steps.after_norm_slices = parts_per_channel(plan.conv.tiling);
  plan.steps.slices = plan.strips.slices();
  return plan;
}

// The most that is kept of a sample: of v, of the input, which is packed for v, or of what is packed for the
// gradients.
int64_t sample_bytes(const BackwardProblem& problem, const ConvGradientsPlan& gradients) {
  const int64_t values = std::max(element_count(problem.v), element_count(problem.conv->input));
  const Checked of_values = Checked(values / problem.v.size[0]) * int64_t(sizeof(float));
  return std::max(of_values.value(), gradients.sample_bytes());
}

BackwardPlan plan_packed_rows(const BackwardProblem& problem, const BackwardTraits& traits,
                              const Card& card) {
  const int64_t samples = problem.v.size[0];
  const ConvGradientsPlan of_sample = plan_conv_gradients(problem, 1, card);
  if (!of_sample.fits(card)) return leave_to_pytorch(Reason::kSharedMemory);
  BackwardPlan plan = recompute(plan_conv(conv_problem(problem, 0, samples), {false, false}, card));
  if (plan.path != Path::kDirect) return plan;
  const int64_t step_samples = samples_of_step(sample_bytes(problem, of_sample), samples);
  plan.gradients = plan_conv_gradients(problem, step_samples, card);
  plan.steps = plan_steps(problem, traits, StepKind::kPackedRows, step_samples);
  return plan;
}

BackwardPlan plan_with_conv(const BackwardProblem& problem, const BackwardTraits& traits, const Card& card) {
  if (!traits.has_conv) return leave_to_pytorch(Reason::kNoKernels);
  if (const auto reason = reason_against_gradients(problem, card)) return leave_to_pytorch(*reason);
  if (serves_strips(problem, traits, card)) {
    const BackwardPlan plan = plan_strips(problem, traits, card);
    if (plan.path == Path::kDirect) return plan;
  }
  if (!fits_packed_rows(problem, traits, card)) return leave_to_pytorch(Reason::kSharedMemory);
  return plan_packed_rows(problem, traits, card);
}

BackwardPlan plan_given(const BackwardProblem& problem, const BackwardTraits& traits) {
  if (traits.pools && !counts_windows(problem)) return {Path::kPlain, Reason::kLargeWindow};
  BackwardPlan plan{Path::kChain};
  plan.steps = plan_steps(problem, traits, StepKind::kTensor, problem.v.size[0]);
  return plan;
}

}  // namespace

Problem conv_problem(const BackwardProblem& problem, int64_t first, int64_t samples) {
  Problem conv{problem.conv->input, &problem.conv->conv, problem.arguments, problem.v};
  conv.input.data =
      static_cast<char*>(conv.input.data) + first * conv.input.stride[0] * bytes_of(conv.input.dtype);
  conv.input.size[0] = conv.output.size[0] = samples;
  return conv;
}

Problem chain_problem(const BackwardProblem& problem, const BackwardTraits& traits, int64_t first,
                      int64_t samples) {
  Problem conv = conv_problem(problem, first, samples);
  for (int d = 0; traits.pools && d < 2; ++d) conv.output.size[2 + d] /= problem.arguments.pool[d];
  return conv;
}

BackwardPlan plan_backward(const BackwardProblem& problem, const BackwardTraits& traits, const Card& card) {
  if (element_count(problem.v) == 0) return {Path::kChain};
  return problem.conv == nullptr ? plan_given(problem, traits) : plan_with_conv(problem, traits, card);
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
  told.remarks.push_back(plan.runs_in_strips() ? Remark{Reason::kStrips, {kStripPixels}}
                                               : Remark{Reason::kSteps, {plan.steps.step_samples}});
  return told;
}

}  // namespace cuda
}  // namespace fusedconv

// One call of a chain's backward: its sizes and memory, and what of them the kernels of a step get.
#pragma once

#include "channel_sums.cuh"
#include "findings.cuh"
#include "plan/workspace.h"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

using cuda::StepKind;
using cuda::StepPlan;

template <class Chain, bool kHasConv>
constexpr cuda::BackwardTraits backward_traits() {
  return {kHasConv,
          Chain::kNeedsStatistics,
          Chain::Reduce::kPools,
          Chain::Reduce::kReducesChannels,
          kHasChannels<Chain>,
          __builtin_popcount(kOfAll<Chain>)};
}

// Computes in T; with a conv, that is float. Takes its memory from the workspace (a null base only counts).
template <class Chain, class T>
class BackwardCall {
 public:
  static constexpr bool kNeedsStatistics = Chain::kNeedsStatistics;
  static constexpr bool kPools = Chain::Reduce::kPools;
  static constexpr bool kReducesChannels = Chain::Reduce::kReducesChannels;
  static constexpr bool kMaySumChannels = kReducesChannels && kNeedsStatistics && std::is_same_v<T, float>;

  const BackwardProblem problem;
  const StepPlan plan;
  const bool writes;  // anything that takes a last pass over v
  const bool runs;    // whether there is anything to do

  BackwardCall(const BackwardProblem& problem, const StepPlan& plan, Workspace& workspace)
      : problem(problem),
        plan(plan),
        writes(problem.wants.v || wants_any(kOfAll<Chain>)),
        runs(writes || wants_any(kAfterNorm<Chain>)) {
    if (runs) take_memory(std::min(plan.step_samples, plan.samples), workspace);
  }

  int64_t groups() const { return kNeedsStatistics ? problem.arguments.num_groups : 1; }

  // The norms of a step, without weight and bias.
  Norm<T>* norms() const { return whole_.norms; }

  // v and grad_v are of these samples alone.
  BackwardWork<T> work_of(int64_t first_sample, int64_t step_samples, const void* v, void* grad_v) const {
    BackwardWork<T> work = whole_;
    work.v = {const_cast<void*>(v), problem.v.dtype};
    work.grad = grad_from(first_sample);
    work.grad_v = {grad_v, problem.grad_v_dtype};
    work.samples = step_samples;
    work.channels = plan.channels;
    work.pixels = plan.pixels;
    work.planes = cuda::sliced_planes(plan.plane, step_samples, plan.channels);
    work.width = may_load_wide(work) ? kWidth<T> : 1;
    work.after_norm = sums_from(whole_.after_norm, first_sample * plan.channels);
    work.of_all = sums_from(whole_.of_all, first_sample * plan.channels);
    if constexpr (kPools) {
      work.pool = cuda::pool_shape(problem, plan);
      work.pool.has_pairs &= is_aligned_to(work.v, 2);
      work.windows = cuda::sliced_planes(plan.window_plane, step_samples, plan.channels);
    }
    if constexpr (kReducesChannels)
      work.blocks = cuda::pixel_blocks(plan, step_samples, work.width, sizeof(T));
    return work;
  }

  // What passes of the conv find, of samples from some on.
  ConvFindings findings(int64_t first_sample) const {
    const Elements grad = grad_from(first_sample);
    const int64_t first_plane = first_sample * plan.channels;
    const int64_t window = kPools ? first_plane * plan.windows : 0;
    return {norms() + first_plane,
            whole_.window_value + window,
            whole_.window_place + window,
            {grad, has_pairs(grad), sums_from(whole_.after_norm, first_plane)}};
  }

  // Each the sum over a channel of all samples.
  ParameterGradients parameters() const {
    ParameterGradients gradients{{}, std::is_same_v<T, double>};
    const PartialSums& after_norm = whole_.after_norm;
    const PartialSums& of_all = whole_.of_all;
    for (int kind = 0; kind < kGradientKinds; ++kind)
      gradients.of[kind] = {problem.grad_parameters[kind],
                            {after_norm.of[kind], of_all.of[kind]},
                            {after_norm.slices, of_all.slices}};
    return gradients;
  }

  // Whether rows of the output's gradient are whole pairs.
  bool has_pairs(const Elements& grad) const { return problem.v.size[3] % 2 == 0 && is_aligned_to(grad, 2); }

 private:
  // ---- what is wanted ----

  bool wants(int kind) const { return problem.wants.parameters[kind]; }
  bool wants_any(unsigned mask) const {
    for (int kind = 0; kind < kGradientKinds; ++kind) {
      if ((mask >> kind & 1) != 0 && wants(kind)) return true;
    }
    return false;
  }

  // Of the output's gradient.
  Elements grad_from(int64_t first_sample) const {
    return elements_from(problem.grad, problem.grad_dtype, first_sample * plan.results);
  }

  // ---- memory ----

  void take_memory(int64_t step_samples, Workspace& workspace) {
    const Checked planes = Checked(step_samples) * plan.channels;
    whole_.arguments = problem.arguments;
    whole_.after_norm = take_sums(kAfterNorm<Chain>, kOfNorm, plan.after_norm_slices, workspace);
    if (writes) whole_.of_all = take_sums(kOfAll<Chain>, 0, plan.slices, workspace);
    if constexpr (kNeedsStatistics) {
      whole_.norms = workspace.take<Norm<T>>(planes);
      whole_.means = workspace.take<GroupMeans<T>>(Checked(step_samples) * groups());
      whole_.by_group_channels = cuda::wide_divisor(plan.channels / groups(), plan.channels);
    }
    if constexpr (kPools) {
      whole_.window_place = workspace.take<int>(planes * plan.windows);
      whole_.window_grad = workspace.take<T>(planes * plan.windows);
      if (plan.kind == StepKind::kStrips) whole_.window_value = workspace.take<T>(planes * plan.windows);
    } else if (kReducesChannels && plan.kind != StepKind::kStrips) {
      whole_.most = workspace.take<T>(Checked(step_samples) * plan.pixels);
      whole_.factor = workspace.take<T>(Checked(step_samples) * plan.pixels);
    }
  }

  // Those of the mask that are wanted or always needed.
  PartialSums take_sums(unsigned mask, unsigned needed, int64_t slices, Workspace& workspace) {
    PartialSums sums{{}, slices};
    for (int kind = 0; kind < kGradientKinds; ++kind) {
      const bool is_needed = (needed >> kind & 1) != 0 || wants(kind);
      if ((mask >> kind & 1) != 0 && is_needed)
        sums.of[kind] = workspace.take<double>(Checked(plan.samples) * plan.channels * slices);
    }
    return sums;
  }

  // Whether rows of pixels are whole wide loads, in every tensor that has pixels.
  bool may_load_wide(const BackwardWork<T>& work) const {
    return work.pixels % kWidth<T> == 0 && is_aligned_to(work.v, kWidth<T>) &&
           is_aligned_to(work.grad_v, kWidth<T>) && (kPools || is_aligned_to(work.grad, kWidth<T>));
  }

  // What is the same for all steps.
  BackwardWork<T> whole_{};
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

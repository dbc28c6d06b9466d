// One call of a chain's backward: its sizes and memory, and what of them the kernels of a step get.
#pragma once

#include "channel_sums.cuh"
#include "cuda/device/workspace.cuh"
#include "findings.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// What steps give: the gradient of v in a tensor, or as packed rows; or v's gradient is nowhere, and they
// give what follows from it (strip_work.cuh).
enum class StepKind { kTensor, kPackedRows, kStrips };

struct StepShape {
  StepKind kind;
  int64_t samples;  // at the most
  // In strips, the slices in which a sample's sums come apart: those behind the norm, and the others.
  int64_t after_norm_slices;
  int64_t slices;
};

// Computes in T; with a conv, that is float. Takes its memory from the workspace (a null base only counts).
// All steps are of one kind.
template <class Chain, class T>
class BackwardCall {
 public:
  static constexpr bool kNeedsStatistics = Chain::kNeedsStatistics;
  static constexpr bool kPools = Chain::Reduce::kPools;
  static constexpr bool kReducesChannels = Chain::Reduce::kReducesChannels;
  static constexpr bool kMaySumChannels = kReducesChannels && kNeedsStatistics && std::is_same_v<T, float>;

  const BackwardProblem problem;
  const StepShape step;
  const int64_t samples;
  const int64_t channels;
  const int64_t pixels;
  const int64_t windows;  // of a plane; its pixels where nothing is pooled
  const PlaneSlices plane;
  const PlaneSlices window_plane;
  const bool sums_channels;  // one kernel does what two do elsewhere
  const bool writes;         // anything that takes a last pass over v
  const bool runs;           // whether there is anything to do

  BackwardCall(const BackwardProblem& problem, const StepShape& step, Workspace& workspace)
      : problem(problem),
        step(step),
        samples(problem.v.size[0]),
        channels(problem.v.size[1]),
        pixels((Checked(problem.v.size[2]) * problem.v.size[3]).value()),
        windows(kPools ? pooled(0) * pooled(1) : pixels),
        plane(slice_planes(pixels)),
        window_plane(kPools ? slice_windows() : plane),
        sums_channels(kMaySumChannels && problem.v.dtype == DType::kFloat32 && has_channel_sums(channels)),
        writes(problem.wants.v || wants_any(kOfAll<Chain>)),
        runs(writes || wants_any(kAfterNorm<Chain>)) {
    if (runs) take_memory(std::min(step.samples, samples), workspace);
  }

  // Whether the kernels serve: rows and columns, and places in a window, are counted in 31 bits.
  bool fits() const {
    constexpr int64_t kMost = INT32_MAX - kPlaneThreads * kThreadValues;
    const int64_t* const window = problem.arguments.pool;
    return !kPools || (std::max(problem.v.size[2], problem.v.size[3]) < kMost &&
                       Checked(window[0]) * window[1] <= INT32_MAX);
  }

  int64_t groups() const { return kNeedsStatistics ? problem.arguments.num_groups : 1; }
  int64_t pooled_cols() const { return kPools ? pooled(1) : 0; }

  // The norms of a step, without weight and bias.
  Norm<T>* norms() const { return whole_.norms; }

  // v and grad_v are of these samples alone.
  BackwardWork<T> work_of(int64_t first_sample, int64_t step_samples, const void* v, void* grad_v) const {
    BackwardWork<T> work = whole_;
    work.v = {const_cast<void*>(v), problem.v.dtype};
    work.grad = grad_from(first_sample);
    work.grad_v = {grad_v, problem.grad_v_dtype};
    set_shape(work, step_samples);
    work.width = may_load_wide(work) ? kWidth<T> : 1;
    work.after_norm = sums_from(whole_.after_norm, first_sample * channels);
    work.of_all = sums_from(whole_.of_all, first_sample * channels);
    if constexpr (kPools) set_pool(work);
    if constexpr (kReducesChannels) set_logsumexp(work);
    return work;
  }

  // What passes of the conv find, of samples from some on.
  ConvFindings findings(int64_t first_sample) const {
    const Elements grad = grad_from(first_sample);
    const int64_t first_plane = first_sample * channels;
    const int64_t window = kPools ? first_plane * windows : 0;
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
      gradients.of[kind] = {
          gradient_of(kind), {after_norm.of[kind], of_all.of[kind]}, {after_norm.slices, of_all.slices}};
    return gradients;
  }

  // Whether rows of the output's gradient are whole pairs.
  bool has_pairs(const Elements& grad) const {
    return problem.v.size[3] % 2 == 0 && is_aligned(grad.data, 2 * bytes_of(grad.dtype));
  }

 private:
  // ---- what is wanted ----

  bool wants(int kind) const {
    const Wanted& wants = problem.wants;
    const bool of_kind[] = {wants.bias, wants.scale, wants.norm_weight, wants.norm_bias, wants.conv_bias};
    return of_kind[kind];
  }
  // Null where nobody wants it.
  void* gradient_of(int kind) const {
    void* const of_kind[] = {problem.bias, problem.scale, problem.norm_weight, problem.norm_bias,
                             problem.conv_bias};
    return of_kind[kind];
  }
  bool wants_any(unsigned mask) const {
    for (int kind = 0; kind < kGradientKinds; ++kind) {
      if ((mask >> kind & 1) != 0 && wants(kind)) return true;
    }
    return false;
  }

  // ---- sizes ----

  int64_t pooled(int d) const { return problem.v.size[2 + d] / problem.arguments.pool[d]; }
  // About as many pixels a thread as elsewhere.
  int lanes_of_window() const {
    const int64_t* window = problem.arguments.pool;
    return cuda::power_of_two_from(window[0] * window[1] / kThreadValues, kWarpThreads);
  }
  PlaneSlices slice_windows() const {
    if (step.kind == StepKind::kStrips) return slice_planes(windows);  // there they are known
    const int64_t* window = problem.arguments.pool;
    constexpr int64_t kLeast = 2;  // windows: what a thread does once takes as long
    const int lanes = lanes_of_window();
    const int64_t of_thread = std::max(kThreadValues / (window[0] * window[1]), lanes == 1 ? kLeast : 1);
    return slice_planes(windows, of_thread, lanes);
  }
  int64_t spans() const { return cuda::divide_up(pixels, kSpanPixels); }              // of a sample
  int64_t results() const { return kReducesChannels ? pixels : channels * windows; }  // of a sample

  // Of the output's gradient.
  Elements grad_from(int64_t first_sample) const {
    return elements_from(problem.grad, problem.grad_dtype, first_sample * results());
  }

  int64_t slices_after_norm() const {
    if (step.kind == StepKind::kStrips && !kPools) return step.after_norm_slices;
    return sums_channels ? spans() : window_plane.slices;
  }
  int64_t slices_of_all() const {
    switch (step.kind) {
      case StepKind::kStrips:
        return step.slices;
      case StepKind::kPackedRows:
        return problem.v.size[2];
      default:
        return plane.slices;
    }
  }

  // ---- memory ----

  void take_memory(int64_t step_samples, Workspace& workspace) {
    const Checked planes = Checked(step_samples) * channels;
    whole_.arguments = problem.arguments;
    whole_.after_norm = take_sums(kAfterNorm<Chain>, kinds(true, {kOfNormWeight, kOfNormBias}),
                                  slices_after_norm(), workspace);
    if (writes) whole_.of_all = take_sums(kOfAll<Chain>, 0, slices_of_all(), workspace);
    if constexpr (kNeedsStatistics) {
      whole_.norms = workspace.take<Norm<T>>(planes);
      whole_.means = workspace.take<GroupMeans<T>>(Checked(step_samples) * groups());
      whole_.by_group_channels = cuda::wide_divisor(channels / groups(), channels);
    }
    if constexpr (kPools) {
      whole_.window_place = workspace.take<int>(planes * windows);
      whole_.window_grad = workspace.take<T>(planes * windows);
      if (step.kind == StepKind::kStrips) whole_.window_value = workspace.take<T>(planes * windows);
    } else if (kReducesChannels && step.kind != StepKind::kStrips) {
      whole_.most = workspace.take<T>(Checked(step_samples) * pixels);
      whole_.factor = workspace.take<T>(Checked(step_samples) * pixels);
    }
  }

  // Those of the mask that are wanted or always needed.
  PartialSums take_sums(unsigned mask, unsigned needed, int64_t slices, Workspace& workspace) {
    PartialSums sums{{}, slices};
    for (int kind = 0; kind < kGradientKinds; ++kind) {
      const bool is_needed = (needed >> kind & 1) != 0 || wants(kind);
      if ((mask >> kind & 1) != 0 && is_needed)
        sums.of[kind] = workspace.take<double>(Checked(samples) * channels * slices);
    }
    return sums;
  }

  // ---- what the kernels get ----

  void set_shape(BackwardWork<T>& work, int64_t step_samples) const {
    constexpr bool kIsPointwise = Chain::Reduce::kStores && !kHasChannels<Chain>;
    if (kIsPointwise && step.kind == StepKind::kTensor &&
        !problem.wants.conv_bias) {  // planes are nothing of their own
      work.samples = 1;
      work.channels = 1;
      work.pixels = step_samples * channels * pixels;
      work.planes = sliced_planes(slice_planes(work.pixels), 1, 1);
      return;
    }
    work.samples = step_samples;
    work.channels = channels;
    work.pixels = pixels;
    work.planes = sliced_planes(plane, step_samples, channels);
  }

  // Whether rows of pixels are whole wide loads, in every tensor that has pixels.
  bool may_load_wide(const BackwardWork<T>& work) const {
    const auto may_start = [](const Elements& elements) {
      return is_aligned(elements.data, kWidth<T> * bytes_of(elements.dtype));
    };
    return work.pixels % kWidth<T> == 0 && may_start(work.v) && may_start(work.grad_v) &&
           (kPools || may_start(work.grad));
  }

  void set_pool(BackwardWork<T>& work) const {
    const auto narrow_size = [](int64_t size) { return int(std::min<int64_t>(size, INT32_MAX)); };
    const int64_t* size = problem.v.size + 2;
    const int64_t* window = problem.arguments.pool;
    PoolShape& pool = work.pool;
    pool.cols = narrow_size(size[1]);
    pool.window_rows = narrow_size(window[0]);
    pool.window_cols = narrow_size(window[1]);
    pool.pooled_rows = int(pooled(0));
    pool.pooled_cols = int(pooled(1));
    pool.lanes = lanes_of_window();
    pool.has_pairs = pool.lanes == 1 && bytes_of(work.v.dtype) == int(sizeof(T)) &&
                     (window[1] == 2 || window[1] == 4) && size[1] % 2 == 0 &&
                     is_aligned(work.v.data, 2 * bytes_of(work.v.dtype));
    pool.by_cols = cuda::wide_divisor(size[1], pixels);
    pool.by_pooled_cols = cuda::wide_divisor(std::max<int64_t>(pooled(1), 1), windows);
    pool.by_window_rows = cuda::divisor(pool.window_rows);
    pool.by_window_cols = cuda::divisor(pool.window_cols);
    work.windows = sliced_planes(window_plane, work.samples, channels);
  }

  // Lanes next to each other have a line of memory; more of them share a pixel if threads would be left over.
  void set_logsumexp(BackwardWork<T>& work) const {
    const int line = std::min(cuda::kLineBytes / int(work.width * sizeof(T)), kWarpThreads / 2);
    const int64_t loads = cuda::divide_up(pixels, work.width);
    work.lanes = kWarpThreads / cuda::power_of_two_from(loads, line);
    while (work.lanes < kWarpThreads && 2 * work.lanes * loads <= kPlaneThreads) work.lanes *= 2;
    work.blocks_per_sample = sums_channels ? spans() : cuda::divide_up(loads, kPlaneThreads / work.lanes);
    work.by_blocks_per_sample =
        cuda::wide_divisor(work.blocks_per_sample, (work.samples + 1) * work.blocks_per_sample);
  }

  // What is the same for all steps.
  BackwardWork<T> whole_{};
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

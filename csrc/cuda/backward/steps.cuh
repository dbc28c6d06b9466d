// Backward of a chain on a given v, the conv's output: plans and queues it. Reads from top to bottom.
//
// The reduction spreads the output's gradient over v's places: it leaves a table from which, with v, the
// gradient at each place follows. From there on all is pointwise, but for two sums over each group of a
// GroupNorm. What it takes is computed again from v and the statistics that forward gave. But for strips, no
// plan and no sum of a sample depends on its batch; the input's gradient does not there either.
#pragma once

#include "channel_sums.cuh"
#include "cuda/device/workspace.cuh"
#include "findings.cuh"
#include "pack_gradient.cuh"
#include "pool_table.cuh"
#include "softmax_table.cuh"
#include "strip_kernel.cuh"

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

// One call that computes in T; with a conv, that is float. Takes its memory from the workspace (a null base
// only counts). All steps are of one kind.
template <class Chain, class T>
class BackwardRun {
 public:
  BackwardRun(const BackwardProblem& problem, const StepShape& step, Workspace& workspace,
              const cuda::Card& card)
      : problem_(problem),
        card_(card),
        step_(step),
        samples_(problem.v.size[0]),
        channels_(problem.v.size[1]),
        pixels_((Checked(problem.v.size[2]) * problem.v.size[3]).value()),
        windows_(kPools ? pooled(0) * pooled(1) : pixels_),
        plane_(slice_planes(pixels_)),
        window_plane_(kPools ? slice_windows() : plane_),
        sums_channels_(kMaySumChannels && problem.v.dtype == DType::kFloat32 && has_channel_sums(channels_)),
        writes_(problem.wants.v || wants_any(kOfAll<Chain>)),
        runs_(writes_ || wants_any(kAfterNorm<Chain>)) {
    if (runs_) take_memory(std::min(step.samples, samples_), workspace);
  }

  // Whether there is anything to do.
  bool runs() const { return runs_; }

  // Whether the kernels serve: rows and columns, and places in a window, are counted in 31 bits.
  bool fits() const {
    constexpr int64_t kMost = INT32_MAX - kPlaneThreads * kThreadValues;
    const int64_t* const window = problem_.arguments.pool;
    return !kPools || (std::max(problem_.v.size[2], problem_.v.size[3]) < kMost &&
                       Checked(window[0]) * window[1] <= INT32_MAX);
  }

  // Queues the norms without weight and bias, which all others take.
  cudaError_t launch_norms(int64_t first_sample, int64_t samples, cudaStream_t stream) const {
    return launch_unit_norms(problem_.statistics + first_sample * groups(), samples, channels_, groups(),
                             norms_, stream);
  }

  // What launch_strips() takes of samples from some on, which passes of the conv find.
  ConvFindings findings(int64_t first_sample) const {
    const Elements grad = elements_from(problem_.grad, problem_.grad_dtype, first_sample * results());
    const int64_t plane = first_sample * channels_;
    const int64_t window = kPools ? plane * windows_ : 0;
    return {norms_ + plane,
            window_value_ + window,
            window_place_ + window,
            {grad, has_pairs(grad), sums_from(after_norm_, plane)}};
  }

  // Queues the gradient of v of `samples` samples from `first_sample` on. v (problem.v.dtype) and grad_v
  // (problem.grad_v_dtype) are contiguous memory of these samples alone; the rest is of all samples.
  cudaError_t launch_step(int64_t first_sample, int64_t samples, const void* v, void* grad_v,
                          cudaStream_t stream) const {
    if (!runs_) return cudaSuccess;
    const BackwardWork<T> work = work_of(first_sample, samples, v, problem_.wants.v ? grad_v : nullptr);
    bool overlaps = false;  // with the kernel before; the first one does not
    if (const cudaError_t status = launch_before_gradient(first_sample, work, overlaps, stream))
      return status;
    if (!writes_) return cudaSuccess;
    return launch_planes(write_gradient<Chain, T>, blocks_of(work.planes), work, overlaps, stream);
  }

  cudaError_t launch_packed_step(int64_t first_sample, int64_t samples, const void* v,
                                 const PackedRows& grad_v, cudaStream_t stream) const {
    if (!runs_) return cudaSuccess;
    PackWork pack{work_of(first_sample, samples, v, nullptr), grad_v, {}};
    if (!problem_.wants.v) pack.to.units = nullptr;
    pack.shape = pack_shape(grad_v, samples, pack_width(pack.work), int(kPools ? pooled(1) : 0));
    bool overlaps = false;
    if (const cudaError_t status = launch_before_gradient(first_sample, pack.work, overlaps, stream))
      return status;
    if (!writes_) return cudaSuccess;
    const LaunchShape shape{grid_of(samples * grad_v.rows, 1), kGradientThreads,
                            int(PackMemory<Chain>::bytes(channels_, pack.shape.pitch)), overlaps};
    return launch_kernel(pack_gradient<Chain>, shape, stream, pack);
  }

  // Of all samples.
  cudaError_t launch_strips(const StripWork& strip, cudaStream_t stream) const {
    if (!runs_) return cudaSuccess;
    StripProblem<Chain> problem{work_of(0, samples_, nullptr, nullptr), strip};
    problem.work.has_pairs = has_pairs(problem.work.grad);
    // With the kernel before, if that is one of ours.
    bool overlaps = card_.overlaps_kernels && (kNeedsStatistics || strip.balance != nullptr);
    if constexpr (kPools) {
      static_assert(kNeedsStatistics && !Chain::Post::kReadsConv, "a pass finds norms, and Pre(v), not v");
      if (const cudaError_t status = launch_planes(found_pool_table<Chain>, blocks_of(problem.work.windows),
                                                   problem.work, overlaps, stream))
        return status;
    }
    if (!writes_) return cudaSuccess;
    if constexpr (kNeedsStatistics) {
      if (const cudaError_t status = launch_means(problem.work, overlaps, stream)) return status;
    }
    return launch_strip_kernel(problem, overlaps, stream);
  }

  // Where cards have so much shared memory.
  static cudaError_t load_strips(const cuda::Card& card) {
    if constexpr (kPools) {
      if (const cudaError_t status = load_kernel(found_pool_table<Chain>)) return status;
    }
    if (const cudaError_t status = load_strip_kernel<kMostOutTiles / 2>(card)) return status;
    return load_strip_kernel<kMostOutTiles>(card);
  }

  static bool may_pack(const BackwardProblem& problem, const cuda::Card& card) {
    const int64_t* size = problem.v.size;
    const int64_t most = card.shared_bytes / int64_t(sizeof(float));
    return problem.v.dtype == DType::kFloat32 && problem.conv != nullptr && size[1] <= most &&
           size[3] <= most && Checked(size[2]) * size[3] < INT32_MAX / (kPackItems + 1) &&
           PackMemory<Chain>::bytes(size[1], pack_pitch(size[3])) <= card.shared_bytes;
  }

  // After the steps of all samples: the gradients of the parameters, each the sum over a channel of all.
  cudaError_t launch_parameters(cudaStream_t stream) const {
    ParameterGradients gradients{{}, std::is_same_v<T, double>};
    bool any = false;
    for (int kind = 0; kind < kGradientKinds; ++kind) {
      gradients.of[kind] = {
          gradient_of(kind), {after_norm_.of[kind], of_all_.of[kind]}, {after_norm_.slices, of_all_.slices}};
      any |= wants(kind);
    }
    if (!any) return cudaSuccess;
    return launch_parameter_gradients(gradients, samples_, channels_, stream);
  }

  static cudaError_t load_packing(const cuda::Card& card) {
    return cudaFuncSetAttribute(pack_gradient<Chain>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                card.shared_bytes);
  }

  // The kernels of steps that give a tensor, and those before packed rows.
  static cudaError_t load() {
    if constexpr (kPools) {
      if (const cudaError_t status = load_kernel(max_pool_table<Chain, T>)) return status;
    } else if constexpr (kReducesChannels) {
      if (const cudaError_t status = load_kernel(logsumexp_table<Chain, T>)) return status;
    }
    if constexpr (kMaySumChannels) {
      if (const cudaError_t status = load_kernel(channel_sums<Chain>)) return status;
    }
    if constexpr (kNeedsStatistics && !kPools) {
      if (const cudaError_t status = load_kernel(sums_after_norm<Chain, T>)) return status;
    }
    if constexpr (kNeedsStatistics) {
      if (const cudaError_t status = load_statistics()) return status;
    }
    if (const cudaError_t status = load_parameter_sums()) return status;
    return load_kernel(write_gradient<Chain, T>);
  }

 private:
  static constexpr bool kNeedsStatistics = Chain::kNeedsStatistics;
  static constexpr bool kPools = Chain::Reduce::kPools;
  static constexpr bool kReducesChannels = Chain::Reduce::kReducesChannels;
  static constexpr bool kMaySumChannels = kReducesChannels && kNeedsStatistics && std::is_same_v<T, float>;

  // ---- launches ----

  static cudaError_t launch_planes(void (*kernel)(BackwardWork<T>), int64_t blocks,
                                   const BackwardWork<T>& work, bool overlaps, cudaStream_t stream) {
    return launch_kernel(kernel, {grid_of(blocks, 1), kPlaneThreads, 0, overlaps}, stream, work);
  }

  // All that the gradient of v at a place takes, and the sums behind the norm.
  cudaError_t launch_before_gradient(int64_t first_sample, const BackwardWork<T>& work, bool& overlaps,
                                     cudaStream_t stream) const {
    if constexpr (kNeedsStatistics) {
      if (const cudaError_t status = launch_norms(first_sample, work.samples, stream)) return status;
      overlaps = card_.overlaps_kernels;
    }
    if (const cudaError_t status = launch_reduction(work, overlaps, stream)) return status;
    if constexpr (kNeedsStatistics) {
      if (writes_) return launch_means(work, overlaps, stream);
    }
    return cudaSuccess;
  }

  cudaError_t launch_means(const BackwardWork<T>& work, bool overlaps, cudaStream_t stream) const {
    return launch_group_means(work.after_norm, work.samples, channels_, pixels_, problem_.arguments,
                              work.norms, work.means, overlaps, stream);
  }

  cudaError_t launch_strip_kernel(const StripProblem<Chain>& problem, bool overlaps,
                                  cudaStream_t stream) const {
    const auto launch = [&](auto tiles) {
      constexpr int kTiles = decltype(tiles)::value;
      const LaunchShape shape{dim3(problem.strip.plan.blocks), kStripThreads,
                              int(sizeof(StripShared<kTiles>)), overlaps};
      return launch_kernel(strip_kernel<Chain, kTiles>, shape, stream, problem);
    };
    if (problem.strip.plan.out_tiles == kMostOutTiles)
      return launch(std::integral_constant<int, kMostOutTiles>{});
    return launch(std::integral_constant<int, kMostOutTiles / 2>{});
  }

  template <int kTiles>
  static cudaError_t load_strip_kernel(const cuda::Card& card) {
    if (sizeof(StripShared<kTiles>) > size_t(card.shared_bytes)) return cudaSuccess;
    return cudaFuncSetAttribute(strip_kernel<Chain, kTiles>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                sizeof(StripShared<kTiles>));
  }

  // The reduction's table, and the sums behind the norm.
  cudaError_t launch_reduction(const BackwardWork<T>& work, bool& overlaps, cudaStream_t stream) const {
    const auto launch = [&](auto* kernel, int64_t blocks) {
      const cudaError_t status = launch_planes(kernel, blocks, work, overlaps, stream);
      overlaps = card_.overlaps_kernels;
      return status;
    };
    if constexpr (kPools) return launch(max_pool_table<Chain, T>, blocks_of(work.windows));
    if constexpr (kMaySumChannels) {
      if (sums_channels_) {
        const LaunchShape shape{grid_of(work.samples * work.blocks_per_sample, 1),
                                channel_sums_threads(channels_), 0, overlaps};
        overlaps = card_.overlaps_kernels;
        return launch_kernel(channel_sums<Chain>, shape, stream, work);
      }
    }
    if constexpr (kReducesChannels) {
      if (const cudaError_t status = launch(logsumexp_table<Chain, T>, work.samples * work.blocks_per_sample))
        return status;
    }
    if constexpr (kNeedsStatistics) return launch(sums_after_norm<Chain, T>, blocks_of(work.planes));
    return cudaSuccess;
  }

  // ---- what is wanted ----

  bool wants(int kind) const {
    const Wanted& wants = problem_.wants;
    const bool of_kind[] = {wants.bias, wants.scale, wants.norm_weight, wants.norm_bias, wants.conv_bias};
    return of_kind[kind];
  }
  // Null where nobody wants it.
  void* gradient_of(int kind) const {
    void* const of_kind[] = {problem_.bias, problem_.scale, problem_.norm_weight, problem_.norm_bias,
                             problem_.conv_bias};
    return of_kind[kind];
  }
  bool wants_any(unsigned mask) const {
    for (int kind = 0; kind < kGradientKinds; ++kind) {
      if ((mask >> kind & 1) != 0 && wants(kind)) return true;
    }
    return false;
  }

  // ---- sizes ----

  int64_t pooled(int d) const { return problem_.v.size[2 + d] / problem_.arguments.pool[d]; }
  // About as many pixels a thread as elsewhere.
  int lanes_of_window() const {
    const int64_t* window = problem_.arguments.pool;
    return cuda::power_of_two_from(window[0] * window[1] / kThreadValues, kWarpThreads);
  }
  PlaneSlices slice_windows() const {
    if (step_.kind == StepKind::kStrips) return slice_planes(windows_);  // there they are known
    const int64_t* window = problem_.arguments.pool;
    constexpr int64_t kLeast = 2;  // windows: what a thread does once takes as long
    const int lanes = lanes_of_window();
    const int64_t of_thread = std::max(kThreadValues / (window[0] * window[1]), lanes == 1 ? kLeast : 1);
    return slice_planes(windows_, of_thread, lanes);
  }
  int64_t spans() const { return cuda::divide_up(pixels_, kSpanPixels); }                // of a sample
  int64_t results() const { return kReducesChannels ? pixels_ : channels_ * windows_; }  // of a sample
  int64_t groups() const { return kNeedsStatistics ? problem_.arguments.num_groups : 1; }

  int64_t slices_after_norm() const {
    if (step_.kind == StepKind::kStrips && !kPools) return step_.after_norm_slices;
    return sums_channels_ ? spans() : window_plane_.slices;
  }
  int64_t slices_of_all() const {
    switch (step_.kind) {
      case StepKind::kStrips:
        return step_.slices;
      case StepKind::kPackedRows:
        return problem_.v.size[2];
      default:
        return plane_.slices;
    }
  }

  // ---- memory ----

  void take_memory(int64_t step_samples, Workspace& workspace) {
    const Checked planes = Checked(step_samples) * channels_;
    after_norm_ = take_sums(kAfterNorm<Chain>, kinds(true, {kOfNormWeight, kOfNormBias}), slices_after_norm(),
                            workspace);
    if (writes_) of_all_ = take_sums(kOfAll<Chain>, 0, slices_of_all(), workspace);
    if constexpr (kNeedsStatistics) {
      norms_ = workspace.take<Norm<T>>(planes);
      means_ = workspace.take<GroupMeans<T>>(Checked(step_samples) * groups());
    }
    if constexpr (kPools) {
      window_place_ = workspace.take<int>(planes * windows_);
      window_grad_ = workspace.take<T>(planes * windows_);
      if (step_.kind == StepKind::kStrips) window_value_ = workspace.take<T>(planes * windows_);
    } else if (kReducesChannels && step_.kind != StepKind::kStrips) {
      most_ = workspace.take<T>(Checked(step_samples) * pixels_);
      factor_ = workspace.take<T>(Checked(step_samples) * pixels_);
    }
  }

  // Those of the mask that are wanted or always needed.
  PartialSums take_sums(unsigned mask, unsigned needed, int64_t slices, Workspace& workspace) {
    PartialSums sums{{}, slices};
    for (int kind = 0; kind < kGradientKinds; ++kind) {
      const bool is_needed = (needed >> kind & 1) != 0 || wants(kind);
      if ((mask >> kind & 1) != 0 && is_needed)
        sums.of[kind] = workspace.take<double>(Checked(samples_) * channels_ * slices);
    }
    return sums;
  }

  // ---- what the kernels get ----

  BackwardWork<T> work_of(int64_t first_sample, int64_t samples, const void* v, void* grad_v) const {
    BackwardWork<T> work{};
    work.v = {const_cast<void*>(v), problem_.v.dtype};
    work.grad = elements_from(problem_.grad, problem_.grad_dtype, first_sample * results());
    work.grad_v = {grad_v, problem_.grad_v_dtype};
    set_shape(work, samples);
    work.width = may_load_wide(work) ? kWidth<T> : 1;
    work.arguments = problem_.arguments;
    work.after_norm = sums_from(after_norm_, first_sample * channels_);
    work.of_all = sums_from(of_all_, first_sample * channels_);
    if constexpr (kNeedsStatistics) {
      work.norms = norms_;
      work.means = means_;
      work.by_group_channels = cuda::wide_divisor(channels_ / groups(), channels_);
    }
    if constexpr (kPools) set_pool(work);
    if constexpr (kReducesChannels) set_logsumexp(work);
    return work;
  }

  void set_shape(BackwardWork<T>& work, int64_t samples) const {
    constexpr bool kIsPointwise = Chain::Reduce::kStores && !kHasChannels<Chain>;
    if (kIsPointwise && step_.kind == StepKind::kTensor &&
        !problem_.wants.conv_bias) {  // planes are nothing of their own
      work.samples = 1;
      work.channels = 1;
      work.pixels = samples * channels_ * pixels_;
      work.planes = sliced_planes(slice_planes(work.pixels), 1, 1);
      return;
    }
    work.samples = samples;
    work.channels = channels_;
    work.pixels = pixels_;
    work.planes = sliced_planes(plane_, samples, channels_);
  }

  // Whether rows of pixels are whole wide loads, in every tensor that has pixels.
  bool may_load_wide(const BackwardWork<T>& work) const {
    const auto may_start = [](const Elements& elements) {
      return is_aligned(elements.data, kWidth<T> * bytes_of(elements.dtype));
    };
    return work.pixels % kWidth<T> == 0 && may_start(work.v) && may_start(work.grad_v) &&
           (kPools || may_start(work.grad));
  }

  // Elements of a load, of which every row is made; a whole warp has one then.
  int pack_width(const BackwardWork<T>& work) const {
    const auto may_start = [](const Elements& elements) {
      return is_aligned(elements.data, kPackWidth * bytes_of(elements.dtype));
    };
    const int64_t cols = problem_.v.size[3];
    const bool is_wide = cols > kWarpThreads && cols % kPackWidth == 0 && may_start(work.v) &&
                         (!Chain::Reduce::kStores || may_start(work.grad));
    return is_wide ? kPackWidth : 1;
  }

  // Whether rows of the output's gradient are whole pairs.
  bool has_pairs(const Elements& grad) const {
    return problem_.v.size[3] % 2 == 0 && is_aligned(grad.data, 2 * bytes_of(grad.dtype));
  }

  void set_pool(BackwardWork<T>& work) const {
    const auto narrow_size = [](int64_t size) { return int(std::min<int64_t>(size, INT32_MAX)); };
    const int64_t* size = problem_.v.size + 2;
    const int64_t* window = problem_.arguments.pool;
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
    pool.by_cols = cuda::wide_divisor(size[1], pixels_);
    pool.by_pooled_cols = cuda::wide_divisor(std::max<int64_t>(pooled(1), 1), windows_);
    pool.by_window_rows = cuda::divisor(pool.window_rows);
    pool.by_window_cols = cuda::divisor(pool.window_cols);
    work.windows = sliced_planes(window_plane_, work.samples, channels_);
    work.window_place = window_place_;
    work.window_grad = window_grad_;
    work.window_value = window_value_;
  }

  // Lanes next to each other have a line of memory; more of them share a pixel if threads would be left over.
  void set_logsumexp(BackwardWork<T>& work) const {
    const int line = std::min(cuda::kLineBytes / int(work.width * sizeof(T)), kWarpThreads / 2);
    const int64_t loads = cuda::divide_up(pixels_, work.width);
    work.lanes = kWarpThreads / cuda::power_of_two_from(loads, line);
    while (work.lanes < kWarpThreads && 2 * work.lanes * loads <= kPlaneThreads) work.lanes *= 2;
    work.blocks_per_sample = sums_channels_ ? spans() : cuda::divide_up(loads, kPlaneThreads / work.lanes);
    work.by_blocks_per_sample =
        cuda::wide_divisor(work.blocks_per_sample, (work.samples + 1) * work.blocks_per_sample);
    work.most = most_;
    work.factor = factor_;
  }

  const BackwardProblem problem_;
  const cuda::Card card_;
  const StepShape step_;
  const int64_t samples_;
  const int64_t channels_;
  const int64_t pixels_;
  const int64_t windows_;  // of a plane; its pixels where nothing is pooled
  const PlaneSlices plane_;
  const PlaneSlices window_plane_;
  const bool sums_channels_;  // one kernel does what two do elsewhere
  const bool writes_;         // anything that takes a last pass over v
  const bool runs_;
  // Of all samples.
  PartialSums after_norm_{};
  PartialSums of_all_{};
  // Of a step's.
  Norm<T>* norms_ = nullptr;
  GroupMeans<T>* means_ = nullptr;
  int* window_place_ = nullptr;
  T* window_grad_ = nullptr;
  T* window_value_ = nullptr;
  T* most_ = nullptr;
  T* factor_ = nullptr;
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

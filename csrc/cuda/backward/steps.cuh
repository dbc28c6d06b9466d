// Backward of a chain on a given v, the conv's output: plans and queues it. Reads from top to bottom.
//
// The reduction spreads the output's gradient over v's places: it leaves a table from which, with v, the
// gradient at each place follows. From there on all is pointwise, but for two sums over each group of a
// GroupNorm. What it takes is computed again from v and the statistics that forward gave. But for strips, no
// plan and no sum of a sample depends on its batch; the input's gradient does not there either.
#pragma once

#include "call.cuh"
#include "pack_gradient.cuh"
#include "pool_table.cuh"
#include "softmax_table.cuh"
#include "strip_kernel.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

template <class Chain, class T>
class BackwardRun {
 public:
  BackwardRun(const BackwardProblem& problem, const StepPlan& plan, Workspace& workspace,
              const cuda::Card& card)
      : call_(problem, plan, workspace), card_(card) {}

  bool runs() const { return call_.runs; }
  ConvFindings findings(int64_t first_sample) const { return call_.findings(first_sample); }

  // Queues the norms without weight and bias, which all others take.
  cudaError_t launch_norms(int64_t first_sample, int64_t samples, cudaStream_t stream) const {
    return launch_unit_norms(call_.problem.statistics + first_sample * call_.groups(), samples,
                             call_.plan.channels, call_.groups(), call_.norms(), stream);
  }

  // Queues the gradient of v; both are contiguous.
  cudaError_t launch_tensor(cudaStream_t stream) const {
    if (!call_.runs) return cudaSuccess;
    const BackwardProblem& problem = call_.problem;
    const BackwardWork<T> work =
        call_.work_of(0, call_.plan.samples, problem.v.data, problem.wants.v ? problem.grad_v : nullptr);
    bool overlaps = false;  // with the kernel before; the first one does not
    if (const cudaError_t status = launch_before_gradient(0, work, overlaps, stream)) return status;
    if (!call_.writes) return cudaSuccess;
    return launch_planes(write_gradient<Chain, T>, blocks_of(work.planes), work, overlaps, stream);
  }

  // Queues the gradient of v of `samples` samples from `first_sample` on, as packed rows. v is contiguous
  // memory of these samples alone; the rest is of all samples.
  cudaError_t launch_packed_step(int64_t first_sample, int64_t samples, const void* v,
                                 const PackedRows& grad_v, cudaStream_t stream) const {
    if (!call_.runs) return cudaSuccess;
    PackWork pack{call_.work_of(first_sample, samples, v, nullptr), grad_v, {}};
    if (!call_.problem.wants.v) pack.to.units = nullptr;
    pack.shape = cuda::pack_shape(grad_v, call_.plan, samples, pack_width<Chain>(pack.work, grad_v.cols));
    bool overlaps = false;
    if (const cudaError_t status = launch_before_gradient(first_sample, pack.work, overlaps, stream))
      return status;
    if (!call_.writes) return cudaSuccess;
    const LaunchShape shape{grid_of(samples * grad_v.rows, 1), kGradientThreads, call_.plan.pack_bytes,
                            overlaps};
    return launch_kernel(pack_gradient<Chain>, shape, stream, pack);
  }

  // Of all samples.
  cudaError_t launch_strips(const StripWork& strip, cudaStream_t stream) const {
    if (!call_.runs) return cudaSuccess;
    StripProblem<Chain> problem{call_.work_of(0, call_.plan.samples, nullptr, nullptr), strip};
    problem.work.has_pairs = call_.has_pairs(problem.work.grad);
    // With the kernel before, if that is one of ours.
    bool overlaps = card_.overlaps_kernels && (kNeedsStatistics || strip.balance != nullptr);
    if constexpr (kPools) {
      static_assert(kNeedsStatistics && !Chain::Post::kReadsConv, "a pass finds norms, and Pre(v), not v");
      if (const cudaError_t status = launch_planes(found_pool_table<Chain>, blocks_of(problem.work.windows),
                                                   problem.work, overlaps, stream))
        return status;
    }
    if (!call_.writes) return cudaSuccess;
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

  // After the steps of all samples: the gradients of the parameters, each the sum over a channel of all.
  cudaError_t launch_parameters(cudaStream_t stream) const {
    const ParameterGradients gradients = call_.parameters();
    for (const ParameterGradient& gradient : gradients.of) {
      if (gradient.to != nullptr)
        return launch_parameter_gradients(gradients, call_.plan.samples, call_.plan.channels, stream);
    }
    return cudaSuccess;
  }

  static cudaError_t load_packing(const cuda::Card& card) {
    return load_kernel(pack_gradient<Chain>, card.shared_bytes);
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
  using Call = BackwardCall<Chain, T>;
  static constexpr bool kNeedsStatistics = Call::kNeedsStatistics;
  static constexpr bool kPools = Call::kPools;
  static constexpr bool kReducesChannels = Call::kReducesChannels;
  static constexpr bool kMaySumChannels = Call::kMaySumChannels;

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
      if (call_.writes) return launch_means(work, overlaps, stream);
    }
    return cudaSuccess;
  }

  cudaError_t launch_means(const BackwardWork<T>& work, bool overlaps, cudaStream_t stream) const {
    return launch_group_means(work.after_norm, work.samples, work.channels, work.pixels, work.arguments,
                              work.norms, work.means, overlaps, stream);
  }

  cudaError_t launch_strip_kernel(const StripProblem<Chain>& problem, bool overlaps,
                                  cudaStream_t stream) const {
    const auto launch = [&](auto tiles) {
      constexpr int kTiles = decltype(tiles)::value;
      const LaunchShape shape{dim3(problem.strip.plan.blocks), kStripThreads,
                              cuda::strip_shared_bytes(kTiles), overlaps};
      return launch_kernel(strip_kernel<Chain, kTiles>, shape, stream, problem);
    };
    if (problem.strip.plan.out_tiles == kMostOutTiles)
      return launch(std::integral_constant<int, kMostOutTiles>{});
    return launch(std::integral_constant<int, kMostOutTiles / 2>{});
  }

  template <int kTiles>
  static cudaError_t load_strip_kernel(const cuda::Card& card) {
    constexpr int kBytes = cuda::strip_shared_bytes(kTiles);
    return kBytes > card.shared_bytes ? cudaSuccess : load_kernel(strip_kernel<Chain, kTiles>, kBytes);
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
      if (call_.plan.sums_channels) {
        const LaunchShape shape{grid_of(work.samples * work.blocks.per_sample, 1),
                                cuda::channel_sums_threads(work.channels), 0, overlaps};
        overlaps = card_.overlaps_kernels;
        return launch_kernel(channel_sums<Chain>, shape, stream, work);
      }
    }
    if constexpr (kReducesChannels) {
      if (const cudaError_t status = launch(logsumexp_table<Chain, T>, work.samples * work.blocks.per_sample))
        return status;
    }
    if constexpr (kNeedsStatistics) return launch(sums_after_norm<Chain, T>, blocks_of(work.planes));
    return cudaSuccess;
  }

  const Call call_;
  const cuda::Card card_;
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

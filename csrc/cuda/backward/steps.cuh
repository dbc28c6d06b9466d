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
  BackwardRun(const BackwardProblem& problem, const StepShape& step, Workspace& workspace,
              const cuda::Card& card)
      : call_(problem, step, workspace), card_(card) {}

  bool runs() const { return call_.runs; }
  bool fits() const { return call_.fits(); }
  ConvFindings findings(int64_t first_sample) const { return call_.findings(first_sample); }

  // Queues the norms without weight and bias, which all others take.
  cudaError_t launch_norms(int64_t first_sample, int64_t samples, cudaStream_t stream) const {
    return launch_unit_norms(call_.problem.statistics + first_sample * call_.groups(), samples,
                             call_.channels, call_.groups(), call_.norms(), stream);
  }

  // Queues the gradient of v of `samples` samples from `first_sample` on. v (problem.v.dtype) and grad_v
  // (problem.grad_v_dtype) are contiguous memory of these samples alone; the rest is of all samples.
  cudaError_t launch_step(int64_t first_sample, int64_t samples, const void* v, void* grad_v,
                          cudaStream_t stream) const {
    if (!call_.runs) return cudaSuccess;
    const BackwardWork<T> work =
        call_.work_of(first_sample, samples, v, call_.problem.wants.v ? grad_v : nullptr);
    bool overlaps = false;  // with the kernel before; the first one does not
    if (const cudaError_t status = launch_before_gradient(first_sample, work, overlaps, stream))
      return status;
    if (!call_.writes) return cudaSuccess;
    return launch_planes(write_gradient<Chain, T>, blocks_of(work.planes), work, overlaps, stream);
  }

  cudaError_t launch_packed_step(int64_t first_sample, int64_t samples, const void* v,
                                 const PackedRows& grad_v, cudaStream_t stream) const {
    if (!call_.runs) return cudaSuccess;
    PackWork pack{call_.work_of(first_sample, samples, v, nullptr), grad_v, {}};
    if (!call_.problem.wants.v) pack.to.units = nullptr;
    pack.shape =
        pack_shape(grad_v, samples, pack_width<Chain>(pack.work, grad_v.cols), int(call_.pooled_cols()));
    bool overlaps = false;
    if (const cudaError_t status = launch_before_gradient(first_sample, pack.work, overlaps, stream))
      return status;
    if (!call_.writes) return cudaSuccess;
    const LaunchShape shape{grid_of(samples * grad_v.rows, 1), kGradientThreads,
                            int(PackMemory<Chain>::bytes(call_.channels, pack.shape.pitch)), overlaps};
    return launch_kernel(pack_gradient<Chain>, shape, stream, pack);
  }

  // Of all samples.
  cudaError_t launch_strips(const StripWork& strip, cudaStream_t stream) const {
    if (!call_.runs) return cudaSuccess;
    StripProblem<Chain> problem{call_.work_of(0, call_.samples, nullptr, nullptr), strip};
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

  static bool may_pack(const BackwardProblem& problem, const cuda::Card& card) {
    const int64_t* size = problem.v.size;
    const int64_t most = card.shared_bytes / int64_t(sizeof(float));
    return problem.v.dtype == DType::kFloat32 && problem.conv != nullptr && size[1] <= most &&
           size[3] <= most && Checked(size[2]) * size[3] < INT32_MAX / (kPackItems + 1) &&
           PackMemory<Chain>::bytes(size[1], pack_pitch(size[3])) <= card.shared_bytes;
  }

  // After the steps of all samples: the gradients of the parameters, each the sum over a channel of all.
  cudaError_t launch_parameters(cudaStream_t stream) const {
    const ParameterGradients gradients = call_.parameters();
    for (const ParameterGradient& gradient : gradients.of) {
      if (gradient.to != nullptr)
        return launch_parameter_gradients(gradients, call_.samples, call_.channels, stream);
    }
    return cudaSuccess;
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
    return launch_group_means(work.after_norm, work.samples, call_.channels, call_.pixels,
                              call_.problem.arguments, work.norms, work.means, overlaps, stream);
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
      if (call_.sums_channels) {
        const LaunchShape shape{grid_of(work.samples * work.blocks_per_sample, 1),
                                channel_sums_threads(call_.channels), 0, overlaps};
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

  const Call call_;
  const cuda::Card card_;
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

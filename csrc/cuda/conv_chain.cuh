// A chain with its conv: from a plan to launches. Reads from top to bottom: which passes a chain takes, what
// memory they need, and in which order they are queued.
#pragma once

#include "conv_gradient_sums_pass.cuh"
#include "conv_kernel.cuh"
#include "conv_logsumexp_pass.cuh"
#include "conv_pack.cuh"
#include "conv_plan.h"
#include "conv_pointwise.cuh"
#include "conv_pool_pass.cuh"
#include "conv_resident_pass.cuh"
#include "conv_store_pass.cuh"
#include "vector_access.cuh"
#include "workspace.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

using cuda::Card;
using cuda::ConvPlan;
using cuda::ConvSource;

// Of a chain with a norm, for backward: what the pool took of Pre(v); or, without a pool, the sums behind the
// norm, by the norms without weight and bias.
struct ConvFindings {
  Norm<float>* norms;  // [N][C], given
  float* pooled;       // [N][C][pooled height][pooled width]
  int* pooled_places;  // each in its window, counted row by row
  ConvGradientSums sums;
};

template <class Chain>
struct ConvChain {
  static constexpr bool kPools = Chain::Reduce::kPools;
  // It needs statistics of all the conv's output before any of it is finished.
  static constexpr bool kWaitsForNorms = Chain::kNeedsStatistics && !kPools;

  static ConvPlan plan(const Problem& problem, const Card& card) {
    return cuda::plan_conv(problem, {kPools, kWaitsForNorms}, card);
  }

  // As a Kernel has it: the plan knows the card.
  static size_t workspace(const Problem& problem, const ConvPlan& plan, const Card&) {
    return conv_problem(problem, plan, nullptr).second;
  }

  static cudaError_t launch(const Problem& problem, const ConvPlan& plan, void* workspace, const Card& card,
                            cudaStream_t stream) {
    if (element_count(problem.output) == 0) return cudaSuccess;
    const ConvProblem p = conv_problem(problem, plan, workspace).first;
    cudaError_t status = cudaErrorInvalidValue;
    visit_modes(problem, plan.source, [&](auto source, auto mode) {
      status = launch_passes<decltype(source), decltype(mode)>(p, plan, card, stream);
    });
    return status;
  }

  // How launch_findings() runs. The output is of the size that the chain gives.
  static ConvPlan plan_findings(const Problem& problem, const Card& card) {
    return cuda::plan_conv(problem, {kPools, false, kPools}, card);
  }

  static size_t workspace_of_findings(const Problem& problem, const ConvPlan& plan) {
    Workspace workspace(nullptr);
    packed_problem(problem, plan, workspace);
    return workspace.bytes();
  }

  // Queues what backward wants to know before it computes v again.
  static cudaError_t launch_findings(const Problem& problem, const ConvPlan& plan, void* workspace,
                                     const ConvFindings& to, const Card& card, cudaStream_t stream) {
    Workspace memory(workspace);
    ConvProblem p = packed_problem(problem, plan, memory);
    p.norms = to.norms;
    p.pooled = to.pooled;
    p.pooled_places = to.pooled_places;
    p.backward = to.sums;
    cudaError_t status = cudaErrorInvalidValue;
    visit_modes(problem, plan.source, [&](auto source, auto mode) {
      status = launch_findings<decltype(source), decltype(mode)>(p, card, stream);
    });
    return status;
  }

  // Into so many slices a channel come the sums of launch_findings().
  static int64_t slices_of_findings(const ConvPlan& plan) { return parts_per_channel(plan.tiling); }

  // Loads the kernels onto the current device and lets them use all of its shared memory.
  static cudaError_t load(const Card& card) {
    cudaError_t status = cudaSuccess;
    const auto allow = [&](const void* kernel) {
      if (status == cudaSuccess)
        status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, card.shared_bytes);
    };
    const auto load_mode = [&](auto source, auto mode) {
      using S = decltype(source);
      using Mode = decltype(mode);
      if (status == cudaSuccess) status = load_pack<Mode>();
      if constexpr (kPools) {
        allow(reinterpret_cast<const void*>(conv_kernel<S, Mode, PoolPass<Chain, false>>));
        allow(reinterpret_cast<const void*>(conv_kernel<S, Mode, PoolPass<Chain, true>>));
      } else {
        if constexpr (Chain::kNeedsStatistics)
          allow(reinterpret_cast<const void*>(conv_kernel<S, Mode, MomentsPass<typename Chain::Pre>>));
        if constexpr (kWaitsForNorms)
          allow(reinterpret_cast<const void*>(conv_kernel<S, Mode, GradientSumsPass<Chain>>));
        allow(reinterpret_cast<const void*>(conv_kernel<S, Mode, LastPass<Mode>>));
        if constexpr (kWaitsForNorms && std::is_same_v<S, Sm90a>)
          allow(reinterpret_cast<const void*>(conv_kernel<S, Mode, ResidentPass<Chain, Mode>>));
      }
    };
    const auto load_source = [&](auto source) {
      load_mode(source, Float32Ieee{});
      load_mode(source, Float32Tf32{});
      load_mode(source, BFloat16{});
      load_mode(source, Float16{});
    };
    load_source(Sm80{});
    load_source(Sm90a{});
    if (status == cudaSuccess && Chain::kNeedsStatistics) status = load_group_statistics<float, float>();
    if constexpr (kPools) {
      if (status == cudaSuccess) status = load_pointwise<Chain>();
    }
    return status;
  }

 private:
  template <class Mode>
  using LastPass =
      std::conditional_t<Chain::Reduce::kReducesChannels, LogSumExpPass<Chain, Mode>, StorePass<Chain, Mode>>;

  // With memory for what every pass takes.
  static ConvProblem packed_problem(const Problem& problem, const ConvPlan& plan, Workspace& workspace) {
    const ConvTiling& t = plan.tiling;
    ConvProblem p{problem.input,      problem.conv->weight, problem.output,
                  problem.conv->bias, problem.arguments,    t};
    p.tiling.reads_vectors &= is_aligned(problem.input.data, kVectorBytes);
    const Checked panels = Checked(problem.input.size[0]) * panels_per_sample(t);
    p.weights =
        workspace.take<uint4>(Checked(plan.parts) * t.row_blocks * t.chunks * (t.weights_bytes / kUnitBytes));
    p.weight_exponents = workspace.take<int>(t.row_blocks * kRows);
    p.row_bias = workspace.take<float>(t.row_blocks * kRows);
    p.shares = workspace.take<int>(Checked(t.row_blocks) * kRows * t.in_channels);
    p.is_wide = workspace.take<int>(t.row_blocks * kRows);
    p.pixels = workspace.take<uint4>(plan.parts * panels * t.chunks * chunk_units(t));
    p.pixel_exponents = workspace.take<int>(panels);
    p.magnitudes = workspace.take<unsigned>(panels * t.in_channels);
    return p;
  }

  static std::pair<ConvProblem, size_t> conv_problem(const Problem& problem, const ConvPlan& plan,
                                                     void* base) {
    const ConvTiling& t = plan.tiling;
    Workspace workspace(base);
    ConvProblem p = packed_problem(problem, plan, workspace);
    p.statistics = problem.statistics;
    const Checked channels = Checked(problem.input.size[0]) * t.out_channels;
    if (Chain::kNeedsStatistics) {
      p.norms = workspace.take<Norm<float>>(channels);
      p.parts = workspace.take<Part<float>>(channels * parts_per_channel(t));
    }
    if (plan.is_resident) {
      p.norm_shape = norm_shape(t, int(problem.arguments.num_groups));
      p.tile_parts =
          workspace.take<TilePart>(Checked(problem.input.size[0]) * p.norm_shape.groups * p.norm_shape.tiles);
    }
    if (kPools) p.pooled = workspace.take<float>(channels * problem.output.size[2] * problem.output.size[3]);
    return {p, workspace.bytes()};
  }

  template <class Visit>
  static void visit_modes(const Problem& problem, ConvSource source, const Visit& visit) {
    const auto with_source = [&](auto source) {
      switch (problem.input.dtype) {
        case DType::kFloat32:
          return problem.conv->tf32 ? visit(source, Float32Tf32{}) : visit(source, Float32Ieee{});
        case DType::kBFloat16:
          return visit(source, BFloat16{});
        case DType::kFloat16:
          return visit(source, Float16{});
        default:
          return;
      }
    };
    source == ConvSource::kSm90a ? with_source(Sm90a{}) : with_source(Sm80{});
  }

  template <class S, class Mode>
  static cudaError_t launch_passes(const ConvProblem& p, const ConvPlan& plan, const Card& card,
                                   cudaStream_t stream) {
    if (const cudaError_t status = launch_pack<Mode>(p, stream)) return status;
    if constexpr (kWaitsForNorms && std::is_same_v<S, Sm90a>) {
      if (plan.is_resident) {
        const cudaError_t status = launch_pass<S, Mode, ResidentPass<Chain, Mode>, true>(p, card, stream);
        if (status != cudaErrorCooperativeLaunchTooLarge) return status;
        cudaGetLastError();  // the stream has fewer multiprocessors than the card: two passes do with any
                             // number
      }
    }
    if constexpr (kPools) {
      if (const cudaError_t status = launch_pass<S, Mode, PoolPass<Chain, false>>(p, card, stream))
        return status;
      if (const cudaError_t status = launch_norms(p, card, stream)) return status;
      return launch_pointwise<Chain>(p, card.overlaps_kernels, stream);
    } else {
      if constexpr (Chain::kNeedsStatistics) {
        using Moments = MomentsPass<typename Chain::Pre>;
        if (const cudaError_t status = launch_pass<S, Mode, Moments>(p, card, stream)) return status;
        if (const cudaError_t status = launch_norms(p, card, stream)) return status;
      }
      return launch_pass<S, Mode, LastPass<Mode>>(p, card, stream);
    }
  }

  template <class S, class Mode>
  static cudaError_t launch_findings(const ConvProblem& p, const Card& card, cudaStream_t stream) {
    using Pass = std::conditional_t<kPools, PoolPass<Chain, true>, GradientSumsPass<Chain>>;
    if (const cudaError_t status = launch_pack<Mode>(p, stream)) return status;
    return launch_pass<S, Mode, Pass>(p, card, stream);
  }

  static cudaError_t launch_norms(const ConvProblem& p, const Card& card, cudaStream_t stream) {
    const ConvTiling& t = p.tiling;
    return launch_statistics<float>(p.parts, parts_per_channel(t), p.input.size[0], t.out_channels,
                                    int64_t(t.out_size[0]) * t.out_size[1], p.arguments,
                                    StatisticsOutput<float>{p.norms, p.statistics}, card.overlaps_kernels,
                                    stream);
  }

  // Persistent blocks, one a multiprocessor.
  template <class S, class Mode, class Pass, bool kIsCooperative = false>
  static cudaError_t launch_pass(const ConvProblem& p, const Card& card, cudaStream_t stream) {
    const ConvTiling& t = p.tiling;
    const int items =
        int(p.input.size[0]) * t.bands * t.tiles_across * (Pass::kAllRowBlocks ? 1 : t.row_blocks);
    const int blocks = items < card.multiprocessors ? items : card.multiprocessors;
    const LaunchShape shape{dim3(blocks), kConvThreads, t.shared_bytes,
                            card.overlaps_kernels && !kIsCooperative, kIsCooperative};
    return launch_kernel(conv_kernel<S, Mode, Pass>, shape, stream, p, items);
  }
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

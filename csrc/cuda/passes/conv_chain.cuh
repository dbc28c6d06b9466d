// A chain with its conv: from a plan to launches. Reads from top to bottom: which passes a chain takes, what
// memory they need, and in which order they are queued.
#pragma once

#include "core/chains.h"
#include "launch_pass.cuh"
#include "logsumexp.cuh"
#include "moments.cuh"
#include "pool.cuh"
#include "pooled_pointwise.cuh"
#include "resident.cuh"
#include "store.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

template <class Chain>
constexpr cuda::ChainShape chain_shape() {
  return {Chain::Reduce::kPools, Chain::kNeedsStatistics && !Chain::Reduce::kPools};
}

template <class Chain>
struct ConvChain {
  static constexpr bool kPools = Chain::Reduce::kPools;
  // It needs statistics of all the conv's output before any of it is finished.
  static constexpr bool kWaitsForNorms = chain_shape<Chain>().waits_for_norms;
  // Samples, in shared memory: see resident.cuh.
  static constexpr bool kMayReside = kWaitsForNorms && kArchitecture.keeps_samples;

  // As a Kernel has it: the plan knows the card.
  static size_t workspace(const Problem& problem, const ConvPlan& plan, const Card&) {
    return conv_problem(problem, plan, nullptr).second;
  }

  static cudaError_t launch(const Problem& problem, const ConvPlan& plan, void* workspace, const Card& card,
                            cudaStream_t stream) {
    if (element_count(problem.output) == 0) return cudaSuccess;
    const ConvProblem p = conv_problem(problem, plan, workspace).first;
    return visit_mode(p.input.dtype, plan.operand_parts,
                      [&](auto mode) { return launch_passes<decltype(mode)>(p, plan, card, stream); });
  }

  // Loads the kernels onto the current device and lets them use all of its shared memory.
  static cudaError_t load(const Card& card) {
    if (const cudaError_t status = load_pack()) return status;
    if (const cudaError_t status = visit_modes([&](auto mode) { return load_passes<decltype(mode)>(card); }))
      return status;
    if constexpr (Chain::kNeedsStatistics) {
      if (const cudaError_t status = load_statistics()) return status;
    }
    if constexpr (kPools) return load_kernel(pooled_pointwise<Chain>);
    return cudaSuccess;
  }

 private:
  template <class Mode>
  using LastPass =
      std::conditional_t<Chain::Reduce::kReducesChannels, LogSumExpPass<Chain, Mode>, StorePass<Chain, Mode>>;

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

  template <class Mode>
  static cudaError_t launch_passes(const ConvProblem& p, const ConvPlan& plan, const Card& card,
                                   cudaStream_t stream) {
    if (const cudaError_t status = launch_pack(p, stream)) return status;
    if constexpr (kMayReside) {
      if (plan.is_resident) {
        const cudaError_t status = launch_pass<Mode, ResidentPass<Chain, Mode>, true>(p, card, stream);
        if (status != cudaErrorCooperativeLaunchTooLarge) return status;
        cudaGetLastError();  // the stream has fewer multiprocessors than the card: two passes do with any
                             // number
      }
    }
    if constexpr (kPools) {
      if (const cudaError_t status = launch_pass<Mode, PoolPass<Chain, false>>(p, card, stream))
        return status;
      if (const cudaError_t status = launch_norms(p, card, stream)) return status;
      return launch_pointwise<Chain>(p, card.overlaps_kernels, stream);
    } else {
      if constexpr (Chain::kNeedsStatistics) {
        using Moments = MomentsPass<typename Chain::Pre>;
        if (const cudaError_t status = launch_pass<Mode, Moments>(p, card, stream)) return status;
        if (const cudaError_t status = launch_norms(p, card, stream)) return status;
      }
      return launch_pass<Mode, LastPass<Mode>>(p, card, stream);
    }
  }

  template <class Mode>
  static cudaError_t load_passes(const Card& card) {
    if constexpr (kPools) {
      return load_pass<Mode, PoolPass<Chain, false>>(card);
    } else {
      if constexpr (kWaitsForNorms) {
        if (const cudaError_t status = load_pass<Mode, MomentsPass<typename Chain::Pre>>(card)) return status;
      }
      if constexpr (kMayReside) {
        if (const cudaError_t status = load_pass<Mode, ResidentPass<Chain, Mode>>(card)) return status;
      }
      return load_pass<Mode, LastPass<Mode>>(card);
    }
  }

  static cudaError_t launch_norms(const ConvProblem& p, const Card& card, cudaStream_t stream) {
    const ConvTiling& t = p.tiling;
    const int64_t parts_per_group = parts_per_channel(t) * (t.out_channels / p.arguments.num_groups);
    return launch_group_statistics(p.parts, parts_per_group, p.input.size[0], t.out_channels,
                                   int64_t(t.out_size[0]) * t.out_size[1], p.arguments,
                                   {p.norms, p.statistics}, card.overlaps_kernels, stream);
  }
};

// A conv's output by itself, with the bits that a chain's forward saw: for backward, which computes it again.
using ConvOutput = ConvChain<Identity>;

template <class Mode>
using StoreV = StorePass<Identity, Mode>;
FUSEDCONV_SHARED_PASS(extern, StoreV)

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

// What backward wants to know of a conv's output before it computes it again: the passes that find it, from a
// plan to launches.
#pragma once

#include "cuda/passes/launch_pass.cuh"
#include "cuda/passes/pool.cuh"
#include "gradient_sums_pass.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// Of a chain with a norm: what the pool took of Pre(v); or, without a pool, the sums behind the norm, by the
// norms without weight and bias.
struct ConvFindings {
  Norm<float>* norms;  // [N][C], given
  float* pooled;       // [N][C][pooled height][pooled width]
  int* pooled_places;  // each in its window, counted row by row
  ConvGradientSums sums;
};

template <class Chain>
struct FindingPasses {
  static constexpr bool kPools = Chain::Reduce::kPools;

  static size_t workspace(const Problem& problem, const ConvPlan& plan) {
    Workspace workspace(nullptr);
    packed_problem(problem, plan, workspace);
    return workspace.bytes();
  }

  // The output is of the size that the chain gives.
  static cudaError_t launch(const Problem& problem, const ConvPlan& plan, void* workspace,
                            const ConvFindings& to, const Card& card, cudaStream_t stream) {
    Workspace memory(workspace);
    ConvProblem p = packed_problem(problem, plan, memory);
    p.norms = to.norms;
    p.pooled = to.pooled;
    p.pooled_places = to.pooled_places;
    p.backward = to.sums;
    if (const cudaError_t status = launch_pack(p, stream)) return status;
    return visit_mode(p.input.dtype, plan.operand_parts, [&](auto mode) {
      return launch_pass<decltype(mode), Pass<decltype(mode)>>(p, card, stream);
    });
  }

  static cudaError_t load(const Card& card) {
    return visit_modes([&](auto mode) { return load_pass<decltype(mode), Pass<decltype(mode)>>(card); });
  }

 private:
  template <class Mode>
  using Pass = std::conditional_t<kPools, PoolPass<Chain, true>, GradientSumsPass<Chain, Mode>>;
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

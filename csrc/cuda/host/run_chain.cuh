// What a chain's file has to say: one line that names it and its composition.
#pragma once

#include "chain_kernels.h"
#include "cuda/backward/chain_backward.cuh"
#include "cuda/given/chain.cuh"
#include "cuda/passes/conv_chain.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

#ifdef FUSEDCONV_GIVEN_ONLY
constexpr bool kImageHasConvs = false;
#else
constexpr bool kImageHasConvs = true;
#endif

// A chain with its conv, if it and the image have one, or on a given tensor.
template <class Chain, bool kFollowsConv>
struct RunChain {
  static constexpr bool kHasConv = kFollowsConv && kImageHasConvs;
  static constexpr cuda::ChainShape kShape = chain_shape<Chain>();
  using Backward = ChainBackward<Chain, kHasConv>;

  static size_t workspace(const Problem& problem, const cuda::ConvPlan& plan, const cuda::Card& card) {
    if constexpr (kHasConv) {
      if (problem.conv != nullptr) return ConvChain<Chain>::workspace(problem, plan, card);
    }
    return GivenChain<Chain>::workspace(problem, card);
  }

  static cudaError_t launch(const Problem& problem, const cuda::ConvPlan& plan, void* workspace,
                            const cuda::Card& card, cudaStream_t stream) {
    if constexpr (kHasConv) {
      if (problem.conv != nullptr) return ConvChain<Chain>::launch(problem, plan, workspace, card, stream);
    }
    return GivenChain<Chain>::launch(problem, workspace, card, stream);
  }

  static cudaError_t load(const cuda::Card& card) {
    if (const cudaError_t status = GivenChain<Chain>::load(card)) return status;
    if (const cudaError_t status = Backward::load(card)) return status;
    if constexpr (kHasConv) return ConvChain<Chain>::load(card);
    return cudaSuccess;
  }
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

#define FUSEDCONV_CUDA_KERNEL(name, ...)                                                          \
  namespace fusedconv {                                                                           \
  inline namespace FUSEDCONV_TARGET {                                                             \
  using Run = RunChain<__VA_ARGS__>;                                                              \
  const cuda::Kernel chain_kernels::name{Run::kShape,         Run::workspace,        Run::launch, \
                                         Run::Backward::plan, Run::Backward::launch, Run::load};  \
  }                                                                                               \
  }

#define FUSEDCONV_CUDA_CHAIN(name, Composition) FUSEDCONV_CUDA_KERNEL(name, Composition, true)
// For a chain that never follows a conv of ours.
#define FUSEDCONV_CUDA_GIVEN_CHAIN(name, Composition) FUSEDCONV_CUDA_KERNEL(name, Composition, false)

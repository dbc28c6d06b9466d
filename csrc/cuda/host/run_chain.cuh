// What a chain's file has to say: one line that names it and its composition.
#pragma once

#include "cuda/backward/chain_backward.cuh"
#include "cuda/given/chain.cuh"
#include "cuda/passes/conv_chain.cuh"
#include "kernels.h"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// A chain with its conv, if it has one, or on a given tensor.
template <class Chain, bool kHasConv>
struct RunChain {
  static cuda::ConvPlan plan(const Problem& problem, const Card& card) {
    if constexpr (kHasConv) return ConvChain<Chain>::plan(problem, card);
    return {ConvSource::kNone, "", {}, 0};
  }

  static size_t workspace(const Problem& problem, const cuda::ConvPlan& plan, const Card& card) {
    if constexpr (kHasConv) {
      if (problem.conv != nullptr) return ConvChain<Chain>::workspace(problem, plan, card);
    }
    return GivenChain<Chain>::workspace(problem, card);
  }

  static cudaError_t launch(const Problem& problem, const cuda::ConvPlan& plan, void* workspace,
                            const Card& card, cudaStream_t stream) {
    if constexpr (kHasConv) {
      if (problem.conv != nullptr) return ConvChain<Chain>::launch(problem, plan, workspace, card, stream);
    }
    return GivenChain<Chain>::launch(problem, workspace, card, stream);
  }

  static cudaError_t load(const Card& card) {
    if (const cudaError_t status = GivenChain<Chain>::load()) return status;
    if (const cudaError_t status = ChainBackward<Chain, kHasConv>::load(card)) return status;
    if constexpr (kHasConv) return ConvChain<Chain>::load(card);
    return cudaSuccess;
  }
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

#define FUSEDCONV_CUDA_KERNEL(name, ...)                                                  \
  namespace fusedconv {                                                                   \
  namespace cuda {                                                                        \
  const Kernel name{RunChain<__VA_ARGS__>::plan,        RunChain<__VA_ARGS__>::workspace, \
                    RunChain<__VA_ARGS__>::launch,      ChainBackward<__VA_ARGS__>::plan, \
                    ChainBackward<__VA_ARGS__>::launch, RunChain<__VA_ARGS__>::load};     \
  }                                                                                       \
  }

#define FUSEDCONV_CUDA_CHAIN(name, Composition) FUSEDCONV_CUDA_KERNEL(name, Composition, true)
// For a chain that never follows a conv of ours.
#define FUSEDCONV_CUDA_TENSOR_CHAIN(name, Composition) FUSEDCONV_CUDA_KERNEL(name, Composition, false)

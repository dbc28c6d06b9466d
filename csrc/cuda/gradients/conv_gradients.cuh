// The gradients of a conv's weight and input from that of its output, by the tensor cores. For convs of
// stride and dilation 1; the rest is PyTorch's.
#pragma once

#include <cuda_runtime_api.h>

#include "core/problem.h"
#include "packed_rows.cuh"
#include "plan/gradient_plan.h"
#include "plan/workspace.h"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

using cuda::ConvShape;
using cuda::InputGradientPlan;
using cuda::kSlotValues;
using cuda::kTaps;
using cuda::kTileChannels;
using cuda::WeightGradientPlan;

// What stands before and behind the kernels that sum up the weight's gradient. Takes its memory from the
// workspace (a null base only counts).
class WeightSums {
 public:
  WeightSums(const BackwardProblem& problem, const ConvShape& shape, const WeightGradientPlan& plan,
             Workspace& workspace);

  // [out_channels], powers of two that the output's gradient is multiplied by, or null. Behind a GroupNorm a
  // channel with small weights has large gradients.
  const float* balance() const { return balance_; }
  // [slots][out_blocks][in_blocks][windows][channel_warps][kSlotValues], or null where nobody wants it.
  float* slots() const { return slots_; }

  // Before them: finds the balance.
  cudaError_t launch_before(cudaStream_t stream) const;
  // After them: adds up the slots.
  cudaError_t launch_after(cudaStream_t stream) const;

 private:
  const ConvBackward& conv_;
  const ConvShape shape_;
  const WeightGradientPlan plan_;
  float* balance_ = nullptr;
  float* slots_ = nullptr;
};

class ConvGradients {
 public:
  ConvGradients(const BackwardProblem& problem, const cuda::ConvGradientsPlan& plan, Workspace& workspace);

  // Where the gradient of the conv's output belongs, of a step's samples.
  const PackedRows& grads() const { return grads_; }

  // Before all steps: finds grads().balance.
  cudaError_t launch_before(cudaStream_t stream) const { return sums_.launch_before(stream); }
  // Queues the input's gradient of `samples` samples from `first` on, and adds what they give to the
  // weight's.
  cudaError_t launch_step(int64_t first, int64_t samples, cudaStream_t stream) const;
  // After all steps: the weight's.
  cudaError_t launch_after(cudaStream_t stream) const { return sums_.launch_after(stream); }

  // Loads the kernels onto the current device and lets them use all of its shared memory.
  static cudaError_t load(const cuda::Card& card);

 private:
  Tensor input_from(int64_t first, int64_t samples) const;
  template <class Mode>
  cudaError_t add_to_weight(const Tensor& input, bool is_first, cudaStream_t stream) const;
  template <class Mode>
  cudaError_t write_input(int64_t first, int64_t samples, cudaStream_t stream) const;

  const ConvBackward& conv_;
  const Wanted wants_;
  const cuda::ConvGradientsPlan& plan_;
  PackedRows grads_;
  PackedRows input_;
  const WeightSums sums_;
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

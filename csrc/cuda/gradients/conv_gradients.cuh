// The gradients of a conv's weight and input from that of its output, by the tensor cores. For convs of
// stride and dilation 1; the rest is PyTorch's.
#pragma once

#include <cuda_runtime_api.h>

#include "core/problem.h"
#include "packed_rows.cuh"
#include "plan/gradient_plan.h"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

using cuda::ConvShape;
using cuda::InputGradientPlan;
using cuda::kTaps;
using cuda::kTileChannels;
using cuda::WeightGradientPlan;

constexpr int kSlotValues = kTileChannels * kUnitChannels * kTaps * kTaps;  // of a warp's sums

// Finds by which powers of two the channels of the output's gradient are multiplied: balance is
// [out_channels]. Behind a GroupNorm a channel with small weights has large gradients.
cudaError_t launch_balance(const Tensor& weight, float* balance, cudaStream_t stream);

// Adds up the weight's gradient from slots: of each block of channels [plan.slots][out_blocks][in_blocks]
// [windows][channel_warps][kSlotValues].
cudaError_t launch_sum_of_slots(const float* slots, const WeightGradientPlan& plan, const ConvShape& shape,
                                const float* balance, float* grad_weight, cudaStream_t stream);

class ConvGradients {
 public:
  // Whether the kernels fit into a block's shared memory; of what reason_against_gradients() lets through.
  static bool may_run(const BackwardProblem& problem, const cuda::Card& card);

  // Steps have so many samples at the most. The workspace is 256-aligned; null if only its bytes are wanted.
  ConvGradients(const BackwardProblem& problem, int64_t step_samples, void* workspace,
                const cuda::Card& card);

  size_t workspace_bytes() const { return workspace_bytes_; }

  // Where the gradient of the conv's output belongs, of a step's samples.
  const PackedRows& grads() const { return grads_; }

  // Of what is kept of a sample, the most of one kind.
  static int64_t sample_bytes(const BackwardProblem& problem, const cuda::Card& card);

  // Before all steps: sets grads().balance.
  cudaError_t launch_before_steps(cudaStream_t stream) const;
  // Queues the input's gradient of `samples` samples from `first` on, and adds what they give to the
  // weight's.
  cudaError_t launch_step(int64_t first, int64_t samples, cudaStream_t stream) const;
  // After all steps.
  cudaError_t launch_weight(cudaStream_t stream) const;

  // Loads the kernels onto the current device and lets them use all of its shared memory.
  static cudaError_t load(const cuda::Card& card);

 private:
  bool wants_weight() const { return wants_.weight; }
  bool wants_input() const { return wants_.input; }
  Tensor input_from(int64_t first, int64_t samples) const;
  template <class Mode>
  cudaError_t add_to_weight(const Tensor& input, bool is_first, cudaStream_t stream) const;
  template <class Mode>
  cudaError_t write_input(int64_t first, int64_t samples, cudaStream_t stream) const;

  const ConvBackward& conv_;
  const Wanted wants_;
  const ConvShape shape_;
  PackedRows grads_{};
  PackedRows input_{};
  WeightGradientPlan weight_plan_{};
  InputGradientPlan input_plan_{};
  float* balance_ = nullptr;
  float* slots_ = nullptr;
  size_t workspace_bytes_ = 0;
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

// The gradients of a conv's weight and input from that of its output. Kernels of their own for 3x3 kernels of
// stride and dilation 1; the rest is PyTorch's.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "../core/problem.h"
#include "card.h"

namespace fusedconv {
namespace cuda {

constexpr int kTaps = 3;  // of a kernel, down and across

// A conv, of as many samples as are worked on at a time. Sizes of a sample fit in ints.
struct ConvShape {
  int in_channels, out_channels;
  int in_size[2], out_size[2];
  int padding[2];
};

// How the gradient of the weight is shared out. A block has 64 of the output's channels and 8 of the
// input's, and walks down strips of the map; its warps have 16 channels each or, of fewer, parts of a strip.
struct WeightGradientPlan {
  int channel_warps;
  int strip_cols, strips;
  int strip_rows, segments;  // a strip is cut into
  int out_blocks, in_blocks;
  int blocks;       // for each pair of these
  int slots;        // in which sums stand apart until the end
  int copy_values;  // that a copy to shared memory takes at once
  int copy_lanes;   // that copy a channel's share of a row
};

// The same for the input's. A block has 8 of its channels and a few strips, one under the other; of each of
// their rows, chunks of the output's channels come into shared memory one after the other.
struct InputGradientPlan {
  int strip_warps, strips;
  int strip_rows, segments;
  int blocks, in_blocks;
  int chunks;
  int copy_values;
  int shift;       // from the first value that is copied of a row to the first that is used
  int rest_lanes;  // for what is left of a row after copies by whole warps
  int shared_bytes;
};

// Why the kernels do not serve; empty if they do.
std::string reason_against_gradients(const BackwardProblem& problem, const Card& card);

class ConvGradients {
 public:
  // Steps have so many samples at the most. The workspace is 256-aligned; null if only its bytes are wanted.
  ConvGradients(const BackwardProblem& problem, int64_t step_samples, void* workspace, const Card& card);

  size_t workspace_bytes() const { return workspace_bytes_; }

  // Queues the input's gradient of `samples` samples from `first` on, and adds what they give to the
  // weight's. grad_v is of these samples alone.
  cudaError_t launch_step(int64_t first, int64_t samples, const void* grad_v, cudaStream_t stream) const;
  // After all steps.
  cudaError_t launch_weight(cudaStream_t stream) const;

  // Loads the kernels onto the current device and lets them use all of its shared memory.
  static cudaError_t load(const Card& card);

 private:
  const ConvBackward& conv_;
  const ConvShape shape_;
  WeightGradientPlan weight_plan_{};
  InputGradientPlan input_plan_{};
  float* slots_ = nullptr;
  size_t workspace_bytes_ = 0;
};

}  // namespace cuda
}  // namespace fusedconv

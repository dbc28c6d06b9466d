// Whether a problem's backward is done in strips (strip_work.cuh), how they are cut, and what they leave for
// the end.
#pragma once

#include "cuda/device/workspace.cuh"
#include "strip_work.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

inline size_t strip_shared_bytes(int out_tiles) {
  return out_tiles == kMostOutTiles ? sizeof(StripShared<kMostOutTiles>)
                                    : sizeof(StripShared<kMostOutTiles / 2>);
}

// Whether strips serve what reason_against_gradients() has nothing against.
inline bool may_run_in_strips(const BackwardProblem& problem, const cuda::Card& card) {
  const ConvShape shape = cuda::conv_shape(problem);
  return cuda::fits_strips(shape, problem.v.size[0]) &&
         strip_shared_bytes(cuda::out_tiles_for(shape.out_channels)) <= size_t(card.shared_bytes);
}

class StripGradients {
 public:
  // The workspace is 256-aligned; null if only its bytes are wanted.
  StripGradients(const BackwardProblem& problem, void* memory, const cuda::Card& card)
      : conv_(*problem.conv),
        shape_(cuda::conv_shape(problem)),
        samples_(problem.v.size[0]),
        plan_(cuda::cut_strips(shape_, samples_, card)) {
    Workspace workspace(memory);
    if (conv_.input.dtype == DType::kFloat32) balance_ = workspace.take<float>(shape_.out_channels);
    if (problem.wants.weight)
      slots_ = workspace.take<float>(Checked(slot_plan().slots) * plan_.out_tiles * kSlotValues);
    workspace_bytes_ = workspace.bytes();
  }

  size_t workspace_bytes() const { return workspace_bytes_; }

  // In which the sums of a sample come apart.
  int64_t slices() const { return int64_t(plan_.strips) * plan_.segments * kTileWarps; }

  StripWork work() const {
    StripWork work{};
    work.shape = shape_;
    work.plan = plan_;
    work.input = conv_.input;
    work.weight = conv_.conv.weight;
    work.bias = conv_.conv.bias;
    work.balance = balance_;
    work.grad_input = {conv_.grad_input.data, conv_.grad_input.dtype};
    work.slots = slots_;
    work.parts = cuda::parts_of(conv_);
    work.units = int(samples_ * plan_.strips * plan_.segments);
    return work;
  }

  cudaError_t launch_before(cudaStream_t stream) const {
    return balance_ == nullptr ? cudaSuccess : launch_balance(conv_.conv.weight, balance_, stream);
  }

  cudaError_t launch_weight(cudaStream_t stream) const {
    if (slots_ == nullptr) return cudaSuccess;
    return launch_sum_of_slots(slots_, slot_plan(), shape_, balance_, static_cast<float*>(conv_.grad_weight),
                               stream);
  }

 private:
  // Slots as those of cuda/gradients/weight_gradient.cuh.
  WeightGradientPlan slot_plan() const {
    WeightGradientPlan plan{};
    plan.channel_warps = plan_.out_tiles;
    plan.out_blocks = plan.in_blocks = 1;
    plan.slots = plan_.blocks * (kSumWarps / plan_.out_tiles);
    return plan;
  }

  const ConvBackward& conv_;
  const ConvShape shape_;
  const int64_t samples_;
  const StripPlan plan_;
  float* balance_ = nullptr;
  float* slots_ = nullptr;
  size_t workspace_bytes_ = 0;
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

// Whether a problem's backward is done in strips (strip_work.cuh), how they are cut, and what they leave for
// the end.
#pragma once

#include <algorithm>
#include <string>

#include "strip_work.cuh"
#include "workspace.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// Why strips do not serve what reason_against_gradients() has nothing against; empty if they do.
inline std::string reason_against_strips(const BackwardProblem& problem, const cuda::Card& card) {
  const ConvShape shape = conv_shape(problem);
  if (shape.in_channels > kUnitChannels) return "more than 8 input channels";
  if (shape.out_channels > kMostOutTiles * kWarpChannels) return "more than 64 output channels";
  if (shape.kernel[0] != kTaps || shape.kernel[1] != kTaps) return "no kernel of 3x3";
  // Of a strip half at least should be pixels.
  if (2 * shape.out_size[1] < kStripPixels) return "narrow rows";
  return sizeof(StripShared<kMostOutTiles>) > size_t(card.shared_bytes) ? "shared memory" : "";
}

class StripGradients {
 public:
  // Steps have so many samples at the most. The workspace is 256-aligned; null if only its bytes are wanted.
  StripGradients(const BackwardProblem& problem, int64_t step_samples, void* memory, const cuda::Card& card)
      : conv_(*problem.conv), shape_(conv_shape(problem)), plan_(plan(shape_, step_samples, card)) {
    Workspace workspace(memory);
    if (conv_.input.dtype == DType::kFloat32) balance_ = workspace.take<float>(shape_.out_channels);
    if (conv_.grad_weight != nullptr)
      slots_ = workspace.take<float>(int64_t(slot_plan().slots) * plan_.out_tiles * kSlotValues);
    workspace_bytes_ = workspace.bytes();
  }

  size_t workspace_bytes() const { return workspace_bytes_; }

  // In which the sums of a sample come apart.
  int64_t slices() const { return int64_t(plan_.strips) * plan_.segments * kTileWarps; }

  StripWork work(int64_t first, int64_t samples) const {
    StripWork work{};
    work.shape = shape_;
    work.plan = plan_;
    work.input = conv_.input;
    work.input.data =
        static_cast<char*>(work.input.data) + first * work.input.stride[0] * bytes_of(work.input.dtype);
    work.weight = conv_.conv.weight;
    work.bias = conv_.conv.bias;
    work.balance = balance_;
    const int64_t sample = int64_t(shape_.in_channels) * shape_.in_size[0] * shape_.in_size[1];
    work.grad_input = elements_from(conv_.grad_input.data, conv_.grad_input.dtype, first * sample);
    work.slots = slots_;
    work.adds = first > 0;
    const bool is_exact = conv_.input.dtype == DType::kFloat32 && !conv_.conv.tf32;
    work.parts = is_exact ? kMostParts : 1;
    work.units = int(samples * plan_.strips * plan_.segments);
    return work;
  }

  cudaError_t launch_before_steps(cudaStream_t stream) const {
    return balance_ == nullptr ? cudaSuccess : launch_balance(conv_.conv.weight, balance_, stream);
  }

  cudaError_t launch_weight(cudaStream_t stream) const {
    if (slots_ == nullptr) return cudaSuccess;
    return launch_sum_of_slots(slots_, slot_plan(), shape_, balance_, static_cast<float*>(conv_.grad_weight),
                               stream);
  }

 private:
  // Segments as let all blocks end soonest.
  static StripPlan plan(const ConvShape& shape, int64_t samples, const cuda::Card& card) {
    constexpr int kLeastRows = 16;
    StripPlan best{};
    best.out_tiles =
        shape.out_channels > kMostOutTiles / 2 * kWarpChannels ? kMostOutTiles : kMostOutTiles / 2;
    best.strips = pieces(shape.out_size[1], kStripPixels);
    int64_t least = 0;
    for (int segments = 1;; ++segments) {
      const int rows = (shape.out_size[0] + (segments - 1) * kHalo + segments - 1) / segments;
      if (segments > 1 && rows < kLeastRows) break;
      const int64_t units = samples * best.strips * pieces(shape.out_size[0], rows);
      const int64_t rounds = cuda::divide_up(units, card.multiprocessors);
      const int64_t time = rounds * (rows - kFirstStep);
      if (segments > 1 && time >= least) continue;
      least = time;
      best.segment_rows = rows;
      best.segments = pieces(shape.out_size[0], rows);
      best.blocks = int(std::min<int64_t>(units, card.multiprocessors));
    }
    return best;
  }

  // Of so many rows or columns each, of which neighbours share kHalo.
  static int pieces(int size, int of_piece) {
    return size <= of_piece ? 1 : 1 + int(cuda::divide_up(size - of_piece, of_piece - kHalo));
  }

  // Slots as those of conv_weight_gradient.cuh.
  WeightGradientPlan slot_plan() const {
    WeightGradientPlan plan{};
    plan.channel_warps = plan_.out_tiles;
    plan.out_blocks = plan.in_blocks = 1;
    plan.slots = plan_.blocks * (kSumWarps / plan_.out_tiles);
    return plan;
  }

  const ConvBackward& conv_;
  const ConvShape shape_;
  const StripPlan plan_;
  float* balance_ = nullptr;
  float* slots_ = nullptr;
  size_t workspace_bytes_ = 0;
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

// Whether a problem's backward is done in strips (strip_work.cuh), how they are cut, and what they leave for
// the end.
#pragma once

#include <algorithm>

#include "cuda/device/workspace.cuh"
#include "strip_work.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// That hold so many channels of the output: 2 or 4.
inline int out_tiles_for(int channels) {
  return channels > kMostOutTiles / 2 * kTileChannels ? kMostOutTiles : kMostOutTiles / 2;
}

inline size_t strip_shared_bytes(int out_tiles) {
  return out_tiles == kMostOutTiles ? sizeof(StripShared<kMostOutTiles>)
                                    : sizeof(StripShared<kMostOutTiles / 2>);
}

// Whether strips serve what reason_against_gradients() has nothing against.
inline bool may_run_in_strips(const BackwardProblem& problem, const cuda::Card& card) {
  const ConvShape shape = conv_shape(problem);
  if (shape.in_channels > kUnitChannels || shape.out_channels > kMostOutTiles * kTileChannels) return false;
  if (shape.kernel[0] != kTaps || shape.kernel[1] != kTaps) return false;
  // Offsets within a sample, and units, are counted in 31 bits.
  const int64_t samples = problem.v.size[0];
  if (std::max(element_count(problem.v), element_count(problem.conv->input)) / samples > INT32_MAX ||
      Checked(samples) * shape.out_size[0] * shape.out_size[1] > Checked(INT32_MAX) * kHalo)
    return false;
  // Of a strip half at least should be pixels.
  if (shape.out_size[1] < kStripPixels / 2) return false;
  return strip_shared_bytes(out_tiles_for(shape.out_channels)) <= size_t(card.shared_bytes);
}

class StripGradients {
 public:
  // The workspace is 256-aligned; null if only its bytes are wanted.
  StripGradients(const BackwardProblem& problem, void* memory, const cuda::Card& card)
      : conv_(*problem.conv),
        shape_(conv_shape(problem)),
        samples_(problem.v.size[0]),
        plan_(plan(shape_, samples_, card)) {
    Workspace workspace(memory);
    if (conv_.input.dtype == DType::kFloat32) balance_ = workspace.take<float>(shape_.out_channels);
    if (conv_.grad_weight != nullptr)
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
    work.parts = parts_of(conv_);
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
  // Segments as let all blocks end soonest.
  static StripPlan plan(const ConvShape& shape, int64_t samples, const cuda::Card& card) {
    constexpr int kLeastRows = 6;
    constexpr int kMostSegments = 64;
    StripPlan best{};
    best.out_tiles = out_tiles_for(shape.out_channels);
    best.strips = pieces(shape.out_size[1], kStripPixels);
    int64_t least = 0;
    for (int segments = 1; segments <= kMostSegments; ++segments) {
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

// Backward of a chain with its conv in one go: a block walks down a strip of a sample, row by row, computes
// v again, the chain's gradient, and from it the gradients of the conv's input and weight. Neither v nor its
// gradient is ever in memory. For convs of 3x3 taps, stride 1, 8 channels to 64 at the most.
//
// Warps have two tasks. Tile warps have 16 pixels and all of the output's channels each: the product that
// gives v leaves the gradient where the next product, that of the input's gradient, takes its operand. Sum
// warps have some channels and all pixels: they multiply what tile warps left in shared memory one row
// before, for the weight's gradient; they also bring rows of the input in and complete rows of its gradient.
#pragma once

#include "cuda/gradients/products.cuh"
#include "gradient.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

using cuda::kFirstStep;
using cuda::kHalo;
using cuda::kMostOperandParts;
using cuda::kMostOutTiles;
using cuda::kStripInputCols;
using cuda::kStripInputRows;
using cuda::kStripPixels;
using cuda::kSumsPitch;
using cuda::kSumWarps;
using cuda::kTilePixels;
using cuda::kTileWarps;
using cuda::StripPlan;

constexpr int kTileThreads = kTileWarps * kWarpThreads;
constexpr int kSumThreads = kSumWarps * kWarpThreads;
constexpr int kStripThreads = kTileThreads + kSumThreads;

struct StripWork {
  ConvShape shape;
  StripPlan plan;
  Tensor input;
  Tensor weight;
  Parameter bias;
  const float* balance;  // [out_channels], powers of two that gradients are multiplied by, or null
  Elements grad_input;   // contiguous; no memory where nobody wants it
  float* slots;          // [slots][out_tiles][kSlotValues], or null
  int operand_parts;     // of a value
  int segments;          // of all strips of all samples
};

// For channels beyond those that there are, weights are zeros; what else there is of them is not used.
template <int kOutTiles>
struct StripShared {
  static constexpr int kChunks = 2 * kOutTiles;  // of 8 channels
  static constexpr int kChannels = kChunks * kUnitChannels;

  uint4 input[kStripInputRows][kMostOperandParts][kStripInputCols];
  uint4 grads[2][kMostOperandParts][kStripPixels]
             [kChunks];                             // halves; chunks of a pixel as chunk_place() says
  float sums[2][kTaps][kUnitChannels][kSumsPitch];  // of a row of the input's gradient, for each tap across
  // The weight as lanes take it: of two taps across and a chunk, and of the third; high words, then low ones.
  uint4 conv_weights[kTaps][kChunks][kWarpThreads];
  uint2 conv_tails[kTaps][kChunks][kWarpThreads];
  // The same for the input's gradient, of two chunks and a tap.
  uint4 gradient_weights[kOutTiles][kTaps][kTaps][kWarpThreads];
  SampleChannel channels[kChannels];
  float2 conv_channels[kChannels];  // factor and bias of what the products give
  float balance[kChannels];
  unsigned weight_largest;  // of all, balanced
  int weights_are_finite;
  // Whether weights of some channel of the output are of very different size between channels of the input.
  // Then `shares`, exponents of each one's largest weight below the channel's, or kNoShare, are looked at.
  int weights_are_wide;
  int shares[kChannels][kUnitChannels];
  uint2 input_largest[2][kSumWarps];  // magnitudes of a row: of what is finite, of all
  int input_exponents[kStripInputRows];
  unsigned input_magnitudes[2][kUnitChannels][kSumWarps];  // of a row; where weights are wide
  // Of each warp's say: whether the tensor cores' arithmetic will do for a row of the input.
  int4 input_is_right[kStripInputRows];
  int grad_exponents[2][kTileWarps];

  // Places change from pixel to pixel, so that 8 pixels of a chunk lie in all banks, and so do pairs.
  static FUSEDCONV_INLINE int chunk_place(int chunk, int pixel) {
    return chunk ^ (kChunks == 8 ? (pixel / 2 + pixel % 2 * 4) % 8 : pixel / 2 % kChunks);
  }
};

static_assert(sizeof(StripShared<kMostOutTiles>) == cuda::strip_shared_bytes(kMostOutTiles));
static_assert(sizeof(StripShared<kMostOutTiles / 2>) == cuda::strip_shared_bytes(kMostOutTiles / 2));

// A segment of a strip.
struct StripSegment {
  int sample;
  int row, rows;  // of the output
  int col;
  int slice;               // number in the sample
  int own_row, own_col;    // from where on its sums count and its gradients are complete
  int last_row, last_col;  // the first ones, of the input's gradient, that the next segment has

  __device__ StripSegment(const StripWork& work, int index) {
    const StripPlan& plan = work.plan;
    const int rest = index / plan.segments;
    const int segment = index % plan.segments;
    const int strip = rest % plan.strips;
    sample = rest / plan.strips;
    slice = segment * plan.strips + strip;
    row = segment * (plan.segment_rows - kHalo);
    rows = min(plan.segment_rows, work.shape.out_size[0] - row);
    col = strip * (kStripPixels - kHalo);
    own_row = segment > 0 ? kHalo : 0;
    own_col = strip > 0 ? kHalo : 0;
    last_row = rows + (segment + 1 == plan.segments ? kHalo : 0);
    last_col = kStripPixels + (strip + 1 == plan.strips ? kHalo : 0);
  }
};

template <class Visit>
__device__ void for_each_tap(const Visit& visit) {
#pragma unroll
  for (int down = 0; down < kTaps; ++down) {
#pragma unroll
    for (int across = 0; across < kTaps; ++across) visit(down, across);
  }
}

template <class Chain>
struct StripProblem {
  BackwardWork<float> work;
  StripWork strip;
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

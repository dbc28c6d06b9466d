// How the gradients of a conv are shared out among blocks: in slabs of the map, from packed rows, or in
// strips with the chain's own backward. A kernel is cut into windows of 3x3 taps; some of the last one's are
// too many.
#pragma once

#include <algorithm>
#include <cstdint>

#include "card.h"
#include "conv_tiling.h"
#include "core/inline.h"
#include "core/problem.h"
#include "sizes.h"

struct uint4;  // CUDA's, of 16 bytes

namespace fusedconv {
namespace cuda {

constexpr int kTaps = 3;            // of a window, down and across
constexpr int kUnitChannels = 8;    // of a pixel, that stand together: a unit
constexpr int kChannelsBytes = 16;  // of a unit
constexpr int kTileChannels = 16;   // of the output, that a product of a warp has

// In int, as the kernels count.
inline int count_of_pieces(int size, int of_piece) { return int(divide_up(size, of_piece)); }

// Of so many rows or columns each, of which neighbours share some.
inline int count_of_pieces(int size, int of_piece, int shared) {
  return size <= of_piece ? 1 : 1 + count_of_pieces(size - of_piece, of_piece - shared);
}

inline int operand_parts(const ConvBackward& conv) { return operand_parts(conv.input.dtype, conv.conv); }

// Of 8 channels, even: zeros are added to the last.
inline int chunks_of(int channels) { return count_of_pieces(channels, 2 * kUnitChannels) * 2; }

// A conv; sizes of a sample fit in ints.
struct ConvShape {
  int in_channels, out_channels;
  int in_size[2], out_size[2];
  int kernel[2];
  int windows[2];
  int padding[2];

  FUSEDCONV_INLINE int count_windows() const { return windows[0] * windows[1]; }
};

// How the conv of a problem looks. Throws std::overflow_error where sizes of a sample do not fit in ints.
inline ConvShape conv_shape(const BackwardProblem& problem) {
  const Tensor& input = problem.conv->input;
  const Conv& conv = problem.conv->conv;
  ConvShape shape{};
  shape.in_channels = Checked(input.size[1]).to<int>();
  shape.out_channels = Checked(problem.v.size[1]).to<int>();
  for (int d = 0; d < 2; ++d) {
    shape.in_size[d] = Checked(input.size[2 + d]).to<int>();
    shape.out_size[d] = Checked(problem.v.size[2 + d]).to<int>();
    shape.kernel[d] = Checked(conv.weight.size[2 + d]).to<int>();
    shape.windows[d] = count_of_pieces(shape.kernel[d], kTaps);
    shape.padding[d] = Checked(conv.padding[d]).to<int>();
  }
  return shape;
}

// ---- slabs ----

// How a sample's map is cut.
struct Slabs {
  int across, cols;
  int down, rows;

  FUSEDCONV_INLINE int64_t of_samples(int64_t samples) const { return samples * across * down; }
};

// Cuts as lets the blocks, each with some slabs at a time, end soonest. A slab reads a few rows that others
// read too.
inline void cut_rows(Slabs& slabs, int rows, int64_t samples, int64_t at_once) {
  constexpr int kMostRows = 64;
  constexpr int kLeastRows = 4;
  constexpr int kMostTries = 64;
  int64_t least = 0;
  const int first = count_of_pieces(rows, kMostRows);
  const int last = std::min(count_of_pieces(rows, kLeastRows), first + kMostTries);
  for (int down = first; down <= last; ++down) {
    Slabs cut = slabs;
    cut.rows = count_of_pieces(rows, down);
    cut.down = count_of_pieces(rows, cut.rows);
    const int64_t time = divide_up(cut.of_samples(samples), at_once) * (cut.rows + kTaps - 1);
    if (down > first && time >= least) continue;
    slabs = cut;
    least = time;
  }
}

// Of all blocks that the card runs at a time, those for each of so many pairs of channels.
inline int64_t blocks_for(size_t shared_bytes, int64_t pairs, const Card& card) {
  constexpr int kMost = 4;  // on a multiprocessor, if its memory suffices
  const int fitting = std::max(int(card.shared_bytes / shared_bytes), 1);
  return std::max<int64_t>(card.multiprocessors * std::min(kMost, fitting) / pairs, 1);
}

// ---- packed rows ----

// A map in packed rows: see cuda/gradients/packed_rows.cuh. Its memory is for a run to set.
struct PackedRows {
  uint4* units;          // [samples][rows][chunks][operand_parts][pitch]; kGuardUnits before and behind
  int* exponents;        // [samples][rows]: float32 was multiplied by two to this power
  const float* balance;  // [channels], powers of two by which they were multiplied before; null: by none
  DType dtype;           // of the values
  int channels;
  int chunks;         // of 8 channels, even: zeros are added to the last
  int operand_parts;  // of a value
  int rows, cols;
  int pitch;  // from cols on zeros: they are also what stands before the next row

  FUSEDCONV_INLINE int64_t row_units() const { return int64_t(chunks) * operand_parts * pitch; }
#ifdef __CUDACC__
  __device__ uint4* row(int64_t index) const { return units + index * row_units(); }
#endif
};

// margin: of zeros that are read beside a row.
inline PackedRows packed_map(const ConvBackward& conv, int channels, const int (&size)[2], int least_pitch,
                             int margin) {
  PackedRows map{};
  map.dtype = conv.input.dtype;
  map.channels = channels;
  map.chunks = chunks_of(channels);
  map.operand_parts = operand_parts(conv);
  map.rows = size[0];
  map.cols = size[1];
  map.pitch = std::max(least_pitch, size[1] + margin);
  return map;
}

// The kernel that packs the input has a row of all channels in shared memory.
constexpr int kRowPadding = 1;  // so that lanes meet in no bank

inline int64_t row_shared_bytes(const PackedRows& to) {
  return to.channels * (to.cols + int64_t(kRowPadding)) * int64_t(sizeof(float));
}

// ---- the gradient of the weight ----

constexpr int kWeightWarps = 4;
constexpr int kBlockChannels = kWeightWarps * kTileChannels;
constexpr int kBlockChunks = kBlockChannels / kUnitChannels;
constexpr int kStepPixels = 16;
constexpr int kMostSlabCols = 64;
constexpr int kInputCols = kMostSlabCols + kTaps - 1;
constexpr int kInputRows = 4;  // that stand in shared memory: those of the taps and the next one
constexpr int kSlotValues = kTileChannels * kUnitChannels * kTaps * kTaps;  // of a warp's sums

// A block has 64 of the output's channels and 8 of the input's, and walks down slabs of the map; its warps
// have 16 channels each or, of fewer, take turns at the pixels.
struct WeightGradientPlan {
  int channel_warps;
  Slabs slabs;
  int out_blocks, in_blocks;
  int blocks;  // for each pair of these and each window
  int slots;   // in which sums stand apart until the end

  FUSEDCONV_INLINE int64_t values_of_slot(const ConvShape& shape) const {
    return int64_t(out_blocks) * in_blocks * shape.count_windows() * channel_warps * kSlotValues;
  }
};

// Two rows of the output's gradient, and those of the input.
constexpr int weight_shared_bytes(int parts) {
  return parts * kChannelsBytes * (2 * kBlockChunks * kMostSlabCols + kInputRows * kInputCols);
}

inline WeightGradientPlan plan_weight_gradient(const ConvShape& shape, int parts, int64_t samples,
                                               const Card& card) {
  WeightGradientPlan plan{};
  plan.out_blocks = count_of_pieces(shape.out_channels, kBlockChannels);
  plan.in_blocks = count_of_pieces(shape.in_channels, kUnitChannels);
  plan.channel_warps = 1;
  while (plan.channel_warps < kWeightWarps && plan.channel_warps * kTileChannels < shape.out_channels)
    plan.channel_warps *= 2;
  plan.slabs.across = count_of_pieces(shape.out_size[1], kMostSlabCols);
  plan.slabs.cols = int(round_up(count_of_pieces(shape.out_size[1], plan.slabs.across), kStepPixels));
  const int64_t pairs = int64_t(plan.out_blocks) * plan.in_blocks * shape.count_windows();
  const int64_t blocks = blocks_for(weight_shared_bytes(parts), pairs, card);
  cut_rows(plan.slabs, shape.out_size[0], samples, blocks);
  plan.blocks = int(std::min(plan.slabs.of_samples(samples), blocks));
  plan.slots = plan.blocks * (kWeightWarps / plan.channel_warps);
  return plan;
}

// ---- the gradient of the input ----

constexpr int kInputWarps = 4;
constexpr int kWarpBlocks = 2;  // of 16 pixels, that a warp has
constexpr int kWarpPixels = kWarpBlocks * 16;
constexpr int kStageChunks = 4;  // of the output's channels, that come in together
constexpr int kStageSteps = kStageChunks / 2;
constexpr int kStages = 2;
constexpr int kStepWords = kTaps * kTaps * 32;  // a lane's pairs of words of the weight, for one step's part

// A block has 8 of the input's channels and a few slabs; of each of their rows, stages of some of the
// output's channels come into shared memory one after the other.
struct InputGradientPlan {
  int slab_warps;
  Slabs slabs;
  int in_blocks, blocks;
  int stages;  // of a row
  int shared_bytes;

  FUSEDCONV_INLINE int slabs_at_once() const { return kInputWarps / slab_warps; }
  // Units of a slab's row: its pixels and those that the taps add.
  FUSEDCONV_INLINE int stage_cols() const { return slab_warps * kWarpPixels + kTaps - 1; }
};

// In shared memory: stages, each of [slabs][chunks][parts][cols] units, then the words of a window of the
// weight, [steps][parts][taps across][taps down][lanes].
struct InputLayout {
  int stage_units, weights_at, bytes;

  FUSEDCONV_INLINE InputLayout(const InputGradientPlan& plan, int parts) {
    constexpr int kPairBytes = 8;
    stage_units = plan.slabs_at_once() * kStageChunks * parts * plan.stage_cols();
    weights_at = kStages * stage_units * kChannelsBytes;
    bytes = weights_at + plan.stages * kStageSteps * parts * kStepWords * kPairBytes;
  }
};

// The most pixels at a time that are not much more than a row has.
inline int slab_warps_for(int cols) {
  const auto cost = [&](int warps) {
    return count_of_pieces(cols, warps * kWarpPixels) * (warps * kWarpPixels + kTaps - 1);
  };
  int best = kInputWarps;
  for (int warps = kInputWarps / 2; warps >= 1; warps /= 2)
    if (cost(warps) < cost(best)) best = warps;
  return best;
}

inline InputGradientPlan plan_input_gradient(const ConvShape& shape, int parts, int64_t samples,
                                             const Card& card) {
  InputGradientPlan plan{};
  plan.slab_warps = slab_warps_for(shape.in_size[1]);
  plan.slabs.cols = plan.slab_warps * kWarpPixels;
  plan.slabs.across = count_of_pieces(shape.in_size[1], plan.slabs.cols);
  plan.in_blocks = count_of_pieces(shape.in_channels, kUnitChannels);
  plan.stages = count_of_pieces(chunks_of(shape.out_channels), kStageChunks);
  plan.shared_bytes = InputLayout(plan, parts).bytes;
  const int64_t blocks = blocks_for(plan.shared_bytes, plan.in_blocks, card);
  cut_rows(plan.slabs, shape.in_size[0], samples, blocks * plan.slabs_at_once());
  plan.blocks = int(std::min(divide_up(plan.slabs.of_samples(samples), plan.slabs_at_once()), blocks));
  return plan;
}

// ---- both ----

constexpr int kStaticBytes = 256;  // of shared memory that a kernel has besides, at the most

struct ConvGradientsPlan {
  ConvShape shape;
  int64_t step_samples;  // of a step, at the most
  WeightGradientPlan weight;
  InputGradientPlan input;
  PackedRows grads, input_rows;

  // Whether the kernels fit into a block's shared memory; of what reason_against_gradients() lets through.
  bool fits(const Card& card) const {
    const int64_t bytes = std::max<int64_t>(input.shared_bytes, row_shared_bytes(input_rows));
    return bytes + kStaticBytes <= card.shared_bytes;
  }

  // Of what is kept of a sample, the most of one kind.
  int64_t sample_bytes() const {
    const auto bytes = [](const PackedRows& of) {
      return Checked(of.rows) * of.row_units() * kChannelsBytes;
    };
    return std::max(bytes(grads), bytes(input_rows)).value();
  }
};

inline ConvGradientsPlan plan_conv_gradients(const BackwardProblem& problem, int64_t step_samples,
                                             const Card& card) {
  const ConvBackward& conv = *problem.conv;
  const int parts = operand_parts(conv);
  ConvGradientsPlan plan{};
  plan.shape = conv_shape(problem);
  plan.step_samples = step_samples;
  const ConvShape& shape = plan.shape;
  plan.weight = plan_weight_gradient(shape, parts, step_samples, card);
  plan.input = plan_input_gradient(shape, parts, step_samples, card);
  // Of the output's gradient all of a slab is read, and as much beside a row as windows have taps. So is the
  // input, which may have padding: what is multiplied by zeros must be finite.
  const int cols = plan.weight.slabs.across * plan.weight.slabs.cols;
  const int beside = shape.windows[1] * kTaps - 1;
  plan.grads = packed_map(conv, shape.out_channels, shape.out_size, cols, beside);
  plan.input_rows = packed_map(conv, shape.in_channels, shape.in_size, cols + beside, shape.padding[1]);
  return plan;
}

// ---- strips ----

constexpr int kTilePixels = 16;
constexpr int kTileWarps = 8;
constexpr int kStripPixels = kTileWarps * kTilePixels;
constexpr int kHalo = kTaps - 1;  // rows and columns that a strip's neighbours have too
constexpr int kMostOutTiles = 4;  // of 16 channels
constexpr int kSumWarps = 4;
constexpr int kStripInputCols = kStripPixels + kHalo;
// Of the input, in shared memory: those that sum warps read, one further down tile warps, and the next one.
constexpr int kStripInputRows = kTaps + 2;
constexpr int kMostOperandParts = 2;          // of a value, for the tensor cores
constexpr int kSumsPitch = kStripPixels + 4;  // so that lanes meet in no bank
// The steps of a walk: before the first row come some that only bring rows in.
constexpr int kFirstStep = -kTaps - 1;

// Neighbouring strips, and the segments into which they are cut, share kHalo rows or columns of the output's
// gradient. The first one of them has all gradients of the weight that they make.
struct StripPlan {
  int strips;
  int segments, segment_rows;
  int blocks;
  int out_tiles;  // that hold the output's channels: 2 or 4

  // In which the sums of a sample come apart.
  int64_t slices() const { return int64_t(strips) * segments * kTileWarps; }

  // The weight's gradient, in slots as those of cuda/gradients/weight_gradient.cuh.
  WeightGradientPlan weight() const {
    WeightGradientPlan plan{};
    plan.channel_warps = out_tiles;
    plan.out_blocks = plan.in_blocks = 1;
    plan.slots = blocks * (kSumWarps / out_tiles);
    return plan;
  }
};

inline int out_tiles_for(int channels) {
  return channels > kMostOutTiles / 2 * kTileChannels ? kMostOutTiles : kMostOutTiles / 2;
}

// What is known of a channel of a sample, SampleChannel (cuda/backward/work.cuh): floats, aligned to 16
// bytes.
constexpr int kSampleChannelBytes = (4 * (kStageParameters + 9) + 15) / 16 * 16;

// As StripShared (cuda/backward/strip_work.cuh) has them.
constexpr int strip_shared_bytes(int out_tiles) {
  constexpr int kInput = kStripInputRows * kMostOperandParts * kStripInputCols * kChannelsBytes;
  constexpr int kSums = 2 * kTaps * kUnitChannels * kSumsPitch * 4;
  constexpr int kFacts = 512;  // of rows and of the weight, and what alignment leaves empty
  // Of 16 channels.
  constexpr int kGrads = 2 * kMostOperandParts * kStripPixels * 2 * kChannelsBytes;
  constexpr int kConvWeights = kTaps * 2 * kWarpLanes * (16 + 8);
  constexpr int kGradientWeights = kTaps * kTaps * kWarpLanes * 16;
  constexpr int kChannels = kTileChannels * (kSampleChannelBytes + 8 + 4 + 4 * kUnitChannels);
  return kInput + kSums + kFacts + out_tiles * (kGrads + kConvWeights + kGradientWeights + kChannels);
}

// Whether the kernel of strips has room for a conv of which packed rows would serve.
inline bool fits_strips(const ConvShape& shape, int64_t samples, const Card& card) {
  if (strip_shared_bytes(out_tiles_for(shape.out_channels)) > card.shared_bytes) return false;
  if (shape.in_channels > kUnitChannels || shape.out_channels > kMostOutTiles * kTileChannels) return false;
  if (shape.kernel[0] != kTaps || shape.kernel[1] != kTaps) return false;
  // Offsets within a sample, and segments, are counted in 31 bits.
  const auto values = [](int channels, const int (&size)[2]) {
    return Checked(channels) * size[0] * size[1];
  };
  if (values(shape.in_channels, shape.in_size) > Checked(INT32_MAX) ||
      values(shape.out_channels, shape.out_size) > Checked(INT32_MAX) ||
      Checked(samples) * shape.out_size[0] * shape.out_size[1] > Checked(INT32_MAX) * kHalo)
    return false;
  // Of a strip half at least should be pixels.
  return shape.out_size[1] >= kStripPixels / 2;
}

// Segments as let all blocks end soonest.
inline StripPlan cut_strips(const ConvShape& shape, int64_t samples, const Card& card) {
  constexpr int kLeastRows = 6;
  constexpr int kMostSegments = 64;
  StripPlan best{};
  best.out_tiles = out_tiles_for(shape.out_channels);
  best.strips = count_of_pieces(shape.out_size[1], kStripPixels, kHalo);
  int64_t least = 0;
  for (int segments = 1; segments <= kMostSegments; ++segments) {
    const int rows = (shape.out_size[0] + (segments - 1) * kHalo + segments - 1) / segments;
    if (segments > 1 && rows < kLeastRows) break;
    const int64_t all = samples * best.strips * count_of_pieces(shape.out_size[0], rows, kHalo);
    const int64_t time = divide_up(all, card.multiprocessors) * (rows - kFirstStep);
    if (segments > 1 && time >= least) continue;
    least = time;
    best.segment_rows = rows;
    best.segments = count_of_pieces(shape.out_size[0], rows, kHalo);
    best.blocks = int(std::min<int64_t>(all, card.multiprocessors));
  }
  return best;
}

}  // namespace cuda
}  // namespace fusedconv

// How the gradients of a conv are shared out: which slabs of a map, and how many blocks walk down them.
#pragma once

#include <algorithm>

#include "input_gradient.cuh"
#include "plan/given_plan.h"
#include "weight_gradient.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

constexpr int kBlocksOfWeight = 4;  // of each kind on a multiprocessor, if its memory suffices
constexpr int kBlocksOfInput = 4;
constexpr int kMostSlabRows = 64;
constexpr int kLeastSlabRows = 4;
constexpr int kMostTries = 64;

// In int, as the kernels count.
inline int divide_up(int a, int b) { return int(cuda::divide_up(a, b)); }

// Into slabs of how many rows maps are cut: as lets the blocks, each with some slabs at a time, end
// soonest. A slab reads a few rows that others read too.
inline int slab_rows_for(int rows, int64_t columns, int64_t blocks) {
  int best = 0;
  int64_t least = 0;
  const int first = divide_up(rows, kMostSlabRows);
  const int last = std::min(divide_up(rows, kLeastSlabRows), first + kMostTries);
  for (int slabs = first; slabs <= last; ++slabs) {
    const int slab_rows = divide_up(rows, slabs);
    const int64_t rounds = (columns * divide_up(rows, slab_rows) + blocks - 1) / blocks;
    const int64_t time = rounds * (slab_rows + kTaps - 1);
    if (best == 0 || time < least) {
      best = slab_rows;
      least = time;
    }
  }
  return best;
}

// Of all blocks that the card runs at a time, those for each of so many pairs of channels.
inline int64_t blocks_for(int of_multiprocessor, size_t shared_bytes, int pairs, const cuda::Card& card) {
  const int fitting = std::max(int(card.shared_bytes / shared_bytes), 1);
  return std::max(card.multiprocessors * std::min(of_multiprocessor, fitting) / pairs, 1);
}

inline WeightGradientPlan plan_weight(const ConvShape& shape, int parts, int64_t samples,
                                      const cuda::Card& card) {
  WeightGradientPlan plan{};
  plan.out_blocks = divide_up(shape.out_channels, kBlockChannels);
  plan.in_blocks = divide_up(shape.in_channels, kUnitChannels);
  plan.channel_warps = 1;
  while (plan.channel_warps < kWeightWarps && plan.channel_warps * kTileChannels < shape.out_channels)
    plan.channel_warps *= 2;
  Slabs& slabs = plan.slabs;
  slabs.across = divide_up(shape.out_size[1], kMostSlabCols);
  slabs.cols = divide_up(divide_up(shape.out_size[1], slabs.across), kStepPixels) * kStepPixels;
  const int64_t blocks = blocks_for(kBlocksOfWeight, weight_shared_bytes(parts),
                                    plan.out_blocks * plan.in_blocks * shape.count_windows(), card);
  slabs.rows = slab_rows_for(shape.out_size[0], samples * slabs.across, blocks);
  slabs.down = divide_up(shape.out_size[0], slabs.rows);
  plan.blocks = int(std::min(samples * slabs.across * slabs.down, blocks));
  plan.slots = plan.blocks * (kWeightWarps / plan.channel_warps);
  return plan;
}

// The most pixels at a time that are not much more than a row has.
inline int slab_warps_for(int cols) {
  const auto cost = [&](int warps) {
    return divide_up(cols, warps * kWarpPixels) * (warps * kWarpPixels + kTaps - 1);
  };
  int best = kInputWarps;
  for (int warps = kInputWarps / 2; warps >= 1; warps /= 2)
    if (cost(warps) < cost(best)) best = warps;
  return best;
}

inline InputGradientPlan plan_input(const ConvShape& shape, int parts, int64_t samples,
                                    const cuda::Card& card) {
  InputGradientPlan plan{};
  plan.slab_warps = slab_warps_for(shape.in_size[1]);
  Slabs& slabs = plan.slabs;
  slabs.cols = plan.slab_warps * kWarpPixels;
  slabs.across = divide_up(shape.in_size[1], slabs.cols);
  plan.in_blocks = divide_up(shape.in_channels, kUnitChannels);
  plan.stages = divide_up(chunks_of(shape.out_channels), kStageChunks);
  plan.shared_bytes = InputLayout(plan, parts).bytes;
  const int slabs_at_once = kInputWarps / plan.slab_warps;
  const int64_t blocks = blocks_for(kBlocksOfInput, plan.shared_bytes, plan.in_blocks, card);
  slabs.rows = slab_rows_for(shape.in_size[0], samples * slabs.across, blocks * slabs_at_once);
  slabs.down = divide_up(shape.in_size[0], slabs.rows);
  plan.blocks = int(std::min(cuda::divide_up(samples * slabs.across * slabs.down, slabs_at_once), blocks));
  return plan;
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

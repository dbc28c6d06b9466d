// How a chain on a given tensor is cut into pieces, each of which a block keeps in its shared memory. All of
// it follows from the shape of one sample, the dtype and the card, so that a sample's bits do not depend on
// its batch.
#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>

#include "card.h"
#include "core/channel_parameters.h"
#include "core/checked.h"
#include "divisor.h"
#include "sizes.h"

namespace fusedconv {
namespace cuda {

// What the plan needs to know of a chain and its types.
struct GivenTraits {
  bool needs_statistics;
  bool reduces_channels;
  int element_bytes;
  int compute_bytes;
  int vector;  // elements of one wide load
};

// A dense tensor: samples of channels x pixels, or of pixels x channels where channels are last.
struct GivenShape {
  int64_t samples;
  int64_t channels;
  int64_t pixels;
  bool channels_last;
  int64_t groups;         // of the norm; 1 without one
  int64_t window_pixels;  // in the rows that one row of pooling windows covers; 1 without a pool
};

// A piece has so many channels and pixels, or what is left of them.
struct GivenPlan {
  bool resident;  // the pieces of whole groups are on chip at the same time: their statistics need no memory
  int width;      // elements of a load: so many that none crosses the end of a piece's row
  int unit_channels;
  int slice_pixels;
  int64_t units;            // pieces next to each other in channels
  int64_t slices;           // pieces next to each other in pixels; if resident, one cluster of blocks
  int group_channels;       // of the groups in a piece, or the piece's share of a group
  int groups;               // of a piece, its share of one counted as one
  int64_t units_per_group;  // 1, unless groups are cut
  // Threads share a piece out by channels and pixels. Without channels last, `lanes` neighbours have pixels
  // of the same channel, and each thread has channels of as few groups as possible, for the sake of moments.
  int threads;
  int channel_threads;
  int run_channels;  // next to each other, that are shared out among so many of the channel_threads
  int run_threads;
  int runs_at_once;
  int pixel_threads;
  int lanes;
  int part_channels;  // that a thread takes the moments of together
  int parts_per_group;
  int group_lanes;     // that add up the parts of a group
  int reducing_lanes;  // that share the channels of a pixel, where those are reduced
  // Exact for what fits into 31 bits.
  Divisor by_slices, by_units, by_channel_threads, by_run_threads, by_group_channels;
  Divisor by_pooled_rows;  // of a whole piece
  // Where things lie in shared memory behind the channels' parameters, in bytes.
  int tile_at;
  int parts_at;
  int moments_at;
  int64_t shared_bytes;
};

constexpr int kMostThreads = 512;
constexpr int kParameterKinds = kChainParameters + 1;  // of a channel's parameters: and the norm's mean
constexpr int kParameterLanes = power_of_two_from(kChainParameters, kWarpLanes);  // that load a channel's
constexpr int kMostWideChannels = 4;  // of a load: a thread has the parameters of each in registers

inline void set_lanes(GivenPlan& plan, const GivenTraits& traits, const GivenShape& shape) {
  const int lines = plan.pixel_threads / plan.lanes;
  if (plan.run_channels == plan.group_channels) {
    plan.part_channels = plan.group_channels;
    plan.parts_per_group = lines * plan.run_threads;
  } else {
    plan.part_channels = plan.group_channels % plan.width == 0 ? plan.width : 1;
    plan.parts_per_group = lines * (plan.group_channels / plan.part_channels);
  }
  plan.group_lanes = power_of_two_from(plan.parts_per_group, kWarpLanes);
  while (plan.group_lanes > 1 && plan.group_lanes * plan.groups > plan.threads) plan.group_lanes /= 2;

  // Lanes next to each other have a line of memory; more of them share a pixel if threads would be left over.
  const int line = std::min(kLineBytes / (plan.width * traits.element_bytes), kWarpLanes / 2);
  const int64_t pixel_loads = divide_up(plan.slice_pixels, shape.channels_last ? 1 : plan.width);
  const int lanes = shape.channels_last ? power_of_two_from(plan.unit_channels / plan.width, line)
                                        : kWarpLanes / power_of_two_from(pixel_loads, line);
  plan.reducing_lanes = sharing_lanes(lanes, pixel_loads, plan.threads);
}

// Where values wait for their moments, as many loads for a thread as keep enough of them under way on a
// multiprocessor, at the registers that a thread takes; few where they do not, or where each value costs
// more.
inline void set_threads(GivenPlan& plan, const GivenTraits& traits, const GivenShape& shape) {
  constexpr int kLeastThreads = 128;
  const bool keeps_many = traits.needs_statistics && !(plan.resident && traits.reduces_channels);
  const int least_loads = keeps_many ? 8 : 3;
  const int64_t loads = divide_up(int64_t(plan.unit_channels) * plan.slice_pixels, plan.width);
  plan.threads = kLeastThreads;
  while (plan.threads < kMostThreads && loads > int64_t(2 * least_loads) * plan.threads) plan.threads *= 2;
  if (shape.channels_last) {
    plan.lanes = 1;
    plan.channel_threads = std::min(plan.unit_channels / plan.width, plan.threads);
    plan.run_channels = plan.unit_channels;
    plan.run_threads = plan.channel_threads;
    plan.runs_at_once = 1;
  } else {
    // A line of memory at least; few lanes, as each has moments to be added up.
    constexpr int kFewLoads = 4;
    const int64_t row_loads = divide_up(plan.slice_pixels, plan.width);
    const int line_loads = kLineBytes / (plan.width * traits.element_bytes);
    plan.lanes = std::max(power_of_two_from(divide_up(row_loads, kFewLoads), kWarpLanes),
                          power_of_two_from(row_loads, std::min(line_loads, kWarpLanes)));
    const int most = std::min(plan.unit_channels, plan.threads / plan.lanes);
    plan.runs_at_once = std::min(plan.groups, most);
    plan.run_channels = plan.group_channels;
    plan.run_threads = most / plan.runs_at_once;
    plan.channel_threads = plan.run_threads * plan.runs_at_once;
  }
  plan.pixel_threads = plan.threads / plan.lanes / plan.channel_threads * plan.lanes;
  plan.by_run_threads = divisor(plan.run_threads);
  plan.by_channel_threads = divisor(plan.channel_threads);
  set_lanes(plan, traits, shape);
}

inline void set_shared_memory(GivenPlan& plan, const GivenTraits& traits) {
  constexpr int64_t kAlignment = 32;  // of the moments of a block
  int64_t bytes = 0;
  const auto take = [&](int64_t count, int64_t size) {
    const int64_t at = bytes;
    bytes += round_up(count * size, kAlignment);
    return int(at);
  };
  take(int64_t(kParameterKinds) * plan.unit_channels, traits.compute_bytes);
  plan.tile_at = take(int64_t(plan.unit_channels) * plan.slice_pixels, traits.element_bytes);
  const int64_t blocks = plan.resident ? plan.slices : 0;
  plan.parts_at = take(int64_t(plan.parts_per_group) * plan.groups, 4 * traits.compute_bytes);
  plan.moments_at = take(blocks * plan.groups, 4 * sizeof(double));
  plan.shared_bytes = bytes;
}

inline void set_piece(GivenPlan& plan, const GivenTraits& traits, const GivenShape& shape,
                      int64_t unit_channels, int64_t slice_pixels) {
  plan.unit_channels = int(unit_channels);
  plan.slice_pixels = int(slice_pixels);
  const int64_t of_group = shape.channels / shape.groups;
  plan.group_channels = int(std::min(of_group, unit_channels));
  plan.groups = plan.unit_channels / plan.group_channels;
  plan.units_per_group = divide_up(of_group, unit_channels);
  plan.units = unit_channels < of_group ? shape.groups * plan.units_per_group
                                        : divide_up(shape.channels, unit_channels);
  plan.slices = divide_up(shape.pixels, slice_pixels);
  plan.by_slices = divisor(int(std::min<int64_t>(plan.slices, INT32_MAX)));
  plan.by_units = divisor(int(std::min<int64_t>(plan.units, INT32_MAX)));
  plan.by_group_channels = divisor(plan.group_channels);
  plan.by_pooled_rows = divisor(int(std::max<int64_t>(slice_pixels / shape.window_pixels, 1)));
  set_threads(plan, traits, shape);
  set_shared_memory(plan, traits);
}

// Whole groups, as few as make whole vectors and at least so many channels; all of them where that takes more
// than `most`, which would not do.
inline int64_t channels_of_groups(const GivenShape& shape, int64_t least, int64_t most, int width) {
  const int64_t of_group = shape.channels / shape.groups;
  for (int64_t groups = 1; groups <= std::min(shape.groups, most / of_group); ++groups) {
    const int64_t channels = groups * of_group;
    if (shape.groups % groups == 0 && channels >= std::min(least, shape.channels) && channels % width == 0)
      return channels;
  }
  return shape.channels;
}

// Every group, or every sample where the channels are reduced, in the shared memory of a block, or of a
// cluster of blocks. pixel_bytes: of a pixel, at the least, where channels are last.
inline bool plan_resident(GivenPlan& plan, const GivenTraits& traits, const GivenShape& shape,
                          const Card& card, int pixel_bytes) {
  // Of a block's values, where a cluster may have so many blocks. More is computed for each where the
  // channels are reduced.
  const int64_t some_bytes = (traits.reduces_channels ? 16 : 48) * 1024;
  constexpr int64_t kLeastBytes = 4 * 1024;
  const bool last = shape.channels_last;
  const int64_t row_bytes = (Checked(shape.pixels) * traits.element_bytes).value();
  const int64_t least_channels =
      last ? pixel_bytes / traits.element_bytes : divide_up(kLeastBytes, row_bytes);
  // Where samples are read again, they come from the L2 in part: that is better than a block alone on a
  // multiprocessor, which loads and computes in turns.
  const int64_t most_bytes = traits.reduces_channels ? card.shared_bytes / 2 : card.shared_bytes;
  const int most_blocks = card.capability >= 90 ? 8 : 1;
  const int64_t most_channels = most_blocks * most_bytes / row_bytes;
  const int64_t channels = traits.reduces_channels ? shape.channels
                                                   : channels_of_groups(shape, least_channels, most_channels,
                                                                        last ? plan.width : 1);
  if (channels > most_channels) return false;
  const int64_t bytes = channels * row_bytes;

  const int blocks = power_of_two_from(divide_up(bytes, some_bytes), most_blocks);
  // Shares of a channel that are less than two sectors of memory cost more than small pieces gain.
  const int64_t line = last ? 1 : 64 / traits.element_bytes;
  int fewer = blocks;
  while (fewer > 1 && shape.pixels < fewer * line) fewer /= 2;
  const int64_t unit = std::lcm(shape.window_pixels, int64_t(last ? 1 : plan.width));
  for (; fewer <= blocks; fewer *= 2) {
    const int64_t slice = round_up(divide_up(shape.pixels, fewer), unit);
    plan.resident = true;
    set_piece(plan, traits, shape, channels, std::min(slice, shape.pixels));
    plan.resident = plan.shared_bytes <= most_bytes;
    if (plan.resident) return true;
  }
  return false;
}

// Whole lines of memory if possible, else whole sectors at least.
inline bool plan_resident(GivenPlan& plan, const GivenTraits& traits, const GivenShape& shape,
                          const Card& card) {
  for (const int pixel_bytes : {128, 64, 32}) {
    if (plan_resident(plan, traits, shape, card, pixel_bytes)) return true;
  }
  return false;
}

// Pieces small enough that several blocks share a multiprocessor: while some load, others compute. Moments
// cost something for each piece.
inline void plan_pieces(GivenPlan& plan, const GivenTraits& traits, const GivenShape& shape,
                        const Card& card) {
  const int kilobytes = traits.needs_statistics ? std::min(48, card.shared_bytes / 3 / 1024) : 16;
  constexpr int64_t kMostChannels = 512;  // whose parameters and moments leave room for others
  const int64_t values = kilobytes * 1024 / traits.element_bytes;
  const int64_t of_group = shape.channels / shape.groups;
  if (shape.channels_last) {
    const int64_t groups = std::min(std::max<int64_t>(kMostChannels / of_group, 1), shape.groups);
    const int64_t channels = std::min(groups * of_group, kMostChannels);
    const int64_t first = of_group > channels ? of_group : channels;  // channels of pieces start at multiples
    if (channels < shape.channels && first % plan.width != 0) plan.width = 1;
    set_piece(plan, traits, shape, channels, std::min(std::max<int64_t>(values / channels, 1), shape.pixels));
  } else {
    const int64_t pixels = std::min(values, shape.pixels);
    const int64_t channels = std::min({std::max<int64_t>(values / pixels, 1), of_group, kMostChannels});
    set_piece(plan, traits, shape, channels, pixels);
  }
}

// Elements of the widest load that divides the tensor's rows: of 16 bytes or 8.
inline int widest_load(const GivenTraits& traits, const GivenShape& shape) {
  if (shape.channels_last) {
    const int width = std::min(traits.vector, kMostWideChannels);
    return shape.channels % width == 0 ? width : 1;
  }
  if (shape.pixels % traits.vector == 0) return traits.vector;
  return shape.pixels % (traits.vector / 2) == 0 ? traits.vector / 2 : 1;
}

// width: elements of a load, widest_load() or 1.
inline GivenPlan plan_given(const GivenTraits& traits, const GivenShape& shape, int width, const Card& card) {
  GivenPlan plan{};
  plan.width = width;
  if (!traits.needs_statistics || !plan_resident(plan, traits, shape, card))
    plan_pieces(plan, traits, shape, card);
  return plan;
}

}  // namespace cuda
}  // namespace fusedconv

// How much of a problem is one tile and one unit, and how many threads share the work.
#pragma once

#include "core/chain.h"
#include "core/checked.h"
#include "source.h"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

constexpr int64_t kTileBytes = 128 * 1024;  // a tile and its input stay in L2
constexpr int64_t kTilePixels = 2048;       // of one channel, which then stays in L1
constexpr int64_t kLeastPixels = 128;       // a tile of fewer costs more than it computes
constexpr int64_t kSampleTiles =
    4;  // a sample is at least so many tiles, for threads to share, where it can be
constexpr int64_t kUnitChannels = 64;       // packing the input is shared by so many channels
constexpr int64_t kUnitBytes = 512 * 1024;  // what is kept of a unit stays in L2, where groups are that small
constexpr int64_t kThreadOperations = 1 << 18;  // fewer are not worth waking a thread

struct Tiling {
  int64_t group_channels;
  int64_t unit_channels;
  int64_t units_per_sample;
  int64_t tile_rows;
  int64_t tiles_per_unit;
  int threads;
};

FUSEDCONV_INLINE int64_t least_common_multiple(int64_t a, int64_t b) {
  int64_t multiple = a;
  while (multiple % b != 0) multiple += a;
  return multiple;
}

template <class Chain, class T>
int64_t channels_of_unit(const Source<T>& source, int64_t group_channels, const Tensor& output) {
  const bool channels_last = output.stride[3] != 1;  // then a unit writes whole pixels
  if (Chain::Reduce::kReducesChannels || (Chain::kNeedsStatistics && channels_last)) return source.channels;
  const int64_t kept_rows = Chain::kNeedsStatistics ? source.rows : 1;
  const int64_t bytes = (Checked(kept_rows) * source.pitch * int64_t(sizeof(T))).value();
  const int64_t step = least_common_multiple(group_channels, kBlockChannels);
  const int64_t fitting = larger(source.channels_for_pack(), kUnitBytes / bytes);
  return smaller(source.channels, larger(step, smaller(fitting, kUnitChannels) / step * step));
}

template <class T>
int64_t rows_of_tile(const Source<T>& source, int64_t unit_channels, int64_t units_per_sample,
                     int64_t row_multiple) {
  const int64_t row_bytes = (Checked(unit_channels) * source.pitch * int64_t(sizeof(T))).value();
  const int64_t least = larger(ceil_div(kLeastPixels, source.pitch), source.least_rows());
  int64_t rows = larger(least, smaller(kTileBytes / row_bytes, kTilePixels / source.pitch));
  if (units_per_sample < kSampleTiles) rows = smaller(rows, larger(source.rows / kSampleTiles, least));
  rows = larger(row_multiple, smaller(rows, source.rows) / row_multiple * row_multiple);
  const int64_t tiles = ceil_div(source.rows, rows);
  return round_up(ceil_div(source.rows, tiles), row_multiple);  // all of nearly the same size
}

// No more threads than have work enough, of so many operations, the product of all counts. What does not fit
// into a number is enough for all.
template <class... Counts>
int threads_worth_waking(int64_t most, Counts... counts) {
  int64_t operations = 1;
  const bool fits = !(__builtin_mul_overflow(operations, int64_t(counts), &operations) || ...);
  return int(fits ? smaller(most, 1 + operations / kThreadOperations) : most);
}

template <class Chain, class T>
Tiling make_tiling(const Source<T>& source, const Arguments& arguments, const Tensor& output, int threads) {
  Tiling tiling;
  tiling.group_channels = Chain::kNeedsStatistics ? source.channels / arguments.num_groups : 1;
  tiling.unit_channels = channels_of_unit<Chain>(source, tiling.group_channels, output);
  tiling.units_per_sample = ceil_div(source.channels, tiling.unit_channels);
  tiling.tile_rows = rows_of_tile(source, tiling.unit_channels, tiling.units_per_sample,
                                  Chain::Reduce::kPools ? arguments.pool[0] : 1);
  tiling.tiles_per_unit = ceil_div(source.rows, tiling.tile_rows);

  // No thread, and no memory for one, without work: a tile at the least, and not too small a share.
  const int64_t tiles = (Checked(source.samples) * tiling.units_per_sample * tiling.tiles_per_unit).value();
  tiling.threads = threads_worth_waking(smaller(threads, tiles), source.samples, source.channels, source.rows,
                                        source.cols, source.cost());
  return tiling;
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

#include "conv_cut.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <set>

#include "sizes.h"

namespace fusedconv {
namespace cuda {

// What there is to choose where not everything fits.
struct CutChoice {
  int cuts, most_stack;
  bool few_windows;
};

namespace {

constexpr int kMostStack = 4;      // the 16 rows of a warp belong to one row of the output
constexpr int kMostTapChunks = 9;  // each has panels of its own

void set_conv(ConvTiling& t, const Problem& problem) {
  const Conv& conv = *problem.conv;
  t.in_channels = int(problem.input.size[1]);
  t.out_channels = int(conv.weight.size[0]);
  for (int d = 0; d < 2; ++d) {
    t.in_size[d] = int(problem.input.size[2 + d]);
    t.kernel[d] = int(conv.weight.size[2 + d]);
    t.padding[d] = int(conv.padding[d]);
    t.dilation[d] = t.kernel[d] == 1 ? 1 : int(conv.dilation[d]);  // of a single tap it may be any number
    t.out_size[d] = t.in_size[d] + 2 * t.padding[d] - t.dilation[d] * (t.kernel[d] - 1);
  }
}

// Whether the 8 channels of a unit are whole vectors, aligned if the first one is. Tiles, and with them a
// result's bits, do not depend on it.
bool reads_vectors(const ConvTiling& t, const Tensor& input) {
  bool aligned = t.unit_taps == 1 && t.in_channels % kUnitElements == 0 && input.stride[1] == 1;
  for (int d : {0, 2, 3}) aligned &= input.stride[d] % kUnitElements == 0;
  return aligned;
}

// Groups of taps along a row of the kernel.
int groups_of_row(const ConvTiling& t) { return int(divide_up(t.kernel[1], t.unit_taps)); }

void set_units(ConvTiling& t, const Tensor& input) {
  t.unit_channels = 1;
  while (t.unit_channels < kUnitElements && t.unit_channels < t.in_channels) t.unit_channels *= 2;
  t.unit_taps = kUnitElements / t.unit_channels;
  t.blocks = int(divide_up(t.in_channels, t.unit_channels));
  t.row_blocks = int(divide_up(t.out_channels, kRows));
  t.by_row_blocks = divisor(t.row_blocks);
  t.reads_vectors = reads_vectors(t, input);
}

// What a chunk has of the kernel, from all of it to one group of taps: fewer rows, then fewer groups of a
// row, the more cuts.
void set_chunk_taps(ConvTiling& t, int cuts) {
  const int groups = groups_of_row(t);
  const int down = std::min(cuts, t.kernel[0] - 1) + 1;
  const int across = cuts + 2 - down;
  t.kernel_rows = int(divide_up(t.kernel[0], down));
  t.tap_groups = int(divide_up(groups, across));
  t.by_chunks_down = divisor(int(divide_up(t.kernel[0], t.kernel_rows)));
  t.by_chunks_across = divisor(int(divide_up(groups, t.tap_groups)));
}

int most_cuts(const ConvTiling& t) { return t.kernel[0] + groups_of_row(t) - 2; }

// Rows of the input that some of the stacked rows of the output read, from the first.
std::set<int> tap_rows(const ConvTiling& t, int stack) {
  std::set<int> rows;
  for (int f = 0; f < stack; ++f)
    for (int k = 0; k < t.kernel_rows; ++k) rows.insert(f + k * t.dilation[0]);
  return rows;
}

// The most output rows on a product's rows, up to `most`, that lessen the work for one of them.
void set_stack(ConvTiling& t, int most) {
  t.stack = 1;
  for (int stack = 2; kRows / stack >= t.out_channels && stack <= most && stack <= t.out_size[0];
       stack *= 2) {
    const auto rows = tap_rows(t, stack).size();
    if (rows <= kMostTapRows && rows * t.stack < tap_rows(t, t.stack).size() * stack) t.stack = stack;
  }
  t.stack_channels = kRows / t.stack;
  t.stack_shift = 0;
  while (1 << t.stack_shift < t.stack_channels) ++t.stack_shift;
}

// Columns of the tiles, and how many rows of shared memory one has.
struct TileSize {
  int across, cols, pitch, rows;
  double used;  // of the columns of the products
};

// Rows of shared memory that a tile of some of them reads, of each remainder modulo stack.
int phase_rows(const ConvTiling& t, int rows) {
  const int last_tap = t.stack - 1 + (t.kernel_rows - 1) * t.dilation[0];
  return rows + last_tap / t.stack;
}

TileSize tile_size(const ConvTiling& t, int columns, int across, int cols_multiple) {
  TileSize size;
  size.cols = int(round_up(divide_up(t.out_size[1], across), cols_multiple));
  size.across = int(divide_up(t.out_size[1], size.cols));
  const int halo = (t.tap_groups - 1) * t.unit_taps * t.dilation[1];
  size.pitch = int(round_up(size.cols + halo, 8));  // 8 columns of a product lie in one row
  size.rows = size.cols > columns ? 0 : 1 + (columns - size.cols) / size.pitch;
  if (size.rows > 0) {
    const int64_t stacks = divide_up(t.out_size[0], t.stack);
    const int64_t down = divide_up(stacks, size.rows);
    size.rows = int(divide_up(stacks, down));  // all of nearly the same size
    size.used = double(t.out_size[0]) * t.out_size[1] / (double(down) * size.across * columns * t.stack);
  }
  return size;
}

// Tiles, and bands: a band of a pooled chain is a row of windows, or some. few_windows: for what is carried
// of windows to take little memory.
bool set_tiles(ConvTiling& t, int columns, const int64_t pool[2], bool few_windows) {
  constexpr double kWorthASplit = 1.1;  // whole rows are written as longer runs
  const int width = int(pool[1]);
  const int most_windows = std::max(1, columns / std::max(8, width));
  const int least_across = int(divide_up(t.out_size[1], few_windows ? most_windows * width : columns));
  const int cols_multiple = std::lcm(2, width);
  TileSize best{};
  for (int across = least_across; across <= least_across + 7; ++across) {
    const TileSize size = tile_size(t, columns, across, across == 1 ? 1 : cols_multiple);
    if (size.rows > 0 && size.used > best.used * (best.across == 1 ? kWorthASplit : 1.0)) best = size;
  }
  if (best.rows == 0) return false;
  t.tile_cols = best.cols;
  t.tiles_across = best.across;
  t.pitch = best.pitch;
  const int most_tile_rows = best.rows * t.stack;
  const int window = int(pool[0]);
  if (window <= most_tile_rows) {
    const int whole_stacks = std::lcm(window, t.stack);  // then panels may have many bands
    const int step = whole_stacks <= most_tile_rows ? whole_stacks : window;
    t.tile_rows = t.band_rows = most_tile_rows / step * step;
    t.sub_tiles = 1;
  } else {
    t.tile_rows = int(round_up(divide_up(window, divide_up(window, most_tile_rows)), t.stack));
    t.sub_tiles = int(divide_up(window, t.tile_rows));
    t.band_rows = window;
  }
  t.bands = int(divide_up(t.out_size[0], t.band_rows));
  t.by_bands = divisor(t.bands);
  t.by_tiles_across = divisor(t.tiles_across);
  for (int d = 0; d < 2; ++d) t.by_pool[d] = divisor(int(pool[d]));
  return true;
}

void set_taps(ConvTiling& t) {
  const std::set<int> rows = tap_rows(t, t.stack);
  t.phase_rows = phase_rows(t, int(divide_up(t.tile_rows, t.stack)));
  // In the order of their addresses: from one half step to the next is always forward.
  t.tap_rows = 0;
  for (int row : rows) t.tap_row[t.tap_rows++] = row;
  std::sort(t.tap_row, t.tap_row + t.tap_rows, [&](int a, int b) { return row_slot(t, a) < row_slot(t, b); });
}

// Of a group of threads: what it carries from tile to tile.
int carry_bytes(const ConvTiling& t, const int64_t pool[2], bool keeps_places) {
  const int windows_across = t.tile_cols / int(pool[1]);
  // A sign for each channel and, if windows reach into further sub-tiles, what is known of them.
  const int carried = t.sub_tiles > 1 ? t.stack_channels * windows_across * (keeps_places ? 2 : 1) : 0;
  return int(round_up((kRows + carried) * int(sizeof(float)), kUnitBytes));
}

// What is in shared memory; false if it does not fit.
bool set_memory(ConvTiling& t, int columns, int parts, int carry_bytes, const Card& card) {
  int64_t furthest = 0;  // unit where the columns of a product start
  for (int i = 0; i < t.tap_rows; ++i)
    furthest = std::max(furthest, int64_t(row_slot(t, t.tap_row[i])) * t.pitch);
  furthest += (t.tap_groups - 1) * t.unit_taps * t.dilation[1];
  const int64_t plane = std::max(int64_t(t.stack) * t.phase_rows * t.pitch, furthest + columns);
  if (plane > card.shared_bytes / kUnitBytes) return false;
  t.plane = int(plane);
  t.staging_bytes = kRows * (columns + kStagingPadding) * int(sizeof(float));
  t.carry_bytes = carry_bytes;
  const int fixed = kSharedHeadBytes + kGroups * (t.staging_bytes + t.carry_bytes);

  const int units_per_block = t.tap_rows * t.tap_groups;
  for (int blocks = t.blocks; blocks >= 1; --blocks) {
    if (t.blocks % blocks != 0 || blocks > card.shared_bytes / kUnitBytes / t.plane) continue;
    if (blocks > 1 && t.in_channels % kUnitElements != 0) continue;  // the last block is not a whole one
    t.blocks_per_chunk = blocks;
    t.chunks = t.blocks / blocks * t.by_chunks_down.value * t.by_chunks_across.value;
    t.half_steps = int(round_up(blocks * units_per_block, 2));
    t.weights_bytes = t.half_steps * kRows * kUnitBytes;
    t.pixels_bytes = blocks * t.plane * kUnitBytes;
    t.weights_stay = t.chunks * t.row_blocks == 1;
    const int weights = parts * t.weights_bytes;
    const int stage = parts * t.pixels_bytes + (t.weights_stay ? 0 : weights);
    const int left = card.shared_bytes - fixed - (t.weights_stay ? weights : 0);
    t.stages = left > 0 ? std::min(kMostStages, left / (kGroups * stage)) : 0;
    if (t.stages > 0 && t.half_steps / 2 <= kMostSteps && parts * t.pixels_bytes / kUnitBytes < 1 << 14) {
      t.shared_bytes = fixed + (t.weights_stay ? weights : 0) + kGroups * t.stages * stage;
      return true;
    }
  }
  return false;
}

// Once all else is known.
void set_steps(ConvTiling& t) {
  const int units_per_block = t.tap_rows * t.tap_groups;
  const auto offset = [&](int half_step) {
    half_step = std::min(half_step, t.blocks_per_chunk * units_per_block - 1);
    const int tap = half_step % units_per_block;
    return uint32_t(half_step / units_per_block * t.plane +
                    row_slot(t, t.tap_row[tap / t.tap_groups]) * t.pitch +
                    tap % t.tap_groups * t.unit_taps * t.dilation[1]);
  };
  for (int s = 0; s < t.half_steps / 2; ++s)
    t.step[s] = offset(2 * s) | (offset(2 * s + 1) - offset(2 * s)) << 16;
}

// How a sample's work compares with that of other choices: in units of pixels to load.
double work(const ConvTiling& t, int parts) {
  constexpr double kHalfStepUnits = 16;  // about what is loaded while one product of a half step is made
  const double loads = t.blocks_per_chunk * t.plane;
  const double products = t.half_steps * kHalfStepUnits * terms_of(parts);
  return std::max(loads, products) * t.chunks * t.bands * t.sub_tiles * t.tiles_across;
}

}  // namespace

const int64_t* ConvCutter::pool() const {
  static constexpr int64_t kNone[2] = {1, 1};
  return chain_.pools ? problem_.arguments.pool : kNone;
}

bool ConvCutter::fits(ConvTiling& t, const CutChoice& choice) const {
  set_chunk_taps(t, choice.cuts);
  if (t.by_chunks_down.value * t.by_chunks_across.value > kMostTapChunks) return false;
  set_stack(t, choice.most_stack);
  if (!set_tiles(t, columns_, pool(), choice.few_windows)) return false;
  set_taps(t);
  return set_memory(t, columns_, parts_, chain_.pools ? carry_bytes(t, pool(), chain_.keeps_places) : 0,
                    card_);
}

// All of the kernel in each chunk and as many stacked rows as are of use; if that does not fit, what is the
// least work.
bool ConvCutter::cut_into_tiles(ConvTiling& t) const {
  set_conv(t, problem_);
  set_units(t, problem_.input);
  if (fits(t, {0, kMostStack, false})) return true;
  double least = std::numeric_limits<double>::infinity();
  ConvTiling tried = t;
  for (int cuts = 0; cuts <= most_cuts(t); ++cuts) {
    for (int most_stack = kMostStack; most_stack >= 1; most_stack /= 2) {
      for (bool few_windows : {false, true}) {
        if (!fits(tried, {cuts, most_stack, few_windows}) || work(tried, parts_) >= least) continue;
        t = tried;
        least = work(t, parts_);
      }
    }
  }
  return least < std::numeric_limits<double>::infinity();
}

bool ConvCutter::keep_tiles(ConvTiling& t) const {
  ConvTiling keeps = t;
  if (!set_memory(keeps, columns_, parts_, kKeptTileBytes, card_) || keeps.chunks > 1) return false;
  t = keeps;
  return true;
}

bool cut_into_panels(ConvTiling& t) {
  constexpr int64_t kMostUnits = int64_t(1) << 28;
  constexpr double kMuch = 1.34;  // what is packed over what is needed
  const auto rows = [&](int bands) { return (bands - 1) * t.band_rows + t.sub_tiles * t.tile_rows; };
  const auto phase_rows_of = [&](int bands) { return phase_rows(t, int(divide_up(rows(bands), t.stack))); };
  const auto units = [&](int bands) { return int64_t(t.stack) * phase_rows_of(bands) * t.pitch; };
  if (units(1) > kMostUnits) return false;
  int bands = 1;
  const bool aligned = t.band_rows % t.stack == 0;  // a tile starts where its first row of a stack does
  while (aligned && bands < t.bands && units(bands + 1) <= kMostUnits) {
    const bool is_small = t.chunks * t.blocks_per_chunk * units(bands + 1) <= kPanelUnits;
    if (!is_small && t.stack * phase_rows_of(bands) <= kMuch * rows(bands)) break;
    ++bands;
  }
  t.panel_bands = int(divide_up(t.bands, divide_up(t.bands, bands)));
  t.panels_down = int(divide_up(t.bands, t.panel_bands));
  t.panel_phase_rows = phase_rows_of(t.panel_bands);
  t.panel_units = int(units(t.panel_bands));
  t.pack_team_warps = kPackWarps;
  while (t.pack_team_warps > 1 && t.pack_team_warps / 2 * kWarpLanes * kPackBatch >= t.panel_units)
    t.pack_team_warps /= 2;
  t.by_pitch = divisor(t.pitch);
  t.by_panel_bands = divisor(t.panel_bands);
  t.by_panel_phase_rows = divisor(t.panel_phase_rows);
  t.by_blocks_per_chunk = divisor(t.blocks_per_chunk);
  t.by_panels_down = divisor(t.panels_down);
  set_steps(t);
  return true;
}

}  // namespace cuda
}  // namespace fusedconv

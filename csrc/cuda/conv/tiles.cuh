// Which tiles a group of threads has, and in which order.
#pragma once

#include "problem.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// One sub-tile of an item of work and the channels of one block of rows. All sizes are those inside of the
// map.
struct alignas(16) Tile {
  int64_t sample;
  int part;  // counted in the sample, for each row of the stack `stack` parts
  int row_block;
  int row, col;  // of the output
  int rows, cols;
  int sub_tile;
  int panel;
  int panel_row;  // where the tile starts, in rows of each remainder modulo stack
};

// A pixel of a tile: that of a column of the product, in one of the stacked rows.
struct Place {
  int row, col;
};

__device__ inline Place place_of(const ConvTiling& t, int column, int stacked) {
  const int slot = t.by_pitch.divide(column);
  return {slot * t.stack + stacked, column - slot * t.pitch};
}

// An item: a band of rows and columns of one sample, with one block of rows, or with all of them.
struct Item {
  int64_t sample;
  int row_block;
  int band, across;
};

template <bool kAllRowBlocks>
__device__ Item item_at(const ConvTiling& t, int index) {
  Item item;
  const auto split = [&](const cuda::Divisor& by) {
    const int quotient = by.divide(index);
    const int rest = index - quotient * by.value;
    index = quotient;
    return rest;
  };
  item.row_block = kAllRowBlocks ? 0 : split(t.by_row_blocks);
  item.across = split(t.by_tiles_across);
  item.band = split(t.by_bands);
  item.sample = index;
  return item;
}

// The same in all threads of a warp, and known to be: wgmma must not stand where threads could part.
__device__ inline int uniform(int x) { return __shfl_sync(~0u, x, 0); }
__device__ inline int group_of_thread() { return uniform(threadIdx.x / kGroupThreads); }

__device__ inline Tile tile_at(const ConvTiling& t, const Item& item, int row_block, int sub_tile) {
  Tile tile;
  tile.sample = item.sample;
  tile.row_block = row_block;
  tile.sub_tile = sub_tile;
  tile.part = (item.band * t.tiles_across + item.across) * t.sub_tiles + sub_tile;
  tile.row = item.band * t.band_rows + sub_tile * t.tile_rows;
  tile.col = item.across * t.tile_cols;
  const int panel_down = t.by_panel_bands.divide(item.band);
  tile.panel = (int(item.sample) * t.panels_down + panel_down) * t.tiles_across + item.across;
  tile.panel_row = (tile.row - panel_down * t.panel_bands * t.band_rows) * t.stack_channels / kRows;
  const int band_end = min(t.out_size[0], (item.band + 1) * t.band_rows);
  // ptxas of CUDA 13.0 joins max(0, min(a, b)) and a later comparison with b, and takes b for the result
  // where it is the larger one. It does not see through a shuffle.
  tile.rows = uniform(max(0, min(t.tile_rows, band_end - tile.row)));
  tile.cols = min(t.tile_cols, t.out_size[1] - tile.col);
  return tile;
}

// Tiles of a group of threads. Groups of a block take turns at its items.
template <bool kAllRowBlocks>
__device__ int count_tiles(const ConvTiling& t, int group, int items) {
  const int step = kGroups * gridDim.x;
  const int of_group = (items - int(blockIdx.x + group * gridDim.x) + step - 1) / step;
  return of_group * t.sub_tiles * (kAllRowBlocks ? t.row_blocks : 1);
}

// The same in their order.
template <bool kAllRowBlocks>
struct TileCursor {
  int item;
  int row_block = 0, sub_tile = 0;  // row_block: where an item has all of them

  __device__ explicit TileCursor(int group) : item(blockIdx.x + group * gridDim.x) {}

  __device__ Tile tile(const ConvTiling& t) const {
    const Item of_tile = item_at<kAllRowBlocks>(t, item);
    return tile_at(t, of_tile, kAllRowBlocks ? row_block : of_tile.row_block, sub_tile);
  }

  __device__ void next(const ConvTiling& t) {
    if (++sub_tile < t.sub_tiles) return;
    sub_tile = 0;
    if (kAllRowBlocks && ++row_block < t.row_blocks) return;
    row_block = 0;
    item += kGroups * gridDim.x;
  }
};

// Where a group is in its ring of stages.
struct Ring {
  int stage = 0;
  uint32_t parity = 0;  // of the round

  __device__ void next(int stages) {
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

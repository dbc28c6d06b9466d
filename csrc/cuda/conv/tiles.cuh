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

// The same in all threads of a warp, and known to be: wgmma must not stand where threads could part.
__device__ inline int uniform(int x) { return __shfl_sync(~0u, x, 0); }
__device__ inline int group_of_thread() { return uniform(threadIdx.x / kGroupThreads); }

// Tiles of a group of threads. An item is a band of rows and columns of one sample, with one block of rows,
// or with all of them; groups of a block take turns at its items.
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
    int rest = item;
    const auto split = [&](const cuda::Divisor& by) {
      const int quotient = by.divide(rest);
      const int part = rest - quotient * by.value;
      rest = quotient;
      return part;
    };
    Tile tile;
    tile.row_block = kAllRowBlocks ? row_block : split(t.by_row_blocks);
    const int across = split(t.by_tiles_across);
    const int band = split(t.by_bands);
    tile.sample = rest;
    tile.sub_tile = sub_tile;
    tile.part = (band * t.tiles_across + across) * t.sub_tiles + sub_tile;
    tile.row = band * t.band_rows + sub_tile * t.tile_rows;
    tile.col = across * t.tile_cols;
    const int panel_down = t.by_panel_bands.divide(band);
    tile.panel = (rest * t.panels_down + panel_down) * t.tiles_across + across;
    tile.panel_row = (tile.row - panel_down * t.panel_bands * t.band_rows) * t.stack_channels / kRows;
    const int band_end = min(t.out_size[0], (band + 1) * t.band_rows);
    // ptxas of CUDA 13.0 joins max(0, min(a, b)) and a later comparison with b, and takes b for the result
    // where it is the larger one. It does not see through a shuffle.
    tile.rows = uniform(max(0, min(t.tile_rows, band_end - tile.row)));
    tile.cols = min(t.tile_cols, t.out_size[1] - tile.col);
    return tile;
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

// Which tiles a block has, and the order in which its stages are filled and used.
#pragma once

#include "conv_problem.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// One sub-tile of an item of work and the channels of one block of rows. All sizes are those inside of the
// map.
struct Tile {
  int64_t sample;
  int part;  // counted in the sample, for each row of the stack `stack` parts
  int row_block;
  int row, col;  // of the output
  int rows, cols;
  int sub_tile;
};

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
  const int band_end = min(t.out_size[0], (item.band + 1) * t.band_rows);
  // ptxas of CUDA 13.0 joins max(0, min(a, b)) and a later comparison with b, and takes b for the result
  // where it is the larger one. It does not see through a shuffle.
  tile.rows = uniform(max(0, min(t.tile_rows, band_end - tile.row)));
  tile.cols = min(t.tile_cols, t.out_size[1] - tile.col);
  return tile;
}

// Calls visit(tile) for the tiles of an item in the order in which stages are filled and used.
template <bool kAllRowBlocks, class Visit>
__device__ void for_each_tile(const ConvTiling& t, const Item& item, const Visit& visit) {
  const int row_blocks = kAllRowBlocks ? t.row_blocks : 1;
  for (int b = 0; b < row_blocks; ++b) {
    for (int s = 0; s < t.sub_tiles; ++s) visit(tile_at(t, item, kAllRowBlocks ? b : item.row_block, s));
  }
}

// Where a role is in the ring of stages. Both roles go through all stages in the same order.
struct Ring {
  int stages;
  int stage = 0;
  uint32_t round = 0;

  __device__ explicit Ring(int count) : stages(count) {}
  __device__ void next() {
    if (++stage == stages) {
      stage = 0;
      ++round;
    }
  }
};

// The stages of a block in the order in which they are filled and used: see for_each_tile.
template <bool kAllRowBlocks>
struct StageCursor {
  int item;
  int row_block = 0, sub_tile = 0, chunk = 0;
  int turn = 0;  // the group that uses it
  Ring ring;

  __device__ explicit StageCursor(const ConvTiling& t) : item(blockIdx.x), ring(t.stages) {}

  __device__ Tile tile(const ConvTiling& t) const {
    const Item of_tile = item_at<kAllRowBlocks>(t, item);
    return tile_at(t, of_tile, kAllRowBlocks ? row_block : of_tile.row_block, sub_tile);
  }

  __device__ void next(const ConvTiling& t) {
    ring.next();
    if (++chunk < t.chunks) return;
    chunk = 0;
    if (++sub_tile < t.sub_tiles) return;
    sub_tile = 0;
    if (kAllRowBlocks && ++row_block < t.row_blocks) return;
    row_block = 0;
    item += gridDim.x;
    turn ^= 1;
  }
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

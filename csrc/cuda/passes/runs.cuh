// A tile's values in memory as runs: one of each channel, row by row. So they stand in shared memory, where
// they are put together, and so whole lines of the output are written.
#pragma once

#include "cuda/conv/fragment.cuh"
#include "cuda/device/packs.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// Elements from one channel's run to the next in shared memory: whole vectors, and so many that neighbours
// lie in other banks.
template <class Out>
__device__ int run_pitch(const ConvTiling& t) {
  constexpr int kBanks = 128 / int(sizeof(Out));
  constexpr int kShift = 16 / int(sizeof(Out)) * 2;
  const int length = t.tile_rows * t.tile_cols;
  return (length - kShift + kBanks - 1) / kBanks * kBanks + kShift;
}

// Whether the rows of a channel follow each other in the output.
__device__ inline bool has_runs(const Tensor& output) {
  return output.stride[3] == 1 && output.stride[2] == output.size[3];
}

// The element of the output where a row of a tile starts, in its first channel.
__device__ inline int64_t offset_in_output(const ConvProblem& p, const Tile& tile, int row) {
  const int64_t* stride = p.output.stride;
  return tile.sample * stride[0] + int64_t(tile.row_block) * kRows * stride[1] +
         (tile.row + row) * stride[2] + tile.col * stride[3];
}

// Calls visit(first, offset, length) for each of a channel's runs in an output that has them: its first
// value's place in the tile, that of the first channel in the output, and how many values it has.
template <class Visit>
__device__ void for_each_run(const ConvProblem& p, const Tile& tile, const Visit& visit) {
  const bool whole_rows = tile.cols == p.tiling.out_size[1];
  const int runs = whole_rows ? 1 : tile.rows;
  const int length = whole_rows ? tile.rows * tile.cols : tile.cols;
  for (int r = 0; r < runs; ++r) visit(r * tile.cols, offset_in_output(p, tile, r), length);
}

// Teams of two warps have every kTeams-th channel: one vector a thread of most runs.
constexpr int kTeamThreads = 2 * kWarpThreads;
constexpr int kTeams = kGroupThreads / kTeamThreads;

__device__ inline int team_of_thread() { return threadIdx.x % kGroupThreads / kTeamThreads; }

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

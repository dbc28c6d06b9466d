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

__device__ inline void write_pair(float* to, float x, float y) {
  *reinterpret_cast<float2*>(to) = make_float2(x, y);
}
__device__ inline void write_pair(__half* to, float x, float y) {
  *reinterpret_cast<__half2*>(to) = __floats2half2_rn(x, y);
}
__device__ inline void write_pair(__nv_bfloat16* to, float x, float y) {
  *reinterpret_cast<__nv_bfloat162*>(to) = __floats2bfloat162_rn(x, y);
}

// Each thread's values to where they belong. to: the first channel's first pixel of the tile.
template <class Out>
__device__ void scatter(const ConvTiling& t, const Fragment& v, Out* to, int channel_stride, int row_stride,
                        int col_stride) {
  const Tile& tile = v.tile;
  const ThreadRows& rows = v.rows;
  Out* of_row[kThreadChannels];
#pragma unroll
  for (int k = 0; k < kThreadChannels; ++k)
    of_row[k] = to + (rows.channel(k) - tile.row_block * kRows) * channel_stride +
                rows.stacked(t) * row_stride + Fragment::first_of_pair() * col_stride;
  const bool pairs = col_stride == 1 && row_stride % 2 == 0 && channel_stride % 2 == 0 &&
                     tile.cols % 2 == 0 && reinterpret_cast<uintptr_t>(to) % (2 * sizeof(Out)) == 0 &&
                     rows.channel(kThreadChannels - 1) < t.out_channels;
  if (pairs && v.has_one_row()) {
    const int slot = t.by_pitch.divide(Fragment::first_column());
    const int start = slot * t.stack * row_stride + Fragment::first_column() - slot * t.pitch;
#pragma unroll
    for (int j = 0; j < kThreadPairs; ++j) {
      if (!v.exists(j, 0)) continue;
#pragma unroll
      for (int k = 0; k < kThreadChannels; ++k)
        write_pair(of_row[k] + start + kBlockColumns * j, v.value(k, j, 0), v.value(k, j, 1));
    }
    return;
  }
  v.for_each_block([&](int j, int row, int col) {
    const int place = row * t.stack * row_stride + col * col_stride;
#pragma unroll
    for (int k = 0; k < kThreadChannels; ++k) {
      Out* pixel = of_row[k] + place;
      const bool exists = rows.channel(k) < t.out_channels;
      if (exists && v.exists(j, 0)) pixel[0] = narrow<Out>(v.value(k, j, 0));
      if (exists && v.exists(j, 1)) pixel[col_stride] = narrow<Out>(v.value(k, j, 1));
    }
  });
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

// v of a tile, computed again: 16 pixels of a row, of all channels of the output. Rows of the product are
// pixels: first the even ones, then the odd ones, so a lane has pairs of neighbours.
#pragma once

#include "cuda/device/plain_conv.cuh"
#include "strip_weights.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// A lane's values: of each chunk at pixels 2 * (lane / 4) and the next one, each of channels
// 2 * (lane % 4) and the next one.
template <int kChunks>
using TileValues = float[kChunks][4];

// A lane's first pixel in the strip.
__device__ inline int tile_pixel() {
  return threadIdx.x / kWarpThreads * kTilePixels + lane_of_thread() / 4 * 2;
}

// A lane's first channel of a chunk.
__device__ inline int tile_channel(int chunk) { return chunk * kUnitChannels + lane_of_thread() % 4 * 2; }

template <int kOutTiles>
class StripConv {
  using Shared = StripShared<kOutTiles>;
  static constexpr int kChunks = Shared::kChunks;
  static constexpr int kChunksAtOnce = 4;

 public:
  __device__ StripConv(const StripWork& work, const Shared& shared)
      : work_(work),
        shared_(shared),
        first_(threadIdx.x / kWarpThreads * kTilePixels + lane_of_thread() % 8 * 2 +
               lane_of_thread() / 8 % 2),
        lane_half_(lane_of_thread() / 16) {}

  __device__ void compute(const StripSegment& segment, int row, TileValues<kChunks>& v) const {
    if (is_plain(row)) return compute_plain(segment, row, v);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (int i = 0; i < 4; ++i) v[c][i] = 0;
    }
#pragma unroll 1  // the instruction cache is small
    for (int down = 0; down < kTaps; ++down) add_row(row, down, v);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const float4 of = *reinterpret_cast<const float4*>(&shared_.conv_channels[tile_channel(c)]);
#pragma unroll
      for (int i = 0; i < 4; ++i) v[c][i] = fmaf(v[c][i], i % 2 == 0 ? of.x : of.z, i % 2 == 0 ? of.y : of.w);
    }
  }

 private:
  // Each row of the input has a scale of its own.
  __device__ void add_row(int row, int down, TileValues<kChunks>& v) const {
    const int place = (row + down) % kStripInputRows;
    const bool is_exact = work_.operand_parts == kMostOperandParts;
    // Two taps across of the high parts and of the low ones, and the third tap of both.
    uint32_t high[4], low[4], tail[4];
    load_matrices(high, shared_address(&shared_.input[place][0][first_ + lane_half_]));
    load_matrices(low, shared_address(&shared_.input[place][1][first_ + lane_half_]));
    load_matrices(tail, shared_address(&shared_.input[place][lane_half_][first_ + kTaps - 1]));
    const float factor = power_of_two(-shared_.input_exponents[place]);
#pragma unroll
    for (int first = 0; first < kChunks; first += kChunksAtOnce) {
      float d[kChunksAtOnce][4]{};
      uint4 b[kChunksAtOnce];
      uint2 b_tail[kChunksAtOnce];
#pragma unroll
      for (int c = 0; c < kChunksAtOnce; ++c) {
        b[c] = shared_.conv_weights[down][first + c][lane_of_thread()];
        b_tail[c] = shared_.conv_tails[down][first + c][lane_of_thread()];
      }
      if (is_exact) {
#pragma unroll
        for (int c = 0; c < kChunksAtOnce; ++c) multiply_add<__half>(d[c], low, b[c].x, b[c].y);
#pragma unroll
        for (int c = 0; c < kChunksAtOnce; ++c) multiply_add<__half>(d[c], high, b[c].z, b[c].w);
#pragma unroll
        for (int c = 0; c < kChunksAtOnce; ++c) multiply_add_half_step(d[c], tail[2], tail[3], b_tail[c].x);
#pragma unroll
        for (int c = 0; c < kChunksAtOnce; ++c) multiply_add_half_step(d[c], tail[0], tail[1], b_tail[c].y);
      }
#pragma unroll
      for (int c = 0; c < kChunksAtOnce; ++c) multiply_add<__half>(d[c], high, b[c].x, b[c].y);
#pragma unroll
      for (int c = 0; c < kChunksAtOnce; ++c) multiply_add_half_step(d[c], tail[0], tail[1], b_tail[c].x);
#pragma unroll
      for (int c = 0; c < kChunksAtOnce; ++c) {
#pragma unroll
        for (int i = 0; i < 4; ++i) v[first + c][i] = fmaf(d[c][i], factor, v[first + c][i]);
      }
    }
  }

  __device__ bool is_plain(int row) const {
    bool is_right = shared_.weights_are_finite != 0;
#pragma unroll
    for (int down = 0; down < kTaps; ++down) {
      const int4 of_warps = shared_.input_is_right[(row + down) % kStripInputRows];
      is_right &= (of_warps.x & of_warps.y & of_warps.z & of_warps.w) != 0;
    }
    return !is_right;
  }

  // Where infinities and NaN must mean what they mean in PyTorch, or one scale would cost digits.
  __device__ void compute_plain(const StripSegment& segment, int row, TileValues<kChunks>& v) const {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (int i = 0; i < 4; ++i)
        v[c][i] = plain_value(work_, segment.sample, tile_channel(c) + i % 2, segment.row + row,
                              segment.col + tile_pixel() + i / 2);
    }
  }

  __device__ static __noinline__ float plain_value(const StripWork& work, int sample, int channel, int row,
                                                   int col) {
    const ConvShape& shape = work.shape;
    if (channel >= shape.out_channels || col >= shape.out_size[1]) return 0;
    const ConvTaps taps{{shape.padding[0], shape.padding[1]}, {1, 1}};
    return plain_conv_at(work.input, work.weight, taps, sample, channel, row, col) +
           value_of<float>(work.bias, channel);
  }

  const StripWork& work_;
  const Shared& shared_;
  const int first_;      // the pixel whose unit this lane names to ldmatrix, in the strip
  const int lane_half_;  // names the next tap, or the other part
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

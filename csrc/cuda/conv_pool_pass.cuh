// The pass of chains that end in a max pool.
#pragma once

#include "conv_pass.cuh"
#include "vector_access.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// Where everything up to the pool is an increasing or decreasing line in each channel: the pool takes the
// largest, or the smallest, values of Pre(v) before the norm is known, and the statistics on the way.
template <class Chain>
class PoolPass : public PassBase {
 public:
  static constexpr bool kAllRowBlocks = false;
  using PassBase::PassBase;

  __device__ void set_rows(const ThreadRows& rows) {
#pragma unroll
    for (int k = 0; k < 2; ++k)
      sign_[k] = rows.channel(k) < p_.tiling.out_channels ? direction(rows.channel(k)) : 1.0f;
  }

  __device__ void prepare(const Tile& tile, const ThreadRows& rows) {
    channels_.load(p_, tile, rows, nullptr);
  }

  template <int kColumns>
  __device__ void finish(const Tile& tile, const ThreadRows& rows, float (&d)[kColumns / 2]) {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) d[i] = Chain::Pre::value(d[i], d[i], channels_.channel[i / 2 % 2]);
    write_moments<kColumns>(p_, tile, rows, d);
    // Even windows take pairs, which a thread has itself.
    const bool pairs = p_.tiling.by_pool[1].value % 2 == 0;
    const int pitch = (2 * kColumns + cuda::kStagingPadding) / (pairs ? 2 : 1);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      float* to = staging() + staging_row(k) * pitch +
                  (half_of_thread() * kColumns / 2 + lane() % 4) * (pairs ? 1 : 2);
#pragma unroll
      for (int i = 0; i < kColumns / 2; i += 4) {
        const float2 x{d[i + 2 * k] * sign_[k], d[i + 2 * k + 1] * sign_[k]};
        if (pairs) {
          to[i] = maximum(x.x, x.y);
        } else {
          *reinterpret_cast<float2*>(to + 2 * i) = x;
        }
      }
    }
    if (rows.stacked(p_.tiling) == 0 && lane() % 4 == 0 && half_of_thread() == 0) {
      signs()[staging_row(0)] = sign_[0];
      signs()[staging_row(1)] = sign_[1];
    }
    sync();
    pool(tile, pairs ? 2 : 1, pitch);
  }

 private:
  // 1 where the chain rises with v, -1 where it falls.
  __device__ float direction(int c) const {
    Channel<float> channel = make_channel<float>(p_.arguments, c);
    set_norm(channel, p_.arguments, c, 0.0, 1.0);
    const auto value = [&](float x) {
      return Chain::Post::value(Chain::Norm::value(x, channel), x, channel);
    };
    return value(1.0f) < value(0.0f) ? -1.0f : 1.0f;
  }

  // The windows of a sub-tile; those that reach into further ones are carried on. A thread takes a window of
  // all its warp's channels; unit columns of it are one value.
  __device__ void pool(const Tile& tile, int unit, int pitch) {
    const ConvTiling& t = p_.tiling;
    const int window_rows = t.by_pool[0].value;
    const int window_cols = t.by_pool[1].value;
    const int pooled_rows = int(p_.output.size[2]);
    const int pooled_cols = int(p_.output.size[3]);
    const int first_row = t.by_pool[0].divide(tile.row);
    const int windows_down = min(pooled_rows - first_row, t.by_pool[0].divide(tile.rows + window_rows - 1));
    const int first_col = t.by_pool[1].divide(tile.col);
    const int windows_across = min(pooled_cols - first_col, t.by_pool[1].divide(tile.cols));
    const int64_t plane = int64_t(pooled_rows) * pooled_cols;
    float* of_tile = p_.pooled + (tile.sample * t.out_channels + tile.row_block * kRows) * plane +
                     first_row * pooled_cols + first_col;
    for (int window = 0; window < windows_down; ++window) {
      const int row = window * window_rows;
      const int rows = min(window_rows, tile.rows - row);
      for (int i = lane(); i < windows_across; i += kWarpThreads) {
        float most[kWarpChannels];
#pragma unroll
        for (int k = 0; k < kWarpChannels; ++k) most[k] = -INFINITY;
        for (int r = row; r < row + rows; ++r) {
          const float* from = staging() + (r & (t.stack - 1)) * t.stack_channels * pitch +
                              (r / t.stack * t.pitch + i * window_cols) / unit;
          const int width = window_cols / unit;
          width % 2 == 0 ? take_larger<2>(most, from, pitch, width)
                         : take_larger<1>(most, from, pitch, width);
        }
        // Windows go on in further sub-tiles where a tile has one window down.
        put(tile, most, of_tile + window * pooled_cols + i, plane, carry() + i, windows_across);
      }
    }
  }

  // Channels that a warp pools: every kWarps-th.
  template <class Visit>
  __device__ void for_each_channel(const Visit& visit) const {
#pragma unroll
    for (int k = 0; k < kWarpChannels; ++k)
      if (warp() + k * kWarps < p_.tiling.stack_channels) visit(k, warp() + k * kWarps);
  }

  // A row of a window, so many values at a time.
  template <int kVector>
  __device__ void take_larger(float (&most)[kWarpChannels], const float* from, int pitch, int width) const {
    for (int w = 0; w < width; w += kVector) {
      for_each_channel([&](int k, int c) {
        const Pack<float, kVector> values = load_pack<kVector>(from + c * pitch + w);
#pragma unroll
        for (float x : values.element) most[k] = maximum(most[k], x);
      });
    }
  }

  __device__ void put(const Tile& tile, const float (&most)[kWarpChannels], float* to, int64_t plane,
                      float* carried, int carried_pitch) const {
    const bool starts = tile.sub_tile == 0;
    const bool ends = tile.sub_tile + 1 == p_.tiling.sub_tiles;
    for_each_channel([&](int k, int c) {
      float* known = carried + c * carried_pitch;
      const float x = starts ? most[k] : maximum(most[k], *known);
      if (!ends) {
        *known = x;
      } else if (tile.row_block * kRows + c < p_.tiling.out_channels) {
        to[c * plane] = signs()[c] * x;
      }
    });
  }

  // Carry memory: a sign for each channel, then the windows.
  __device__ float* signs() const { return reinterpret_cast<float*>(carry_); }
  __device__ float* carry() const { return signs() + kRows; }

  ThreadChannels<kReadChannel<typename Chain::Pre>> channels_;
  float sign_[2];
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

// The pass of chains that end in a max pool.
#pragma once

#include "cuda/device/packs.cuh"
#include "pass.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// Where everything up to the pool is an increasing or decreasing line in each channel: the pool takes the
// largest, or the smallest, values of Pre(v) before the norm is known, and the statistics on the way.
// kKeepsPlaces: their places instead, for backward, which knows the statistics; then it keeps to PyTorch's
// order where values are equal.
template <class Chain, bool kKeepsPlaces>
class PoolPass : public PassBase {
  static_assert(kIsMaxPool<typename Chain::Reduce>);

 public:
  static constexpr bool kAllRowBlocks = false;
  using PassBase::PassBase;

  __device__ void set_rows(const ThreadRows& rows) {
#pragma unroll
    for (int k = 0; k < kThreadChannels; ++k)
      sign_[k] = rows.channel(k) < p_.tiling.out_channels ? direction(rows.channel(k)) : 1.0f;
    channels_.load(p_, rows);
  }

  __device__ void finish(Fragment v) {
    apply<typename Chain::Pre>(v, channels_);
    // Even windows take pairs, which a thread has itself.
    const bool pairs = !kKeepsPlaces && p_.tiling.by_pool[1].value % 2 == 0;
    pairs ? stage_pairs(v) : stage_values(v);
    write_signs(v);
    if constexpr (!kKeepsPlaces) write_moments(p_, v);
    sync();
    pairs ? pool<2>(v.tile) : pool<1>(v.tile);
  }

 private:
  // 1 where the chain rises with v, -1 where it falls. For places, 0 where it does neither: the first one
  // wins.
  __device__ float direction(int c) const {
    Channel<float> channel = make_channel<float>(p_.arguments, c);
    set_norm(channel, p_.arguments, c, GroupStatistics{0.0, 1.0});
    channel.norm_shift = 0;  // beside a large one nothing of the slope would be left
    const auto value = [&](float x) {
      return Chain::Post::value(Chain::Norm::value(x, channel), x, channel);
    };
    if (kKeepsPlaces && value(1.0f) == value(0.0f)) return 0;
    return value(1.0f) < value(0.0f) ? -1.0f : 1.0f;
  }

  // Values of a row of the staging memory: kUnit columns are one.
  template <int kUnit>
  static constexpr int kPitch = kStagingPitch / kUnit;

  // v where the larger one wins in each channel: times sign_. For places, as it is.
  __device__ float ordered(const Fragment& v, float x, int k) const {
    const float sign = kKeepsPlaces ? 1.0f : sign_[k];
    return fmaf(x, v.scaling().factor[k] * sign, v.scaling().bias[k] * sign);
  }

  __device__ void stage_values(const Fragment& v) const {
    v.stage(staging(), [&](float x, int k) { return ordered(v, x, k); });
  }

  // Of each pair the larger one.
  __device__ void stage_pairs(const Fragment& v) const {
    v.stage_pairs(staging(),
                  [&](float x, float y, int k) { return maximum(ordered(v, x, k), ordered(v, y, k)); });
  }

  __device__ void write_signs(const Fragment& v) const {
    if (v.rows.stacked(p_.tiling) > 0 || !Fragment::is_writer() || !Fragment::has_first_columns()) return;
#pragma unroll
    for (int k = 0; k < kThreadChannels; ++k) signs()[Fragment::row(k)] = sign_[k];
  }

  // The windows of a sub-tile; those that reach into further ones are carried on. A thread takes a window of
  // all its warp's channels.
  template <int kUnit>
  __device__ void pool(const Tile& tile) {
    const ConvTiling& t = p_.tiling;
    constexpr int kRowPitch = kPitch<kUnit>;
    const int window_rows = t.by_pool[0].value;
    const int width = t.by_pool[1].value / kUnit;
    const int pooled_rows = int(p_.output.size[2]);
    const int pooled_cols = int(p_.output.size[3]);
    const int first_row = t.by_pool[0].divide(tile.row);
    const int windows_down = min(pooled_rows - first_row, t.by_pool[0].divide(tile.rows + window_rows - 1));
    const int first_col = t.by_pool[1].divide(tile.col);
    const int windows_across = min(pooled_cols - first_col, t.by_pool[1].divide(tile.cols));
    const int64_t plane = int64_t(pooled_rows) * pooled_cols;
    const int64_t of_tile = (tile.sample * t.out_channels + tile.row_block * kRows + warp()) * plane +
                            first_row * pooled_cols + first_col;
    for (int window = 0; window < windows_down; ++window) {
      const int row = window * window_rows;
      const int rows = min(window_rows, tile.rows - row);
      for (int i = lane_of_thread(); i < windows_across; i += kWarpThreads) {
        Windows windows(*this);
#pragma unroll 1
        for (int r = row; r < row + rows; ++r) {
          const int slot = r * t.stack_channels / kRows;  // r / stack
          const float* from = staging() + (r & (t.stack - 1)) * t.stack_channels * kRowPitch +
                              warp() * kRowPitch + slot * (t.pitch / kUnit) + i * width;
          windows.start_row((tile.row + r - (first_row + window) * window_rows) * width);
          width % 2 == 0 ? take_larger<2, kRowPitch>(windows, from, width)
                         : take_larger<1, kRowPitch>(windows, from, width);
        }
        // Windows go on in further sub-tiles where a tile has one window down.
        put(tile, windows, of_tile + window * pooled_cols + i, plane, carry() + warp() * windows_across + i,
            windows_across);
      }
    }
  }

  // A thread's: the value so far of each of its channels, whose larger one wins times sign.
  struct LargestWindows {
    float most[kWarpChannels];

    __device__ explicit LargestWindows(const PoolPass&) {
#pragma unroll
      for (float& x : most) x = -INFINITY;
    }
    __device__ void start_row(int) {}
    __device__ void take(int k, float x, int) { most[k] = maximum(most[k], x); }
  };

  // The same and its place, counted row by row; -1 at first.
  struct PlacedWindows {
    float most[kWarpChannels];
    int place[kWarpChannels];
    float sign[kWarpChannels];
    int row_place;  // of a row's first value

    __device__ explicit PlacedWindows(const PoolPass& pass) {
#pragma unroll
      for (int k = 0; k < kWarpChannels; ++k) {
        most[k] = 0;
        place[k] = -1;
        sign[k] = 0;
      }
      pass.for_each_channel([&](int k, int c) { sign[k] = pass.signs()[c]; });
    }
    __device__ void start_row(int place) { row_place = place; }
    __device__ void take(int k, float x, int col) { take_placed(k, x, row_place + col); }
    __device__ void take_placed(int k, float x, int at) {
      if (place[k] >= 0 && !(sign[k] * x > sign[k] * most[k]) && x == x) return;
      most[k] = x;
      place[k] = at;
    }
  };

  using Windows = std::conditional_t<kKeepsPlaces, PlacedWindows, LargestWindows>;

  // Channels that a warp pools: every kWarps-th.
  template <class Visit>
  __device__ void for_each_channel(const Visit& visit) const {
#pragma unroll
    for (int k = 0; k < kWarpChannels; ++k)
      if (warp() + k * kWarps < p_.tiling.stack_channels) visit(k, warp() + k * kWarps);
  }

  // A row of a window, so many values at a time.
  template <int kVector, int kRowPitch>
  __device__ void take_larger(Windows& windows, const float* from, int width) const {
#pragma unroll 1
    for (int w = 0; w < width; w += kVector, from += kVector) {
      for_each_channel([&](int k, int) {
        const Pack<float, kVector> values = load_pack<kVector>(from + k * kWarps * kRowPitch);
#pragma unroll
        for (int i = 0; i < kVector; ++i) windows.take(k, values.element[i], w + i);
      });
    }
  }

  __device__ void put(const Tile& tile, Windows& windows, int64_t to, int64_t plane, float* carried,
                      int carried_pitch) const {
    const bool starts = tile.sub_tile == 0;
    const bool ends = tile.sub_tile + 1 == p_.tiling.sub_tiles;
    int* const carried_places =
        reinterpret_cast<int*>(carry() + p_.tiling.stack_channels * carried_pitch) + (carried - carry());
    if (!starts) {
      for_each_channel([&](int k, int) {
        const int at = k * kWarps * carried_pitch;
        if constexpr (kKeepsPlaces) {
          const float later = windows.most[k];
          const int place = windows.place[k];
          windows.most[k] = carried[at];
          windows.place[k] = carried_places[at];
          windows.take_placed(k, later, place);
        } else {
          windows.most[k] = maximum(windows.most[k], carried[at]);
        }
      });
    }
    if (!ends) {
      for_each_channel([&](int k, int) {
        const int at = k * kWarps * carried_pitch;
        carried[at] = windows.most[k];
        if constexpr (kKeepsPlaces) carried_places[at] = windows.place[k];
      });
      return;
    }
    const int channels = p_.tiling.out_channels - tile.row_block * kRows;
    for_each_channel([&](int k, int c) {
      if (c >= channels) return;
      const int64_t at = to + k * kWarps * plane;
      if constexpr (kKeepsPlaces) {
        p_.pooled[at] = windows.most[k];
        p_.pooled_places[at] = windows.place[k];
      } else {
        p_.pooled[at] = signs()[c] * windows.most[k];
      }
    });
  }

  // Carry memory: a sign for each channel, then the windows' values, and their places.
  __device__ float* signs() const { return reinterpret_cast<float*>(carry_); }
  __device__ float* carry() const { return signs() + kRows; }

  ThreadChannels<kReadChannel<typename Chain::Pre>> channels_;
  float sign_[kThreadChannels];
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

// The pass of chains that reduce the channels of a pixel.
#pragma once

#include "cuda/device/packs.cuh"
#include "cuda/device/reduce.cuh"
#include "pass.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// Reduces the channels of a pixel.
template <class Chain, class Mode>
class LogSumExpPass : public PassBase {
  static_assert(kIsLogSumExp<typename Chain::Reduce>);

 public:
  static constexpr bool kAllRowBlocks = true;
  using PassBase::PassBase;

  __device__ void set_rows(const ThreadRows& rows) { channels_.load(p_, rows); }

  __device__ void prepare(const Tile& tile, const ThreadRows& rows) {
    if (Chain::kNeedsStatistics) channels_.load_norms(p_, tile, rows);
  }

  __device__ void finish(Fragment v) {
    v.unscale();
    v.stage(staging(), [this](float x, int k) { return Chain::value(x, channels_.channel[k]); });
    sync();
    reduce(v.tile);
  }

 private:
  // A thread has a column, whose sum it keeps from one block of rows to the next.
  __device__ void reduce(const Tile& tile) {
    const ConvTiling& t = p_.tiling;
    const int channels = min(t.stack_channels, t.out_channels - tile.row_block * kRows);
    const int column = thread();
    if (column >= kTileColumns) return;
    for (int f = 0; f < t.stack; ++f) {
      if (tile.row_block == 0) sum_ = {};
      const float* from = staged_column(column, f);
      LogSumExp<float> of_block[1];
      add_channels<16, 1, 1>(of_block, 0, 1, channels,
                             [&](int c, float* x) { *x = from[c * kStagingPitch]; });
      sum_.add(of_block[0]);
      if (tile.row_block + 1 == t.row_blocks) write(tile, column, f, sum_.value());
    }
  }

  __device__ void write(const Tile& tile, int column, int stacked, float x) {
    const Place place = place_of(p_.tiling, column, stacked);
    if (place.row >= tile.rows || place.col >= tile.cols) return;
    const int64_t* stride = p_.output.stride;
    const int64_t at =
        tile.sample * stride[0] + (tile.row + place.row) * stride[2] + (tile.col + place.col) * stride[3];
    const Pack<float, 1> y{Chain::Final::value(x, x, Channel<float>{})};
    store_output<NarrowOutput<Mode>>(p_.output, at, y);
  }

  ThreadChannels<kReadChannel<typename Chain::Pre, typename Chain::Post>> channels_;
  LogSumExp<float> sum_;
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

// How a chain ends on a block's piece: it stores its values, or reduces them.
#pragma once

#include "cuda/device/reduce.cuh"
#include "tile.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

template <class Chain, class Tile, class T, class Element, int kCount>
__device__ Pack<T, kCount> finished(const Pack<Element, kCount>& v,
                                    const Channel<T> (&channels)[Tile::kChannels]) {
  Pack<T, kCount> y;
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    const Channel<T>& channel = channels[Tile::channel_of(k)];
    const T value = Chain::value(widen<T>(v.element[k]), channel);
    y.element[k] = Chain::Final::value(value, value, channel);
  }
  return y;
}

// From the tile or, kFromMemory, from the tensor.
template <class Chain, bool kFromMemory, class Tile>
__device__ void store_piece(const Tile& tile) {
  using Element = typename Tile::Element;
  using T = typename Tile::T;
  constexpr int kCount = Tile::kCount;
  // Loads on their way at a time: more from memory, as far as registers go.
  constexpr int kBatch = Chain::kNeedsStatistics || kCount > 4 ? 2 : 4;
  const Element* const input = static_cast<const Element*>(tile.work.input.data);
  // Steps in memory are not found here: wide loads know them when compiled, and need the registers.
  const int pixel_step = tile.pixel_step();
  const int step = tile.step();
  tile.for_each_channel([&](int c) {
    Channel<T> channels[Tile::kChannels];
#pragma unroll
    for (int k = 0; k < Tile::kChannels; ++k) channels[k] = tile.block.channel_at(c + k);
    const Element* kept = tile.values() + tile.offset(c, tile.first_pixel);
    int64_t at = tile.memory_offset(c, tile.first_pixel);
    for (int p = tile.first_pixel; p < tile.piece.pixels; p += kBatch * pixel_step) {
      Pack<Element, kCount> v[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (p + i * pixel_step < tile.piece.pixels)
          v[i] = load_pack<kCount>(kFromMemory ? input + at + i * tile.memory_step() : kept + i * step);
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        if (p + i * pixel_step < tile.piece.pixels)
          store_output<Element>(tile.work.output, at + i * tile.memory_step(),
                                finished<Chain, Tile>(v[i], channels));
      }
      kept += kBatch * step;
      at += kBatch * tile.memory_step();
    }
  });
}

// The largest values of a piece's windows of kRows x kCols or, 0, of any size. Neighbouring threads have
// windows that are neighbours in memory: so many lanes the columns of a row of windows or, where channels are
// last, the channels of one.
template <class Chain, int kRows, int kCols, class Tile>
__device__ void pool_windows(const Tile& tile) {
  using T = typename Tile::T;
  using Element = typename Tile::Element;
  const GivenPlan& plan = tile.plan;
  const int window_rows = kRows > 0 ? kRows : int(tile.work.arguments.pool[0]);
  const int window_cols = kCols > 0 ? kCols : int(tile.work.arguments.pool[1]);
  const int rows = plan.by_pooled_rows.value;  // the last piece of a sample may have fewer
  const int cols = int(tile.work.shape.window_pixels) / window_rows;
  const int pooled_cols = int(tile.work.output.size[3]);
  const int col_step = tile.offset(0, 1);
  const int64_t* stride = tile.work.output.stride;
  const int64_t first_row = int64_t(tile.piece.slice) * rows;
  const int64_t first_output =
      tile.piece.sample * stride[0] + tile.piece.channel * stride[1] + first_row * stride[2];
  const auto pool_window = [&](int c, int row, int col, const Channel<T>& channel) {
    const Element* const at = tile.values() + tile.offset(c, row * window_rows * cols + col * window_cols);
    const T most = window_maximum<T>(window_rows, window_cols, [&](int r, int q) {
      return Chain::value(widen<T>(at[(r * cols + q) * col_step]), channel);
    });
    store_output<Element>(tile.work.output, first_output + c * stride[1] + row * stride[2] + col * stride[3],
                          Pack<T, 1>{Chain::Final::value(most, most, channel)});
  };
  const int lanes = lanes_of(tile.channels_last() ? tile.piece.channels : pooled_cols);
  const int lane = threadIdx.x & (lanes - 1);
  const int line_step = blockDim.x >> log2_of(lanes);
  const int lines = rows * (tile.channels_last() ? pooled_cols : tile.piece.channels);
  const int rows_here = int(min(tile.work.output.size[2] - first_row, int64_t(rows)));
  for (int line = threadIdx.x >> log2_of(lanes); line < lines; line += line_step) {
    const int outer = plan.by_pooled_rows.divide(line);  // a column of windows, or a channel
    const int row = line - outer * rows;
    if (row >= rows_here) continue;
    if (tile.channels_last()) {
      for (int c = lane; c < tile.piece.channels; c += lanes)
        pool_window(c, row, outer, tile.block.channel_at(c));
    } else {
      const Channel<T> channel = tile.block.channel_at(outer);
      for (int col = lane; col < pooled_cols; col += lanes) pool_window(outer, row, col, channel);
    }
  }
}

template <class Chain, class Tile>
__device__ void pool_piece(const Tile& tile) {
  static_assert(kIsMaxPool<typename Chain::Reduce>);
  const int64_t* window = tile.work.arguments.pool;
  if (window[0] == 2 && window[1] == 2) return pool_windows<Chain, 2, 2>(tile);
  pool_windows<Chain, 0, 0>(tile);
}

template <class Chain, class Tile>
__device__ void reduce_piece(const Tile& tile) {
  using T = typename Tile::T;
  const ReducingThread thread(tile.channels_last(), tile.plan.reducing_lanes);
  const int loads = (tile.piece.pixels + Tile::kPixels - 1) / Tile::kPixels;
  for (int first = 0; first < loads; first += thread.pixels) {
    const int p = (first + thread.pixel) * Tile::kPixels;
    const bool exists = p < tile.piece.pixels;
    T y[Tile::kPixels];
    thread.logsumexp<Chain, Tile::kChannels>(y, exists ? tile.piece.channels : 0, [&](int c, T* x) {
      const auto v = load_pack<Tile::kCount>(tile.values() + tile.offset(c, p));
#pragma unroll
      for (int k = 0; k < Tile::kCount; ++k)
        x[k] = Chain::value(widen<T>(v.element[k]), tile.block.channel_at(c + Tile::channel_of(k)));
    });
    if (exists) thread.store(tile.work.output, tile.piece.sample, tile.piece.pixel + p, y);
  }
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

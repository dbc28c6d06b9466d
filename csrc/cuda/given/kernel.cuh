// One piece of a tensor, one block: it keeps its values in shared memory, takes their moments, and ends the
// chain, or does one of both.
#pragma once

#include "cuda/device/reduce.cuh"
#include "moments.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

template <class Chain, class In, int kCount, bool kOfChannels>
class PieceOfChain {
 public:
  using Tile = GivenTile<Chain, In, kCount, kOfChannels>;
  using Moments = GivenMoments<Chain, In, kCount, kOfChannels>;
  using T = typename Tile::T;

  __device__ explicit PieceOfChain(const GivenWork<T>& work) : tile_(work) {}

  __device__ void run() const {
    if constexpr (Chain::kNeedsStatistics) {
      if (tile_.work.step == GivenStep::kWhole) return run_whole();
      if (tile_.work.step == GivenStep::kMoments) return write_moments();
    }
    if constexpr (Chain::Reduce::kStores) finish();
  }

 private:
  static constexpr int kChannels = Tile::kChannels;
  static constexpr int kPixels = Tile::kPixels;

  // ---- the steps ----

  __device__ void run_whole() const {
    const Moments moments(tile_);
    moments.arrive_at_cluster();
    tile_.load();
    moments.take();
    moments.wait_for_cluster();  // every block of it has started: its memory may be written
    moments.share();
    moments.sync_cluster();
    moments.set_norms();
    __syncthreads();
    if constexpr (Chain::Reduce::kStores) {
      store<false>();
    } else if constexpr (Chain::Reduce::kPools) {
      if (tile_.work.arguments.pool[0] == 2 && tile_.work.arguments.pool[1] == 2) return pool<2, 2>();
      pool<0, 0>();  // any size
    } else {
      reduce_channels();
    }
  }

  __device__ void write_moments() const {
    let_next_kernel_start();
    const Moments moments(tile_);
    tile_.load();
    moments.take();
    const GivenShape& shape = tile_.work.shape;
    const int64_t parts_per_group = tile_.plan.units_per_group * tile_.plan.slices;
    const int64_t first_group = tile_.piece.channel / (shape.channels / shape.groups);
    const int64_t part =
        tile_.piece.unit % tile_.plan.units_per_group * tile_.plan.slices + tile_.piece.slice;
    moments.sum_groups([&](int g, int lane, int, const Deviations<double>& d) {
      if (lane > 0) return;
      const double offset = d.sum / d.count;
      const double m2 = d.squares - d.sum * offset;
      tile_.work.parts[(tile_.piece.sample * shape.groups + first_group + g) * parts_per_group + part] = {
          d.count, d.shift + offset, m2 < 0 ? 0 : m2};  // keeps NaN
    });
  }

  // Straight from memory to memory.
  __device__ void finish() const {
    if constexpr (Chain::kReadsChannel || Chain::kNeedsStatistics) {
      tile_.load_parameters(false);
      if constexpr (Chain::kNeedsStatistics) tile_.load_norms();
      __syncthreads();
    }
    store<true>();
  }

  // ---- the end of the chain ----

  // From the tile or, kFromMemory, from the tensor.
  template <bool kFromMemory>
  __device__ void store() const {
    // Loads on their way at a time: more from memory, as far as registers go.
    constexpr int kBatch = Chain::kNeedsStatistics || kCount > 4 ? 2 : 4;
    const In* const input = static_cast<const In*>(tile_.work.input);
    const OutputMemory<In> output(tile_.work.output);
    tile_.for_each_channel([&](int c) {
      Channel<T> channels[kChannels];
#pragma unroll
      for (int k = 0; k < kChannels; ++k) channels[k] = tile_.channel_at(c + k);
      const In* kept = tile_.values() + tile_.offset(c, tile_.share.pixel);
      int64_t at = tile_.memory_offset(c, tile_.share.pixel);
      for (int first = tile_.share.pixel; first < tile_.piece.pixels; first += kBatch * tile_.pixel_step()) {
        Pack<In, kCount> v[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          if (first + i * tile_.pixel_step() >= tile_.piece.pixels) continue;
          v[i] =
              load_pack<kCount>(kFromMemory ? input + at + i * tile_.memory_step() : kept + i * tile_.step());
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          if (first + i * tile_.pixel_step() < tile_.piece.pixels)
            output.store(at + i * tile_.memory_step(), finished(v[i], channels));
        }
        kept += kBatch * tile_.step();
        at += kBatch * tile_.memory_step();
      }
    });
  }

  __device__ static Pack<T, kCount> finished(const Pack<In, kCount>& v,
                                             const Channel<T> (&channels)[kChannels]) {
    Pack<T, kCount> y;
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const Channel<T>& channel = channels[Tile::channel_of(k)];
      const T value = Chain::value(widen<T>(v.element[k]), channel);
      y.element[k] = Chain::Final::value(value, value, channel);
    }
    return y;
  }

  // Windows of kRows x kCols or, 0, of any size. Neighbouring threads have windows that are neighbours in
  // memory: so many lanes the columns of a row of windows or, where channels are last, the channels of one.
  template <int kRows, int kCols>
  __device__ void pool() const {
    const int window_rows = kRows > 0 ? kRows : int(tile_.work.arguments.pool[0]);
    const int window_cols = kCols > 0 ? kCols : int(tile_.work.arguments.pool[1]);
    const int rows = tile_.plan.by_pooled_rows.value;  // the last piece of a sample may have fewer
    const int cols = int(tile_.work.shape.window_pixels) / window_rows;
    const int pooled_cols = int(tile_.work.output.size[3]);
    const int row_step = tile_.offset(0, cols);
    const int col_step = tile_.offset(0, 1);
    const OutputMemory<In> output(tile_.work.output);
    const int64_t* stride = tile_.work.output.stride;
    const int64_t first_row = tile_.piece.slice * rows;
    const int64_t first_output =
        tile_.piece.sample * stride[0] + tile_.piece.channel * stride[1] + first_row * stride[2];
    const auto pool_window = [&](int c, int row, int col, const Channel<T>& channel) {
      const In* const first = tile_.values() + tile_.offset(c, row * window_rows * cols + col * window_cols);
      const T most = window_maximum<T>(window_rows, window_cols, [&](int r, int q) {
        return Chain::value(widen<T>(first[r * row_step + q * col_step]), channel);
      });
      output.store(first_output + c * stride[1] + row * stride[2] + col * stride[3],
                   Pack<T, 1>{Chain::Final::value(most, most, channel)});
    };
    const int lanes = lanes_of(tile_.channels_last() ? tile_.piece.channels : pooled_cols);
    const int lane = threadIdx.x & (lanes - 1);
    const int line_step = blockDim.x >> log2_of(lanes);
    const int lines = rows * (tile_.channels_last() ? pooled_cols : tile_.piece.channels);
    const int rows_here = int(min(tile_.work.output.size[2] - first_row, int64_t(rows)));
    for (int line = threadIdx.x >> log2_of(lanes); line < lines; line += line_step) {
      const int outer = tile_.plan.by_pooled_rows.divide(line);  // a column of windows, or a channel
      const int row = line - outer * rows;
      if (row >= rows_here) continue;
      if (tile_.channels_last()) {
        for (int c = lane; c < tile_.piece.channels; c += lanes)
          pool_window(c, row, outer, tile_.channel_at(c));
      } else {
        const Channel<T> channel = tile_.channel_at(outer);
        for (int col = lane; col < pooled_cols; col += lanes) pool_window(outer, row, col, channel);
      }
    }
  }

  __device__ void reduce_channels() const {
    const ReducingThread thread(tile_.channels_last(), tile_.plan.reducing_lanes);
    const OutputPixels<In> output(tile_.work.output, tile_.piece.sample);
    const int loads = (tile_.piece.pixels + kPixels - 1) / kPixels;
    for (int first = 0; first < loads; first += thread.pixels) {
      const int p = (first + thread.pixel) * kPixels;
      const bool exists = p < tile_.piece.pixels;
      T y[kPixels];
      thread.logsumexp<Chain, kChannels>(y, exists ? tile_.piece.channels : 0, [&](int c, T* x) {
        const auto v = load_pack<kCount>(tile_.values() + tile_.offset(c, p));
#pragma unroll
        for (int k = 0; k < kCount; ++k)
          x[k] = Chain::value(widen<T>(v.element[k]), tile_.channel_at(c + Tile::channel_of(k)));
      });
      if (exists) output.store(thread, tile_.piece.pixel + p, y);
    }
  }

  const Tile tile_;
};

// Of a multiprocessor, by registers: while one loads, another computes. Doubles take too many.
template <class T>
constexpr int kLeastBlocks = sizeof(T) == sizeof(double) ? 1 : 2;

template <class Chain, class In>
__global__ void __launch_bounds__(cuda::kMostThreads, kLeastBlocks<Compute<In>>)
    given_chain(const __grid_constant__ GivenWork<Compute<In>> work) {
  if (block_index() >= work.pieces) return;
  visit_width<In>(work, [&](auto count, auto of_channels) {
    PieceOfChain<Chain, In, decltype(count)::value, decltype(of_channels)::value>(work).run();
  });
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

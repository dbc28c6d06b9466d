// What becomes of a conv's tiles: the ways to go through a problem that chains are put together from. A pass
// is an object of one thread; it gets the tile in accumulators, as conv_kernel.cuh says.
#pragma once

#include "../core/chain.h"
#include "conv_kernel.cuh"
#include "tensor_reduce.cuh"
#include "vector_access.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

template <class... Stages>
constexpr bool kReadChannel = (Stages::kReadsChannel || ...);

// The parameters of a thread's two channels; kReads: whether any stage reads them.
template <bool kReads>
struct ThreadChannels {
  Channel<float> channel[2];

  // norms: of the chain's norm, or null where it is not known yet.
  __device__ void load(const ConvProblem& p, const Tile& tile, const ThreadRows& rows,
                       const Norm<float>* norms) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      if (rows.channel(k) >= p.tiling.out_channels) continue;
      if (kReads) channel[k] = make_channel<float>(p.arguments, rows.channel(k));
      if (norms != nullptr)
        set_norm(channel[k], norms[tile.sample * p.tiling.out_channels + rows.channel(k)]);
    }
  }
};

// What passes share: the memory of their group of threads, and its barrier.
class PassBase {
 public:
  __device__ PassBase(const ConvProblem& problem, uint8_t* staging, uint8_t* carry, int barrier)
      : p_(problem), staging_(staging), carry_(carry), barrier_(barrier) {}

  // Called before the first tile with these rows.
  __device__ void set_rows(const ThreadRows&) {}
  // Until nobody reads the staging memory any more.
  __device__ void before_staging() {
    wait_for_bulk_copies();
    sync();
  }
  __device__ void end() {}

 protected:
  __device__ void sync() const { sync_threads(barrier_, kGroupThreads); }
  // Until this thread's have read what they copy.
  __device__ static void wait_for_bulk_copies() {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
#endif
  }
  __device__ static int thread() { return threadIdx.x % kGroupThreads; }
  __device__ static int lane() { return threadIdx.x % kWarpThreads; }
  __device__ static int warp() { return thread() / kWarpThreads; }
  __device__ float* staging() const { return reinterpret_cast<float*>(staging_); }
  // The row of staging memory for the k-th row of accumulators.
  __device__ static int staging_row(int k) { return row_of_thread() + 8 * k; }

  const ConvProblem& p_;
  uint8_t* const staging_;
  uint8_t* const carry_;
  const int barrier_;
};

// Over four neighbouring lanes; each gets it.
template <class T>
__device__ T sum_of_four(T x) {
  x += __shfl_xor_sync(~0u, x, 1);
  return x + __shfl_xor_sync(~0u, x, 2);
}

// Calls visit(k, column, x) for the pixels of a thread's two rows of accumulators: k the row, column 0 or 1
// in turns.
template <int kColumns, class Mask, class Visit>
__device__ void for_each_pixel(Mask pixels, const float (&d)[kColumns / 2], const Visit& visit) {
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      if (pixels.first(j)) visit(k, 0, d[4 * j + 2 * k]);
      if (pixels.second(j)) visit(k, 1, d[4 * j + 2 * k + 1]);
    }
  }
}

// The moments of a thread's rows of accumulators, and the three other threads' that share them. By two passes
// over the registers, so that a mean much larger than the deviation costs no digits. Two sums side by side
// for each row, to wait less.
template <int kColumns>
__device__ void write_moments(const ConvProblem& p, const Tile& tile, const ThreadRows& rows,
                              const float (&d)[kColumns / 2]) {
  const ConvTiling& t = p.tiling;
  const float count = float(sum_of_four(rows.pixels.count()));
  const float share = count == 0 ? 0.0f : reciprocal(count);
  float sum[2][2]{};
  float mean[2];
  for_each_pixel<kColumns>(rows.pixels, d, [&](int k, int i, float x) { sum[k][i] += x; });
#pragma unroll
  for (int k = 0; k < 2; ++k) mean[k] = sum_of_four(sum[k][0] + sum[k][1]) * share;
  // A sum's rounding is next to nothing beside the mean, but not beside a deviation that is.
  float rest[2][2]{};
  float squares[2][2]{};
  for_each_pixel<kColumns>(rows.pixels.rotated(), d, [&](int k, int i, float x) {
    const float deviation = x - mean[k];
    rest[k][i] += deviation;
    squares[k][i] = fmaf(deviation, deviation, squares[k][i]);
  });
  float m2[2];
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    m2[k] = sum_of_four(squares[k][0] + squares[k][1]);
    mean[k] = fmaf(sum_of_four(rest[k][0] + rest[k][1]), share, mean[k]);
  }
  const int parts = parts_per_channel(t);
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    if (threadIdx.x % 4 == 0 && rows.channel(k) < t.out_channels) {
      const int64_t channel = tile.sample * t.out_channels + rows.channel(k);
      p.parts[channel * parts + (tile.part * t.stack + rows.stacked(t)) * 2 + half_of_thread()] = {
          count, mean[k], m2[k]};
    }
  }
}

// Statistics of Pre(v), and nothing else.
template <class Pre>
class MomentsPass : public PassBase {
 public:
  static constexpr bool kAllRowBlocks = false;
  using PassBase::PassBase;

  __device__ void prepare(const Tile& tile, const ThreadRows& rows) {
    channels_.load(p_, tile, rows, nullptr);
  }
  __device__ void before_staging() {}  // each thread has its own part of it

  template <int kColumns>
  __device__ void finish(const Tile& tile, const ThreadRows& rows, float (&d)[kColumns / 2]) {
    if constexpr (Pre::kReadsChannel) {
#pragma unroll
      for (int i = 0; i < kColumns / 2; ++i) d[i] = Pre::value(d[i], d[i], channels_.channel[i / 2 % 2]);
    }
    write_moments<kColumns>(p_, tile, rows, d);
  }

 private:
  ThreadChannels<kReadChannel<Pre>> channels_;
};

// Stores every value of the chain.
template <class Chain, class Mode>
class StorePass : public PassBase {
 public:
  static constexpr bool kAllRowBlocks = false;
  using PassBase::PassBase;

  __device__ void prepare(const Tile& tile, const ThreadRows& rows) {
    channels_.load(p_, tile, rows, Chain::kNeedsStatistics ? p_.norms : nullptr);
  }

  template <int kColumns>
  __device__ void finish(const Tile& tile, const ThreadRows& rows, float (&d)[kColumns / 2]) {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
      const Channel<float>& channel = channels_.channel[i / 2 % 2];
      const float y = Chain::value(d[i], channel);
      d[i] = Chain::Final::value(y, y, channel);
    }
    if (p_.output.dtype == DType::kFloat32) {
      store<kColumns, float>(tile, rows, d);
    } else {
      store<kColumns, typename Mode::In>(tile, rows, d);
    }
  }

  __device__ void end() { wait_for_bulk_copies(); }

 private:
  // Where the rows of a channel follow each other in the output, a tile's are one run of each channel: it is
  // put together in shared memory and written as whole lines. Else each thread writes what it has.
  template <int kColumns, class Out>
  __device__ void store(const Tile& tile, const ThreadRows& rows, const float (&d)[kColumns / 2]) {
    const Tensor& output = p_.output;
    if (output.stride[3] != 1 || output.stride[2] != output.size[3]) {
      // Within a sample offsets fit in ints.
      return scatter<kColumns, Out>(tile, rows, d, static_cast<Out*>(output.data) + offset_of(tile, 0),
                                    int(output.stride[1]), int(output.stride[2]), int(output.stride[3]));
    }
    const ConvTiling& t = p_.tiling;
    Out* run = reinterpret_cast<Out*>(staging_);
    const int pitch = run_pitch<Out>();
    scatter<kColumns, Out>(tile, rows, d, run, pitch, tile.cols, 1);
    fence_async_proxy();
    sync();
    const int channels = min(t.stack_channels, t.out_channels - tile.row_block * kRows);
    const bool whole_rows = tile.cols == t.out_size[1];
    const int runs = whole_rows ? 1 : tile.rows;
    const int length = whole_rows ? tile.rows * tile.cols : tile.cols;
    for (int r = 0; r < runs; ++r) {
      Out* to = static_cast<Out*>(output.data) + offset_of(tile, r);
      write_runs(run + r * tile.cols, pitch, to, output.stride[1], channels, length);
    }
  }

  __device__ int64_t offset_of(const Tile& tile, int row) const {
    const int64_t* stride = p_.output.stride;
    return tile.sample * stride[0] + int64_t(tile.row_block) * kRows * stride[1] +
           (tile.row + row) * stride[2] + tile.col * stride[3];
  }

  // Elements from one channel's run to the next: whole vectors, and so many that neighbours lie in other
  // banks.
  template <class Out>
  __device__ int run_pitch() const {
    constexpr int kBanks = 128 / int(sizeof(Out));
    constexpr int kShift = 16 / int(sizeof(Out)) * 2;
    const int length = p_.tiling.tile_rows * p_.tiling.tile_cols;
    return (length - kShift + kBanks - 1) / kBanks * kBanks + kShift;
  }

  // Each thread's values to where they belong.
  template <int kColumns, class Out>
  __device__ void scatter(const Tile& tile, const ThreadRows& rows, const float (&d)[kColumns / 2], Out* to,
                          int channel_stride, int row_stride, int col_stride) {
    const ConvTiling& t = p_.tiling;
    Out* of_row[2];
#pragma unroll
    for (int k = 0; k < 2; ++k)
      of_row[k] = to + (rows.channel(k) - tile.row_block * kRows) * channel_stride +
                  rows.stacked(t) * row_stride + lane() % 4 * 2 * col_stride;
    const bool pairs = col_stride == 1 && row_stride % 2 == 0 && channel_stride % 2 == 0 &&
                       tile.cols % 2 == 0 && reinterpret_cast<uintptr_t>(to) % (2 * sizeof(Out)) == 0 &&
                       rows.channel(1) < t.out_channels;
    if (pairs &&
        t.pitch % kColumns == 0) {  // a thread's columns lie in one row: the usual case, and the fastest
      const int slot = t.by_pitch.divide(half_of_thread() * kColumns);
      const int start = slot * t.stack * row_stride + half_of_thread() * kColumns - slot * t.pitch;
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
        if (!rows.pixels.first(j)) continue;
#pragma unroll
        for (int k = 0; k < 2; ++k)
          write_pair(of_row[k] + start + 8 * j, d[4 * j + 2 * k], d[4 * j + 2 * k + 1]);
      }
      return;
    }
    for_each_block<kColumns>(t, [&](int j, int row, int col) {
      const int place = row * t.stack * row_stride + col * col_stride;
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        Out* pixel = of_row[k] + place;
        const bool exists = rows.channel(k) < t.out_channels;
        if (exists && rows.pixels.first(j)) pixel[0] = narrow<Out>(d[4 * j + 2 * k]);
        if (exists && rows.pixels.second(j)) pixel[col_stride] = narrow<Out>(d[4 * j + 2 * k + 1]);
      }
    });
  }

  __device__ static void write_pair(float* to, float x, float y) {
    *reinterpret_cast<float2*>(to) = make_float2(x, y);
  }
  __device__ static void write_pair(__half* to, float x, float y) {
    *reinterpret_cast<__half2*>(to) = __floats2half2_rn(x, y);
  }
  __device__ static void write_pair(__nv_bfloat16* to, float x, float y) {
    *reinterpret_cast<__nv_bfloat162*>(to) = __floats2bfloat162_rn(x, y);
  }

  // A run of each channel, from shared memory to the output: by the copy engine, while this group goes on, or
  // by the widest vectors that all runs are made of.
  template <class Out>
  __device__ void write_runs(const Out* from, int pitch, Out* to, int64_t stride, int channels, int length) {
    const uintptr_t bytes = reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to) |
                            uintptr_t(stride * sizeof(Out)) | uintptr_t(length * sizeof(Out));
    if (bytes % 16 == 0) {
#if __CUDA_ARCH__ >= 900
      bulk_copy_runs(from, pitch, to, stride, channels, length * int(sizeof(Out)));
#else
      copy_runs<16 / sizeof(Out)>(from, pitch, to, stride, channels, length);
#endif
    } else if (bytes % 8 == 0) {
      copy_runs<8 / sizeof(Out)>(from, pitch, to, stride, channels, length);
    } else {
      copy_runs<1>(from, pitch, to, stride, channels, length);
    }
  }

  // Lanes of a warp are served one after the other: each warp has a few channels.
  template <class Out>
  __device__ void bulk_copy_runs(const Out* from, int pitch, Out* to, int64_t stride, int channels,
                                 int bytes) {
    constexpr int kWarpChannels = kRows / (kGroupThreads / kWarpThreads);
    const int c = warp() * kWarpChannels + lane();
    if (lane() >= kWarpChannels || c >= channels) return;
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to + c * stride),
                 "r"(shared_address(from + c * pitch)), "r"(bytes)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  }

  // Two warps have every kTeams-th channel: one vector each of most runs.
  template <int kVector, class Out>
  __device__ void copy_runs(const Out* from, int pitch, Out* to, int64_t stride, int channels, int length) {
    constexpr int kTeamThreads = 2 * kWarpThreads;
    constexpr int kTeams = kGroupThreads / kTeamThreads;
    const int team = thread() / kTeamThreads;
    from += team * pitch;
    to += team * stride;
#pragma unroll 1
    for (int i = thread() % kTeamThreads * kVector; i < length; i += kTeamThreads * kVector) {
      const Out* run = from + i;
      Out* out = to + i;
#pragma unroll 4
      for (int c = team; c < channels; c += kTeams, run += kTeams * pitch, out += kTeams * stride)
        store_pack(out, load_pack<kVector>(run));
    }
  }

  ThreadChannels<kReadChannel<typename Chain::Pre, typename Chain::Post, typename Chain::Final>> channels_;
};

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
    const bool pairs = p_.arguments.pool[1] % 2 == 0;
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
  static constexpr int kWarps = kGroupThreads / kWarpThreads;
  static constexpr int kWarpChannels = kRows / kWarps;

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

// Reduces the channels of a pixel.
template <class Chain, class Mode>
class LogSumExpPass : public PassBase {
 public:
  static constexpr bool kAllRowBlocks = true;
  using PassBase::PassBase;

  __device__ void prepare(const Tile& tile, const ThreadRows& rows) {
    channels_.load(p_, tile, rows, Chain::kNeedsStatistics ? p_.norms : nullptr);
  }

  template <int kColumns>
  __device__ void finish(const Tile& tile, const ThreadRows&, float (&d)[kColumns / 2]) {
    constexpr int kPitch = 2 * kColumns + cuda::kStagingPadding;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      float* to = staging() + staging_row(k) * kPitch + half_of_thread() * kColumns + lane() % 4 * 2;
      const Channel<float>& channel = channels_.channel[k];
#pragma unroll
      for (int i = 0; i < kColumns / 2; i += 4) {
        *reinterpret_cast<float2*>(to + 2 * i) = {Chain::value(d[i + 2 * k], channel),
                                                  Chain::value(d[i + 2 * k + 1], channel)};
      }
    }
    sync();
    reduce<kColumns, kPitch>(tile);
  }

 private:
  // A thread has a column, whose sum it keeps from one block of rows to the next.
  template <int kColumns, int kPitch>
  __device__ void reduce(const Tile& tile) {
    const ConvTiling& t = p_.tiling;
    const int channels = min(t.stack_channels, t.out_channels - tile.row_block * kRows);
    const int column = thread();
    if (column >= 2 * kColumns) return;
    for (int f = 0; f < t.stack; ++f) {
      if (tile.row_block == 0) sum_ = {};
      const float* from = staging() + f * t.stack_channels * kPitch + column;
      sum_.add(channel_logsumexp<float>(channels, 0, 1, [&](int c) { return from[c * kPitch]; }));
      if (tile.row_block + 1 == t.row_blocks) write(tile, column, f, sum_.value());
    }
  }

  __device__ void write(const Tile& tile, int column, int stacked, float x) {
    const ConvTiling& t = p_.tiling;
    const int row = column / t.pitch * t.stack + stacked;
    const int col = column % t.pitch;
    if (row >= tile.rows || col >= tile.cols) return;
    const int64_t* stride = p_.output.stride;
    const int64_t at = tile.sample * stride[0] + (tile.row + row) * stride[2] + (tile.col + col) * stride[3];
    const float y = Chain::Final::value(x, x, Channel<float>{});
    if (p_.output.dtype == DType::kFloat32) {
      static_cast<float*>(p_.output.data)[at] = y;
    } else {
      static_cast<typename Mode::In*>(p_.output.data)[at] = narrow<typename Mode::In>(y);
    }
  }

  ThreadChannels<kReadChannel<typename Chain::Pre, typename Chain::Post>> channels_;
  LogSumExp<float> sum_;
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

// What becomes of a conv's tiles: the ways to go through a problem that chains are put together from. A pass
// is an object of one thread; it gets the tile in accumulators, as conv_kernel.cuh says.
#pragma once

#include "../core/chain.h"
#include "conv_kernel.cuh"
#include "vector_access.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// The parameters of a thread's two channels.
struct ThreadChannels {
  Channel<float> channel[2];

  // norms: of the chain's norm, or null where it is not known yet.
  __device__ void load(const ConvProblem& p, const Tile& tile, const ThreadRows& rows,
                       const Norm<float>* norms) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      if (rows.channel[k] >= p.tiling.out_channels) continue;
      channel[k] = make_channel<float>(p.arguments, rows.channel[k]);
      if (norms != nullptr)
        set_norm(channel[k], norms[tile.sample * p.tiling.out_channels + rows.channel[k]]);
    }
  }
};

// Everything up to the reduction.
template <class Chain>
__device__ float value_of(float v, const Channel<float>& channel) {
  const float pre = Chain::Pre::value(v, v, channel);
  return Chain::Post::value(Chain::Norm::value(pre, channel), v, channel);
}

// What passes share: the memory of their group of threads, and its barrier.
class PassBase {
 public:
  __device__ PassBase(const ConvProblem& problem, uint8_t* staging, uint8_t* carry, int barrier)
      : p_(problem), staging_(staging), carry_(carry), barrier_(barrier) {}

  // Until nobody reads the staging memory any more.
  __device__ void before_staging() {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
#endif
    sync();
  }
  __device__ void finish_item(const Item&) {}
  __device__ void end() {}

 protected:
  __device__ void sync() const { sync_threads(barrier_, kGroupThreads); }
  __device__ static int thread() { return threadIdx.x % kGroupThreads; }
  __device__ static int lane() { return threadIdx.x % kWarpThreads; }
  __device__ static int warp() { return thread() / kWarpThreads; }
  __device__ float* staging() const { return reinterpret_cast<float*>(staging_); }
  // The row of staging memory for the k-th row of accumulators.
  __device__ static int staging_row(int k) { return warp() * 16 + lane() / 4 + 8 * k; }

  const ConvProblem& p_;
  uint8_t* const staging_;
  uint8_t* const carry_;
  const int barrier_;
};

// The moments of a thread's two rows of accumulators, the same in the four threads that share them: by two
// passes over the registers, so that a mean much larger than the deviation costs no digits.
template <int kColumns>
__device__ void write_moments(const ConvProblem& p, const Tile& tile, const ThreadRows& rows,
                              const float (&d)[kColumns / 2]) {
  const ConvTiling& t = p.tiling;
  float sum[2]{};
  int count[2]{};
  const auto for_each_pixel = [&](const auto& visit) {
    for_each_pair<kColumns>(t, [&](int i, int row, int col) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const bool is_row = row * t.stack + rows.stacked[k] < tile.rows;
        visit(k, d[i + 2 * k], is_row && col < tile.cols);
        visit(k, d[i + 2 * k + 1], is_row && col + 1 < tile.cols);
      }
    });
  };
  for_each_pixel([&](int k, float x, bool exists) {
    sum[k] += exists ? x : 0.0f;
    count[k] += exists;
  });
  float mean[2];
  float m2[2]{};
#pragma unroll
  for (int k = 0; k < 2; ++k) mean[k] = count[k] == 0 ? 0.0f : sum[k] / float(count[k]);
  for_each_pixel([&](int k, float x, bool exists) {
    const float deviation = exists ? x - mean[k] : 0.0f;
    m2[k] = fmaf(deviation, deviation, m2[k]);
  });
  const int parts = parts_per_channel(t);
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    float n = float(count[k]);
#pragma unroll
    for (int distance = 1; distance < 4;
         distance *= 2) {  // Chan, Golub, LeVeque (1979), with the neighbours'
      const float other_n = __shfl_xor_sync(~0u, n, distance);
      const float delta = __shfl_xor_sync(~0u, mean[k], distance) - mean[k];
      const float other_m2 = __shfl_xor_sync(~0u, m2[k], distance);
      const float all = n + other_n;
      const float share = all == 0 ? 0.0f : other_n / all;
      m2[k] += other_m2 + delta * delta * n * share;
      mean[k] += delta * share;
      n = all;
    }
    if (threadIdx.x % 4 == 0 && rows.channel[k] < t.out_channels) {
      const int64_t channel = tile.sample * t.out_channels + rows.channel[k];
      p.parts[channel * parts + tile.part * t.stack + rows.stacked[k]] = {n, mean[k], m2[k]};
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
  ThreadChannels channels_;
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
      const float y = value_of<Chain>(d[i], channel);
      d[i] = Chain::Final::value(y, y, channel);
    }
    if (p_.output.dtype == DType::kFloat32) {
      store<kColumns, float>(tile, rows, d);
    } else {
      store<kColumns, typename Mode::In>(tile, rows, d);
    }
  }

  __device__ void end() {
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
#endif
  }

 private:
  // Where the rows of a channel follow each other in the output, a tile's are one run of each channel: it is
  // put together in shared memory and written as whole lines. Else each thread writes what it has.
  template <int kColumns, class Out>
  __device__ void store(const Tile& tile, const ThreadRows& rows, const float (&d)[kColumns / 2]) {
    const Tensor& output = p_.output;
    if (output.stride[3] != 1 || output.stride[2] != output.size[3]) {
      return scatter<kColumns, Out>(tile, rows, d, static_cast<Out*>(output.data) + offset_of(tile, 0),
                                    output.stride[1], output.stride[2], output.stride[3]);
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

  template <int kColumns, class Out, class Stride>
  __device__ void scatter(const Tile& tile, const ThreadRows& rows, const float (&d)[kColumns / 2], Out* to,
                          Stride channel_stride, Stride row_stride, Stride col_stride) {
    const ConvTiling& t = p_.tiling;
    const int first_channel = tile.row_block * kRows;
    const bool pairs = col_stride == 1 && row_stride % 2 == 0 && channel_stride % 2 == 0 &&
                       reinterpret_cast<uintptr_t>(to) % (2 * sizeof(Out)) == 0;
    Out* of_row[2];
    int rows_left[2];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      of_row[k] = to + (rows.channel[k] - first_channel) * channel_stride + rows.stacked[k] * row_stride;
      rows_left[k] = rows.channel[k] < t.out_channels ? tile.rows - rows.stacked[k] : 0;
    }
    for_each_pair<kColumns>(t, [&](int i, int row, int col) {
      const bool first = col < tile.cols;
      const bool second = col + 1 < tile.cols;
      const Stride place = row * t.stack * row_stride + col * col_stride;
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        if (row * t.stack >= rows_left[k]) continue;
        Out* pixel = of_row[k] + place;
        if (pairs && second) {
          *reinterpret_cast<Pack<Out, 2>*>(pixel) = {narrow<Out>(d[i + 2 * k]),
                                                     narrow<Out>(d[i + 2 * k + 1])};
        } else {
          if (first) pixel[0] = narrow<Out>(d[i + 2 * k]);
          if (second) pixel[col_stride] = narrow<Out>(d[i + 2 * k + 1]);
        }
      }
    });
  }

  // A run of each channel, from shared memory to the output.
  template <class Out>
  __device__ void write_runs(const Out* from, int pitch, Out* to, int64_t stride, int channels, int length) {
    const int bytes = length * int(sizeof(Out));
    const bool aligned = (reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to) |
                          uintptr_t(stride * sizeof(Out)) | uintptr_t(bytes)) %
                             16 ==
                         0;
#if __CUDA_ARCH__ >= 900
    if (aligned) {  // by the copy engine, while this group goes on
      if (thread() < channels) {
        asm volatile(
            "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to + thread() * stride),
            "r"(shared_address(from + thread() * pitch)), "r"(bytes)
            : "memory");
        asm volatile("cp.async.bulk.commit_group;" ::: "memory");
      }
      return;
    }
#endif
    const int step = aligned ? 16 / int(sizeof(Out)) : 1;
    for (int c = warp(); c < channels; c += kGroupThreads / kWarpThreads) {
      for (int i = lane() * step; i < length; i += kWarpThreads * step) {
        if (aligned) {
          *reinterpret_cast<uint4*>(to + c * stride + i) =
              *reinterpret_cast<const uint4*>(from + c * pitch + i);
        } else {
          to[c * stride + i] = from[c * pitch + i];
        }
      }
    }
  }

  ThreadChannels channels_;
};

// Where everything up to the pool is an increasing or decreasing line in each channel: the pool takes the
// largest, or the smallest, values of Pre(v) before the norm is known, and the statistics on the way.
template <class Chain>
class PoolPass : public PassBase {
 public:
  static constexpr bool kAllRowBlocks = false;
  using PassBase::PassBase;

  __device__ void prepare(const Tile& tile, const ThreadRows& rows) {
    channels_.load(p_, tile, rows, nullptr);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      if (rows.channel[k] < p_.tiling.out_channels) sign_[k] = direction(rows.channel[k]);
    }
  }

  template <int kColumns>
  __device__ void finish(const Tile& tile, const ThreadRows& rows, float (&d)[kColumns / 2]) {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) d[i] = Chain::Pre::value(d[i], d[i], channels_.channel[i / 2 % 2]);
    write_moments<kColumns>(p_, tile, rows, d);
    // Even windows take pairs, which a thread has itself.
    const bool pairs = p_.arguments.pool[1] % 2 == 0;
    const int pitch = (kColumns + 2 * cuda::kStagingPadding) / (pairs ? 2 : 1);
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      float* to = staging() + staging_row(k) * pitch + lane() % 4 * (pairs ? 1 : 2);
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

  // The windows of a sub-tile; those that reach into further ones are carried on.
  __device__ void pool(const Tile& tile, int unit, int pitch) {
    const ConvTiling& t = p_.tiling;
    const int window_rows = int(p_.arguments.pool[0]);
    const int window_cols = int(p_.arguments.pool[1]);
    const int pooled_rows = t.out_size[0] / window_rows;
    const int pooled_cols = t.out_size[1] / window_cols;
    const int first_row = tile.row / window_rows;
    const int windows_down = min(pooled_rows - first_row, (tile.rows + window_rows - 1) / window_rows);
    const int first_col = tile.col / window_cols;
    const int windows_across = min(pooled_cols - first_col, tile.cols / window_cols);
    const int channels = min(t.stack_channels, t.out_channels - tile.row_block * kRows);
    float* carry = reinterpret_cast<float*>(carry_);
    for (int c = warp(); c < channels; c += kGroupThreads / kWarpThreads) {
      const int channel = tile.row_block * kRows + c;
      const float sign = direction(channel);
      float* to = p_.pooled +
                  ((tile.sample * t.out_channels + channel) * pooled_rows + first_row) * pooled_cols +
                  first_col;
      for (int window = 0; window < windows_down; ++window) {
        const int rows = min(window_rows, tile.rows - window * window_rows);
        for (int i = lane(); i < windows_across; i += kWarpThreads) {
          float most = -INFINITY;
          for (int r = 0; r < rows; ++r) {
            const int row = window * window_rows + r;
            const float* from = staging() + (row % t.stack * t.stack_channels + c) * pitch +
                                (row / t.stack * t.pitch + i * window_cols) / unit;
            for (int w = 0; w < window_cols / unit; ++w) most = maximum(most, from[w]);
          }
          if (t.sub_tiles == 1) {
            to[window * pooled_cols + i] = sign * most;
            continue;
          }
          float* carried = carry + c * windows_across + i;  // one window down, then
          if (tile.sub_tile > 0) most = maximum(most, *carried);
          if (tile.sub_tile + 1 < t.sub_tiles) {
            *carried = most;
          } else {
            to[i] = sign * most;
          }
        }
      }
    }
  }

  ThreadChannels channels_;
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
    constexpr int kPitch = kColumns + cuda::kStagingPadding;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      float* to = staging() + staging_row(k) * kPitch + lane() % 4 * 2;
      const Channel<float>& channel = channels_.channel[k];
#pragma unroll
      for (int i = 0; i < kColumns / 2; i += 4) {
        *reinterpret_cast<float2*>(to + 2 * i) = {value_of<Chain>(d[i + 2 * k], channel),
                                                  value_of<Chain>(d[i + 2 * k + 1], channel)};
      }
    }
    sync();
    reduce<kColumns, kPitch>(tile);
  }

 private:
  // Each thread has some columns, whose sums it keeps from one block of rows to the next.
  template <int kColumns, int kPitch>
  __device__ void reduce(const Tile& tile) {
    constexpr int kOwn = kColumns / kGroupThreads;
    const ConvTiling& t = p_.tiling;
    const int channels = min(t.stack_channels, t.out_channels - tile.row_block * kRows);
    const bool last = tile.row_block + 1 == t.row_blocks;
    for (int f = 0; f < t.stack; ++f) {
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const int column = thread() + i * kGroupThreads;
        if (tile.row_block == 0) sums_[i] = {};
        sums_[i].add(staging() + f * t.stack_channels * kPitch + column, kPitch, channels);
        if (last) write(tile, column, f, sums_[i].value());
      }
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

  // The logarithm of a sum of exponentials so far: of exp(x - most), most being the largest. In powers of
  // two, which the hardware takes.
  struct LogSumExp {
    float most = -INFINITY;
    float sum = 0;

    __device__ void add(const float* from, int pitch, int count) {
      constexpr int kChunk = 16;
      for (int first = 0; first < count; first += kChunk) {
        float x[kChunk];
        float highest = most;
#pragma unroll
        for (int c = 0; c < kChunk; ++c) {
          x[c] = first + c < count ? from[(first + c) * pitch] * kLog2E : -INFINITY;
          highest = maximum(highest, x[c]);
        }
        const float shift = isinf(highest) ? 0.0f : highest;
        sum *= exp2_fast(most - shift);
#pragma unroll
        for (int c = 0; c < kChunk; ++c) sum += exp2_fast(x[c] - shift);
        most = highest;
      }
    }

    __device__ float value() const {
      if (isinf(most)) return most;
      return (most + log2_fast(sum)) * kLn2;
    }

    static constexpr float kLog2E = 1.4426950408889634f;
    static constexpr float kLn2 = 0.6931471805599453f;
    __device__ static float exp2_fast(float x) {
      float y;
      asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
      return y;
    }
    __device__ static float log2_fast(float x) {
      float y;
      asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
      return y;
    }
  };

  ThreadChannels channels_;
  LogSumExp sums_[2];
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

// A pass is what becomes of a conv's tiles: an object of one thread, which gets each tile in accumulators, as
// conv_kernel.cuh says. Here are what passes share, and the one that only measures.
#pragma once

#include "../core/chain.h"
#include "conv_rows.cuh"
#include "statistics.cuh"

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
  static constexpr int kWarps = kGroupThreads / kWarpThreads;
  static constexpr int kWarpChannels = kRows / kWarps;  // each warp's share of a block of rows
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

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

// A pass is what becomes of a conv's tiles: an object of one thread, which gets each tile in accumulators, as
// cuda/conv/kernel.cuh says. Here are what passes share, and the one that only measures.
#pragma once

#include "core/chain.h"
#include "cuda/conv/rows.cuh"
#include "cuda/device/barriers.cuh"
#include "cuda/device/statistics.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

template <class... Stages>
constexpr bool kReadChannel = (Stages::kReadsChannel || ...);

// What the output holds, of a kernel for some mode, where that is not float32.
template <class Mode>
using NarrowOutput = std::conditional_t<Mode::kParts == 2, float, typename Mode::Element>;

// The parameters of a thread's two channels; kReads: whether any stage reads them.
template <bool kReads>
struct ThreadChannels {
  Channel<float> channel[2];

  __device__ void load(const ConvProblem& p, const ThreadRows& rows) {
#pragma unroll
    for (int k = 0; k < 2; ++k)
      if (kReads && rows.channel(k) < p.tiling.out_channels)
        channel[k] = make_channel<float>(p.arguments, rows.channel(k));
  }

  __device__ void load_norms(const ConvProblem& p, const Tile& tile, const ThreadRows& rows) {
#pragma unroll
    for (int k = 0; k < 2; ++k)
      if (rows.channel(k) < p.tiling.out_channels)
        set_norm(channel[k], p.norms[tile.sample * p.tiling.out_channels + rows.channel(k)]);
  }
};

// Takes affine stages into a scaling.
template <class Start, bool kReads>
__device__ void compose(Scaling& scaling, const ThreadChannels<kReads>& channels) {
#pragma unroll
  for (int k = 0; k < 2; ++k) Start::compose(scaling.factor[k], scaling.bias[k], channels.channel[k]);
}

// Puts Pre(v) in place of accumulators, as far as it is not affine: that is left to the scaling, for when
// they are fewer.
template <class Pre, bool kReads, int kCount>
__device__ void apply(float (&d)[kCount], const ThreadChannels<kReads>& channels, Scaling& scaling) {
  using Start = AffineStart<Pre>;
  using Rest = typename Start::Rest;
  compose<Start>(scaling, channels);
  if constexpr (!std::is_same_v<Rest, Sequence<>>) {
    unscale(d, scaling);
    scaling = {};
#pragma unroll
    for (int i = 0; i < kCount; ++i) d[i] = Rest::value(d[i], d[i], channels.channel[i / 2 % 2]);
  }
}

// What passes share: the memory of their group of threads, and its barrier.
class PassBase {
 public:
  static constexpr bool kMayFold = true;  // whether sums of chunks may stand in the staging memory

  __device__ PassBase(const ConvProblem& problem, uint8_t* staging, uint8_t* carry, int barrier)
      : p_(problem), staging_(staging), carry_(carry), barrier_(barrier) {}

  // Called before the first tile with these rows.
  __device__ void set_rows(const ThreadRows&) {}
  // Called for each tile, before its products.
  __device__ void prepare(const Tile&, const ThreadRows&) {}
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
  static constexpr int kWarps = kGroupWarps;
  static constexpr int kWarpChannels = kRows / kWarps;  // each warp's share of a block of rows
  __device__ static int thread() { return threadIdx.x % kGroupThreads; }
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

// The moments of a thread's two rows, and the three other threads' that share them, about a guess of the
// mean: so a mean much larger than the deviation costs no digits.
class RowMoments {
 public:
  template <int kCount>
  __device__ RowMoments(PixelMask pixels, float (&d)[kCount]) {
    constexpr int kBlocks = kCount / 4;
    // Waste mostly stands at the end of a row: one mask there is the usual case. Elsewhere it gets the guess.
    const uint32_t inner = (1u << (kBlocks - 1)) - 1;
    const bool usual = (~pixels.bits & (inner | inner << 16)) == 0;
    if (__all_sync(~0u, usual)) {
      guess_first(d);
    } else {
      guess_all(pixels, d);
    }
    count = float(sum_of_four(pixels.count()));
    const float share = count == 0 ? 0.0f : reciprocal(count);
    float sum[2][2]{};  // two side by side for each row, to wait less
    float squares[2][2]{};
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int k = i / 2 % 2;
      float deviation = d[i] - mean[k];
      if (i / 4 == kBlocks - 1 && !(i % 2 == 0 ? pixels.first(i / 4) : pixels.second(i / 4))) deviation = 0;
      sum[k][i % 2] += deviation;
      squares[k][i % 2] = fmaf(deviation, deviation, squares[k][i % 2]);
    }
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const float rest = sum_of_four(sum[k][0] + sum[k][1]);
      const float offset = rest * share;
      m2[k] = maximum(0.0f, fmaf(-rest, offset, sum_of_four(squares[k][0] + squares[k][1])));
      mean[k] += offset;
    }
  }

  float count;
  float mean[2];
  float m2[2];

 private:
  template <int kCount>
  __device__ void guess_first(const float (&d)[kCount]) {
#pragma unroll
    for (int k = 0; k < 2; ++k)
      mean[k] = sum_of_four(d[2 * k] + d[2 * k + 1] + (d[4 + 2 * k] + d[5 + 2 * k])) * (1.0f / 16);
  }

  template <int kCount>
  __device__ void guess_all(PixelMask pixels, float (&d)[kCount]) {
    const int valid = sum_of_four(pixels.count());
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      float sum = 0;
#pragma unroll
      for (int j = 0; j < kCount / 4; ++j) {
        if (pixels.first(j)) sum += d[4 * j + 2 * k];
        if (pixels.second(j)) sum += d[4 * j + 2 * k + 1];
      }
      mean[k] = valid == 0 ? 0.0f : sum_of_four(sum) / float(valid);
#pragma unroll
      for (int j = 0; j < kCount / 4; ++j) {
        if (!pixels.first(j)) d[4 * j + 2 * k] = mean[k];
        if (!pixels.second(j)) d[4 * j + 2 * k + 1] = mean[k];
      }
    }
  }
};

// Writes the moments of a tile of the conv's output, or of what was made of it.
__device__ void write_moments(const ConvProblem& p, const Tile& tile, const ThreadRows& rows,
                              float (&d)[kColumns / 2], const Scaling& scaling) {
  const ConvTiling& t = p.tiling;
  const RowMoments moments(rows.pixels, d);
  if (threadIdx.x % 4 != 0) return;
  const int parts = parts_per_channel(t);
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    if (rows.channel(k) >= t.out_channels) continue;
    const float factor = scaling.factor[k];
    const int64_t channel = tile.sample * t.out_channels + rows.channel(k);
    p.parts[channel * parts + (tile.part * t.stack + rows.stacked(t)) * 2 + half_of_thread()] = {
        moments.count, fmaf(moments.mean[k], factor, scaling.bias[k]), moments.m2[k] * factor * factor};
  }
}

// Statistics of Pre(v), and nothing else.
template <class Pre>
class MomentsPass : public PassBase {
 public:
  static constexpr bool kAllRowBlocks = false;
  using PassBase::PassBase;

  __device__ void set_rows(const ThreadRows& rows) { channels_.load(p_, rows); }
  __device__ void before_staging() {}  // it stages nothing; sums of chunks are each thread's own

  __device__ void finish(const Tile& tile, const ThreadRows& rows, float (&d)[kColumns / 2],
                         Scaling scaling) {
    apply<Pre>(d, channels_, scaling);
    write_moments(p_, tile, rows, d, scaling);
  }

 private:
  ThreadChannels<kReadChannel<Pre>> channels_;
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

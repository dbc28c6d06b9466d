// What becomes of a conv's tiles is a pass's affair. Here are the contract, and what passes share.
//
// A pass is an object of one thread of a group of kGroupThreads, which works at one tile at a time
// (cuda/conv/kernel.cuh). All threads of the group make the same calls, with whole warps together:
//
//   Pass(problem, staging, carry, barrier)  once, when what earlier kernels wrote can be read
//   set_rows(rows)             before the first tile with these channels
//   prepare(tile, rows)        before a tile's products: what is loaded here arrives while they are made
//   before_staging()           once or twice a tile, before anybody writes to the staging memory. When it
//                              returns, no thread of the group nor the copy engine reads what the last tile
//                              left there
//   finish(fragment)           with v
//   end()                      once, after the last tile, of which there may be none: all is written then
//
// On entry of finish() the values are the product's, scaled: v = value * factor + bias of their channel,
// which unscale() makes them. Values that do not exist (beyond the map, or the last channel) are there too
// and are anything. The pass sees them through the Fragment alone, may change them, and has done with them
// when it returns. The Tile stays known until the group's next but one: a pass may finish it later.
//
// Memory, each of the group alone: staging (kRows rows of kStagingPitch floats) from finish() to the next
// tile's before_staging(), in between it is the conv's; carry (ConvTiling::carry_bytes, which the plan knows
// of: cuda::ChainShape) always, and nobody clears it. Whoever writes there and reads what others wrote has to
// sync(). The group's barrier is free in all of these calls. Of global memory a pass writes nothing but what
// it is for, places of its own of the output, of moments, of sums, and each of them once.
//
// kAllRowBlocks: a group gets all blocks of rows of a tile one after the other, not just one. kMayFold: sums
// of chunks may stand in the staging memory while a tile's products are made; a pass without it keeps there
// what it likes until before_staging(), and serves no conv that would fold (plan/conv_plan.cpp).
#pragma once

#include "core/chain.h"
#include "cuda/conv/fragment.cuh"
#include "cuda/device/barriers.cuh"
#include "cuda/device/statistics.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

template <class... Stages>
constexpr bool kReadChannel = (Stages::kReadsChannel || ...);

// What the output holds, of a kernel for some mode, where that is not float32.
template <class Mode>
using NarrowOutput = std::conditional_t<Mode::kParts == 2, float, typename Mode::Element>;

// The parameters of a thread's channels; kReads: whether any stage reads them.
template <bool kReads>
struct ThreadChannels {
  Channel<float> channel[kThreadChannels];

  __device__ void load(const ConvProblem& p, const ThreadRows& rows) {
#pragma unroll
    for (int k = 0; k < kThreadChannels; ++k)
      if (kReads && rows.channel(k) < p.tiling.out_channels)
        channel[k] = make_channel<float>(p.arguments, rows.channel(k));
  }

  __device__ void load_norms(const ConvProblem& p, const Tile& tile, const ThreadRows& rows) {
#pragma unroll
    for (int k = 0; k < kThreadChannels; ++k)
      if (rows.channel(k) < p.tiling.out_channels)
        set_norm(channel[k], p.norms[tile.sample * p.tiling.out_channels + rows.channel(k)]);
  }
};

// Takes affine stages into a fragment's scaling.
template <class Start, bool kReads>
__device__ void compose(Fragment& v, const ThreadChannels<kReads>& channels) {
  Scaling& scaling = v.scaling();
#pragma unroll
  for (int k = 0; k < kThreadChannels; ++k)
    Start::compose(scaling.factor[k], scaling.bias[k], channels.channel[k]);
}

// Puts Pre(v) in place of v, as far as it is not affine: that is left to the scaling, for when there are
// fewer values.
template <class Pre, bool kReads>
__device__ void apply(Fragment& v, const ThreadChannels<kReads>& channels) {
  using Start = AffineStart<Pre>;
  using Rest = typename Start::Rest;
  compose<Start>(v, channels);
  if constexpr (!std::is_same_v<Rest, Sequence<>>) {
    v.unscale();
    v.for_each([&](float& x, int k) { x = Rest::value(x, x, channels.channel[k]); });
  }
}

// What passes share: the memory of their group of threads, and its barrier.
class PassBase {
 public:
  static constexpr bool kMayFold = true;

  __device__ PassBase(const ConvProblem& problem, uint8_t* staging, uint8_t* carry, int barrier)
      : p_(problem), staging_(staging), carry_(carry), barrier_(barrier) {}

  __device__ void set_rows(const ThreadRows&) {}
  __device__ void prepare(const Tile&, const ThreadRows&) {}
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

  // What was staged of a column of one of the stacked rows: its first channel; others are kStagingPitch
  // apart.
  __device__ float* staged_column(int column, int stacked) const {
    return staging() + stacked * p_.tiling.stack_channels * kStagingPitch + column;
  }

  const ConvProblem& p_;
  uint8_t* const staging_;
  uint8_t* const carry_;
  const int barrier_;
};

// The moments of a thread's rows, found together with the threads that share them, about a guess of the mean:
// so a mean much larger than the deviation costs no digits.
class RowMoments {
 public:
  float count;
  float mean[kThreadChannels];
  float m2[kThreadChannels];

  __device__ explicit RowMoments(const Fragment& v) {
    // Waste mostly stands at the end of a row: one mask there is the usual case. Elsewhere it gets the guess.
    if (__all_sync(~0u, v.rows.pixels.lacks_at_most_last())) {
      guess_first(v);
    } else {
      guess_all(v);
    }
    count = float(Fragment::sum_of_row(v.rows.pixels.count()));
    const float share = count == 0 ? 0.0f : reciprocal(count);
    float sum[kThreadChannels][2]{};  // two side by side for each row, to wait less
    float squares[kThreadChannels][2]{};
#pragma unroll
    for (int j = 0; j < kThreadPairs; ++j) {
#pragma unroll
      for (int k = 0; k < kThreadChannels; ++k) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float deviation = v.value(k, j, i) - mean[k];
          if (j == kThreadPairs - 1 && !v.exists(j, i)) deviation = 0;
          sum[k][i] += deviation;
          squares[k][i] = fmaf(deviation, deviation, squares[k][i]);
        }
      }
    }
#pragma unroll
    for (int k = 0; k < kThreadChannels; ++k) {
      const float rest = Fragment::sum_of_row(sum[k][0] + sum[k][1]);
      const float offset = rest * share;
      m2[k] = maximum(0.0f, fmaf(-rest, offset, Fragment::sum_of_row(squares[k][0] + squares[k][1])));
      mean[k] += offset;
    }
  }

 private:
  // From the first two pairs of each thread.
  __device__ void guess_first(const Fragment& v) {
#pragma unroll
    for (int k = 0; k < kThreadChannels; ++k)
      mean[k] =
          Fragment::sum_of_row(v.value(k, 0, 0) + v.value(k, 0, 1) + (v.value(k, 1, 0) + v.value(k, 1, 1))) *
          (1.0f / (4 * kRowThreads));
  }

  __device__ void guess_all(const Fragment& v) {
    const int valid = Fragment::sum_of_row(v.rows.pixels.count());
#pragma unroll
    for (int k = 0; k < kThreadChannels; ++k) {
      float sum = 0;
#pragma unroll
      for (int j = 0; j < kThreadPairs; ++j) {
        if (v.exists(j, 0)) sum += v.value(k, j, 0);
        if (v.exists(j, 1)) sum += v.value(k, j, 1);
      }
      mean[k] = valid == 0 ? 0.0f : Fragment::sum_of_row(sum) / float(valid);
#pragma unroll
      for (int j = 0; j < kThreadPairs; ++j) {
        if (!v.exists(j, 0)) v.value(k, j, 0) = mean[k];
        if (!v.exists(j, 1)) v.value(k, j, 1) = mean[k];
      }
    }
  }
};

// Writes the moments of a tile of v, or of what was made of it.
__device__ inline void write_moments(const ConvProblem& p, const Fragment& v) {
  const RowMoments moments(v);
  if (!Fragment::is_writer()) return;
  const int parts = parts_per_channel(p.tiling);
  const Scaling& scaling = v.scaling();
#pragma unroll
  for (int k = 0; k < kThreadChannels; ++k) {
    if (v.rows.channel(k) >= p.tiling.out_channels) continue;
    const float factor = scaling.factor[k];
    const int64_t channel = v.tile.sample * p.tiling.out_channels + v.rows.channel(k);
    p.parts[channel * parts + v.part()] = {moments.count, fmaf(moments.mean[k], factor, scaling.bias[k]),
                                           moments.m2[k] * factor * factor};
  }
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

// What a thread of those that multiply has of a tile: two rows of accumulators, in half of the columns.
#pragma once

#include "cuda/device/barriers.cuh"
#include "cuda/device/plain_conv.cuh"
#include "cuda/device/split.cuh"
#include "products.cuh"
#include "tiles.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

constexpr int kThreadChannels = 2;  // rows of the product that a thread has
constexpr int kRowThreads = 4;      // threads that share a row, in its half of the columns

// The first of a thread's two rows of a product; the other is 8 further down.
__device__ inline int row_of_thread() {
  return threadIdx.x % kHalfThreads / kWarpThreads * 16 + threadIdx.x % kWarpThreads / 4;
}

// Which half of a tile's columns a thread has.
__device__ inline int half_of_thread() { return threadIdx.x / kHalfThreads % 2; }

// Which of a thread's columns are pixels of the map: of the two columns 8 j + 2 (lane % 4) and the next, bit
// j tells of the first and bit 16 + j of the second. As bits, for what was found out once to fit in a
// register.
struct PixelMask {
  uint32_t bits = 0;

  __device__ bool first(int j) const { return bits >> j & 1; }
  __device__ bool second(int j) const { return bits >> (16 + j) & 1; }
  __device__ int count() const { return __popc(bits); }
  // Whether no pair has less than two pixels, but perhaps the last one.
  __device__ bool lacks_at_most_last() const {
    constexpr uint32_t kBefore = (1u << (kColumns / 8 - 1)) - 1;
    return (~bits & (kBefore | kBefore << 16)) == 0;
  }
};

__device__ inline PixelMask pixel_mask(const ConvTiling& t, int stacked, int rows, int cols) {
  static_assert(kColumns <= 128, "two bits for 8 columns");
  PixelMask mask;
  const int slot = t.by_pitch.divide(half_of_thread() * kColumns);
  int row = slot * t.stack + stacked;
  int col = half_of_thread() * kColumns - slot * t.pitch + threadIdx.x % 4 * 2;
#pragma unroll 1
  for (int j = 0; j < kColumns / 8; ++j) {
    mask.bits |= (uint32_t(row < rows && col < cols) | uint32_t(row < rows && col + 1 < cols) << 16) << j;
    col += 8;
    if (col >= t.pitch) {
      col -= t.pitch;
      row += t.stack;
    }
  }
  return mask;
}

// What a thread knows of the two rows of accumulators that it holds, and of their channels.
struct ThreadRows {
  int row_block = -1;
  int first_channel;  // of the output; beyond the last where the row is not used
  float bias[2];      // of the conv
  PixelMask pixels;   // of the tile

  __device__ int channel(int k) const { return first_channel + 8 * k; }
  // Of the weights' scale; anything where they are not finite.
  __device__ int exponent(int k) const { return facts_ << (k == 0 ? 20 : 8) >> 20; }
  // Whether all weights of the block of rows are finite, and no row has some of very different size. By a
  // vote of the warp, so that the compiler knows that no threads part where this decides: or every vote and
  // shuffle behind it would get a check for them.
  __device__ bool are_usual() const { return __all_sync(~0u, facts_ & kIsUsual); }
  // Which of the stacked rows of the output, the same for both.
  __device__ static int stacked(const ConvTiling& t) { return row_of_thread() >> t.stack_shift; }

  __device__ void load(const ConvProblem& p, int block) {
    const ConvTiling& t = p.tiling;
    row_block = block;
    first_channel = row_block * kRows + (row_of_thread() & (t.stack_channels - 1));
    const int* exponents = p.weight_exponents + row_block * kRows;
    const int* is_unusual = p.is_unusual + row_block * kRows;
    facts_ = 0;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int m = row_of_thread() + 8 * k;
      facts_ |= (exponents[m] & 0xfff) << 12 * k;
      bias[k] = p.row_bias[row_block * kRows + m];
    }
    const int lane = lane_of_thread();
    if ((is_unusual[lane] | is_unusual[lane + kWarpThreads]) == 0) facts_ |= kIsUsual;
  }

 private:
  static constexpr int kIsUsual = 1 << 24;

  // Both exponents in 12 bits each and, for the vote, what is known of rows `lane` and `lane + 32` of the
  // block: beside the accumulators registers are few.
  int facts_;
};

// Whether one of a thread's rows loses digits or has weights that are not finite: then plain arithmetic takes
// its tile. exponent: of the panel's scale.
__device__ inline bool rows_are_wrong(const ConvProblem& p, const Tile& tile, const ThreadRows& rows,
                                      int exponent) {
  const int channels = p.tiling.in_channels;
  const unsigned* magnitude = p.magnitudes + int64_t(tile.panel) * channels;
  bool are_wrong = false;
  // No loop is unrolled: what is rare must not take registers and instruction cache from what is not.
#pragma unroll 1
  for (int k = 0; k < 2; ++k) {
    const int row = rows.row_block * kRows + row_of_thread() + 8 * k;
    const int* const shares = p.shares + int64_t(row) * channels;
    are_wrong |= p.weight_exponents[row] == kNonFinite ||
                 loses_digits<1>(channels, [=](int c) { return magnitude[c]; }, shares, exponent);
  }
  return are_wrong;
}

// Puts the conv's output, by plain arithmetic, in place of a thread's accumulators: by way of memory, as
// registers have no index.
__device__ inline void recompute(const ConvProblem& p, const Tile& tile, const ThreadRows& rows,
                                 float (&d)[kColumns / 2], float* staging, int barrier) {
  sync_threads(barrier, kGroupThreads);  // other threads' sums of chunks may stand in the same memory
  const ConvTiling& t = p.tiling;
  const ConvTaps taps{{t.padding[0], t.padding[1]}, {t.dilation[0], t.dilation[1]}};
  float* own = staging + threadIdx.x % kGroupThreads;
  for (int i = 0; i < kColumns / 2; ++i) {
    const int column = half_of_thread() * kColumns + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
    const bool is_first = i / 2 % 2 == 0;
    const int channel = rows.channel(is_first ? 0 : 1);
    const Place at = place_of(t, column, rows.stacked(t));
    if (at.row < tile.rows && at.col < tile.cols && channel < t.out_channels) {
      own[i * kGroupThreads] =
          plain_conv_at(p.input, p.weight, taps, tile.sample, channel, tile.row + at.row, tile.col + at.col) +
          (is_first ? rows.bias[0] : rows.bias[1]);
    }
  }
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) d[i] = own[i * kGroupThreads];
  sync_threads(barrier, kGroupThreads);  // and what a pass writes next
}

// From a thread's two rows of accumulators to the conv's output: v = d * factor + bias. The factor undoes the
// operands' scales: a power of two.
struct Scaling {
  float factor[2] = {1, 1};
  float bias[2] = {0, 0};
};

// Of the accumulators; where one step does not undo the scales they get the first one here.
template <class Mode, int kCount>
__device__ Scaling scaling_of(const ConvProblem& p, float (&d)[kCount], const ThreadRows& rows,
                              int exponent) {
  Scaling scaling{{1, 1}, {rows.bias[0], rows.bias[1]}};
  if (!is_scaled<Mode>(p.input.dtype)) return scaling;
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const int power = -(exponent + rows.exponent(k));
    const int within = within_normal(power);
    scaling.factor[k] = power_of_two(within);
    if (power == within) continue;
    const float rest = power_of_two(power - within);
#pragma unroll
    for (int i = 2 * k; i < kCount; i += 4) {
      d[i] *= rest;
      d[i + 1] *= rest;
    }
  }
  return scaling;
}

// Adds what is in memory to the accumulators, and leaves the sums there as well.
__device__ inline void fold(float (&d)[kColumns / 2], uint8_t* staging, bool is_first) {
  float4* sums = reinterpret_cast<float4*>(staging) + threadIdx.x % kGroupThreads;
#pragma unroll
  for (int i = 0; i < kColumns / 8; ++i) {
    float4& sum = sums[i * kGroupThreads];
    float* part = d + 4 * i;
    if (!is_first) {
      part[0] += sum.x;
      part[1] += sum.y;
      part[2] += sum.z;
      part[3] += sum.w;
    }
    sum = {part[0], part[1], part[2], part[3]};
  }
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

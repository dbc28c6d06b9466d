// How a block shares out a row of a sample, of all channels: what it gets, and its shared memory.
#pragma once

#include "cuda/gradients/packed_rows.cuh"
#include "work.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

constexpr int kGradientThreads = 256;
constexpr int kGradientWarps = kGradientThreads / kWarpThreads;
constexpr int kGradientBlocks = 4;  // on a multiprocessor, for registers
constexpr int kPackItems = 4;       // loads of v that a lane has under way
constexpr int kPackWidth = 2;       // elements of such a load, or 1: many rows are no multiple of 4

// How a block shares out its row. All of it follows from the size of a sample.
struct PackShape {
  int pitch;         // floats between channels in shared memory
  int width;         // elements of a load: kPackWidth or 1
  int lanes;         // of a warp, that share a row of a channel: a power of two, kPackItems at least
  int pass_shift;    // log2 of the loads of a lane that are of one channel, of kPackItems
  int window_lanes;  // that share a row of windows: a power of two
  cuda::WideDivisor by_rows;
};

inline int pack_pitch(int64_t cols) { return int(cuda::round_up(cols, kMostWidth)); }

// Elements of a load, of which every row is made; a whole warp has one then.
template <class Chain>
int pack_width(const BackwardWork<float>& work, int cols) {
  const auto may_start = [](const Elements& elements) {
    return is_aligned(elements.data, kPackWidth * bytes_of(elements.dtype));
  };
  const bool is_wide = cols > kWarpThreads && cols % kPackWidth == 0 && may_start(work.v) &&
                       (!Chain::Reduce::kStores || may_start(work.grad));
  return is_wide ? kPackWidth : 1;
}

inline PackShape pack_shape(const PackedRows& to, int64_t samples, int width, int pooled_cols) {
  PackShape shape{};
  shape.pitch = pack_pitch(to.cols);
  shape.width = width;
  const int64_t loads = cuda::divide_up(to.cols, width);
  shape.lanes = std::max(cuda::power_of_two_from(loads, kWarpThreads), kPackItems);
  const int passes = cuda::power_of_two_from(cuda::divide_up(loads, shape.lanes), kPackItems);
  while (1 << shape.pass_shift < passes) ++shape.pass_shift;
  shape.window_lanes = cuda::power_of_two_from(std::max(pooled_cols, 1), kWarpThreads);
  shape.by_rows = cuda::wide_divisor(to.rows, (samples + 1) * to.rows);
  return shape;
}

// work's planes and grad_v are not used.
struct PackWork {
  BackwardWork<float> work;
  PackedRows to;  // without units where nobody wants it: then only sums are left
  PackShape shape;
};

constexpr int count_of(unsigned mask) {
  int count = 0;
  for (; mask != 0; mask >>= 1) count += mask & 1;
  return count;
}

// A block's shared memory.
template <class Chain>
struct PackMemory {
  float* values;            // [channels][pitch]
  float* of_pixels;         // [2][pitch], where channels are reduced
  SampleChannel* channels;  // [channels], where there is anything to be known of them
  unsigned* largest;        // [2][warps]
  double* sums;             // [kinds][channels]

  static constexpr int kPixelRows = Chain::Reduce::kReducesChannels ? 2 : 0;
  static constexpr int kKinds = count_of(kOfAll<Chain>);

  __device__ PackMemory(void* memory, int of_channels, int pitch)
      : values(static_cast<float*>(memory)),
        of_pixels(values + of_channels * pitch),
        channels(reinterpret_cast<SampleChannel*>(of_pixels + kPixelRows * pitch)),
        largest(reinterpret_cast<unsigned*>(channels + (kHasChannels<Chain> ? of_channels : 0))),
        sums(reinterpret_cast<double*>(largest + 2 * kGradientWarps)) {}

  static int64_t bytes(int64_t of_channels, int64_t pitch) {
    return int64_t(sizeof(float)) * (of_channels + kPixelRows) * pitch +
           (kHasChannels<Chain> ? int64_t(sizeof(SampleChannel)) * of_channels : 0) +
           int64_t(sizeof(unsigned)) * 2 * kGradientWarps + int64_t(sizeof(double)) * kKinds * of_channels;
  }

  // Of a kind of kOfAll.
  __device__ double* sums_of(int kind, int of_channels) const {
    return sums + __popc(kOfAll<Chain> & ((1u << kind) - 1)) * of_channels;
  }
};

// A block's row.
struct PackRow {
  int64_t index;  // through all samples
  int64_t sample;
  int row;

  __device__ explicit PackRow(const PackWork& pack) : index(block_index()) {
    sample = pack.shape.by_rows.divide(index);
    row = int(index - sample * pack.to.rows);
  }
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

// What sum warps do: rows of the input come in and are packed, what tile warps left is multiplied with them,
// and complete rows of the input's gradient are stored.
#pragma once

#include "strip_tile.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// Which of the sum warps' threads this is.
__device__ inline int sum_thread() { return threadIdx.x - kTileThreads; }
__device__ inline int sum_warp() { return sum_thread() / kWarpThreads; }

// Rows of the input on their way to shared memory: loaded in one step, packed in the next one.
template <int kOutTiles>
class StripInput {
  using Shared = StripShared<kOutTiles>;

 public:
  __device__ StripInput(const StripWork& work, Shared& shared) : work_(work), shared_(shared) {}

  __device__ void load(const StripSegment& segment, int row) {
    for_each_unit([&](int k, int col) {
      if (work_.input.dtype == DType::kFloat32) {
        load_words<uint32_t>(segment, row, col, word_[k]);
      } else {
        load_words<uint16_t>(segment, row, col, word_[k]);
      }
    });
  }

  // Converts the row that was loaded, and finds its largest values.
  __device__ void measure(int row) {
    uint2 largest{0, 0};
    for_each_unit([&](int k, int) {
      if (work_.input.dtype != DType::kFloat32) widen_words(word_[k]);
#pragma unroll
      for (int c = 0; c < kUnitChannels; ++c) {
        const float x = __uint_as_float(word_[k][c]);
        largest.x = max(largest.x, finite_magnitude(x));
        largest.y = max(largest.y, magnitude_of(x));
      }
    });
    largest = {largest_of_warp(largest.x), largest_of_warp(largest.y)};
    if (lane_of_thread() == 0) shared_.input_largest[row & 1][sum_warp()] = largest;
    if (shared_.weights_are_wide) measure_channels(row);
  }

  // Packs the row that was loaded and measured.
  __device__ void write(int row) {
    uint2 largest = shared_.input_largest[row & 1][0];
    for (int warp = 1; warp < kSumWarps; ++warp) {
      const uint2 other = shared_.input_largest[row & 1][warp];
      largest = {max(largest.x, other.x), max(largest.y, other.y)};
    }
    const int exponent = scale_exponent(largest.x);
    const int place = row % kStripInputRows;
    if (sum_thread() == 0) shared_.input_exponents[place] = exponent;
    constexpr unsigned kMostBits = (127u + 96) << 23;  // beyond, v times the weights' scale may be infinite
    const bool is_right =
        largest.y < kMostBits && !(shared_.weights_are_wide && row_loses_digits(row, exponent));
    if (lane_of_thread() == 0) (&shared_.input_is_right[place].x)[sum_warp()] = is_right;
    const float scale = power_of_two(exponent);
    for_each_unit([&](int k, int col) {
      float x[kUnitChannels];
#pragma unroll
      for (int c = 0; c < kUnitChannels; ++c) x[c] = __uint_as_float(word_[k][c]) * scale;
      PackedUnit<kUnitChannels> parts[kMostOperandParts];
      pack_unit<SplitHalves>(x, parts);
#pragma unroll
      for (int p = 0; p < kMostOperandParts; ++p)
        if (p < work_.operand_parts) shared_.input[place][p][col] = words_of(parts[p]);
    });
  }

 private:
  // Of the row that was loaded, the largest value of each channel.
  __device__ void measure_channels(int row) {
#pragma unroll
    for (int c = 0; c < kUnitChannels; ++c) {
      unsigned of_thread = 0;
      for_each_unit(
          [&](int k, int) { of_thread = max(of_thread, finite_magnitude(__uint_as_float(word_[k][c]))); });
      const unsigned of_warp = largest_of_warp(of_thread);
      if (lane_of_thread() == 0) shared_.input_magnitudes[row & 1][c][sum_warp()] = of_warp;
    }
  }

  // Whether some channel of the output does, of those that a warp looks at. exponent: of the row's scale.
  __device__ bool row_loses_digits(int row, int exponent) const {
    bool loses = false;
    const auto magnitude_at = [&](int c) {
      const unsigned (&of_warps)[kSumWarps] = shared_.input_magnitudes[row & 1][c];
      return max(max(of_warps[0], of_warps[1]), max(of_warps[2], of_warps[3]));
    };
    for (int channel = sum_thread(); channel < Shared::kChannels; channel += kSumThreads)
      loses |= loses_digits<kUnitChannels>(kUnitChannels, magnitude_at, shared_.shares[channel], exponent);
    return __any_sync(~0u, loses);
  }

  // Those of a thread: the last ones of a row are a second one of the first threads.
  static constexpr int kUnits = 2;
  template <class Visit>
  __device__ void for_each_unit(const Visit& visit) const {
    visit(0, sum_thread());
    if (sum_thread() < kStripInputCols - kSumThreads) visit(1, kSumThreads + sum_thread());
  }

  template <class Word>
  __device__ void load_words(const StripSegment& segment, int row, int col,
                             uint32_t (&word)[kUnitChannels]) const {
    const ConvShape& shape = work_.shape;
    const int y = segment.row + row - shape.padding[0];
    const int x = segment.col + col - shape.padding[1];
    const bool exists = y >= 0 && y < shape.in_size[0] && x >= 0 && x < shape.in_size[1];
    const int64_t* stride = work_.input.stride;
    const Word* from = static_cast<const Word*>(work_.input.data) + segment.sample * stride[0] +
                       y * stride[2] + x * stride[3];
#pragma unroll
    for (int c = 0; c < kUnitChannels; ++c, from += stride[1]) {
      word[c] = 0;
      if (exists && c < shape.in_channels) word[c] = *from;
    }
  }

  __device__ void widen_words(uint32_t (&word)[kUnitChannels]) const {
    const bool is_bfloat16 = work_.input.dtype == DType::kBFloat16;
#pragma unroll
    for (uint32_t& w : word) w = __float_as_uint(from_half_bits(uint16_t(w), is_bfloat16));
  }

  const StripWork& work_;
  Shared& shared_;
  uint32_t word_[kUnits][kUnitChannels]{};
};

// The weight's gradient: a warp has 16 of the output's channels and, where that leaves warps over, a share of
// the pixels.
template <int kOutTiles>
class StripWeightGradient {
  using Shared = StripShared<kOutTiles>;
  static constexpr int kShares = kSumWarps / kOutTiles;
  static constexpr int kTilesOfShare = kTileWarps / kShares;

 public:
  __device__ StripWeightGradient(const StripWork& work, const Shared& shared)
      : work_(work),
        shared_(shared),
        warp_(sum_warp()),
        out_tile_(warp_ % kOutTiles),
        share_(warp_ / kOutTiles) {}

  // The sums of a tile, which has a scale of its own, are rounded by themselves: the tensor cores cut off
  // what they add up.
  __device__ void add_row(int row) {
    int exponents[kTaps];
#pragma unroll
    for (int down = 0; down < kTaps; ++down)
      exponents[down] = shared_.input_exponents[(row + down) % kStripInputRows];
#pragma unroll 1
    for (int tile = share_ * kTilesOfShare; tile < (share_ + 1) * kTilesOfShare; ++tile) {
      float d[kTaps][kTaps][4]{};
      multiply(row, tile, d);
      const int exponent = shared_.grad_exponents[row % 2][tile];
#pragma unroll
      for (int down = 0; down < kTaps; ++down) exponents[down] += exponent;
      add_unscaled(exponents, d, sums_);
#pragma unroll
      for (int down = 0; down < kTaps; ++down) exponents[down] -= exponent;
    }
  }

  // Adds a segment's sums to the block's, which the first one writes: the fewer are added up at once, the
  // less is rounded off.
  __device__ void end_segment() {
    const int slot = blockIdx.x * kShares + share_;
    float* const to = work_.slots + (slot * kOutTiles + out_tile_) * kSlotValues;
    store_slot(to, sums_, !is_first_);
    for_each_tap([this](int down, int across) {
#pragma unroll
      for (float& sum : sums_[down][across]) sum = 0;
    });
    is_first_ = false;
  }

 private:
  __device__ void multiply(int row, int tile, float (&d)[kTaps][kTaps][4]) const {
    const bool is_exact = work_.operand_parts == kMostOperandParts;
    // Channels 0 to 7 and 8 to 15 of the first pixels, then of the next.
    const int grad_pixel = tile * kTilePixels + lane_of_thread() / 16 * 8 + lane_of_thread() % 8;
    const int grad_place = Shared::chunk_place(out_tile_ * 2 + lane_of_thread() / 8 % 2, grad_pixel);
    const int pixel = tile * kTilePixels + lane_of_thread() / 8 % 2 * 8 + lane_of_thread() % 8;
    uint32_t a[kMostOperandParts][4];
    uint32_t b[kTaps][kTaps][4];  // the first parts' words, then the second ones'
#pragma unroll
    for (int part = 0; part < kMostOperandParts; ++part)
      load_transposed(a[part], shared_address(&shared_.grads[row % 2][part][grad_pixel][grad_place]));
    for_each_tap([&](int down, int across) {
      const int place = (row + down) % kStripInputRows;
      load_transposed(b[down][across],
                      shared_address(&shared_.input[place][lane_of_thread() / 16][pixel + across]));
    });
    if (is_exact) {
      for_each_tap([&](int y, int x) { multiply_add<__half>(d[y][x], a[1], b[y][x][0], b[y][x][1]); });
      for_each_tap([&](int y, int x) { multiply_add<__half>(d[y][x], a[0], b[y][x][2], b[y][x][3]); });
    }
    for_each_tap([&](int y, int x) { multiply_add<__half>(d[y][x], a[0], b[y][x][0], b[y][x][1]); });
  }

  const StripWork& work_;
  const Shared& shared_;
  const int warp_, out_tile_, share_;
  bool is_first_ = true;
  float sums_[kTaps][kTaps][4]{};
};

// Stores the row of the input's gradient that tile warps have completed.
template <class Element, int kOutTiles>
__device__ void store_input_row(const StripWork& work, const StripShared<kOutTiles>& shared,
                                const StripSegment& segment, int row) {
  const ConvShape& shape = work.shape;
  const int y = segment.row + row - shape.padding[0];
  if (row < segment.own_row || y < 0 || y >= shape.in_size[0]) return;
  const int64_t map = int64_t(shape.in_size[0]) * shape.in_size[1];
  for (int col = segment.own_col + sum_thread(); col < segment.last_col; col += kSumThreads) {
    const int x = segment.col + col - shape.padding[1];
    if (x < 0 || x >= shape.in_size[1]) continue;
    int64_t to = segment.sample * shape.in_channels * map + int64_t(y) * shape.in_size[1] + x;
#pragma unroll
    for (int c = 0; c < kUnitChannels; ++c, to += map) {
      if (c >= shape.in_channels) break;
      float sum = 0;
#pragma unroll
      for (int across = 0; across < kTaps; ++across) {
        const int from = col - across;
        if (from >= 0 && from < kStripPixels) sum += shared.sums[row % 2][across][c][from];
      }
      static_cast<Element*>(work.grad_input.data)[to] = narrow<Element>(sum);
    }
  }
}

template <int kOutTiles>
__device__ void store_input_row(const StripWork& work, const StripShared<kOutTiles>& shared,
                                const StripSegment& segment, int row) {
  switch (work.grad_input.dtype) {
    case DType::kBFloat16:
      return store_input_row<__nv_bfloat16>(work, shared, segment, row);
    case DType::kFloat16:
      return store_input_row<__half>(work, shared, segment, row);
    default:
      return store_input_row<float>(work, shared, segment, row);
  }
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

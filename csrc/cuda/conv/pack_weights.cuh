// Packs a conv's weights as the left operand of its products: for each block of 64 rows, chunk, part and half
// step, 64 units of 8 values. Zeros stand where a row has no tap. The bias goes with them, row by row, in
// float, and what tells whether one scale for all pixels of a panel will do: see loses_digits().
#pragma once

#include "core/parameter.h"
#include "cuda/device/split.cuh"
#include "problem.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// Held: see Unit. To ask for the dtype at each weight would be to wait for each by itself.
template <class Held>
__device__ float weight_at(const ConvProblem& p, int64_t offset) {
  const Held held = static_cast<const Held*>(p.weight.data)[offset];
  if constexpr (std::is_same_v<Held, float>) {
    return held;
  } else {
    return from_half_bits(held, p.weight.dtype == DType::kBFloat16);
  }
}

// The weight that row m of a block of rows has at one value of a unit along the sum.
template <class Held>
__device__ float weight_of(const ConvProblem& p, int row_block, int m, int chunk, int half_step,
                           int element) {
  const ConvTiling& t = p.tiling;
  const int units_per_block = t.tap_rows * t.tap_groups;
  const ChunkPlace first(t, chunk);
  const int block = first.block + half_step / units_per_block;
  const int in_channel = block * t.unit_channels + element % t.unit_channels;
  const int row = t.tap_row[half_step % units_per_block / t.tap_groups] - m / t.stack_channels;
  const int row_of_chunk = row / t.dilation[0];
  const int kernel_row = first.kernel_row + row_of_chunk;
  const int kernel_col =
      first.kernel_col + half_step % t.tap_groups * t.unit_taps + element / t.unit_channels;
  const int out_channel = row_block * kRows + m % t.stack_channels;
  const bool exists = out_channel < t.out_channels && half_step / units_per_block < t.blocks_per_chunk &&
                      in_channel < t.in_channels && row >= 0 && row % t.dilation[0] == 0 &&
                      row_of_chunk < t.kernel_rows && kernel_row < t.kernel[0] && kernel_col < t.kernel[1];
  if (!exists) return 0;
  const int64_t* stride = p.weight.stride;
  return weight_at<Held>(
      p, out_channel * stride[0] + in_channel * stride[1] + kernel_row * stride[2] + kernel_col * stride[3]);
}

// The largest magnitude of the weights between two channels; NaN wins.
template <class Held>
__device__ unsigned channel_magnitude(const ConvProblem& p, int out_channel, int in_channel) {
  const int64_t* stride = p.weight.stride;
  const int64_t first = out_channel * stride[0] + in_channel * stride[1];
  unsigned magnitude = 0;
  for (int kh = 0; kh < p.tiling.kernel[0]; ++kh)
    for (int kw = 0; kw < p.tiling.kernel[1]; ++kw)
      magnitude = max(magnitude, magnitude_of(weight_at<Held>(p, first + kh * stride[2] + kw * stride[3])));
  return magnitude;
}

// Of a row: the exponent of its scale, its bias, and each input channel's share of its largest weight.
template <class Held>
__device__ int describe_row(const ConvProblem& p, int row, int out_channel) {
  const ConvTiling& t = p.tiling;
  const bool exists = out_channel < t.out_channels;
  int* share = p.shares + int64_t(row) * t.in_channels;  // magnitudes at first
  unsigned most = 0;
  for (int c = lane_of_thread(); c < t.in_channels; c += kWarpThreads) {
    const unsigned magnitude = exists ? channel_magnitude<Held>(p, out_channel, c) : 0;
    share[c] = int(magnitude);
    most = max(most, magnitude);
  }
  most = largest_of_warp(most);
  bool are_wide = false;
  for (int c = lane_of_thread(); c < t.in_channels; c += kWarpThreads) {
    share[c] = share_of(unsigned(share[c]), most);
    are_wide |= is_wide(share[c]);
  }
  are_wide = __any_sync(~0u, are_wide);
  const int exponent = is_scaled(p.input.dtype) ? scale_exponent(most) : 0;
  if (lane_of_thread() == 0) {
    p.weight_exponents[row] = is_finite(most) ? exponent : kNonFinite;
    p.row_bias[row] = exists ? value_of<float>(p.conv_bias, out_channel) : 0.0f;
    p.is_wide[row] = is_scaled(p.input.dtype) && are_wide;
  }
  return exponent;
}

// By a warp: one row of a block of rows, in all chunks.
template <class Held>
__device__ void pack_weights(const ConvProblem& p, int row) {
  const ConvTiling& t = p.tiling;
  const int row_block = row / kRows;
  const int m = row % kRows;
  const int values = t.half_steps * kUnitElements;
  const int exponent = describe_row<Held>(p, row, row_block * kRows + m % t.stack_channels);
  const float scale = power_of_two(exponent);
  const bool is_bfloat16 = p.input.dtype == DType::kBFloat16;
  const int part = t.half_steps * kRows;  // units
  for (int chunk = 0; chunk < t.chunks; ++chunk) {
    uint4* const units = p.weights + int64_t(row_block * t.chunks + chunk) * p.operand_parts * part + m;
    for (int i = 2 * lane_of_thread(); i < values; i += 2 * kWarpThreads) {
      const int half_step = i / kUnitElements;
      const int element = i % kUnitElements;
      const float first = weight_of<Held>(p, row_block, m, chunk, half_step, element) * scale;
      const float second = weight_of<Held>(p, row_block, m, chunk, half_step, element + 1) * scale;
      const SplitPair pair =
          is_bfloat16 ? SplitPair{narrow_pair<__nv_bfloat16>(first, second), 0} : split_pair(first, second);
      uint32_t* const word = reinterpret_cast<uint32_t*>(units + half_step * kRows) + element / 2;
      *word = pair.high;
      if (p.operand_parts == SplitHalves::kParts) word[part * kUnitElements / 2] = pair.low;
    }
  }
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

// Packs a conv's weights as the left operand of its products: for each block of 64 rows, chunk, part and half
// step, 64 units of 8 values. Zeros stand where a row has no tap. The bias goes with them, row by row, in
// float, and what tells whether one scale for all pixels of a panel will do: see loses_digits().
#pragma once

#include "core/parameter.h"
#include "cuda/device/elements.cuh"
#include "pack_unit.cuh"
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

// The weights that row m of a block of rows has in one unit along the sum.
template <class Held>
__device__ Unit<Held> load_weights(const ConvProblem& p, int row_block, int m, int chunk, int half_step) {
  const ConvTiling& t = p.tiling;
  const int units_per_block = t.tap_rows * t.tap_groups;
  const ChunkPlace first(t, chunk);
  const int block_of_chunk = half_step / units_per_block;
  const int unit_of_block = half_step - block_of_chunk * units_per_block;
  const int tap_row = unit_of_block / t.tap_groups;
  const int row = t.tap_row[tap_row] - m / t.stack_channels;
  const int row_of_chunk = row / t.dilation[0];
  const int kernel_row = first.kernel_row + row_of_chunk;
  const int kernel_col = first.kernel_col + (unit_of_block - tap_row * t.tap_groups) * t.unit_taps;
  const int in_channel = (first.block + block_of_chunk) * t.unit_channels;
  const int out_channel = row_block * kRows + m % t.stack_channels;
  const bool is_row = out_channel < t.out_channels && block_of_chunk < t.blocks_per_chunk && row >= 0 &&
                      row_of_chunk * t.dilation[0] == row && row_of_chunk < t.kernel_rows &&
                      kernel_row < t.kernel[0];
  const int64_t* stride = p.weight.stride;
  const Held* const from = static_cast<const Held*>(p.weight.data) + out_channel * stride[0] +
                           in_channel * stride[1] + kernel_row * stride[2] + kernel_col * stride[3];
  Unit<Held> unit{};
#pragma unroll
  for (int i = 0; i < kUnitElements; ++i) {
    const int channel = i & (t.unit_channels - 1);
    const int tap = i >> log2_of(t.unit_channels);
    if (is_row && in_channel + channel < t.in_channels && kernel_col + tap < t.kernel[1])
      unit.set(i, from + channel * stride[1] + tap * stride[3]);
  }
  unit.settle(false);
  return unit;
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
    p.is_unusual[row] = !is_finite(most) || (is_scaled(p.input.dtype) && are_wide);
  }
  return exponent;
}

// By a warp: one row of a block of rows, in all chunks; a lane has a unit.
template <class Held>
__device__ void pack_weights(const ConvProblem& p, int row) {
  const ConvTiling& t = p.tiling;
  const int row_block = row / kRows;
  const int m = row % kRows;
  const float scale = power_of_two(describe_row<Held>(p, row, row_block * kRows + m % t.stack_channels));
  const int part = t.half_steps * kRows;  // units
  for (int chunk = 0; chunk < t.chunks; ++chunk) {
    uint4* const units = p.weights + int64_t(row_block * t.chunks + chunk) * p.operand_parts * part + m;
    for (int half_step = lane_of_thread(); half_step < t.half_steps; half_step += kWarpThreads)
      store_unit(load_weights<Held>(p, row_block, m, chunk, half_step), scale, p.operand_parts,
                 units + half_step * kRows, part);
  }
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

// Rows of a map as operands of the tensor cores: of each pixel units of 8 channels, so that a shift along the
// row is a shift by whole units. Float32 is scaled by a power of two, one for each row of all channels, and
// split: see scales.cuh and split.cuh in cuda/device. So channels that differ by no more than 2^17 in size
// keep all of their digits.
#pragma once

#include <cstdint>

#include "cuda/device/split.cuh"
#include "plan/gradient_plan.h"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

using cuda::kUnitChannels;
using cuda::PackedRows;

// The last ones before the first row are zeros; those behind the last row may be read, and are anything.
constexpr int kGuardUnits = 256;
constexpr int kZeroGuardUnits = 32;

// By all threads of a block: a row of channels in shared memory, [channels][pitch]. row is counted through
// all samples; largest is the row's largest finite_magnitude, of float32.
template <class Mode, int kThreads>
__device__ void pack_row_as(const PackedRows& to, int64_t row, const float* values, int pitch,
                            unsigned largest) {
  constexpr int kWarps = kThreads / 32;
  const int exponent = is_scaled<Mode>(to.dtype) ? scale_exponent(largest) : 0;
  const float scale = power_of_two(exponent);
  if (is_scaled<Mode>(to.dtype) && threadIdx.x == 0) to.exponents[row] = exponent;
  uint4* const units = to.row(row);
  if (row == 0 && threadIdx.x < kZeroGuardUnits) units[-1 - int(threadIdx.x)] = {};
  int chunk = threadIdx.x / 32;  // a warp has 32 columns of one at a time
  for (int col = threadIdx.x % 32;; chunk += kWarps) {
    for (; chunk >= to.chunks; chunk -= to.chunks) col += 32;
    if (col >= to.pitch) break;
    const int channels = col < to.cols ? to.channels - chunk * kUnitChannels : 0;
    const float* const from = values + chunk * kUnitChannels * pitch + col;
    float x[kUnitChannels]{};
    if (channels >= kUnitChannels) {  // spares a comparison for each
#pragma unroll
      for (int k = 0; k < kUnitChannels; ++k) x[k] = from[k * pitch] * scale;
    } else {
#pragma unroll
      for (int k = 0; k < kUnitChannels; ++k) {
        if (k < channels) x[k] = from[k * pitch] * scale;
      }
    }
    PackedUnit<kUnitChannels> parts[Mode::kParts];
    pack_unit<Mode>(x, parts);
    uint4* const unit = units + chunk * Mode::kParts * to.pitch + col;
#pragma unroll
    for (int p = 0; p < Mode::kParts; ++p) unit[p * to.pitch] = words_of(parts[p]);
  }
}

template <int kThreads>
__device__ void pack_row(const PackedRows& to, int64_t row, const float* values, int pitch,
                         unsigned largest) {
  visit_mode(to.dtype, to.operand_parts,
             [&](auto mode) { pack_row_as<decltype(mode), kThreads>(to, row, values, pitch, largest); });
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

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

// The last ones before the first row are zeros; those behind the last row may be read, and are anything.
constexpr int kGuardUnits = 256;
constexpr int kZeroGuardUnits = 32;

struct PackedRows {
  uint4* units;          // [samples][rows][chunks][parts][pitch], a unit each; kGuardUnits before and behind
  int* exponents;        // [samples][rows]: float32 was multiplied by two to this power
  const float* balance;  // [channels], powers of two by which they were multiplied before; null: by none
  DType dtype;           // of the values
  int channels;
  int chunks;  // of 8 channels, even: zeros are added to the last
  int parts;
  int rows, cols;
  int pitch;  // from cols on zeros: they are also what stands before the next row

  FUSEDCONV_INLINE int64_t row_units() const { return int64_t(chunks) * parts * pitch; }
  __device__ uint4* row(int64_t index) const { return units + index * row_units(); }
};

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
  if (to.dtype == DType::kBFloat16) {
    pack_row_as<BFloat16s, kThreads>(to, row, values, pitch, largest);
  } else if (to.parts == SplitHalves::kParts) {
    pack_row_as<SplitHalves, kThreads>(to, row, values, pitch, largest);
  } else {
    pack_row_as<Halves, kThreads>(to, row, values, pitch, largest);
  }
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

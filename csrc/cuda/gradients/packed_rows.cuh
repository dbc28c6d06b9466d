// Rows of a map as operands of the tensor cores: of each pixel units of 8 channels, so that a shift along the
// row is a shift by whole units. Float32 is scaled by a power of two, one for each row of all channels, and
// split: see cuda/device/split.cuh. So channels that differ by no more than 2^17 in size keep all of their
// digits.
#pragma once

#include <cstdint>

#include "cuda/device/packs.cuh"
#include "cuda/device/split.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

constexpr int kUnitChannels = 8;
// The last ones before the first row are zeros; those behind the last row may be read, and are anything.
constexpr int kGuardUnits = 256;
constexpr int kZeroGuardUnits = 32;

struct PackedRows {
  uint4* units;          // [samples][rows][chunks][parts][pitch], a unit each; kGuardUnits before and behind
  int* exponents;        // [samples][rows]: values were multiplied by two to this power, if the mode scales
  const float* balance;  // [channels], powers of two by which they were multiplied before; null: by none
  int channels;
  int chunks;  // of 8 channels, even: zeros are added to the last
  int parts;
  int rows, cols;
  int pitch;  // from cols on zeros: they are also what stands before the next row
};

inline int chunks_of(int channels) { return ((channels - 1) / (2 * kUnitChannels) + 1) * 2; }

FUSEDCONV_INLINE int64_t packed_row_units(const PackedRows& packed) {
  return int64_t(packed.chunks) * packed.parts * packed.pitch;
}

// The bits of a magnitude, for the largest one of a row; what is not finite has no say in the scale.
__device__ inline unsigned finite_magnitude(float x) {
  const unsigned bits = __float_as_uint(x) & 0x7fffffffu;
  return bits < kInfinityBits ? bits : 0u;
}

using PackedUnit = Pack<uint32_t, kUnitChannels / 2>;

template <class Element>
__device__ uint32_t narrow_pair(float low, float high) {
  std::conditional_t<std::is_same_v<Element, __half>, __half2, __nv_bfloat162> pair;
  if constexpr (std::is_same_v<Element, __half>) {
    pair = __floats2half2_rn(low, high);
  } else {
    pair = __floats2bfloat162_rn(low, high);
  }
  uint32_t bits;
  memcpy(&bits, &pair, sizeof(bits));
  return bits;
}

__device__ inline float2 half_values(uint32_t bits) {
  __half2 pair;
  memcpy(&pair, &bits, sizeof(pair));
  return __half22float2(pair);
}

// Two values as halves, and what these lack of them.
struct SplitPair {
  uint32_t high, low;
};

__device__ inline SplitPair split_pair(float first, float second) {
  const uint32_t high = narrow_pair<__half>(first, second);
  const float2 rounded = half_values(high);
  return {high, narrow_pair<__half>(first - rounded.x, second - rounded.y)};
}

// What parts before it lack of scaled values; the first one lacks all.
template <class Mode>
__device__ void pack_unit(const float (&x)[kUnitChannels], PackedUnit (&parts)[Mode::kParts]) {
#pragma unroll
  for (int i = 0; i < kUnitChannels / 2; ++i) {
    if constexpr (Mode::kParts == 2) {
      const SplitPair pair = split_pair(x[2 * i], x[2 * i + 1]);
      parts[0].element[i] = pair.high;
      parts[1].element[i] = pair.low;
    } else {
      parts[0].element[i] = narrow_pair<typename Mode::Element>(x[2 * i], x[2 * i + 1]);
    }
  }
}

// By all threads of a block: a row of channels in shared memory, [channels][pitch]. row is counted through
// all samples; largest is the row's largest finite_magnitude, if the mode scales.
template <class Mode, int kThreads>
__device__ void pack_row(const PackedRows& to, int64_t row, const float* values, int pitch,
                         unsigned largest) {
  constexpr int kWarps = kThreads / 32;
  const int exponent = Mode::kScales ? scale_exponent(largest) : 0;
  const float scale = power_of_two(exponent);
  if (Mode::kScales && threadIdx.x == 0) to.exponents[row] = exponent;
  uint4* const units = to.units + row * packed_row_units(to);
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
    PackedUnit parts[Mode::kParts];
    pack_unit<Mode>(x, parts);
    uint4* const unit = units + chunk * Mode::kParts * to.pitch + col;
#pragma unroll
    for (int p = 0; p < Mode::kParts; ++p)
      unit[p * to.pitch] = {parts[p].element[0], parts[p].element[1], parts[p].element[2],
                            parts[p].element[3]};
  }
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

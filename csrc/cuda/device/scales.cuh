// Float32 as scaled halves keeps its digits as long as the largest value of many is scaled near the largest
// half, and the others are not too far below. Here stand the scales, powers of two that are passed on as
// exponents; the way back from them; and what tells where one scale would not do. Magnitudes are passed on as
// the bits of floats, which compare like them: infinity is above all that is finite, NaN above infinity.
#pragma once

#include "core/problem.h"
#include "core/target.h"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// Whether what a tensor of the dtype holds has more range than the tensor cores' types.
FUSEDCONV_INLINE bool is_scaled(DType dtype) { return dtype == DType::kFloat32; }

// ---- magnitudes ----

constexpr unsigned kInfinityBits = 0x7f800000;

__device__ inline unsigned magnitude_of(float x) { return __float_as_uint(x) & 0x7fffffffu; }

__device__ inline bool is_finite(unsigned magnitude) { return magnitude < kInfinityBits; }

// For the largest one of many: what is not finite has no say in a scale.
__device__ inline unsigned finite_magnitude(float x) {
  const unsigned magnitude = magnitude_of(x);
  return is_finite(magnitude) ? magnitude : 0u;
}

__device__ inline int exponent_of(unsigned magnitude) { return int(magnitude >> 23) - 127; }

// ---- scales ----

// The largest magnitude is scaled into [2^14, 2^15): under the largest half, 65504.
constexpr int kScaledExponent = 14;
constexpr int kMostExponent = 126;  // 2^126 and 2^-126 are normal floats

__device__ inline float power_of_two(int exponent) { return __int_as_float((exponent + 127) << 23); }

// For values up to a magnitude.
__device__ inline int scale_exponent(unsigned magnitude) {
  return min(kScaledExponent + 127 - int(magnitude >> 23), kMostExponent);
}

// The power of two next to one that may be none of a normal float.
__device__ inline int within_normal(int exponent) {
  return min(max(exponent, -kMostExponent), kMostExponent);
}

// Undoes scales: divides by two to a power, in two steps where that is no normal float.
struct Unscale {
  float rest;  // comes first; 1 nearly always
  float factor;

  __device__ explicit Unscale(int exponent) {
    const int within = within_normal(-exponent);
    rest = power_of_two(-exponent - within);
    factor = power_of_two(within);
  }

  // Whether one step does for an exponent.
  __device__ static bool is_one_step(int exponent) { return abs(exponent) <= kMostExponent; }

  // sums += d, unscaled.
  template <int kCount>
  __device__ void add(float (&sums)[kCount], const float (&d)[kCount]) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) sums[i] = fmaf(d[i] * rest, factor, sums[i]);
  }
};

// sums += d, divided by two to a power for each row. Nearly always that takes one step, for all rows.
template <int kRows, int kCols, int kCount>
__device__ void add_unscaled(const int (&exponents)[kRows], const float (&d)[kRows][kCols][kCount],
                             float (&sums)[kRows][kCols][kCount]) {
  bool is_one_step = true;
#pragma unroll
  for (int exponent : exponents) is_one_step &= Unscale::is_one_step(exponent);
  if (is_one_step) {
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const float factor = power_of_two(-exponents[row]);
#pragma unroll
      for (int col = 0; col < kCols; ++col) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) sums[row][col][i] = fmaf(d[row][col][i], factor, sums[row][col][i]);
      }
    }
  } else {
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
      const Unscale unscale(exponents[row]);
#pragma unroll
      for (int col = 0; col < kCols; ++col) unscale.add(sums[row][col], d[row][col]);
    }
  }
}

// ---- where the tensor cores' arithmetic would not do ----

// In place of an exponent, of values that are not all finite.
constexpr int kNonFinite = 1 << 20;

// A half's last digit is worth 2^-24, and the largest value is scaled to 2^14 at least: a value keeps all of
// its digits down to 2^-16 of the largest one. One to spare.
constexpr int kExactBits = 15;

// A channel of the input has a share of the weights of a channel of the output: the exponent of its largest
// one, as seen from the largest of all. Zeros have none: they lose no digits.
constexpr int kNoShare = -(1 << 20);

__device__ inline int share_of(unsigned magnitude, unsigned most) {
  return magnitude == 0 ? kNoShare : exponent_of(magnitude) - exponent_of(most);
}

__device__ inline bool is_wide(int share) { return share != kNoShare && share < -kExactBits; }

// Whether the largest products of a channel of the output are much smaller than the largest of all pixels
// that have one scale times the channel's largest weight, so that this scale would cost their pixels digits.
// That takes weights of very different size between channels, which is rare, and pixels to match.
// magnitude_at(c): of the pixels' channel c. shares: of its weights. exponent: of the pixels' scale.
template <int kUnroll, class MagnitudeAt>
__device__ bool loses_digits(int channels, const MagnitudeAt& magnitude_at, const int* shares, int exponent) {
  int largest = kNoShare;  // of the products, as exponents
#pragma unroll kUnroll
  for (int c = 0; c < channels; ++c) {
    const unsigned pixels = magnitude_at(c);
    const int share = shares[c];
    if (pixels != 0 && share != kNoShare) largest = max(largest, exponent_of(pixels) + share);
  }
  return largest != kNoShare && largest + exponent < kScaledExponent - kExactBits;
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

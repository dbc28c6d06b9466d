// How the operands of a conv become operands of the tensor cores, whose products are added in float32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "core/problem.h"
#include "core/target.h"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// From what tensors hold to so many parts that the tensor cores take, scaled where these have less range.
template <class Held, class Taken, int kCount>
struct Operand {
  using In = Held;
  using Element = Taken;
  static constexpr int kParts = kCount;
  static constexpr bool kScales = !std::is_same_v<In, Element>;
};

// Float32, exact: x = high + low, both halves, after a scaling by a power of two that brings the largest
// value of a panel (of a channel, for weights) near the largest half. high * high + low * high + high * low
// is the product but for 2^-22 of it.
struct Float32Ieee : Operand<float, __half, 2> {};

// Float32 as TF32, which has a half's mantissa: the first of these products.
struct Float32Tf32 : Operand<float, __half, 1> {};

struct BFloat16 : Operand<__nv_bfloat16, __nv_bfloat16, 1> {};
struct Float16 : Operand<__half, __half, 1> {};

// What differs between kernels that multiply: the type that the tensor cores take, and how many parts a value
// has. What tensors hold, and with it whether values are scaled, is known when a kernel runs: float32 is
// either of the first two, bfloat16 the third, float16 the second without a scale.
template <class Taken, int kCount>
struct Parts {
  using Element = Taken;
  static constexpr int kParts = kCount;
};
struct SplitHalves : Parts<__half, 2> {};
struct Halves : Parts<__half, 1> {};
struct BFloat16s : Parts<__nv_bfloat16, 1> {};

// Whether what a tensor of the dtype holds has more range than the tensor cores' types.
FUSEDCONV_INLINE bool is_scaled(DType dtype) { return dtype == DType::kFloat32; }

// The largest magnitude is scaled into [2^14, 2^15): under the largest half, 65504.
constexpr int kScaledExponent = 14;
constexpr int kMostExponent = 126;  // 2^126 and 2^-126 are normal floats

__device__ inline float power_of_two(int exponent) { return __int_as_float((exponent + 127) << 23); }

// The power of two for values up to a magnitude, given as the bits of a float.
__device__ inline int scale_exponent(unsigned magnitude) {
  return min(kScaledExponent + 127 - int(magnitude >> 23), kMostExponent);
}

// Of a magnitude, as the bits of a float.
__device__ inline int exponent_of(unsigned magnitude) { return int(magnitude >> 23) - 127; }

// A half's last digit is worth 2^-24, and the largest value is scaled to 2^14 at least: a value keeps all of
// its digits down to 2^-16 of the largest one. One to spare.
constexpr int kExactBits = 15;

constexpr unsigned kInfinityBits = 0x7f800000;

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

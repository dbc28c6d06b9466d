// How the operands of a conv become operands of the tensor cores, whose products are added in float32.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <type_traits>

#include "packs.cuh"
#include "scales.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// What differs between kernels that multiply: the type that the tensor cores take, and how many parts a value
// has. What tensors hold, and with it whether values are scaled, is known when a kernel runs.
template <class Taken, int kCount>
struct Parts {
  using Element = Taken;
  static constexpr int kParts = kCount;
};

// Float32, exact: x = high + low, both halves, after a scaling by a power of two that brings the largest
// value of many near the largest half. high * high + low * high + high * low is the product but for 2^-22 of
// it.
struct SplitHalves : Parts<__half, 2> {};

// Float32 as TF32, which has a half's mantissa: the first of these products. And float16, without a scale.
struct Halves : Parts<__half, 1> {};

struct BFloat16s : Parts<__nv_bfloat16, 1> {};

// Calls visit with a value of the mode that multiplies a tensor's values, of so many parts each.
#pragma nv_exec_check_disable
template <class Visit>
__host__ __device__ auto visit_mode(DType dtype, int operand_parts, const Visit& visit) {
  if (dtype == DType::kBFloat16) return visit(BFloat16s{});
  return operand_parts == SplitHalves::kParts ? visit(SplitHalves{}) : visit(Halves{});
}

// The same with each mode, until one fails.
template <class Visit>
auto visit_modes(const Visit& visit) {
  if (const auto status = visit(SplitHalves{})) return status;
  if (const auto status = visit(Halves{})) return status;
  return visit(BFloat16s{});
}

// Whether values that become Mode's may be scaled, and whether they are.
template <class Mode>
constexpr bool kMayScale = !std::is_same_v<Mode, BFloat16s>;
template <class Mode>
FUSEDCONV_INLINE bool is_scaled(DType dtype) {
  return kMayScale<Mode> && (Mode::kParts == 2 || is_scaled(dtype));
}

// Calls visit(a value of the type that a tensor holds) where its values become Mode's.
template <class Mode, class Visit>
__device__ void visit_held(DType dtype, const Visit& visit) {
  if constexpr (std::is_same_v<Mode, BFloat16s>) {
    visit(__nv_bfloat16{});
  } else if (is_scaled<Mode>(dtype)) {
    visit(float{});
  } else {
    visit(__half{});
  }
}

// ---- floats, already scaled, as parts ----

template <class Element>
__device__ uint32_t narrow_pair(float first, float second) {
  std::conditional_t<std::is_same_v<Element, __half>, __half2, __nv_bfloat162> pair;
  if constexpr (std::is_same_v<Element, __half>) {
    pair = __floats2half2_rn(first, second);
  } else {
    pair = __floats2bfloat162_rn(first, second);
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

// The same, as the parts of a mode.
template <class Mode>
__device__ void pack_pair(float first, float second, uint32_t (&parts)[Mode::kParts]) {
  if constexpr (Mode::kParts == 2) {
    const SplitPair pair = split_pair(first, second);
    parts[0] = pair.high;
    parts[1] = pair.low;
  } else {
    parts[0] = narrow_pair<typename Mode::Element>(first, second);
  }
}

// A part of so many values, in words.
template <int kValues>
using PackedUnit = Pack<uint32_t, kValues / 2>;

__device__ inline uint4 words_of(const PackedUnit<8>& unit) {
  return {unit.element[0], unit.element[1], unit.element[2], unit.element[3]};
}

template <class Mode, int kValues>
__device__ void pack_unit(const float (&x)[kValues], PackedUnit<kValues> (&parts)[Mode::kParts]) {
#pragma unroll
  for (int i = 0; i < kValues / 2; ++i) {
    uint32_t pair[Mode::kParts];
    pack_pair<Mode>(x[2 * i], x[2 * i + 1], pair);
#pragma unroll
    for (int p = 0; p < Mode::kParts; ++p) parts[p].element[i] = pair[p];
  }
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

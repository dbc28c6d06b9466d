// Parameters of channels, in the dtype that they come in.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "problem.h"
#include "target.h"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

template <class To, class From>
FUSEDCONV_INLINE To bit_cast(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

FUSEDCONV_INLINE float from_bfloat16(uint16_t bits) { return bit_cast<float>(uint32_t(bits) << 16); }

// The exponent is moved by normal numbers only, which no thread flushes to zero: by 224, so that infinity and
// NaN are float's, and back by 112. Then a subnormal half has come out as (1 + f) 2^-15 where f 2^-14 is
// meant, and only for those is twice the value less 2^-14, which is that, the smaller one.
FUSEDCONV_INLINE float from_float16(uint16_t bits) {
  const uint32_t sign = uint32_t(bits & 0x8000u) << 16;
  const uint32_t magnitude = uint32_t(bits & 0x7fffu) << 13;
  const float normal = bit_cast<float>(magnitude + (uint32_t(224) << 23)) * 0x1p-112f;
  const float subnormal = 2.0f * normal - 0x1p-14f;
  return bit_cast<float>(bit_cast<uint32_t>(subnormal < normal ? subnormal : normal) | sign);
}

// Calls visit with each number below kCount, known when compiled: what they index stays in registers.
template <int kCount, class Visit>
FUSEDCONV_INLINE void unroll(const Visit& visit) {
  if constexpr (kCount > 0) {
    unroll<kCount - 1>(visit);
    visit(std::integral_constant<int, kCount - 1>{});
  }
}

// A channel's value in the compute type. Kernels ask once a channel, a row or a tile, so a switch will do.
template <class T>
FUSEDCONV_INLINE T value_of(const Parameter& parameter, int64_t channel, T absent = T(0)) {
  if (parameter.data == nullptr) return absent;
  switch (parameter.dtype) {
    case DType::kFloat64:
      return T(static_cast<const double*>(parameter.data)[channel]);
    case DType::kBFloat16:
      return T(from_bfloat16(static_cast<const uint16_t*>(parameter.data)[channel]));
    case DType::kFloat16:
      return T(from_float16(static_cast<const uint16_t*>(parameter.data)[channel]));
    default:
      return T(static_cast<const float*>(parameter.data)[channel]);
  }
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

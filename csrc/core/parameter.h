// Parameters of channels, in the dtype that they come in.
#pragma once

#include <cstdint>
#include <cstring>

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

// The exponent is moved by a multiplication, which also turns half's subnormals into float's normal numbers.
FUSEDCONV_INLINE float from_float16(uint16_t bits) {
  const uint32_t sign = uint32_t(bits & 0x8000u) << 16;
  const uint32_t magnitude = uint32_t(bits & 0x7fffu) << 13;
  const bool special = (bits & 0x7c00u) == 0x7c00u;                                        // infinity and NaN
  const float scaled = bit_cast<float>(magnitude) * bit_cast<float>(uint32_t(239) << 23);  // 2^112
  return bit_cast<float>((special ? (magnitude | 0x7f800000u) : bit_cast<uint32_t>(scaled)) | sign);
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

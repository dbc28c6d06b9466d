// Division without dividing.
#pragma once

#include <algorithm>
#include <cstdint>

namespace fusedconv {
namespace cuda {

// Divides numbers under 2^31 by one that is known when a launch is planned: by a product with 2^(32 + shift)
// / value, rounded up, which is exact there.
struct Divisor {
  int value;
  int shift;
  uint32_t reciprocal;

#ifdef __CUDACC__
  __device__ int divide(int n) const {
    return value == 1 ? n : int(__umulhi(uint32_t(n), reciprocal) >> shift);
  }
#endif
};

inline Divisor divisor(int value) {
  int shift = 0;
  while ((int64_t(2) << shift) < value) ++shift;
  return {value, shift, uint32_t(((uint64_t(1) << (32 + shift)) + value - 1) / value)};
}

// Divides numbers of any size, and those of a launch that has none of 2^31 or more without dividing.
struct WideDivisor {
  int64_t value;
  Divisor narrow;
  bool is_narrow;

#ifdef __CUDACC__
  __device__ int64_t divide(int64_t n) const { return is_narrow ? narrow.divide(int(n)) : n / value; }
#endif
};

// For numbers under `end`.
inline WideDivisor wide_divisor(int64_t value, int64_t end) {
  return {value, divisor(int(std::min<int64_t>(value, INT32_MAX))), end <= INT32_MAX};
}

}  // namespace cuda
}  // namespace fusedconv

// Division without dividing.
#pragma once

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

}  // namespace cuda
}  // namespace fusedconv

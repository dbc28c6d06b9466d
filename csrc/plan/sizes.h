// Arithmetic of plans. What does not fit in 63 bits throws std::overflow_error: see core/checked.h.
#pragma once

#include <cstdint>

#include "core/checked.h"

namespace fusedconv {
namespace cuda {

inline int64_t divide_up(int64_t a, int64_t b) { return divide_up(Checked(a), b).value(); }
inline int64_t round_up(int64_t a, int64_t multiple) { return round_up(Checked(a), multiple).value(); }

// The least power of two from `least` on, or `most`.
constexpr int power_of_two_from(int64_t least, int most) {
  int power = 1;
  while (power < least && power < most) power *= 2;
  return power;
}

}  // namespace cuda
}  // namespace fusedconv

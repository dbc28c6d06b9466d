// Arithmetic of plans. What does not fit in 63 bits throws std::overflow_error: see core/checked.h.
#pragma once

#include <cstdint>

#include "core/checked.h"

namespace fusedconv {
namespace cuda {

constexpr int kWarpLanes = 32;

inline int64_t divide_up(int64_t a, int64_t b) { return divide_up(Checked(a), b).value(); }
inline int64_t round_up(int64_t a, int64_t multiple) { return round_up(Checked(a), multiple).value(); }

// The least power of two from `least` on, or `most`.
constexpr int power_of_two_from(int64_t least, int most) {
  int power = 1;
  while (power < least && power < most) power *= 2;
  return power;
}

// Lanes of a warp that share something of so many loads: so many, and more as long as threads would be left
// over.
inline int sharing_lanes(int lanes, int64_t loads, int threads) {
  while (lanes < kWarpLanes && loads <= threads / (2 * lanes)) lanes *= 2;
  return lanes;
}

}  // namespace cuda
}  // namespace fusedconv

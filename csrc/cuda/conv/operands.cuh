// What the tensor cores' products of one chunk take.
#pragma once

#include <cstdint>

#include "core/target.h"
#include "plan/conv_tiling.h"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

using cuda::kMostSumSteps;

// Operands of some steps of a chunk in shared memory: see ConvTiling. A half step is one unit along the sum:
// its weights are kRows units.
struct Operands {
  uint32_t weights;  // shared addresses of the first parts
  uint32_t pixels;
  uint32_t weights_part;  // bytes from one part to the next
  uint32_t pixels_part;
  const uint32_t* offsets;
  int steps;  // at most kMostSumSteps
};

constexpr int kHalfStepBytes = cuda::kRows * cuda::kUnitBytes;

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "conv_plan.h"

namespace fusedconv {
namespace cuda {

// How a chain's backward runs.
struct BackwardPlan {
  bool runs;           // false: the conv's part is left to PyTorch, for this reason
  std::string reason;  // or the plan in words
  ConvPlan conv = {};  // of v, which is computed again
  int64_t step_samples = 0;
  bool in_strips = false;
  size_t workspace = 0;
};

}  // namespace cuda
}  // namespace fusedconv

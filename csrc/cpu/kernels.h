// The chains as compiled for one instruction set.
#pragma once

#include "core/chain_list.h"
#include "core/target.h"
#include "kernel.h"

namespace fusedconv {

inline namespace FUSEDCONV_TARGET {

#define FUSEDCONV_DECLARE(name)                   \
  void name(const Problem& problem, int threads); \
  void name##_backward(const BackwardProblem& problem, int threads);
FUSEDCONV_FOR_EACH_CHAIN(FUSEDCONV_DECLARE)
#undef FUSEDCONV_DECLARE

// Nulls for a name that no chain has.
Kernel find_kernel(const char* chain);

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

#pragma once

#include "core/problem.h"

namespace fusedconv {

// A chain on the CPU, compiled for one instruction set.
struct Kernel {
  void (*forward)(const Problem& problem, int threads);
  void (*backward)(const BackwardProblem& problem, int threads);
};

}  // namespace fusedconv

#pragma once

#include "../core/problem.h"

namespace fusedconv {

// A chain on the CPU, compiled for one instruction set.
using Kernel = void (*)(const Problem& problem, int threads);

}  // namespace fusedconv

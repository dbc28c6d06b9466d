// Chooses, at run time, the best instruction set that both this binary and this machine have.
#pragma once

#include <string>
#include <vector>

#include "kernel.h"

namespace fusedconv {

// Level in use: "baseline" (SSE2, NEON), "avx2" (with FMA) or "avx512". FUSEDCONV_CPU_ISA caps it.
std::string cpu_isa();
// All levels that can run here, best last.
std::vector<std::string> cpu_isas();

// A chain's kernel at the level in use. Throws std::invalid_argument for a name that no chain has.
Kernel find_on_cpu(const std::string& chain);
void run_on_cpu(const Kernel& kernel, const Problem& problem, int threads);
void run_backward_on_cpu(const Kernel& kernel, const BackwardProblem& problem, int threads);

}  // namespace fusedconv

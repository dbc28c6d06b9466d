// The CUDA backend as the rest sees it; entry_absent.cpp answers for a build without CUDA.
#pragma once

#include <cstddef>
#include <functional>
#include <string>
#include <vector>

#include "core/problem.h"
#include "plan/plan.h"

namespace fusedconv {

std::string cuda_version();        // of the toolkit this was built with, or "not built"
std::string cuda_architectures();  // "90a-real", "80 90a-real"; empty without CUDA
std::vector<std::string> cuda_chains();
// Throws std::invalid_argument if FUSEDCONV_CUDA_SOURCE asks for what there is not.
void check_cuda_source();
// Empty if the device can run this build's kernels, else the reason.
std::string cuda_status(int device);

// A chain, or its backward, that is ready to run on one device, for problems that differ in their pointers
// only.
template <class AnyProblem>
struct CudaRun {
  Plan plan;
  // Queues it on a stream; empty where the conv is left to PyTorch.
  std::function<void(const AnyProblem& problem, void* workspace, void* stream)> run;
};

// Throws std::invalid_argument for a chain without a kernel. Where CUDA fails, here or in a run, and where a
// given tensor's sizes are beyond what can be computed, std::runtime_error names the operator and says why.
CudaRun<Problem> prepare_on_cuda(const std::string& chain, const Problem& problem, int device);
// Where the conv is left to PyTorch, v must be given; there may be no kernel even then.
CudaRun<BackwardProblem> prepare_on_cuda(const std::string& chain, const BackwardProblem& problem,
                                         int device);

}  // namespace fusedconv

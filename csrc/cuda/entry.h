// The CUDA backend as the rest sees it; entry_absent.cpp answers for a build without CUDA.
#pragma once

#include <string>
#include <vector>

#include "../core/problem.h"

namespace fusedconv {

std::string cuda_version();        // of the toolkit this was built with, or "not built"
std::string cuda_architectures();  // "90", "80;90a"; empty without CUDA
std::vector<std::string> cuda_chains();
// Empty if the device can run this build's kernels, else the reason.
std::string cuda_status(int device);

// Queues a chain on a stream of a device. Throws std::invalid_argument for a chain without a kernel and
// std::runtime_error, with CUDA's message, if the launch fails.
void run_on_cuda(const std::string& chain, const Problem& problem, int device, void* stream);

}  // namespace fusedconv

// The CUDA backend as the rest sees it; entry_absent.cpp answers for a build without CUDA.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "../core/problem.h"

namespace fusedconv {

std::string cuda_version();        // of the toolkit this was built with, or "not built"
std::string cuda_architectures();  // "90", "80;90a"; empty without CUDA
std::vector<std::string> cuda_chains();
// Empty if the device can run this build's kernels, else the reason.
std::string cuda_status(int device);

// Bytes of memory on the device that a run of this chain wants; pointers in the problem do not matter.
size_t cuda_workspace(const std::string& chain, const Problem& problem, int device);
// Queues a chain on a stream of a device. Both throw std::invalid_argument for a chain without a kernel and
// std::runtime_error, with CUDA's message, if something fails.
void run_on_cuda(const std::string& chain, const Problem& problem, void* workspace, int device, void* stream);

}  // namespace fusedconv

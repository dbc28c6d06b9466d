// CUDA's errors as exceptions.
#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace fusedconv {

inline void check_cuda(cudaError_t status, const std::string& what) {
  if (status != cudaSuccess) {
    cudaGetLastError();  // the next launch must not report this one
    throw std::runtime_error("fusedconv: " + what + ": " + cudaGetErrorName(status) + ": " +
                             cudaGetErrorString(status));
  }
}

}  // namespace fusedconv

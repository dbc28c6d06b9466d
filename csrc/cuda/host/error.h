// CUDA's errors as exceptions. Whoever catches them last adds the operator's name.
#pragma once

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace fusedconv {

inline void check_cuda(cudaError_t status, const char* what) {
  if (status != cudaSuccess) {
    cudaGetLastError();  // the next launch must not report this one
    const char* const advice =
        status == cudaErrorInitializationError
            ? " (a process that was forked from one that had used CUDA cannot use it: 'spawn' it)"
            : "";
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorName(status) + ": " +
                             cudaGetErrorString(status) + advice);
  }
}

}  // namespace fusedconv

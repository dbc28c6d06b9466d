// The chains that have a CUDA kernel. Each has a file <name>.cu.
#pragma once

#include <cuda_runtime_api.h>

#include "../core/problem.h"

#define FUSEDCONV_FOR_EACH_CUDA_CHAIN(X) X(relu_hardswish)

namespace fusedconv {
namespace cuda {

struct Kernel {
  // Queues the chain on a stream of the current device; the status is the launch's.
  cudaError_t (*launch)(const Problem& problem, cudaStream_t stream);
  // Loads the chain's code onto the current device, which a stream capture would not allow.
  cudaError_t (*load)();
};

#define FUSEDCONV_DECLARE(name) extern const Kernel name;
FUSEDCONV_FOR_EACH_CUDA_CHAIN(FUSEDCONV_DECLARE)
#undef FUSEDCONV_DECLARE

}  // namespace cuda
}  // namespace fusedconv

#pragma once

#include <cuda_runtime_api.h>

namespace fusedconv {
namespace cuda {

// For which architecture those kernels were compiled that the current device runs, such as 90; a newer device
// may run those of an older one. Loads code.
cudaError_t find_architecture(int& architecture);

}  // namespace cuda
}  // namespace fusedconv

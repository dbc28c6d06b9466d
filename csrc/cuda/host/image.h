// All code for some architectures. Each image is compiled from the same sources, but for those of convs where
// it has none, in a namespace of its own, as the CPU's instruction sets are; which ones a build has follows
// from its list of architectures.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "kernels.h"

namespace fusedconv {
namespace cuda {

struct Image {
  Instructions instructions;  // of convs
  // Devices that may run it, by their compute capability.
  int first_capability, last_capability;
  // For which architecture those of its kernels were compiled that the current device runs, such as 90; an
  // error if it runs none. Loads code.
  cudaError_t (*find_architecture)(int& architecture);
  // Null for a name that is no chain's.
  const Kernel* (*find_kernel)(const std::string& chain);
};

}  // namespace cuda
}  // namespace fusedconv

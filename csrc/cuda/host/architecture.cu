#include "architecture.h"

namespace fusedconv {
namespace cuda {
namespace {

__global__ void any_kernel() {}

}  // namespace

cudaError_t find_architecture(int& architecture) {
  cudaFuncAttributes attributes{};
  const cudaError_t status = cudaFuncGetAttributes(&attributes, any_kernel);
  architecture = attributes.ptxVersion;
  return status;
}

}  // namespace cuda
}  // namespace fusedconv

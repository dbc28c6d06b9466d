// Packs the operands of a conv's products, once for all passes: weights as the left one, the input as the
// right one, in the shapes that conv_tiling.h tells.
#pragma once

#include <cuda_runtime.h>

#include "cuda/device/split.cuh"
#include "problem.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

cudaError_t launch_pack(const ConvProblem& p, cudaStream_t stream);

// Loads its kernels onto the current device.
cudaError_t load_pack();

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

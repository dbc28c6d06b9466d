// Packs a conv's weights as the left operand of its products: for each block of 64 rows, chunk, part and half
// step, 64 units of 8 values. Zeros stand where a row has no tap. The bias goes with them, row by row, in
// float, and what tells whether one scale for all pixels of a tile will do: see conv_fill.cuh.
#pragma once

#include <cuda_runtime.h>

#include "conv_modes.cuh"
#include "conv_problem.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

template <class Mode>
cudaError_t launch_pack_weights(const ConvProblem& p, cudaStream_t stream);

// Loads its kernel onto the current device.
template <class Mode>
cudaError_t load_pack_weights();

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

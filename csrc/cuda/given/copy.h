// A tensor of any strides to one of any other strides.
#pragma once

#include <cuda_runtime_api.h>

#include "core/problem.h"
#include "core/target.h"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// Sizes and dtypes are the same.
cudaError_t launch_copy(const Tensor& from, const Tensor& to, cudaStream_t stream);
cudaError_t load_copy();

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

// How a tensor's values lie in memory.
#pragma once

#include "core/problem.h"
#include "core/target.h"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// Rows that follow each other without a gap.
FUSEDCONV_INLINE bool has_joined_rows(const Tensor& tensor) {
  return tensor.stride[2] == tensor.size[3] * tensor.stride[3];
}

FUSEDCONV_INLINE void join_rows(Tensor& tensor) {
  tensor.size[3] *= tensor.size[2];
  tensor.size[2] = 1;
  tensor.stride[2] = tensor.size[3] * tensor.stride[3];
}

// All rows and columns of a sample are pixels at one distance, and each pixel's channels lie side by side.
FUSEDCONV_INLINE bool has_channels_side_by_side(const Tensor& tensor) {
  const bool is_pixel = tensor.size[2] * tensor.size[3] == 1;
  return tensor.stride[1] == 1 && (is_pixel || has_joined_rows(tensor));
}

// The same, and a pixel follows the one before without a gap.
FUSEDCONV_INLINE bool is_channels_last(const Tensor& tensor) {
  return tensor.stride[1] == 1 && tensor.stride[3] == tensor.size[1] && has_joined_rows(tensor);
}

// The channels of a pixel become pixels.
FUSEDCONV_INLINE void take_channels_for_pixels(Tensor& tensor) {
  tensor.size[3] *= tensor.size[1];
  tensor.size[1] = 1;
  tensor.stride[3] = 1;
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

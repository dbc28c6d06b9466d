// The plain structs that cross from Python to the kernels: pointers, sizes, strides.
#pragma once

#include <cstdint>

#include "inline.h"

namespace fusedconv {

enum class DType : int { kFloat32, kFloat64, kBFloat16, kFloat16 };

// A tensor (N, C, H, W) that the caller owns; strides in elements.
struct Tensor {
  void* data;
  DType dtype;
  int64_t size[4];
  int64_t stride[4];
};

FUSEDCONV_INLINE int64_t element_count(const Tensor& tensor) {
  return tensor.size[0] * tensor.size[1] * tensor.size[2] * tensor.size[3];
}

// A value for each channel, contiguous; null where absent. See parameter.h.
struct Parameter {
  const void* data;
  DType dtype;
};

// A Conv2d with one group. weight is (C_out, C_in, KH, KW).
struct Conv {
  Tensor weight;
  Parameter bias;
  int64_t stride[2];
  int64_t padding[2];
  int64_t dilation[2];
  bool tf32;  // float32 products of TF32 precision will do
};

// What the stages after the conv take.
struct Arguments {
  Parameter bias;
  Parameter scale;
  Parameter norm_weight;
  Parameter norm_bias;
  int64_t num_groups;
  double eps;
  int64_t pool[2];
  double clamp_min;
  double clamp_max;
};

// Backward of a chain on v: from the gradient of its output to those of v and of the parameters. All tensors
// are contiguous, of v's dtype: float32 or float64.
struct BackwardProblem {
  Tensor v;
  const void* grad;
  Arguments arguments;
  // Like v, and written whether it is wanted or not: steps keep in it what they need between them. May be v
  // itself where nothing is reduced.
  void* grad_v;
  bool wants_v;
  void* bias;  // gradients of the parameters: a value a channel; null where nobody wants it
  void* scale;
  void* norm_weight;
  void* norm_bias;
};

// One call: output = chain(v), where v = conv(input), or v = input if conv is null.
struct Problem {
  Tensor input;
  const Conv* conv;
  Arguments arguments;
  Tensor output;
};

}  // namespace fusedconv

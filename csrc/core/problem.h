// The plain structs that cross from Python to the kernels: pointers, sizes, strides.
#pragma once

#include <cstdint>

#include "channel_parameters.h"
#include "inline.h"

namespace fusedconv {

enum class DType : int { kFloat32, kFloat64, kBFloat16, kFloat16 };

FUSEDCONV_INLINE int64_t bytes_of(DType dtype) {
  return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2;
}

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

// A Conv2d. weight is (C_out, C_in / groups, KH, KW); kernels take one group only.
struct Conv {
  Tensor weight;
  Parameter bias;
  int64_t stride[2];
  int64_t padding[2];
  int64_t dilation[2];
  bool tf32;  // float32 products of TF32 precision will do
  int64_t groups = 1;
};

// What the stages after the conv take.
struct Arguments {
  Parameter parameters[kChainParameters];
  int64_t num_groups;
  double eps;
  int64_t pool[2];
  double clamp_min;
  double clamp_max;
};

// Of a GroupNorm's group in one sample.
struct GroupStatistics {
  double mean;
  double inverse_deviation;  // 1 / sqrt(variance + eps)
};

// What the conv's part of backward takes and gives. Where v is the chain's input there is none.
struct ConvBackward {
  Tensor input;
  Conv conv;
  Tensor grad_input;  // contiguous, of input's dtype; data is null where nobody wants it
  void* grad_weight;  // contiguous, of the compute type; null where nobody wants it
};

// Whose gradients somebody wants.
struct Wanted {
  bool v, input, weight;  // v's, or what follows from it
  bool parameters[kGradientKinds];
};

// Backward of a chain: from the gradient of its output to those of v and of the parameters, which are values
// a channel in the compute type: double where v is, else float.
struct BackwardProblem {
  Tensor v;  // contiguous; without memory where conv is not null: then it is computed again
  const void* grad;
  DType grad_dtype;  // on the CPU v's, as that of grad_v: float32 or float64
  Arguments arguments;
  const GroupStatistics* statistics;  // those that forward found; null where the chain has no norm
  // Like v, and may be v itself where nothing is reduced. The CPU writes it whether it is wanted or not:
  // steps keep in it what they need between them.
  void* grad_v;
  DType grad_v_dtype;
  Wanted wants;  // all that a plan looks at; a run brings memory for those, and null for the others
  void* grad_parameters[kGradientKinds];
  const ConvBackward* conv;  // on the CPU only float32's, of stride 1
};

// One call: output = chain(v), where v = conv(input), or v = input if conv is null.
struct Problem {
  Tensor input;
  const Conv* conv;
  Arguments arguments;
  Tensor output;
  GroupStatistics* statistics = nullptr;  // [N][num_groups], for backward; null where nobody wants them
};

}  // namespace fusedconv

// A conv in plain arithmetic: for the pixels at which that of the tensor cores would not do. See scales.cuh.
#pragma once

#include "elements.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// Down and across.
struct ConvTaps {
  int padding[2], dilation[2];
};

// The output at a pixel, without the bias, where infinities and NaN mean what they mean in PyTorch. The
// stride is 1.
__device__ inline float plain_conv_at(const Tensor& input, const Tensor& weight, const ConvTaps& taps,
                                      int64_t sample, int channel, int row, int col) {
  float sum = 0;
  // No loop is unrolled: what is rare must not take registers and instruction cache from what is not.
#pragma unroll 1
  for (int kh = 0; kh < int(weight.size[2]); ++kh) {
#pragma unroll 1
    for (int kw = 0; kw < int(weight.size[3]); ++kw) {
      const int h = row - taps.padding[0] + kh * taps.dilation[0];
      const int w = col - taps.padding[1] + kw * taps.dilation[1];
      const bool exists = unsigned(h) < unsigned(input.size[2]) && unsigned(w) < unsigned(input.size[3]);
      int64_t from = sample * input.stride[0] + h * input.stride[2] + w * input.stride[3];
      int64_t at = channel * weight.stride[0] + kh * weight.stride[2] + kw * weight.stride[3];
#pragma unroll 1
      for (int c = 0; c < int(weight.size[1]); ++c, from += input.stride[1], at += weight.stride[1]) {
        // The padding's zeros count: times infinity they are NaN.
        const float pixel = exists ? value_at<float>(input, from) : 0.0f;
        sum = fmaf(pixel, value_at<float>(weight, at), sum);
      }
    }
  }
  return sum;
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

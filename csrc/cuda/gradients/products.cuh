// What both gradients of a conv share: products of packed rows, copies of their units, and the way back from
// their scales.
#pragma once

#include "conv_gradients.cuh"
#include "cuda/conv/problem.cuh"
#include "cuda/device/barriers.cuh"
#include "cuda/device/mma_sync.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// Of two operands of so many parts: of two low * high, high * low, then high * high. Small ones come first,
// as the tensor cores cut off what does not fit beside a larger sum.
template <class Mode>
constexpr int kProducts = Mode::kParts == 2 ? 3 : 1;

template <class Mode>
__device__ void multiply_parts(int product, float* d, const uint32_t (&a)[Mode::kParts][4],
                               const uint32_t (&b)[Mode::kParts][2]) {
  const int of_a = Mode::kParts == 2 && product == 0;
  const int of_b = Mode::kParts == 2 && product == 1;
  multiply_add<typename Mode::Element>(d, a[of_a], b[of_b][0], b[of_b][1]);
}

// Adds what is divided by two to some power, in two steps where one factor would not be a float.
class Unscale {
 public:
  __device__ explicit Unscale(int exponent)
      : is_small_(abs(exponent) <= kMostExponent),
        first_(power_of_two(is_small_ ? -exponent : -(exponent / 2))),
        second_(power_of_two(is_small_ ? 0 : exponent / 2 - exponent)) {}

  template <int kCount>
  __device__ void add(float (&sums)[kCount], const float (&d)[kCount]) const {
    if (is_small_) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) sums[i] = fmaf(d[i], first_, sums[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) sums[i] = fmaf(d[i] * first_, second_, sums[i]);
    }
  }

 private:
  const bool is_small_;
  const float first_, second_;
};

// The first taps of a window of the kernel.
struct WindowPlace {
  int down, across;

  __device__ WindowPlace(const ConvShape& shape, int window)
      : down(window / shape.windows[1] * kTaps), across(window % shape.windows[1] * kTaps) {}
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

// What both gradients of a conv share: products of packed rows, and windows of the kernel.
#pragma once

#include "conv_gradients.cuh"
#include "cuda/device/barriers.cuh"
#include "cuda/device/elements.cuh"
#include "cuda/device/mma_sync.cuh"
#include "cuda/device/split.cuh"
#include "cuda/device/warp.cuh"

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

// The first taps of a window of the kernel.
struct WindowPlace {
  int down, across;

  __device__ WindowPlace(const ConvShape& shape, int window)
      : down(window / shape.windows[1] * kTaps), across(window % shape.windows[1] * kTaps) {}
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

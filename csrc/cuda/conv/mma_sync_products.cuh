// Products by mma.sync.
#pragma once

#include "cuda/device/mma_sync.cuh"
#include "operands.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// mma.sync takes operands from registers; ldmatrix puts them there.
struct MmaSyncProducts {
  static constexpr int kColumns = 64;  // of one group of four warps

  // kFirst: the accumulators are taken for zeros.
  template <class Mode, bool kFirst>
  __device__ static void add(float (&d)[kColumns / 2], const Operands& from) {
    if (kFirst) {
#pragma unroll
      for (int i = 0; i < kColumns / 2; ++i) d[i] = 0;
    }
    // The fewer products are added to a sum that has its size, the less is cut off: so the small products
    // come first.
    if constexpr (Mode::kParts == 2) add_products<Mode, true>(d, from);
    add_products<Mode, false>(d, from);
  }

 private:
  // Those of the first parts, or the small ones, with a second part.
  template <class Mode, bool kSmall>
  __device__ static void add_products(float (&d)[kColumns / 2], const Operands& from) {
    using Element = typename Mode::Element;
    constexpr int kParts = kSmall ? 2 : 1;
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32 % 4;
    // Lanes 0 to 7 give the rows of the first 8x8 matrix, 8 to 15 those of the second, and so on. Of the
    // weights these are rows 0 to 7 and 8 to 15 of the first half step, then of the second; of the pixels
    // both halves of 8 columns, then of the next 8.
    const uint32_t a_lane =
        from.weights + (warp * 16 + lane % 16) * cuda::kUnitBytes + lane / 16 * kHalfStepBytes;
    const uint32_t b_lane = from.pixels + (lane % 8 + lane / 16 * 8) * cuda::kUnitBytes;
    const uint32_t second_half = lane / 8 % 2;
    for (int s = 0; s < from.steps; ++s) {
      const uint32_t entry = from.offsets[s];
      const uint32_t b_step = b_lane + ((entry & 0xffff) + (entry >> 16) * second_half) * cuda::kUnitBytes;
      uint32_t a[kParts][4];
#pragma unroll
      for (int part = 0; part < kParts; ++part)
        load_matrices(a[part], a_lane + s * 2 * kHalfStepBytes + part * from.weights_part);
#pragma unroll
      for (int j = 0; j < kColumns / 16; ++j) {
        uint32_t b[kParts][4];
#pragma unroll
        for (int part = 0; part < kParts; ++part)
          load_matrices(b[part], b_step + j * 16 * cuda::kUnitBytes + part * from.pixels_part);
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          float* to = d + (2 * j + k) * 4;
          if constexpr (kSmall) {
            multiply_add<Element>(to, a[1], b[0][2 * k], b[0][2 * k + 1]);
            multiply_add<Element>(to, a[0], b[1][2 * k], b[1][2 * k + 1]);
          } else {
            multiply_add<Element>(to, a[0], b[0][2 * k], b[0][2 * k + 1]);
          }
        }
      }
    }
  }
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

// The tensor cores' products of one chunk, added to accumulators in registers. Two sources of the same
// values: Sm90a by wgmma, Sm80 by mma.sync. Both leave the accumulators in the same places: of four in a row,
// two belong to row 16 * warp + lane / 4 and two to the row 8 further down, in columns 8 * (i / 4) + 2 *
// (lane % 4) and the next.
#pragma once

#include <type_traits>

#include "cuda/device/barriers.cuh"
#include "cuda/device/mma_sync.cuh"
#include "cuda/device/split.cuh"
#include "problem.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

using cuda::kMostSumSteps;

// Operands of some steps of a chunk in shared memory: see ConvTiling. A half step is one unit along the sum:
// its weights are kRows units.
struct Operands {
  uint32_t weights;  // shared addresses of the first parts
  uint32_t pixels;
  uint32_t weights_part;  // bytes from one part to the next
  uint32_t pixels_part;
  const uint32_t* offsets;
  int steps;  // at most kMostSumSteps
};

constexpr int kHalfStepBytes = cuda::kRows * cuda::kUnitBytes;

// mma.sync takes operands from registers; ldmatrix puts them there.
struct Sm80 {
  static constexpr int kColumns = 64;  // of one group of four warps
  static constexpr bool kCompiles = kConvCompiles;

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

// wgmma: four warps multiply operands that it reads from shared memory by itself.
struct Sm90a {
  static constexpr int kColumns = 128;

#ifndef __CUDA_ARCH_FEAT_SM90_ALL
  static constexpr bool kCompiles = false;  // other architectures run Sm80
#else
  static constexpr bool kCompiles = true;

  // Of operands' descriptors, the high halves: 8 units one after the other are a core matrix, the next 8 rows
  // follow 128 bytes on.
  static constexpr uint32_t kDescriptorHigh = 8 * cuda::kUnitBytes >> 4;

// access: how accumulators are used, "+f" or, where sums start, "=f".
#define FUSEDCONV_WGMMA(types, access, keeps)                                                               \
  asm volatile("{ .reg .pred p; .reg .b64 a, b; setp.ne.b32 p, " keeps                                      \
               ", 0; mov.b64 a, {%64, %66}; "                                                               \
               "mov.b64 b, {%65, %66}; wgmma.mma_async.sync.aligned.m64n128k16.f32." types                  \
               " {"                                                                                         \
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, " \
               "%20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, " \
               "%38, %39, %40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, " \
               "%56, %57, %58, %59, %60, %61, %62, %63"                                                     \
               "}, a, b, p, 1, 1, 0, 0; }"                                                                  \
               : access(d[0]), access(d[1]), access(d[2]), access(d[3]), access(d[4]), access(d[5]),        \
                 access(d[6]), access(d[7]), access(d[8]), access(d[9]), access(d[10]), access(d[11]),      \
                 access(d[12]), access(d[13]), access(d[14]), access(d[15]), access(d[16]), access(d[17]),  \
                 access(d[18]), access(d[19]), access(d[20]), access(d[21]), access(d[22]), access(d[23]),  \
                 access(d[24]), access(d[25]), access(d[26]), access(d[27]), access(d[28]), access(d[29]),  \
                 access(d[30]), access(d[31]), access(d[32]), access(d[33]), access(d[34]), access(d[35]),  \
                 access(d[36]), access(d[37]), access(d[38]), access(d[39]), access(d[40]), access(d[41]),  \
                 access(d[42]), access(d[43]), access(d[44]), access(d[45]), access(d[46]), access(d[47]),  \
                 access(d[48]), access(d[49]), access(d[50]), access(d[51]), access(d[52]), access(d[53]),  \
                 access(d[54]), access(d[55]), access(d[56]), access(d[57]), access(d[58]), access(d[59]),  \
                 access(d[60]), access(d[61]), access(d[62]), access(d[63])                                 \
               : "r"(a), "r"(b), "n"(kDescriptorHigh))

  // a, b: the low halves of the operands' descriptors.
  template <class Mode, bool kFirst = false>
  __device__ static void multiply(float (&d)[kColumns / 2], uint32_t a, uint32_t b) {
    constexpr bool kHalf = std::is_same_v<typename Mode::Element, __half>;
    if constexpr (kHalf && kFirst) {
      FUSEDCONV_WGMMA("f16.f16", "=f", "0");
    } else if constexpr (kHalf) {
      FUSEDCONV_WGMMA("f16.f16", "+f", "1");
    } else if constexpr (kFirst) {
      FUSEDCONV_WGMMA("bf16.bf16", "=f", "0");
    } else {
      FUSEDCONV_WGMMA("bf16.bf16", "+f", "1");
    }
  }
#undef FUSEDCONV_WGMMA

  // kFirst: the accumulators are taken for zeros.
  template <class Mode, bool kFirst>
  __device__ static void add(float (&d)[kColumns / 2], const Operands& from) {
    const uint32_t weights = (from.weights >> 4) | (kHalfStepBytes >> 4) << 16;
    const uint32_t pixels = from.pixels >> 4;
    constexpr uint32_t kStep = 2 * kHalfStepBytes >> 4;
    // A step ends what it starts in the compiler's eyes, as it sees threads part at each branch; else it
    // would have one step wait for the other.
    const auto for_each_step = [&](const auto& first_step, const auto& step) {
      asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
      first_step(weights, pixels + from.offsets[0]);
      asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#pragma unroll
      for (int s = 1; s < kMostSumSteps; ++s) {
        if (s >= from.steps) break;
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        step(weights + s * kStep, pixels + from.offsets[s]);
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      }
    };
    const auto large = [&](uint32_t a, uint32_t b) { multiply<Mode>(d, a, b); };
    // The small products first, as in Sm80.
    if constexpr (Mode::kParts == 2) {
      const uint32_t weights_part = from.weights_part >> 4;
      const uint32_t pixels_part = from.pixels_part >> 4;
      for_each_step(
          [&](uint32_t a, uint32_t b) {
            multiply<Mode, kFirst>(d, a + weights_part, b);
            multiply<Mode>(d, a, b + pixels_part);
          },
          [&](uint32_t a, uint32_t b) {
            multiply<Mode>(d, a + weights_part, b);
            multiply<Mode>(d, a, b + pixels_part);
          });
      for_each_step(large, large);
    } else {
      for_each_step([&](uint32_t a, uint32_t b) { multiply<Mode, kFirst>(d, a, b); }, large);
    }
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  }
#endif
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

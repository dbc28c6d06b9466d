// The tensor cores' products of one chunk, added to accumulators in registers. Two sources of the same
// values: Sm90a by wgmma, Sm80 by mma.sync. Both leave the accumulators in the same places: of four in a row,
// two belong to row 16 * warp + lane / 4 and two to the row 8 further down, in columns 8 * (i / 4) + 2 *
// (lane % 4) and the next.
#pragma once

#include <type_traits>

#include "barriers.cuh"
#include "conv_modes.cuh"
#include "conv_tiling.h"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// Operands of one chunk in shared memory, and its steps: see ConvTiling. A half step is one unit along the
// sum: its weights are kRows units.
struct Operands {
  uint32_t weights;  // shared addresses of the first parts
  uint32_t pixels;
  uint32_t weights_part;  // bytes from one part to the next
  uint32_t pixels_part;
  const uint32_t* offsets;
  int steps;
};

constexpr int kHalfStepBytes = cuda::kRows * cuda::kUnitBytes;

// mma.sync takes operands from registers; ldmatrix puts them there.
struct Sm80 {
  static constexpr int kColumns = 64;  // of one group of four warps
  static constexpr bool kCompiles = true;

  __device__ static void load_matrices(uint32_t (&to)[4], uint32_t address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address));
  }

  template <class Mode>
  __device__ static void multiply(float* d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
    if constexpr (std::is_same_v<typename Mode::Element, __half>) {
      asm volatile(
          "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
          "{%0, %1, %2, %3};"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    } else {
      asm volatile(
          "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
          "{%0, %1, %2, %3};"
          : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
          : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    }
  }

  template <class Mode>
  __device__ static void add(float (&d)[kColumns / 2], const Operands& from, bool first) {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32 % 4;
    if (first) {
#pragma unroll
      for (int i = 0; i < kColumns / 2; ++i) d[i] = 0;
    }
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
      uint32_t a[Mode::kParts][4];
#pragma unroll
      for (int part = 0; part < Mode::kParts; ++part) {
        load_matrices(a[part], a_lane + s * 2 * kHalfStepBytes + part * from.weights_part);
      }
#pragma unroll
      for (int j = 0; j < kColumns / 16; ++j) {
        uint32_t b[Mode::kParts][4];
#pragma unroll
        for (int part = 0; part < Mode::kParts; ++part) {
          load_matrices(b[part], b_step + j * 16 * cuda::kUnitBytes + part * from.pixels_part);
        }
#pragma unroll
        for (int k = 0; k < 2; ++k) {
          float* to = d + (2 * j + k) * 4;
          if constexpr (Mode::kParts == 2) {  // the smaller products first
            multiply<Mode>(to, a[1], b[0][2 * k], b[0][2 * k + 1]);
            multiply<Mode>(to, a[0], b[1][2 * k], b[1][2 * k + 1]);
          }
          multiply<Mode>(to, a[0], b[0][2 * k], b[0][2 * k + 1]);
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

  // A matrix whose rows are units: 8 units one after the other are a core matrix, the next 8 rows follow 128
  // bytes on, the other half of the step `leading` bytes on.
  __device__ static uint64_t descriptor(uint32_t low) {
    return uint64_t(8 * cuda::kUnitBytes >> 4) << 32 | low;
  }

#define FUSEDCONV_WGMMA(types)                                                                              \
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %66, 0; wgmma.mma_async.sync.aligned.m64n128k16.f32." types  \
               " {"                                                                                         \
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                     \
               "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "           \
               "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "           \
               "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"             \
               "}, %64, %65, p, 1, 1, 0, 0; }"                                                              \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]),        \
                 "+f"(d[7]), "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]),    \
                 "+f"(d[14]), "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), \
                 "+f"(d[21]), "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), \
                 "+f"(d[28]), "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), \
                 "+f"(d[35]), "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), \
                 "+f"(d[42]), "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), \
                 "+f"(d[49]), "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), \
                 "+f"(d[56]), "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), \
                 "+f"(d[63])                                                                                \
               : "l"(a), "l"(b), "r"(keep))

  template <class Mode>
  __device__ static void multiply(float (&d)[kColumns / 2], uint64_t a, uint64_t b, int keep) {
    if constexpr (std::is_same_v<typename Mode::Element, __half>) {
      FUSEDCONV_WGMMA("f16.f16");
    } else {
      FUSEDCONV_WGMMA("bf16.bf16");
    }
  }
#undef FUSEDCONV_WGMMA

  template <class Mode>
  __device__ static void add(float (&d)[kColumns / 2], const Operands& from, bool first) {
    const uint32_t weights = (from.weights >> 4) | (kHalfStepBytes >> 4) << 16;
    const uint32_t pixels = from.pixels >> 4;
    int keep = !first;
    const auto for_each_step = [&](const auto& multiply_step) {
      int s = 0;
      do {
        asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
        multiply_step(descriptor(weights + s * (2 * kHalfStepBytes >> 4)),
                      descriptor(pixels + from.offsets[s]));
        keep = 1;
        asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
      } while (++s < from.steps);
    };
    // The tensor cores cut sums off. The fewer products are added to a sum that has its size, the less is
    // lost: so the small products come first.
    if constexpr (Mode::kParts == 2) {
      for_each_step([&](uint64_t a, uint64_t b) {
        multiply<Mode>(d, a + (from.weights_part >> 4), b, keep);
        multiply<Mode>(d, a, b + (from.pixels_part >> 4), 1);
      });
    }
    for_each_step([&](uint64_t a, uint64_t b) { multiply<Mode>(d, a, b, keep); });
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
  }
#endif
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

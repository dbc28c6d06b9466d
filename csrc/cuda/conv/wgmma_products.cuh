// Products by wgmma, which sm_90a alone has.
#pragma once

#include <type_traits>

#include "cuda/device/split.cuh"
#include "operands.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// wgmma: four warps multiply operands that it reads from shared memory by itself.
struct WgmmaProducts {
  static constexpr int kColumns = 128;

  // Of operands' descriptors, the high halves: 8 units one after the other are a core matrix, the next 8 rows
  // follow 128 bytes on.
  static constexpr uint32_t kDescriptorHigh = 8 * cuda::kUnitBytes >> 4;

// Eight of the accumulators.
#define FUSEDCONV_ACCESS(access, i)                                                                       \
  access(d[i]), access(d[i + 1]), access(d[i + 2]), access(d[i + 3]), access(d[i + 4]), access(d[i + 5]), \
      access(d[i + 6]), access(d[i + 7])
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
               : FUSEDCONV_ACCESS(access, 0), FUSEDCONV_ACCESS(access, 8), FUSEDCONV_ACCESS(access, 16),    \
                 FUSEDCONV_ACCESS(access, 24), FUSEDCONV_ACCESS(access, 32), FUSEDCONV_ACCESS(access, 40),  \
                 FUSEDCONV_ACCESS(access, 48), FUSEDCONV_ACCESS(access, 56)                                 \
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
#undef FUSEDCONV_ACCESS

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
    // The small products first, as with mma.sync.
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
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

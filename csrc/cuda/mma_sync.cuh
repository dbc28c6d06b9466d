// mma.sync: d += a * b of one warp, from operands in registers. Of 16 rows and 8 columns a lane has, in d,
// rows lane / 4 and 8 further down, columns 2 * (lane % 4) and the next. An operand's word is one float, read
// as TF32, or two neighbours along the sum; a's are those of both rows, then again 4 words further on.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "../core/target.h"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

#define FUSEDCONV_MMA(shape_and_types)                                                                       \
  asm("mma.sync.aligned." shape_and_types " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                       \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))

template <class Element>
__device__ inline void multiply_add(float* d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<Element, __half>) {
    FUSEDCONV_MMA("m16n8k16.row.col.f32.f16.f16.f32");
  } else if constexpr (std::is_same_v<Element, __nv_bfloat16>) {
    FUSEDCONV_MMA("m16n8k16.row.col.f32.bf16.bf16.f32");
  } else {
    static_assert(std::is_same_v<Element, float>);
    FUSEDCONV_MMA("m16n8k8.row.col.f32.tf32.tf32.f32");
  }
}

#undef FUSEDCONV_MMA

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

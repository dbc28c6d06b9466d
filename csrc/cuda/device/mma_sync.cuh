// mma.sync: d += a * b of one warp, from operands in registers that ldmatrix loads from shared memory. Of d's
// 16 rows and 8 columns a lane has rows lane / 4 and 8 further down, columns 2 * (lane % 4) and the next.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "core/target.h"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

#define FUSEDCONV_MMA(types)                                                          \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." types                         \
               ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                       \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))

template <class Element>
__device__ inline void multiply_add(float* d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<Element, __half>) {
    FUSEDCONV_MMA("f16.f16");
  } else {
    static_assert(std::is_same_v<Element, __nv_bfloat16>);
    FUSEDCONV_MMA("bf16.bf16");
  }
}

#undef FUSEDCONV_MMA

// The same for halves and a sum half as long: a's first two words, b's first one.
__device__ inline void multiply_add_half_step(float* d, uint32_t a0, uint32_t a1, uint32_t b0) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a0), "r"(a1), "r"(b0));
}

// Four matrices of 8 rows, 16 bytes each: lanes 0 to 7 give the rows' addresses of the first, and so on.
__device__ inline void load_matrices(uint32_t (&to)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address));
}

__device__ inline void load_transposed(uint32_t (&to)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(address));
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

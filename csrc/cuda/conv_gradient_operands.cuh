// Operands of the conv's gradients for mma.sync, from values as they stand in shared memory. Float32 is exact
// by three products of two TF32 parts each: low * high, high * low and high * high.
#pragma once

#include "conv_modes.cuh"
#include "conv_problem.cuh"
#include "mma_sync.cuh"
#include "vector_access.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// To the nearest value of TF32's 10 bits of mantissa.
__device__ inline uint32_t round_to_tf32(uint32_t bits) { return (bits + 0x1000u) & 0xffffe000u; }

// A word of an operand in so many parts: a float in one or two, or a pair of half precision as it is.
template <class Mode>
struct Word {
  static constexpr int kParts = Mode::kParts;
  static constexpr int kProducts = kParts == 2 ? 3 : 1;
  uint32_t part[kParts];

  __device__ void set(uint32_t bits) {
    part[0] = bits;
    if constexpr (std::is_same_v<typename Mode::In, float>) {
      const float x = __uint_as_float(bits);
      part[0] = round_to_tf32(bits);  // of a NaN perhaps a zero
      if constexpr (kParts == 2) {
        part[1] = __float_as_uint(x - __uint_as_float(part[0]));
      } else if (x != x) {
        part[0] = bits;
      }
    }
  }
};

struct alignas(16) WordsOfA {
  uint32_t word[4];
};

// Those of one step along the sum.
template <class Mode>
struct StepOfA {
  using W = Word<Mode>;
  WordsOfA part[W::kParts];

  __device__ void set(int i, uint32_t bits) {
    W word;
    word.set(bits);
#pragma unroll
    for (int p = 0; p < W::kParts; ++p) part[p].word[i] = word.part[p];
  }
};

// One of the products of a step; small ones come first.
template <class Mode>
__device__ void multiply_step(int product, float* d, const StepOfA<Mode>& a, const Word<Mode>& b0,
                              const Word<Mode>& b1) {
  using W = Word<Mode>;
  const int of_a = W::kParts == 2 && product == 0;
  const int of_b = W::kParts == 2 && product == 1;
  multiply_add<typename Mode::In>(d, a.part[of_a].word, b0.part[of_b], b1.part[of_b]);
}

// Copies kBytes from global to shared memory; zeros where nothing exists, and then global may point anywhere.
// Asynchronous, if it is of 4 bytes or more.
template <int kBytes>
__device__ void copy_or_clear(void* shared, const void* global, bool exists) {
  if constexpr (kBytes >= 4) {
    __pipeline_memcpy_async(shared, global, kBytes, exists ? 0 : kBytes);
  } else {
    *static_cast<uint16_t*>(shared) = exists ? *static_cast<const uint16_t*>(global) : uint16_t(0);
  }
}

// Calls visit with the bytes of a copy of so many values, known when compiled.
template <class In, class Visit>
__device__ void visit_copy_bytes(int values, const Visit& visit) {
  switch (values * int(sizeof(In))) {
    case 16:
      return visit(std::integral_constant<int, 16>{});
    case 8:
      return visit(std::integral_constant<int, 8>{});
    case 4:
      return visit(std::integral_constant<int, 4>{});
    default:
      return visit(std::integral_constant<int, 2>{});
  }
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

// Gradients of pixels next to each other, of a dtype that is known when a kernel runs.
#pragma once

#include "elements.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// Two as they lie in memory: to convert them at once would be to wait for each load by itself. Of two bytes
// each, a pair that was loaded at once stays in the first word.
struct GradientPair {
  uint32_t word[2];

  // second: of the second one's place, if they are no pair in memory.
  template <class Word>
  __device__ void load(const Word* at, const Word* second, bool is_pair) {
    if (!is_pair) {
      word[0] = *at;
      word[1] = *second;
    } else if constexpr (sizeof(Word) == sizeof(uint32_t)) {
      const uint2 pair = *reinterpret_cast<const uint2*>(at);
      word[0] = pair.x;
      word[1] = pair.y;
    } else {
      word[0] = *reinterpret_cast<const uint32_t*>(at);
    }
  }

  // For dtypes of two bytes.
  __device__ void widen(bool is_pair, bool is_bfloat16) {
    const auto widened = [is_bfloat16](uint32_t bits) {
      return __float_as_uint(from_half_bits(uint16_t(bits), is_bfloat16));
    };
    word[1] = widened(is_pair ? word[0] >> 16 : word[1]);
    word[0] = widened(word[0]);
  }

  __device__ float value(int i) const { return __uint_as_float(word[i]); }
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

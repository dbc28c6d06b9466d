// A unit of an operand, as it is loaded and as it is packed.
#pragma once

#include "cuda/device/split.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// 8 values: those of one unit of 16 bytes once they are halves. Held is what the input holds: float, or the
// bits of either type of two bytes.
template <class Held>
struct Unit {
  float value[kUnitElements];

  __device__ void set(const float* vectors) {
    const float4 first = reinterpret_cast<const float4*>(vectors)[0];
    const float4 second = reinterpret_cast<const float4*>(vectors)[1];
    value[0] = first.x, value[1] = first.y, value[2] = first.z, value[3] = first.w;
    value[4] = second.x, value[5] = second.y, value[6] = second.z, value[7] = second.w;
  }
  __device__ void set(int i, const float* from) { value[i] = *from; }
  __device__ void settle(bool) {}
};

// Values of two bytes are loaded into a register each, and put together when all of a thread's loads are on
// their way: they would be waited for.
template <>
struct Unit<uint16_t> {
  uint32_t word[kUnitElements];

  __device__ void set(const uint16_t* vector) {
    const uint4 words = *reinterpret_cast<const uint4*>(vector);
    word[0] = words.x, word[1] = words.y, word[2] = words.z, word[3] = words.w;
  }
  __device__ void set(int i, const uint16_t* from) { word[i] = *from; }
  __device__ void settle(bool was_vector) {
    if (was_vector) return;
#pragma unroll
    for (int i = 0; i < kUnitElements / 2; ++i) word[i] = __byte_perm(word[2 * i], word[2 * i + 1], 0x5410);
  }
};

// Writes a unit's parts; the second one, if there is one, so many units behind the first.
__device__ inline void store_unit(const Unit<float>& unit, float scale, int parts, uint4* to, int64_t part) {
  float x[kUnitElements];
#pragma unroll
  for (int i = 0; i < kUnitElements; ++i) x[i] = unit.value[i] * scale;
  PackedUnit<kUnitElements> packed[SplitHalves::kParts];
  pack_unit<SplitHalves>(x, packed);
  *to = words_of(packed[0]);
  if (parts == SplitHalves::kParts) to[part] = words_of(packed[1]);
}

__device__ inline void store_unit(const Unit<uint16_t>& unit, float, int, uint4* to, int64_t) {
  *to = {unit.word[0], unit.word[1], unit.word[2], unit.word[3]};
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

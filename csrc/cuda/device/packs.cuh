// Conversions between what tensors hold and what is computed in, and several elements at once.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_pipeline_primitives.h>

#include <type_traits>

#include "core/problem.h"
#include "core/target.h"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

constexpr int kVectorBytes = 16;  // the widest load

inline bool is_aligned(const void* data, size_t bytes) {
  return reinterpret_cast<uintptr_t>(data) % bytes == 0;
}

// What a chain on elements of a type computes in.
template <class Element>
using Compute = std::conditional_t<std::is_same_v<Element, double>, double, float>;

template <class T, class Element>
__device__ T widen(Element x) {
  return static_cast<T>(x);
}

template <class Element, class T>
__device__ Element narrow(T x) {
  return static_cast<Element>(x);
}

template <class Element, int kCount>
struct alignas(sizeof(Element) * kCount) Pack {
  Element element[kCount];
};

template <int kCount, class Element>
__device__ Pack<Element, kCount> load_pack(const Element* from) {
  return *reinterpret_cast<const Pack<Element, kCount>*>(from);
}

template <int kCount, class Element>
__device__ void store_pack(Element* to, const Pack<Element, kCount>& pack) {
  *reinterpret_cast<Pack<Element, kCount>*>(to) = pack;
}

// Of values that were just computed the compiler may make a store each; this is one for every 16 bytes. To
// global memory that the kernel does not read: other accesses may be moved across it.
template <int kCount, class Element>
__device__ void store_vector(Element* to, const Pack<Element, kCount>& pack) {
  constexpr int kBytes = int(sizeof(pack));
  if constexpr (kBytes < 8) {
    store_pack(to, pack);
  } else {
    uint2 words[kBytes / 8];
    memcpy(words, &pack, kBytes);
    if constexpr (kBytes == 8) {
      asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(to), "r"(words[0].x), "r"(words[0].y));
    } else {
#pragma unroll
      for (int i = 0; i < kBytes / 8; i += 2)
        asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(reinterpret_cast<uint2*>(to) + i),
                     "r"(words[i].x), "r"(words[i].y), "r"(words[i + 1].x), "r"(words[i + 1].y));
    }
  }
}

// Two values at a place of both.
__device__ inline void write_pair(float* to, float x, float y) {
  *reinterpret_cast<float2*>(to) = make_float2(x, y);
}
__device__ inline void write_pair(__half* to, float x, float y) {
  *reinterpret_cast<__half2*>(to) = __floats2half2_rn(x, y);
}
__device__ inline void write_pair(__nv_bfloat16* to, float x, float y) {
  *reinterpret_cast<__nv_bfloat162*>(to) = __floats2bfloat162_rn(x, y);
}

// Copies from global to shared memory, without waiting where the hardware can: see wait_for_copies().
template <int kCount, class Element>
__device__ void copy_pack(Element* shared, const Element* global) {
  constexpr size_t kBytes = sizeof(Pack<Element, kCount>);
  if constexpr (kBytes >= 4) {
    __pipeline_memcpy_async(shared, global, kBytes);
  } else {
    store_pack<kCount>(shared, load_pack<kCount>(global));
  }
}

// Until this thread's copies have arrived; other threads see them after a barrier.
__device__ inline void wait_for_copies() {
  __pipeline_commit();
  __pipeline_wait_prior(0);
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

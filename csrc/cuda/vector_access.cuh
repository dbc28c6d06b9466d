// Conversions between what tensors hold and what is computed in, and several elements at once.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_pipeline_primitives.h>

#include <type_traits>

#include "../core/problem.h"
#include "../core/target.h"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

constexpr int kVectorBytes = 16;  // the widest load

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

template <int kBytes>
using Word = std::conditional_t<
    kBytes == 16, uint4,
    std::conditional_t<kBytes == 8, uint2, std::conditional_t<kBytes == 4, uint32_t, uint16_t>>>;

// By words, not by elements, of which a store each may be made.
template <int kCount, class Element>
__device__ void store_pack(Element* to, const Pack<Element, kCount>& pack) {
  constexpr int kBytes = sizeof(pack) < kVectorBytes ? int(sizeof(pack)) : kVectorBytes;
  Word<kBytes> words[sizeof(pack) / kBytes];
  memcpy(words, &pack, sizeof(pack));
#pragma unroll
  for (int i = 0; i < int(sizeof(pack)) / kBytes; ++i) reinterpret_cast<Word<kBytes>*>(to)[i] = words[i];
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

// The memory of an output whose dtype is In's, or float32.
template <class In>
class OutputMemory {
 public:
  using T = Compute<In>;

  __device__ explicit OutputMemory(const Tensor& tensor)
      : data_(tensor.data), widens_(sizeof(In) < sizeof(T) && tensor.dtype == DType::kFloat32) {}

  template <int kCount>
  __device__ void store(int64_t offset, const Pack<T, kCount>& pack) const {
    if (widens_) {
      store_pack(static_cast<T*>(data_) + offset, pack);
    } else {
      Pack<In, kCount> narrowed;
#pragma unroll
      for (int k = 0; k < kCount; ++k) narrowed.element[k] = narrow<In>(pack.element[k]);
      store_pack(static_cast<In*>(data_) + offset, narrowed);
    }
  }

 private:
  void* const data_;
  const bool widens_;
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

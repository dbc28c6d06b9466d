// Elements of a dtype that a kernel learns when it runs: the same for all of its threads. Where it computes
// in double they are doubles.
#pragma once

#include "core/parameter.h"
#include "packs.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

struct Elements {
  void* data;
  DType dtype;
};

// Whether loads of so many elements may start there.
inline bool is_aligned_to(const Elements& elements, int64_t count) {
  return is_aligned(elements.data, count * bytes_of(elements.dtype));
}

// From an element on.
inline Elements elements_from(const void* data, DType dtype, int64_t first) {
  if (data == nullptr) return {nullptr, dtype};
  return {const_cast<char*>(static_cast<const char*>(data)) + first * bytes_of(dtype), dtype};
}

// The kind differs from lane to lane: it is compared, as arguments that it indexes would be copied to memory.
__device__ inline Parameter parameter_of(const Arguments& arguments, int kind) {
  const Parameter* parameter = arguments.parameters + kChainParameters - 1;
#pragma unroll
  for (int k = kChainParameters - 2; k >= 0; --k)
    parameter = kind == k ? arguments.parameters + k : parameter;
  return *parameter;
}

// The kind of a kernel's elements: their type, or this for both dtypes of two bytes. One kernel for all would
// be so large that most of what it executes stands far behind its start, where it waits for instructions.
struct HalfPrecision {};

// Calls visit with a value of the elements' type, known when compiled.
template <class Kind, class Visit>
__device__ void visit_element(DType dtype, const Visit& visit) {
  if constexpr (std::is_same_v<Kind, HalfPrecision>) {
    if (dtype == DType::kFloat16) return visit(__half{});
    visit(__nv_bfloat16{});
  } else {
    visit(Kind{});
  }
}

// From the bits of a dtype of two bytes.
__device__ inline float from_half_bits(uint16_t bits, bool is_bfloat16) {
  return is_bfloat16 ? from_bfloat16(bits) : __half2float(__ushort_as_half(bits));
}

// From dtypes of two bytes, a pair of them in each word: one branch for all, and none of a pair taken apart.
template <int kCount>
__device__ Pack<float, kCount> from_half_words(const uint32_t* words, DType dtype) {
  const auto half_bits = [&](int k) { return uint16_t(words[k / 2] >> (k % 2 * 16)); };
  Pack<float, kCount> values;
  if (dtype == DType::kBFloat16) {
#pragma unroll
    for (int k = 0; k < kCount; ++k) values.element[k] = from_bfloat16(half_bits(k));
  } else {
#pragma unroll
    for (int k = 0; k < kCount; ++k) values.element[k] = __half2float(__ushort_as_half(half_bits(k)));
  }
  return values;
}

// Elements as they lie in memory: to convert them at once would be to wait for each load by itself.
template <class T, int kCount>
struct RawPack {
  using Word = std::conditional_t<std::is_same_v<T, double>, double, uint32_t>;
  Word word[kCount];  // half of them where elements are of half precision
};

template <class T, int kCount>
__device__ RawPack<T, kCount> load_raw(const Elements& from, int64_t offset) {
  using Word = typename RawPack<T, kCount>::Word;
  RawPack<T, kCount> raw{};
  const auto copy = [&raw](const auto& pack, auto words) {
#pragma unroll
    for (int i = 0; i < decltype(words)::value; ++i) raw.word[i] = pack.element[i];
  };
  if (sizeof(T) == sizeof(double) || from.dtype == DType::kFloat32) {
    copy(load_pack<kCount>(static_cast<const Word*>(from.data) + offset),
         std::integral_constant<int, kCount>{});
  } else if constexpr (sizeof(T) == sizeof(float)) {
    const uint16_t* const at = static_cast<const uint16_t*>(from.data) + offset;
    if constexpr (kCount == 1) {
      raw.word[0] = *at;
    } else {
      copy(load_pack<kCount / 2>(reinterpret_cast<const uint32_t*>(at)),
           std::integral_constant<int, kCount / 2>{});
    }
  }
  return raw;
}

template <class T, int kCount>
__device__ Pack<T, kCount> values_of(const RawPack<T, kCount>& raw, DType dtype) {
  Pack<T, kCount> values;
  if (sizeof(T) == sizeof(double) || dtype == DType::kFloat32) {
    memcpy(&values, raw.word, sizeof(values));
  } else if constexpr (sizeof(T) == sizeof(float)) {
    values = from_half_words<kCount>(raw.word, dtype);
  }
  return values;
}

template <class T, int kCount>
__device__ Pack<T, kCount> load_values(const Elements& from, int64_t offset) {
  return values_of(load_raw<T, kCount>(from, offset), from.dtype);
}

template <class T>
__device__ T value_at(const Tensor& from, int64_t offset) {
  return load_values<T, 1>({from.data, from.dtype}, offset).element[0];
}

template <class Element, class T, int kCount>
__device__ void store_as(void* to, int64_t offset, const Pack<T, kCount>& values) {
  Pack<Element, kCount> narrowed;
#pragma unroll
  for (int k = 0; k < kCount; ++k) narrowed.element[k] = narrow<Element>(values.element[k]);
  store_vector(static_cast<Element*>(to) + offset, narrowed);
}

template <class T, int kCount>
__device__ void store_values(const Elements& to, int64_t offset, const Pack<T, kCount>& values) {
  if (sizeof(T) == sizeof(double) || to.dtype == DType::kFloat32) {
    store_as<T>(to.data, offset, values);
  } else if (to.dtype == DType::kBFloat16) {
    store_as<__nv_bfloat16>(to.data, offset, values);
  } else {
    store_as<__half>(to.data, offset, values);
  }
}

// To a tensor of Element's dtype or, if that has two bytes, float32.
template <class Element, class T, int kCount>
__device__ void store_output(const Tensor& to, int64_t offset, const Pack<T, kCount>& values) {
  if (sizeof(Element) == sizeof(T) || to.dtype != DType::kFloat32) {
    store_as<Element>(to.data, offset, values);
  } else {
    store_as<T>(to.data, offset, values);
  }
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

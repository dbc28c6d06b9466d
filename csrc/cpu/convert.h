// Rows of a tensor of any dtype and stride to and from the compute type.
#pragma once

#include "core/parameter.h"
#include "core/vector_math.h"
#include "transpose.h"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

template <class T>
FUSEDCONV_INLINE T widen(T x) {
  return x;
}

FUSEDCONV_INLINE float widen(BFloat16 x) { return from_bfloat16(x.bits); }
FUSEDCONV_INLINE float widen(Float16 x) { return from_float16(x.bits); }

template <class To, class From>
struct Narrow {
  static FUSEDCONV_INLINE To from(From x) { return To(x); }
};

// Both round to nearest, ties to even.
template <>
struct Narrow<BFloat16, float> {
  static FUSEDCONV_INLINE BFloat16 from(float x) {
    const uint32_t bits = bit_cast<uint32_t>(x);
    return {uint16_t((x != x ? 0x7fc00000u : bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
  }
};

template <>
struct Narrow<Float16, float> {
  static FUSEDCONV_INLINE Float16 from(float x) {
    const uint32_t bits = bit_cast<uint32_t>(x);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    uint32_t half;
    if (magnitude > 0x7f800000u) {
      half = 0x7e00u;  // NaN
    } else if (magnitude >= 0x477ff000u) {
      half = 0x7c00u;  // from 65520 on it rounds to infinity
    } else if (magnitude < 0x38800000u) {
      // Subnormal in half: adding 0.5 leaves the rounded multiple of 2^-24 in the low mantissa bits.
      half = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
    } else {
      half = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    }
    return {uint16_t(half | sign)};
  }
};

template <class Pointer>
struct PointeeOf;
template <class Element>
struct PointeeOf<Element*> {
  using type = Element;
};
template <class Pointer>
using Pointee = typename PointeeOf<Pointer>::type;

template <class A, class B>
constexpr bool kIsSame = false;
template <class A>
constexpr bool kIsSame<A, A> = true;

// Calls visit with a null pointer of the dtype's element type. The compute type double goes with float64
// only.
template <class T, class Visit>
FUSEDCONV_INLINE void visit_dtype(DType dtype, const Visit& visit) {
  if constexpr (sizeof(T) == sizeof(double)) {
    visit(static_cast<double*>(nullptr));
  } else {
    switch (dtype) {
      case DType::kBFloat16:
        return visit(static_cast<BFloat16*>(nullptr));
      case DType::kFloat16:
        return visit(static_cast<Float16*>(nullptr));
      default:
        return visit(static_cast<float*>(nullptr));
    }
  }
}

// A vector of elements that lie side by side, in the compute type. Touches no memory past the first `count`.
template <class T, class Element>
FUSEDCONV_INLINE Vector<T> load_vector(const Element* from, int64_t count) {
  if constexpr (kIsSame<T, Element>) {
    return count == kLanes<T> ? load(from) : load_first(from, count);
  } else {
    T lane[kLanes<T>]{};
    if (count == kLanes<T>) {
      for (int i = 0; i < kLanes<T>; ++i) lane[i] = widen(from[i]);
    } else {
      for (int64_t i = 0; i < count; ++i) lane[i] = widen(from[i]);
    }
    return load(lane);
  }
}

template <class T, class Element>
FUSEDCONV_INLINE void store_vector(Element* to, Vector<T> x, int64_t count) {
  if constexpr (kIsSame<T, Element>) {
    count == kLanes<T> ? store(to, x) : store_first(to, x, count);
  } else {
    T lane[kLanes<T>];
    store(lane, x);
    if (count == kLanes<T>) {
      for (int i = 0; i < kLanes<T>; ++i) to[i] = Narrow<Element, T>::from(lane[i]);
    } else {
      for (int64_t i = 0; i < count; ++i) to[i] = Narrow<Element, T>::from(lane[i]);
    }
  }
}

// to[c * to_stride + r] = from[r * from_stride + c]. One of the element types is T, the compute type.
template <class T, class From, class To>
void transpose_block(const From* from, int64_t from_stride, To* to, int64_t to_stride, int64_t rows,
                     int64_t cols) {
  for (int64_t r = 0; r < rows; r += kLanes<T>) {
    const int64_t some_rows = rows - r < kLanes<T> ? rows - r : kLanes<T>;
    for (int64_t c = 0; c < cols; c += kLanes<T>) {
      const int64_t some_cols = cols - c < kLanes<T> ? cols - c : kLanes<T>;
      Vector<T> square[kLanes<T>]{};
      for (int64_t i = 0; i < some_rows; ++i)
        square[i] = load_vector<T>(from + (r + i) * from_stride + c, some_cols);
      transpose<T>(square);
      for (int64_t i = 0; i < some_cols; ++i)
        store_vector<T>(to + (c + i) * to_stride + r, square[i], some_rows);
    }
  }
}

// Copies a channels x pixels block between a tensor with the given strides and contiguous rows of the compute
// type. The tensor's smaller stride is walked innermost.
template <class Element, class T>
void load_block(const Element* from, int64_t channel_stride, int64_t pixel_stride, T* to, int64_t to_stride,
                int64_t channels, int64_t pixels) {
  if (pixel_stride == 1 || channel_stride >= pixel_stride || channels == 1) {
    for (int64_t c = 0; c < channels; ++c) {
      const Element* row = from + c * channel_stride;
      T* to_row = to + c * to_stride;
      if (pixel_stride == 1) {
        for (int64_t w = 0; w < pixels; ++w) to_row[w] = widen(row[w]);
      } else {
        for (int64_t w = 0; w < pixels; ++w) to_row[w] = widen(row[w * pixel_stride]);
      }
    }
    return;
  }
  if (channel_stride == 1) return transpose_block<T>(from, pixel_stride, to, to_stride, pixels, channels);
  for (int64_t w = 0; w < pixels; ++w) {
    const Element* pixel = from + w * pixel_stride;
    for (int64_t c = 0; c < channels; ++c) to[c * to_stride + w] = widen(pixel[c * channel_stride]);
  }
}

template <class Element, class T>
void store_block(const T* from, int64_t from_stride, Element* to, int64_t channel_stride,
                 int64_t pixel_stride, int64_t channels, int64_t pixels) {
  if (pixel_stride == 1 || channel_stride >= pixel_stride || channels == 1) {
    for (int64_t c = 0; c < channels; ++c) {
      const T* row = from + c * from_stride;
      Element* to_row = to + c * channel_stride;
      if (pixel_stride == 1) {
        for (int64_t w = 0; w < pixels; ++w) to_row[w] = Narrow<Element, T>::from(row[w]);
      } else {
        for (int64_t w = 0; w < pixels; ++w) to_row[w * pixel_stride] = Narrow<Element, T>::from(row[w]);
      }
    }
    return;
  }
  // An output is dense: where its channels do not lie in planes, they lie side by side.
  transpose_block<T>(from, from_stride, to, pixel_stride, channels, pixels);
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

// The widest vector of the instruction set, in the compilers' own vector types, and elementary functions on
// it.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "target.h"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
constexpr int kVectorRegisters = 32;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
constexpr int kVectorRegisters = 16;
#elif defined(__aarch64__)
constexpr int kVectorBytes = 16;
constexpr int kVectorRegisters = 32;
#else
constexpr int kVectorBytes = 16;
constexpr int kVectorRegisters = 16;
#endif

template <class T>
struct VectorTypes;

template <>
struct VectorTypes<float> {
  typedef float Value __attribute__((vector_size(kVectorBytes)));
  typedef int32_t Bits __attribute__((vector_size(kVectorBytes)));
  typedef uint32_t Unsigned __attribute__((vector_size(kVectorBytes)));
};

template <>
struct VectorTypes<double> {
  typedef double Value __attribute__((vector_size(kVectorBytes)));
  typedef int64_t Bits __attribute__((vector_size(kVectorBytes)));
  typedef uint64_t Unsigned __attribute__((vector_size(kVectorBytes)));
};

template <class T>
using Vector = typename VectorTypes<T>::Value;

template <class T>
constexpr int kLanes = kVectorBytes / int(sizeof(T));

// What is known about a floating-point format.
template <class T>
struct Format;

template <>
struct Format<float> {
  using Element = float;
  using Integer = int32_t;
  static constexpr int kMantissaBits = 23;
  static constexpr uint32_t kExponentBias = 127;
  static constexpr float kRound =
      12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, held in the low bits
  static constexpr float kMaxExponent = 89.0f;      // rounds to 128 powers of two: infinity
  static constexpr float kMinExponent = -88.0f;     // rounds to -127 powers of two: zero
  static constexpr float kMostSigmoid = 87.0f;      // exp of it is under 2^126
  static constexpr float kLog2High = 0.693359375f;  // few bits, so that its product with an integer is exact
  static constexpr float kLog2Low = -2.12194440054690583e-4f;
  static constexpr int kExpTerms = 7;  // |r| <= ln(2)/2: the first term left out is under 6e-9
  static constexpr int kLogTerms = 5;  // s^2 <= 0.0295: the first term left out is under 3e-9
};

template <>
struct Format<double> {
  using Element = double;
  using Integer = int64_t;
  static constexpr int kMantissaBits = 52;
  static constexpr uint64_t kExponentBias = 1023;
  static constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52
  static constexpr double kMaxExponent = 710.0;
  static constexpr double kMinExponent = -709.0;
  static constexpr double kMostSigmoid = 708.0;
  static constexpr double kLog2High = 0.69314718036912381649;
  static constexpr double kLog2Low = 1.9082149292705877e-10;
  static constexpr int kExpTerms = 13;
  static constexpr int kLogTerms = 11;
};

template <class T>
FUSEDCONV_INLINE Vector<T> load(const T* from) {
  Vector<T> x;
  std::memcpy(&x, from, sizeof(x));
  return x;
}

template <class T>
FUSEDCONV_INLINE void store(T* to, Vector<T> x) {
  std::memcpy(to, &x, sizeof(x));
}

// Written out: compilers see one broadcast in this form only.
template <class T>
FUSEDCONV_INLINE Vector<T> broadcast(T x) {
  if constexpr (kLanes<T> == 16) {
    return Vector<T>{x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x};
  } else if constexpr (kLanes<T> == 8) {
    return Vector<T>{x, x, x, x, x, x, x, x};
  } else if constexpr (kLanes<T> == 4) {
    return Vector<T>{x, x, x, x};
  } else {
    return Vector<T>{x, x};
  }
}

// Sums of neighbouring lanes, a's and then b's.
template <class T>
FUSEDCONV_INLINE Vector<T> add_neighbours(Vector<T> a, Vector<T> b) {
#if defined(__clang__)
  if constexpr (kLanes<T> == 16) {
    return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +
           __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
  } else if constexpr (kLanes<T> == 8) {
    return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14) +
           __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15);
  } else if constexpr (kLanes<T> == 4) {
    return __builtin_shufflevector(a, b, 0, 2, 4, 6) + __builtin_shufflevector(a, b, 1, 3, 5, 7);
  } else {
    return __builtin_shufflevector(a, b, 0, 2) + __builtin_shufflevector(a, b, 1, 3);
  }
#else
  typename VectorTypes<T>::Bits even{};
  for (int i = 0; i < kLanes<T>; ++i) even[i] = 2 * i;
  return __builtin_shuffle(a, b, even) + __builtin_shuffle(a, b, even + 1);
#endif
}

// A store that leaves the caches alone, to a place aligned to the vector. Ends with stream_fence.
template <class T>
FUSEDCONV_INLINE void stream(T* to, Vector<T> x) {
#if defined(__AVX512F__)
  _mm512_stream_si512(reinterpret_cast<__m512i*>(to), (__m512i)x);
#elif defined(__AVX2__)
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to), (__m256i)x);
#elif defined(__SSE2__)
  _mm_stream_si128(reinterpret_cast<__m128i*>(to), (__m128i)x);
#else
  store(to, x);
#endif
}

// Orders streamed stores before what other threads are told next.
FUSEDCONV_INLINE void stream_fence() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// The mask of so many lanes.
template <class T>
FUSEDCONV_INLINE typename VectorTypes<T>::Bits first_lanes(int64_t count) {
  using Bits = typename VectorTypes<T>::Bits;
  Bits lane{};
  for (int i = 0; i < kLanes<T>; ++i) lane[i] = i;
  return lane < Bits{} + typename Format<T>::Integer(count);
}

// The first lanes of a vector in memory, and zeros; touches no memory past them.
template <class T>
FUSEDCONV_INLINE Vector<T> load_first(const T* from, int64_t count) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) return (Vector<T>)_mm512_maskz_loadu_ps(__mmask16((1u << count) - 1), from);
  if constexpr (sizeof(T) == 8) return (Vector<T>)_mm512_maskz_loadu_pd(__mmask8((1u << count) - 1), from);
#elif defined(__AVX2__)
  const __m256i mask = (__m256i)first_lanes<T>(count);
  if constexpr (sizeof(T) == 4) return (Vector<T>)_mm256_maskload_ps(from, mask);
  if constexpr (sizeof(T) == 8) return (Vector<T>)_mm256_maskload_pd(from, mask);
#else
  Vector<T> x{};
  for (int64_t i = 0; i < count; ++i) x[i] = from[i];
  return x;
#endif
}

template <class T>
FUSEDCONV_INLINE void store_first(T* to, Vector<T> x, int64_t count) {
#if defined(__AVX512F__)
  if constexpr (sizeof(T) == 4) _mm512_mask_storeu_ps(to, __mmask16((1u << count) - 1), (__m512)x);
  if constexpr (sizeof(T) == 8) _mm512_mask_storeu_pd(to, __mmask8((1u << count) - 1), (__m512d)x);
#elif defined(__AVX2__)
  const __m256i mask = (__m256i)first_lanes<T>(count);
  if constexpr (sizeof(T) == 4) _mm256_maskstore_ps(to, mask, (__m256)x);
  if constexpr (sizeof(T) == 8) _mm256_maskstore_pd(to, mask, (__m256d)x);
#else
  for (int64_t i = 0; i < count; ++i) to[i] = x[i];
#endif
}

template <class Mask, class X>
FUSEDCONV_INLINE X select(Mask mask, X yes, X no) {
  return mask ? yes : no;
}

// The second where either is NaN. Each is one instruction on x86, which compilers do not see in the
// comparison.
FUSEDCONV_INLINE Vector<float> larger_or_second(Vector<float> a, Vector<float> b) {
#if defined(__AVX512F__)
  return (Vector<float>)_mm512_maskz_max_ps(0xffff, (__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (Vector<float>)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return select(a > b, a, b);
#endif
}

FUSEDCONV_INLINE Vector<float> smaller_or_second(Vector<float> a, Vector<float> b) {
#if defined(__AVX512F__)
  return (Vector<float>)_mm512_maskz_min_ps(0xffff, (__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (Vector<float>)_mm256_min_ps((__m256)a, (__m256)b);
#else
  return select(a < b, a, b);
#endif
}

FUSEDCONV_INLINE Vector<double> larger_or_second(Vector<double> a, Vector<double> b) {
  return select(a > b, a, b);
}
FUSEDCONV_INLINE Vector<double> smaller_or_second(Vector<double> a, Vector<double> b) {
  return select(a < b, a, b);
}

// NaN wins, as in torch.maximum.
template <class X>
FUSEDCONV_INLINE X maximum(X a, X b) {
  return select(a > b || a != a, a, b);
}

template <class X>
struct ElementOf;
template <>
struct ElementOf<Vector<float>> : Format<float> {};
template <>
struct ElementOf<Vector<double>> : Format<double> {};

constexpr double factorial(int n) { return n <= 1 ? 1.0 : n * factorial(n - 1); }

// exp(x) = (fraction + 1) * scale, scale a power of two: for kMinExponent <= x <= kMaxExponent, and NaN.
template <class X>
struct Exponential {
  X fraction;
  X scale;
};

template <class X>
FUSEDCONV_INLINE Exponential<X> split_exponential(X x) {
  using F = ElementOf<X>;
  using T = typename F::Element;
  using Unsigned = typename VectorTypes<T>::Unsigned;  // NaN's bits may wrap around
  const X shifted = x * T(1.4426950408889634074) + F::kRound;
  const X n = shifted - F::kRound;
  const X r = (x - n * F::kLog2High) - n * F::kLog2Low;
  // Taylor's series of exp(r) - 1, divided by r, in Horner's form.
  X series = X{} + T(1.0 / factorial(F::kExpTerms));
#pragma GCC unroll 16
  for (int k = F::kExpTerms - 1; k >= 1; --k) series = series * r + T(1.0 / factorial(k));
  const Unsigned exponent = (Unsigned)shifted + F::kExponentBias;
  return {series * r, (X)(exponent << F::kMantissaBits)};
}

// Keeps NaN.
template <class X>
FUSEDCONV_INLINE X limit(X x, X low, X high) {
  return larger_or_second(low, smaller_or_second(high, x));
}

// 1 / x for 1 <= x < 2^126, and NaN. AVX-512 has an estimate of 14 bits, which one step of Newton's makes 28
// in a third of a division's time; elsewhere it is a division.
FUSEDCONV_INLINE Vector<float> reciprocal(Vector<float> x) {
#if defined(__AVX512F__)
  const Vector<float> estimate = (Vector<float>)_mm512_maskz_rcp14_ps(0xffff, (__m512)x);
  return estimate + estimate * (1.0f - x * estimate);
#else
  return 1.0f / x;
#endif
}

FUSEDCONV_INLINE Vector<double> reciprocal(Vector<double> x) { return 1.0 / x; }

// At the ends of the range the scale is infinity and zero.
template <class X>
FUSEDCONV_INLINE X exp(X x) {
  using F = ElementOf<X>;
  const Exponential<X> e = split_exponential(limit(x, X{} + F::kMinExponent, X{} + F::kMaxExponent));
  return (e.fraction + typename F::Element(1)) * e.scale;
}

// Keeps NaN.
template <class T, class X>
FUSEDCONV_INLINE X relu(X x) {
  return select(x < T(0), X{}, x);
}

// relu6(x + 3) / 6
template <class T, class X>
FUSEDCONV_INLINE X hardsigmoid(X x) {
  X gate = x + T(3);
  gate = select(gate < T(0), X{}, gate);
  gate = select(gate > T(6), X{} + T(6), gate);
  return gate * T(1.0 / 6.0);
}

// Zero below -kMostSigmoid, where exp(-x) has no reciprocal, whatever it comes to.
template <class X>
FUSEDCONV_INLINE X sigmoid(X x) {
  using F = ElementOf<X>;
  using T = typename F::Element;
  const X most = X{} + F::kMostSigmoid;
  const Exponential<X> e = split_exponential(-smaller_or_second(most, x));
  const X y = reciprocal(T(1) + (e.fraction + T(1)) * e.scale);
  return select(x < -most, X{}, y);
}

// (e - 1) / (e + 1) with e = exp(2x); e - 1 without cancellation at small x.
template <class X>
FUSEDCONV_INLINE X tanh(X x) {
  using T = typename ElementOf<X>::Element;
  const X saturated = X{} + T(20);  // from there on tanh rounds to one
  const Exponential<X> e = split_exponential(T(2) * limit(x, -saturated, saturated));
  const X minus_one = e.fraction * e.scale + (e.scale - T(1));
  return minus_one * reciprocal(minus_one + T(2));
}

// log(x) for finite x >= 1, and NaN: 2 atanh(s) + exponent * log(2), s = (m - 1) / (m + 1), m in [sqrt(1/2),
// sqrt(2)).
template <class X>
FUSEDCONV_INLINE X log(X x) {
  using F = ElementOf<X>;
  using T = typename F::Element;
  using Bits = typename VectorTypes<T>::Bits;
  using Unsigned = typename VectorTypes<T>::Unsigned;
  const Bits one = (Bits)(X{} + T(1));
  const Bits root_half = (Bits)(X{} + T(0.70710678118654752440));
  const Bits bits = (Bits)((Unsigned)x + (Unsigned)(one - root_half));  // NaN's bits may wrap around
  const Bits exponent = (bits >> F::kMantissaBits) - (Bits{} + typename F::Integer(F::kExponentBias));
  const X m = (X)((Unsigned)x - ((Unsigned)exponent << F::kMantissaBits));
  const X s = (m - T(1)) / (m + T(1));
  const X s2 = s * s;
  X series = X{} + T(1) / T(2 * F::kLogTerms + 1);
#pragma GCC unroll 16
  for (int k = F::kLogTerms - 1; k >= 0; --k) series = series * s2 + T(1) / T(2 * k + 1);
  const X n = __builtin_convertvector(exponent, X);
  return select(x != x, x, n * F::kLog2High + (n * F::kLog2Low + T(2) * s * series));
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

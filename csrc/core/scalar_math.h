// Elementary functions on one value. See core/math.h. In float they are made of the hardware's
// approximations, whose absolute errors are near 1e-7 here; denormals count as zero.
#pragma once

#include <cmath>

#include "target.h"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

template <class X>
FUSEDCONV_INLINE X select(bool mask, X yes, X no) {
  return mask ? yes : no;
}

// NaN wins, as in torch.maximum.
FUSEDCONV_INLINE float maximum(float a, float b) {
#if __CUDA_ARCH__ >= 800
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(a), "f"(b));
  return y;
#else
  return a > b || a != a ? a : b;
#endif
}

FUSEDCONV_INLINE double maximum(double a, double b) { return a > b || a != a ? a : b; }

FUSEDCONV_INLINE float exp2(float x) {
#ifdef __CUDA_ARCH__
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return std::exp2(x);
#endif
}

FUSEDCONV_INLINE double exp2(double x) { return std::exp2(x); }

// exp(kTimes * x)
template <int kTimes = 1>
FUSEDCONV_INLINE float exp(float x) {
  constexpr float kLog2E = 1.4426950408889634f;
  return exp2(x * (kTimes * kLog2E));
}

FUSEDCONV_INLINE double exp(double x) { return std::exp(x); }

FUSEDCONV_INLINE float log(float x) {
#ifdef __CUDA_ARCH__
  constexpr float kLn2 = 0.6931471805599453f;
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y * kLn2;
#else
  return std::log(x);
#endif
}

FUSEDCONV_INLINE double log(double x) { return std::log(x); }

FUSEDCONV_INLINE float reciprocal(float x) {
#ifdef __CUDA_ARCH__
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
#else
  return 1 / x;
#endif
}

FUSEDCONV_INLINE double reciprocal(double x) { return 1 / x; }

// Keeps NaN.
template <class T>
FUSEDCONV_INLINE T relu(T x) {
  return maximum(x, T(0));
}

// relu6(x + 3) / 6
template <class T>
FUSEDCONV_INLINE T hardsigmoid(T x) {
  const T gate = x * T(1.0 / 6.0) + T(0.5);
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(T) == sizeof(float)) return __saturatef(gate);  // 0 for NaN
#endif
  return gate < T(0) ? T(0) : gate > T(1) ? T(1) : gate;
}

template <class X>
FUSEDCONV_INLINE X sigmoid(X x) {
  return reciprocal(X(1) + exp(-x));
}

// Right at both infinities: exp(2x) is 0 or infinite there.
FUSEDCONV_INLINE float tanh(float x) { return fmaf(-2.0f, reciprocal(1 + exp<2>(x)), 1.0f); }
FUSEDCONV_INLINE double tanh(double x) { return std::tanh(x); }

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

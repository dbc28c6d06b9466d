// Squares of as many vectors as a vector has lanes, turned in registers.
#pragma once

#include "core/vector_math.h"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// The lanes of the lower, or of the upper halves of a and b in turns.
template <class T, int kHalf>
FUSEDCONV_INLINE Vector<T> interleave(Vector<T> a, Vector<T> b) {
  constexpr int kFirst = kHalf * kLanes<T> / 2;
#if defined(__clang__)
  if constexpr (kLanes<T> == 16) {
    return __builtin_shufflevector(a, b, kFirst, kFirst + 16, kFirst + 1, kFirst + 17, kFirst + 2,
                                   kFirst + 18, kFirst + 3, kFirst + 19, kFirst + 4, kFirst + 20, kFirst + 5,
                                   kFirst + 21, kFirst + 6, kFirst + 22, kFirst + 7, kFirst + 23);
  } else if constexpr (kLanes<T> == 8) {
    return __builtin_shufflevector(a, b, kFirst, kFirst + 8, kFirst + 1, kFirst + 9, kFirst + 2, kFirst + 10,
                                   kFirst + 3, kFirst + 11);
  } else if constexpr (kLanes<T> == 4) {
    return __builtin_shufflevector(a, b, kFirst, kFirst + 4, kFirst + 1, kFirst + 5);
  } else {
    return __builtin_shufflevector(a, b, kFirst, kFirst + 2);
  }
#else
  typename VectorTypes<T>::Bits places{};
  for (int i = 0; i < kLanes<T>; ++i) places[i] = kFirst + i / 2 + i % 2 * kLanes<T>;
  return __builtin_shuffle(a, b, places);
#endif
}

// Vector i becomes lane i of all vectors. A step halves the distance between neighbours of a column.
template <class T, int kSteps = kLanes<T>>
FUSEDCONV_INLINE void transpose(Vector<T> (&square)[kLanes<T>]) {
  if constexpr (kSteps > 1) {
    constexpr int kHalf = kLanes<T> / 2;
    Vector<T> next[kLanes<T>];
#pragma GCC unroll 8
    for (int i = 0; i < kHalf; ++i) {
      next[2 * i] = interleave<T, 0>(square[i], square[i + kHalf]);
      next[2 * i + 1] = interleave<T, 1>(square[i], square[i + kHalf]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kLanes<T>; ++i) square[i] = next[i];
    transpose<T, kSteps / 2>(square);
  }
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

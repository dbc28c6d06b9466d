// Moments of one channel of a tile.
#pragma once

#include "../core/moments.h"
#include "source.h"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

template <class T>
FUSEDCONV_INLINE double sum_of_lanes(Vector<T> x) {
  double sum = 0;
  for (int lane = 0; lane < kLanes<T>; ++lane) sum += double(x[lane]);
  return sum;
}

// Calls visit(x, mask) for the vectors of rows x cols pixels; mask says which lanes are pixels.
template <class T, class Visit>
FUSEDCONV_INLINE void for_each_vector(const T* plane, int64_t pitch, int64_t rows, int64_t cols,
                                      const Visit& visit) {
  using Bits = typename VectorTypes<T>::Bits;
  Bits lane{};
  for (int i = 0; i < kLanes<T>; ++i) lane[i] = i;
  const int64_t whole = cols / kLanes<T> * kLanes<T>;
  const Bits tail = lane < Bits{} + decltype(lane[0] + lane[0])(cols - whole);
  for (int64_t r = 0; r < rows; ++r) {
    const T* row = plane + r * pitch;
    for (int64_t w = 0; w < whole; w += kLanes<T>) visit(load(row + w), lane == lane);
    if (whole < cols) visit(load(row + whole), tail);
  }
}

// The mean first, then the deviations from it; their own sum corrects the rounding of the mean. The tile is
// in the cache, so that the second pass costs little.
template <class T, class Stage>
Moments moments_of(const T* plane, int64_t pitch, int64_t rows, int64_t cols, const Stage& stage) {
  const double count = double(rows) * double(cols);
  const Vector<T> zero{};
  Vector<T> sum{};
  for_each_vector(plane, pitch, rows, cols,
                  [&](Vector<T> x, auto mask) { sum += select(mask, stage(x), zero); });
  const T mean = T(sum_of_lanes<T>(sum) / count);
  Vector<T> deviation{};
  Vector<T> square{};
  for_each_vector(plane, pitch, rows, cols, [&](Vector<T> x, auto mask) {
    const Vector<T> d = select(mask, stage(x) - mean, zero);
    deviation += d;
    square += d * d;
  });
  const double residual = sum_of_lanes<T>(deviation) / count;
  return {count, double(mean) + residual, sum_of_lanes<T>(square) - residual * residual * count};
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

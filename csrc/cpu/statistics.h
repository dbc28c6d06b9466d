// Moments of one channel of a tile.
#pragma once

#include "core/moments.h"
#include "source.h"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// In double. Half a vector of floats becomes a vector of doubles.
FUSEDCONV_INLINE double sum_of_lanes(Vector<double> x) {
  double sum = 0;
  for (int i = 0; i < kLanes<double>; ++i) sum += x[i];
  return sum;
}

FUSEDCONV_INLINE double sum_of_lanes(Vector<float> x) {
  typedef float Half __attribute__((vector_size(kVectorBytes / 2)));
  Half half[2];
  std::memcpy(half, &x, sizeof(x));
  return sum_of_lanes(__builtin_convertvector(half[0], Vector<double>) +
                      __builtin_convertvector(half[1], Vector<double>));
}

// Sums that run side by side: a sum waits some cycles for its last addition.
constexpr int kSums = 4;

template <class T>
FUSEDCONV_INLINE Vector<T> total(const Vector<T> (&sum)[kSums]) {
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

// Calls visit(x, mask, sum) for each vector of rows x cols pixels; mask says which lanes are pixels, sum
// which of kSums sums the vector goes to.
template <class T, class Visit>
FUSEDCONV_INLINE void for_each_vector(const T* plane, int64_t pitch, int64_t rows, int64_t cols,
                                      const Visit& visit) {
  const int64_t whole = cols / kLanes<T> * kLanes<T>;
  const auto all = first_lanes<T>(kLanes<T>);
  const auto tail = first_lanes<T>(cols - whole);
  for (int64_t r = 0; r < rows; ++r) {
    const T* row = plane + r * pitch;
    int64_t w = 0;
    for (; w + kSums * kLanes<T> <= whole; w += kSums * kLanes<T>) {
#pragma GCC unroll 4
      for (int sum = 0; sum < kSums; ++sum) visit(load(row + w + sum * kLanes<T>), all, sum);
    }
    for (; w < whole; w += kLanes<T>) visit(load(row + w), all, 0);
    if (whole < cols) visit(load(row + whole), tail, 1);
  }
}

// So many pixels are summed in the compute type, a lane's share of them by one addition after the other; sums
// of more are put together in double.
constexpr int64_t kLanePixels = 128;
template <class T>
constexpr int64_t kSumPixels = kLanePixels * kLanes<T>;

// Calls visit(top, left, rows, cols) for pieces of rows x cols pixels that are few, where each lane has a
// sum: so vectors are counted whole.
template <class T, class Visit>
FUSEDCONV_INLINE void for_each_few(int64_t rows, int64_t cols, const Visit& visit) {
  const int64_t some_cols = smaller(cols, kSumPixels<T>);
  const int64_t some_rows = larger(1, kSumPixels<T> / round_up(some_cols, kLanes<T>));
  for (int64_t top = 0; top < rows; top += some_rows) {
    for (int64_t left = 0; left < cols; left += some_cols) {
      visit(top, left, smaller(some_rows, rows - top), smaller(some_cols, cols - left));
    }
  }
}

// The moments of stage(x) for few pixels, by their deviations from a shift, which is the mean of an eighth of
// their rows or more. So the variance is at least an eighth of the squared distance between shift and mean,
// and the sum of squares before it is shifted back at most nine times what is left: few digits are lost.
template <class T, class Stage>
Moments moments_of_few(const T* plane, int64_t pitch, int64_t rows, int64_t cols, const Stage& stage) {
  constexpr int64_t kShare = 8;
  const int64_t some_rows = ceil_div(rows, kShare);
  const double count = double(rows) * double(cols);
  const Vector<T> zero{};
  Vector<T> sum[kSums]{};
  for_each_vector(plane, pitch, some_rows, cols,
                  [&](Vector<T> x, auto mask, int i) { sum[i] += select(mask, stage(x), zero); });
  const T shift = T(sum_of_lanes(total<T>(sum)) / (double(some_rows) * double(cols)));
  Vector<T> deviation[kSums]{};
  Vector<T> square[kSums]{};
  for_each_vector(plane, pitch, rows, cols, [&](Vector<T> x, auto mask, int i) {
    const Vector<T> d = select(mask, stage(x) - shift, zero);
    deviation[i] += d;
    square[i] += d * d;
  });
  const double distance = sum_of_lanes(total<T>(deviation)) / count;
  return {count, double(shift) + distance, sum_of_lanes(total<T>(square)) - distance * distance * count};
}

// The same for any number of pixels.
template <class T, class Stage>
Moments moments_of(const T* plane, int64_t pitch, int64_t rows, int64_t cols, const Stage& stage) {
  Moments all{};
  for_each_few<T>(rows, cols, [&](int64_t top, int64_t left, int64_t some_rows, int64_t some_cols) {
    all = combine(all, moments_of_few(plane + top * pitch + left, pitch, some_rows, some_cols, stage));
  });
  return all;
}

FUSEDCONV_INLINE GroupStatistics statistics_of(const Moments& all, double eps) {
  const double variance = all.m2 < 0 ? 0 : all.m2 / all.count;  // below zero by rounding only
  return {all.mean, 1.0 / __builtin_sqrt(variance + eps)};
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

// Runs of elements that are no multiple of a vector: the last vector has fewer lanes that count.
#pragma once

#include "core/vector_math.h"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// Elements `step` apart, and zeros.
template <class T>
FUSEDCONV_INLINE Vector<T> load_lanes(const T* from, int64_t step, int64_t count) {
  T lane[kLanes<T>] = {};
  for (int64_t i = 0; i < count; ++i) lane[i] = from[i * step];
  return load(lane);
}

template <class T>
struct AllLanes {
  FUSEDCONV_INLINE Vector<T> load(const T* from) const { return FUSEDCONV_TARGET::load(from); }
  FUSEDCONV_INLINE Vector<T> load_every(const T* from, int64_t step) const {
    return load_lanes(from, step, kLanes<T>);
  }
  FUSEDCONV_INLINE void store(T* to, Vector<T> x) const { FUSEDCONV_TARGET::store(to, x); }
  FUSEDCONV_INLINE Vector<T> keep(Vector<T> x) const { return x; }
};

// Touches no memory past the first `count` elements.
template <class T>
struct FirstLanes {
  int64_t count;

  FUSEDCONV_INLINE Vector<T> load(const T* from) const { return load_first(from, count); }
  FUSEDCONV_INLINE Vector<T> load_every(const T* from, int64_t step) const {
    return load_lanes(from, step, count);
  }
  FUSEDCONV_INLINE void store(T* to, Vector<T> x) const { store_first(to, x, count); }

  // Zero in the other lanes.
  FUSEDCONV_INLINE Vector<T> keep(Vector<T> x) const { return select(first_lanes<T>(count), x, Vector<T>{}); }
};

// Calls visit(lanes, i) for the vectors of the elements from begin to end.
template <class T, class Visit>
FUSEDCONV_INLINE void for_each_lanes(int64_t begin, int64_t end, const Visit& visit) {
  int64_t i = begin;
  for (; i + kLanes<T> <= end; i += kLanes<T>) visit(AllLanes<T>{}, i);
  if (i < end) visit(FirstLanes<T>{end - i}, i);
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

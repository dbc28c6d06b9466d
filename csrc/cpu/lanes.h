// Runs of elements that are no multiple of a vector: the last vector has fewer lanes that count.
#pragma once

#include "vector_math.h"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

template <class T>
struct AllLanes {
  FUSEDCONV_INLINE Vector<T> load(const T* from) const { return FUSEDCONV_TARGET::load(from); }
  FUSEDCONV_INLINE void store(T* to, Vector<T> x) const { FUSEDCONV_TARGET::store(to, x); }
  FUSEDCONV_INLINE Vector<T> keep(Vector<T> x) const { return x; }
};

// Touches no memory past the first `count` elements.
template <class T>
struct FirstLanes {
  int64_t count;

  // The other lanes repeat the first one, so that they meet no special value of their own.
  FUSEDCONV_INLINE Vector<T> load(const T* from) const {
    T lane[kLanes<T>];
    for (int i = 0; i < kLanes<T>; ++i) lane[i] = from[i < count ? i : 0];
    return FUSEDCONV_TARGET::load(lane);
  }

  FUSEDCONV_INLINE void store(T* to, Vector<T> x) const {
    T lane[kLanes<T>];
    FUSEDCONV_TARGET::store(lane, x);
    for (int64_t i = 0; i < count; ++i) to[i] = lane[i];
  }

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

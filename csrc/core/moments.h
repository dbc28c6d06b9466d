// Count, mean and sum of squared deviations, in double: no cancellation for data far from zero.
#pragma once

#include "target.h"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

struct Moments {
  double count;
  double mean;
  double m2;
};

// Chan, Golub, LeVeque (1979): the moments of two sets of values together.
FUSEDCONV_INLINE Moments combine(Moments a, Moments b) {
  const double count = a.count + b.count;
  if (count == 0) return a;
  const double delta = b.mean - a.mean;
  const double share = b.count / count;
  return {count, a.mean + delta * share, a.m2 + b.m2 + delta * delta * a.count * share};
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

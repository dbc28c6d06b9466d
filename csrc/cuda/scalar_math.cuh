// Elementary functions on one value. See core/math.h.
#pragma once

#include "../core/target.h"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

template <class X>
FUSEDCONV_INLINE X select(bool mask, X yes, X no) {
  return mask ? yes : no;
}

// NaN wins, as in torch.maximum.
template <class X>
FUSEDCONV_INLINE X maximum(X a, X b) {
  return a > b || a != a ? a : b;
}

template <class X>
FUSEDCONV_INLINE X sigmoid(X x) {
  return X(1) / (X(1) + exp(-x));
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

// Conversions between what tensors hold and what is computed in, and several elements at once.
#pragma once

#include "../core/target.h"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

template <class T, class Element>
__device__ T widen(Element x) {
  return static_cast<T>(x);
}

template <class Element, class T>
__device__ Element narrow(T x) {
  return static_cast<Element>(x);
}

template <class Element, int kCount>
struct alignas(sizeof(Element) * kCount) Pack {
  Element element[kCount];
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

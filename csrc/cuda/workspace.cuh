// Memory that the kernels of one call hand on to each other: one allocation of the caller's.
#pragma once

#include <cstddef>
#include <cstdint>

#include "../core/target.h"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// Shares it out. From a null base it only counts the bytes.
class Workspace {
 public:
  explicit Workspace(void* base) : base_(reinterpret_cast<uintptr_t>(base)) {}

  template <class T>
  T* take(int64_t count) {
    constexpr size_t kAlignment = 256;
    T* const at = reinterpret_cast<T*>(base_ + bytes_);
    bytes_ += (count * sizeof(T) + kAlignment - 1) / kAlignment * kAlignment;
    return at;
  }

  size_t bytes() const { return bytes_; }

 private:
  uintptr_t base_;
  size_t bytes_ = 0;
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

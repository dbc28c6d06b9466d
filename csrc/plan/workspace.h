// Memory that the kernels of one call hand on to each other: one allocation of the caller's.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/checked.h"

namespace fusedconv {

// Shares it out. From a null base it only counts the bytes. Throws where these do not fit in 63 bits.
class Workspace {
 public:
  explicit Workspace(void* base) : base_(reinterpret_cast<uintptr_t>(base)) {}

  template <class T>
  T* take(Checked count) {
    constexpr int64_t kAlignment = 256;
    T* const at = reinterpret_cast<T*>(base_ + bytes());
    bytes_ = bytes_ + round_up(count * int64_t(sizeof(T)), kAlignment);
    return at;
  }

  size_t bytes() const { return size_t(bytes_.value()); }

 private:
  uintptr_t base_;
  Checked bytes_ = 0;
};

}  // namespace fusedconv

// Scratch memory. Not std::vector: its code, compiled for one instruction set, could serve them all
// (target.h).
#pragma once

#include <cstdint>

#include "core/checked.h"
#include "core/target.h"
#include "memory.h"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

template <class T>
class Buffer {
 public:
  // Of as many elements as the product of all counts: threads, say, times what each has.
  template <class... Counts>
  explicit Buffer(Checked count, Counts... times)
      : data_(static_cast<T*>(allocate_aligned(
            size_t(((Checked(int64_t(sizeof(T))) * count) * ... * Checked(times)).value())))) {}
  ~Buffer() { free_aligned(data_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  T* data() const { return data_; }
  T& operator[](int64_t i) const { return data_[i]; }

 private:
  T* data_;
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

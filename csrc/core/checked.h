// Arithmetic on sizes that callers choose, on the host: what does not fit throws std::overflow_error, which
// says what was computed, and never wraps.
#pragma once

#include <cstdint>
#include <cstdio>
#include <limits>
#include <stdexcept>

namespace fusedconv {

// As in inline.h, for the host alone: the linker keeps one copy of an inline function for all, and it may be
// the one compiled for AVX-512.
#define FUSEDCONV_HOST_INLINE inline __attribute__((always_inline))

// An int64_t whose sums, differences and products are checked. What has no operand of this type is not: start
// a formula with the sizes themselves.
class Checked {
 public:
  FUSEDCONV_HOST_INLINE Checked(int64_t value) : value_(value) {}

  FUSEDCONV_HOST_INLINE int64_t value() const { return value_; }

  // In a narrower type.
  template <class To>
  FUSEDCONV_HOST_INLINE To to() const {
    static_assert(sizeof(To) < sizeof(int64_t));
    if (value_ < int64_t(std::numeric_limits<To>::min()) || value_ > int64_t(std::numeric_limits<To>::max()))
      fail("%lld in %lld bytes", value_, sizeof(To));
    return To(value_);
  }

  friend FUSEDCONV_HOST_INLINE Checked operator+(Checked a, Checked b) {
    int64_t sum = 0;
    if (__builtin_add_overflow(a.value_, b.value_, &sum)) fail("%lld + %lld", a.value_, b.value_);
    return sum;
  }
  friend FUSEDCONV_HOST_INLINE Checked operator-(Checked a, Checked b) {
    int64_t difference = 0;
    if (__builtin_sub_overflow(a.value_, b.value_, &difference)) fail("%lld - %lld", a.value_, b.value_);
    return difference;
  }
  friend FUSEDCONV_HOST_INLINE Checked operator*(Checked a, Checked b) {
    int64_t product = 0;
    if (__builtin_mul_overflow(a.value_, b.value_, &product)) fail("%lld * %lld", a.value_, b.value_);
    return product;
  }

  friend FUSEDCONV_HOST_INLINE bool operator==(Checked a, Checked b) { return a.value_ == b.value_; }
  friend FUSEDCONV_HOST_INLINE bool operator!=(Checked a, Checked b) { return a.value_ != b.value_; }
  friend FUSEDCONV_HOST_INLINE bool operator<(Checked a, Checked b) { return a.value_ < b.value_; }
  friend FUSEDCONV_HOST_INLINE bool operator<=(Checked a, Checked b) { return a.value_ <= b.value_; }
  friend FUSEDCONV_HOST_INLINE bool operator>(Checked a, Checked b) { return a.value_ > b.value_; }
  friend FUSEDCONV_HOST_INLINE bool operator>=(Checked a, Checked b) { return a.value_ >= b.value_; }

  // Of sizes: a is not negative, b is positive.
  friend FUSEDCONV_HOST_INLINE Checked divide_up(Checked a, Checked b) {
    return a.value_ / b.value_ + int64_t(a.value_ % b.value_ != 0);
  }
  friend FUSEDCONV_HOST_INLINE Checked round_up(Checked a, Checked b) { return divide_up(a, b) * b; }

 private:
  [[noreturn]] FUSEDCONV_HOST_INLINE static void fail(const char* format, int64_t a, int64_t b) {
    char computed[64];
    std::snprintf(computed, sizeof(computed), format, static_cast<long long>(a), static_cast<long long>(b));
    char message[128];
    std::snprintf(message, sizeof(message), "a size is too large: %s", computed);
    throw std::overflow_error(message);
  }

  int64_t value_;
};

#undef FUSEDCONV_HOST_INLINE

}  // namespace fusedconv

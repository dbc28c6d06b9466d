// What becomes of the pointwise results: all are stored, or a window or a pixel's channels reduce to one.
#pragma once

#include <type_traits>

#include "math.h"
#include "target.h"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

struct Store {
  static constexpr bool kStores = true;
  static constexpr bool kPools = false;
  static constexpr bool kReducesChannels = false;
};

// MaxPool2d with stride equal to the window and no padding; the rows and columns that fill no window are
// dropped.
struct MaxPool {
  static constexpr bool kStores = false;
  static constexpr bool kPools = true;
  static constexpr bool kReducesChannels = false;
};

// logsumexp over the channels, kept as one channel.
struct ChannelLogSumExp {
  static constexpr bool kStores = false;
  static constexpr bool kPools = false;
  static constexpr bool kReducesChannels = true;
};

// For those who would take any other pool, or any other reduction of channels, for these to assert.
template <class Reduce>
constexpr bool kIsMaxPool = std::is_same_v<Reduce, MaxPool>;
template <class Reduce>
constexpr bool kIsLogSumExp = std::is_same_v<Reduce, ChannelLogSumExp>;

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

// The reductions of a chain, from a functor that gives the values before them.
#pragma once

#include <cmath>

#include "../core/math.h"
#include "statistics.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// The largest of value(row, col) in a window.
template <class T, class Index, class Value>
__device__ T window_maximum(Index rows, Index cols, const Value& value) {
  T most = -T(INFINITY);
  for (Index r = 0; r < rows; ++r) {
#pragma unroll 4
    for (Index q = 0; q < cols; ++q) most = maximum(most, value(r, q));
  }
  return most;
}

// The logarithm of a sum of exponentials so far: sum is that of exp(x - most), most the largest x.
template <class T>
struct LogSumExp {
  T most = -T(INFINITY);
  T sum = 0;

  // Where the largest is infinite, x - most would be NaN.
  __device__ static T shift_of(T most) { return isinf(most) ? T(0) : most; }

  template <int kCount>
  __device__ void add(const T (&x)[kCount]) {
    T highest = most;
#pragma unroll
    for (int k = 0; k < kCount; ++k) highest = maximum(highest, x[k]);
    const T shift = shift_of(highest);
    sum *= exp(most - shift);
#pragma unroll
    for (int k = 0; k < kCount; ++k) sum += exp(x[k] - shift);
    most = highest;
  }

  __device__ void add(const LogSumExp& other) {
    const T highest = maximum(most, other.most);
    const T shift = shift_of(highest);
    sum = sum * exp(most - shift) + other.sum * exp(other.most - shift);
    most = highest;
  }

  __device__ T value() const { return isinf(most) ? most : most + log(sum); }
};

// logsumexp of value(c) over the channels, which so many neighbouring lanes share; all of them get it. All
// lanes of the warp must come here: those that have nothing, with 0 channels.
template <class T, class Index, class Value>
__device__ T channel_logsumexp(Index channels, int lanes, const Value& value) {
  constexpr int kChunk = 32 / int(sizeof(T));  // so many loads are on their way at a time
  LogSumExp<T> result;
  for (Index first = threadIdx.x % lanes; first < channels; first += kChunk * lanes) {
    T x[kChunk];
#pragma unroll
    for (int k = 0; k < kChunk; ++k) {
      const Index c = first + k * lanes;
      x[k] = c < channels ? value(c) : -T(INFINITY);
    }
    result.add(x);
  }
  for (int distance = 1; distance < lanes; distance *= 2) {
    result.add(LogSumExp<T>{__shfl_xor_sync(~0u, result.most, distance),
                            __shfl_xor_sync(~0u, result.sum, distance)});
  }
  return result.value();
}

// Lanes that share a pixel's channels: neighbours, where the channels are.
__host__ __device__ inline int lanes_of_channels(bool channels_last, int64_t channels) {
  int lanes = 1;
  while (channels_last && lanes < kWarpThreads && lanes < channels) lanes *= 2;
  return lanes;
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

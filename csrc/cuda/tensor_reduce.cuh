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

  // Those of so many neighbouring lanes, of which all get the result.
  __device__ void add_lanes(int lanes) {
    for (int distance = 1; distance < lanes; distance *= 2)
      add(LogSumExp{__shfl_xor_sync(~0u, most, distance), __shfl_xor_sync(~0u, sum, distance)});
  }

  __device__ T value() const { return isinf(most) ? most : most + log(sum); }
};

// Of value(c) over every step-th of the channels.
template <class T, class Index, class Value>
__device__ LogSumExp<T> channel_logsumexp(Index channels, int first, int step, const Value& value) {
  constexpr int kChunk = 64 / int(sizeof(T));  // so many loads are on their way at a time
  LogSumExp<T> result;
  for (Index chunk = first; chunk < channels; chunk += kChunk * step) {
    T x[kChunk];
    if (chunk + (kChunk - 1) * step < channels) {  // spares a comparison for each
#pragma unroll
      for (int k = 0; k < kChunk; ++k) x[k] = value(chunk + k * step);
    } else {
#pragma unroll
      for (int k = 0; k < kChunk; ++k) {
        const Index c = chunk + k * step;
        x[k] = c < channels ? value(c) : -T(INFINITY);
      }
    }
    result.add(x);
  }
  return result;
}

// Lanes that share a pixel's channels: neighbours, where the channels are.
__host__ __device__ inline int lanes_of_channels(bool channels_last, int64_t channels) {
  int lanes = 1;
  while (channels_last && lanes < kWarpThreads && lanes < channels) lanes *= 2;
  return lanes;
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

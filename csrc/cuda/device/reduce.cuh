// The reductions of a chain, from a functor that gives the values before them.
#pragma once

#include <cmath>

#include "core/pointwise.h"
#include "core/reduce.h"
#include "elements.cuh"
#include "warp.cuh"

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

  // Those of so many lanes at this distance, of which all get the result.
  __device__ void add_lanes(int lanes, int distance = 1) {
    for (int i = 1; i < lanes; i *= 2)
      add(LogSumExp{__shfl_xor_sync(~0u, most, i * distance), __shfl_xor_sync(~0u, sum, i * distance)});
  }

  __device__ T value() const { return isinf(most) ? most : most + log(sum); }
};

// Adds the channels first, first + step, ... of kPixels neighbouring pixels. values(c, x) sets
// x[pixel * kChannels + k] for the channels from c on; so many values are under way at a time.
template <int kAtOnce, int kPixels, int kChannels, class T, class Index, class Values>
__device__ void add_channels(LogSumExp<T> (&sums)[kPixels], Index first, Index step, Index channels,
                             const Values& values) {
  constexpr int kValues = kPixels * kChannels;
  constexpr int kLoads = kValues < kAtOnce ? kAtOnce / kValues : 1;
  for (Index chunk = first; chunk < channels; chunk += kLoads * step) {
    T x[kLoads][kValues];
    if (chunk + (kLoads - 1) * step < channels) {  // spares a comparison for each
#pragma unroll
      for (int i = 0; i < kLoads; ++i) values(chunk + i * step, x[i]);
    } else {
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
#pragma unroll
        for (int k = 0; k < kValues; ++k) x[i][k] = -T(INFINITY);
        if (chunk + i * step < channels) values(chunk + i * step, x[i]);
      }
    }
#pragma unroll
    for (int p = 0; p < kPixels; ++p) {
      T of_pixel[kLoads * kChannels];
#pragma unroll
      for (int i = 0; i < kLoads * kChannels; ++i)
        of_pixel[i] = x[i / kChannels][p * kChannels + i % kChannels];
      sums[p].add(of_pixel);
    }
  }
}

// How the threads of a block share pixels and their channels, both counted in loads: neighbours have
// neighbours in memory.
struct ReducingThread {
  int lanes;     // of a warp, that share a pixel's channels: a power of two
  int distance;  // between those
  int channel;
  int pixel;
  int pixels;  // of the block

  __device__ ReducingThread(bool channels_last, int lanes_of_pixel) : lanes(lanes_of_pixel) {
    const int lane = threadIdx.x % kWarpThreads;
    const int pixels_of_warp = kWarpThreads / lanes;
    distance = channels_last ? 1 : pixels_of_warp;
    channel = channels_last ? lane % lanes : lane / pixels_of_warp;
    pixel =
        threadIdx.x / kWarpThreads * pixels_of_warp + (channels_last ? lane / lanes : lane % pixels_of_warp);
    pixels = blockDim.x / lanes;
  }

  // The chain's results from its values at kPixels neighbouring pixels: all lanes that share them get them.
  // channels: 0 where there is no pixel.
  template <class Chain, int kChannels, int kPixels, class T, class Index, class Values>
  __device__ void logsumexp(T (&result)[kPixels], Index channels, const Values& values) const {
    static_assert(kIsLogSumExp<typename Chain::Reduce>);
    LogSumExp<T> sums[kPixels];
    add_channels<32 / sizeof(T), kPixels, kChannels>(sums, Index(channel) * kChannels,
                                                     Index(lanes) * kChannels, channels, values);
#pragma unroll
    for (int p = 0; p < kPixels; ++p) {
      sums[p].add_lanes(lanes, distance);
      const T y = sums[p].value();
      result[p] = Chain::Final::value(y, y, Channel<T>{});
    }
  }

  // The results of kPixels pixels of a sample, from some pixel on: the lanes that share them take turns.
  // Where an output's rows follow each other, as most do, nothing is divided.
  template <int kPixels, class T>
  __device__ void store(const Tensor& output, int64_t sample, int64_t pixel, const T (&y)[kPixels]) const {
    const int64_t* stride = output.stride;
    const int64_t cols = output.size[3];
    const int64_t to_next_row = stride[2] - cols * stride[3];
    const int64_t row = to_next_row == 0 ? 0 : pixel / cols;
    int64_t col = pixel - row * cols;
    int64_t offset = sample * stride[0] + row * stride[2] + col * stride[3];
#pragma unroll
    for (int k = 0; k < kPixels; ++k) {
      if ((k & (lanes - 1)) == channel) store_values({output.data, output.dtype}, offset, Pack<T, 1>{y[k]});
      offset += stride[3];
      if (++col == cols) {
        col = 0;
        offset += to_next_row;
      }
    }
  }
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

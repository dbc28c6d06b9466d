// GroupNorm's statistics: moments of parts of a group become each channel's norm. No atomics, and one order
// of combination for each number of parts: the same bits in every run and for every batch size.
#pragma once

#include <cuda_runtime.h>

#include <type_traits>

#include "core/chain.h"
#include "warp.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// The moments of a part of a group.
template <class T>
struct Part {
  T count;
  T mean;
  T m2;  // sum of squared deviations from the mean
};

// Some values: how many, and the sums of their deviations from a shift and of these squared.
template <class T>
struct alignas(4 * sizeof(T)) Deviations {
  T count;
  T shift;
  T sum;
  T squares;
};

// GroupNorm of one channel of one sample: (x - mean) * scale + shift. Aligned so that one load gets it.
template <class T>
struct alignas(4 * sizeof(T)) Norm {
  T mean;
  T scale;
  T shift;
};

template <class T>
__device__ void set_norm(Channel<T>& channel, const Norm<T>& norm) {
  channel.mean = norm.mean;
  channel.norm_scale = norm.scale;
  channel.norm_shift = norm.shift;
}

// Sum and sum of squares of values counted from a common shift: of parts, by plain additions. With the mean
// of any one part for the shift, nothing is lost in double where the parts' means differ by a million
// deviations.
template <class T>
struct Sums {
  T sum, squares;

  template <class P>
  __device__ void add(const Part<P>& part, P shift) {
    const T delta = part.mean - shift;
    sum += T(part.count) * delta;
    squares += T(part.m2) + T(part.count) * delta * delta;
  }

  template <class P>
  __device__ void add(const Deviations<P>& d, T shift) {
    const T delta = T(d.shift) - shift;
    sum += T(d.sum) + T(d.count) * delta;
    squares += T(d.squares) + delta * (2 * T(d.sum) + T(d.count) * delta);
  }

  __device__ void add(const Sums& other) {
    sum += other.sum;
    squares += other.squares;
  }

  // Those of so many neighbouring lanes, a power of two: added in the same tree by each. Shuffles do not
  // depend on their number: where lanes might part, they take a detour.
  __device__ void add_lanes(int lanes) {
#pragma unroll
    for (int distance = 1; distance < kWarpThreads; distance *= 2) {
      const Sums other{__shfl_xor_sync(~0u, sum, distance), __shfl_xor_sync(~0u, squares, distance)};
      if (distance < lanes) add(other);
    }
  }
};

// Of a group, from its sums; share: 1 / the group's values.
__device__ inline GroupStatistics statistics_of(const Sums<double>& sums, double shift, double share,
                                                double eps) {
  const double offset = sums.sum * share;
  const double m2 = sums.squares - sums.sum * offset;
  const double variance = (m2 < 0 ? 0.0 : m2) * share;
  return {shift + offset, rsqrt(variance + eps)};
}

// GroupNorm of a channel with this weight and bias.
template <class T>
__device__ Norm<T> norm_of(const GroupStatistics& statistics, double weight, double bias) {
  Channel<T> channel{};
  set_norm(channel, weight, bias, statistics);
  return {channel.mean, channel.norm_scale, channel.norm_shift};
}

// An array of Value<float> or of Value<double>: which, a kernel for all chains learns when it runs.
template <template <class> class Value>
struct FloatsOrDoubles {
  void* data;
  bool are_doubles;

  template <class T>
  FloatsOrDoubles(const Value<T>* values)
      : data(const_cast<Value<T>*>(values)), are_doubles(std::is_same_v<T, double>) {}

  // Calls visit with a pointer to what it is.
  template <class Visit>
  __device__ void visit(const Visit& visit) const {
    if (are_doubles) {
      visit(static_cast<Value<double>*>(data));
    } else {
      visit(static_cast<Value<float>*>(data));
    }
  }
};

// Where statistics go: as a norm for each channel, and for backward as they are.
struct StatisticsOutput {
  FloatsOrDoubles<Norm> norms;  // [N][C]
  GroupStatistics* statistics;  // [N][groups], or null
};

// Queues the statistics of a tensor of N samples, whose groups have so many parts each: parts is
// [N][groups][parts_per_group]. pixels: of a channel. overlaps: see launch.cuh.
cudaError_t launch_group_statistics(FloatsOrDoubles<Part> parts, int64_t parts_per_group, int64_t samples,
                                    int64_t channels, int64_t pixels, const Arguments& arguments,
                                    const StatisticsOutput& to, bool overlaps, cudaStream_t stream);

// Queues norms without weight and bias: norms is [N][C], statistics is [N][groups].
cudaError_t launch_unit_norms(const GroupStatistics* statistics, int64_t samples, int64_t channels,
                              int64_t groups, FloatsOrDoubles<Norm> norms, cudaStream_t stream);

// Loads both kernels onto the current device.
cudaError_t load_statistics();

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

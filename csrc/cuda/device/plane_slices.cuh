// Planes cut into slices: teams of threads next to each other have one each. All of it follows from the size
// of a plane.
#pragma once

#include "launch.cuh"
#include "plan/divisor.h"
#include "plan/sizes.h"
#include "warp.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

constexpr int kPlaneThreads = 256;
constexpr int kThreadValues = 16;  // of a slice, at the most: so many are added up in float
constexpr int kMostWidth = 4;      // elements of a load

struct PlaneSlices {
  int64_t values;    // of a plane
  int64_t slices;    // of a plane
  int slice_values;  // the last one of a plane may have fewer
  int team;          // threads: a power of two, of whole warps
};

// Of so many values a thread, or fewer; or of so many lanes a value.
inline PlaneSlices slice_planes(int64_t values, int64_t thread_values = kThreadValues, int lanes = 1) {
  const int64_t most = kPlaneThreads / lanes * thread_values;
  const int64_t least = std::max<int64_t>(cuda::divide_up(values, most), 1);
  const int64_t of_slice =
      std::max<int64_t>(cuda::round_up(cuda::divide_up(values, least), kMostWidth), kMostWidth);
  const int64_t threads = cuda::divide_up(of_slice, thread_values) * lanes;
  const int team = std::max(cuda::power_of_two_from(threads, kPlaneThreads), kWarpThreads);
  return {values, std::max<int64_t>(cuda::divide_up(values, of_slice), 1), int(of_slice), team};
}

// The planes of a launch.
struct SlicedPlanes {
  PlaneSlices of;
  int64_t planes;
  cuda::WideDivisor by_slices;
  cuda::WideDivisor by_channels;
};

inline SlicedPlanes sliced_planes(const PlaneSlices& slices, int64_t samples, int64_t channels) {
  const int64_t planes = samples * channels;
  return {slices, planes, cuda::wide_divisor(slices.slices, planes * slices.slices),
          cuda::wide_divisor(channels, planes)};
}

inline int64_t blocks_of(const SlicedPlanes& planes) {
  return cuda::divide_up(planes.planes * planes.of.slices, kPlaneThreads / planes.of.team);
}

// What a thread's team has. The last teams of a launch may have nothing.
struct Slice {
  bool exists;
  int64_t plane;
  int64_t sample;
  int64_t channel;
  int64_t index;  // in the plane
  int64_t first;  // of its values in the plane
  int values;
  int team;
  int thread;  // of the team

  __device__ explicit Slice(const SlicedPlanes& planes) : team(planes.of.team) {
    const int shift = log2_of(team);
    const int64_t i = block_index() * (kPlaneThreads >> shift) + (threadIdx.x >> shift);
    exists = i < planes.planes * planes.of.slices;
    thread = threadIdx.x & (team - 1);
    const int64_t slice = exists ? i : 0;
    plane = planes.by_slices.divide(slice);
    index = slice - plane * planes.of.slices;
    sample = planes.by_channels.divide(plane);
    channel = plane - sample * planes.by_channels.value;
    first = index * planes.of.slice_values;
    values = exists ? int(min(planes.of.values - first, int64_t(planes.of.slice_values))) : 0;
  }
};

// Calls load(i), then use(i, what it loaded) for the slice's packs of kCount values that a thread has, which
// start at i; loads of kBatch packs are under way together. No memory is written before they are done.
template <int kBatch, int kCount, class Load, class Use>
__device__ void for_each_pack(const Slice& slice, const Load& load, const Use& use) {
  const int step = slice.team * kCount;
  for (int first = slice.thread * kCount; first < slice.values; first += kBatch * step) {
    decltype(load(0)) loaded[kBatch];
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      if (first + k * step < slice.values) loaded[k] = load(first + k * step);
    }
    asm volatile("" ::: "memory");
#pragma unroll
    for (int k = 0; k < kBatch; ++k) {
      if (first + k * step < slice.values) use(first + k * step, loaded[k]);
    }
  }
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

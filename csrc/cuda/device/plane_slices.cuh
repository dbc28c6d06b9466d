// What a thread has of the slices into which planes are cut.
#pragma once

#include "launch.cuh"
#include "plan/plane_slices.h"
#include "warp.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

using cuda::kMostWidth;
using cuda::kPlaneThreads;
using cuda::kThreadValues;
using cuda::PlaneSlices;
using cuda::SlicedPlanes;

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

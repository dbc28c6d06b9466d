// Planes cut into slices: teams of threads next to each other have one each. All of it follows from the size
// of a plane.
#pragma once

#include <algorithm>
#include <cstdint>

#include "divisor.h"
#include "sizes.h"

namespace fusedconv {
namespace cuda {

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
  const int64_t least = std::max<int64_t>(divide_up(values, most), 1);
  const int64_t of_slice = std::max<int64_t>(round_up(divide_up(values, least), kMostWidth), kMostWidth);
  const int64_t threads = divide_up(of_slice, thread_values) * lanes;
  const int team = std::max(power_of_two_from(threads, kPlaneThreads), kWarpLanes);
  return {values, std::max<int64_t>(divide_up(values, of_slice), 1), int(of_slice), team};
}

// The planes of a launch.
struct SlicedPlanes {
  PlaneSlices of;
  int64_t planes;
  WideDivisor by_slices;
  WideDivisor by_channels;
};

inline SlicedPlanes sliced_planes(const PlaneSlices& slices, int64_t samples, int64_t channels) {
  const int64_t planes = samples * channels;
  return {slices, planes, wide_divisor(slices.slices, planes * slices.slices),
          wide_divisor(channels, planes)};
}

inline int64_t blocks_of(const SlicedPlanes& planes) {
  return divide_up(planes.planes * planes.of.slices, kPlaneThreads / planes.of.team);
}

}  // namespace cuda
}  // namespace fusedconv

// A warp and its lanes.
#pragma once

#include "core/target.h"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

constexpr int kWarpThreads = 32;

__device__ inline int lane_of_thread() { return threadIdx.x % kWarpThreads; }

// The largest value of a warp's threads.
__device__ inline unsigned largest_of_warp(unsigned x) {
#if __CUDA_ARCH__ >= 800
  return __reduce_max_sync(~0u, x);
#else
  for (int distance = 1; distance < kWarpThreads; distance *= 2)
    x = max(x, __shfl_xor_sync(~0u, x, distance));
  return x;
#endif
}

// A power of two of lanes for so many things, as many as there are or a warp.
__device__ inline int lanes_of(int count) {
  int lanes = 1;
  while (lanes < count && lanes < kWarpThreads) lanes *= 2;
  return lanes;
}

__device__ inline int log2_of(int power_of_two) { return 31 - __clz(power_of_two); }

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

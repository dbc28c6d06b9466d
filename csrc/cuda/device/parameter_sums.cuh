// Sums of gradients over the places of a channel, by slices of planes; and what they are for: the gradients
// of parameters, and that of a GroupNorm. No atomics, and one order of addition for each number of slices.
#pragma once

#include "plane_slices.cuh"
#include "statistics.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// Of gradients' kinds: ChannelParameter's.
constexpr unsigned kOfStages = (1u << kStageParameters) - 1;
constexpr unsigned kOfNorm = 1u << kNormWeight | 1u << kNormBias;
constexpr unsigned kOfConv = 1u << kConvBias;

// Of each kind [samples][C][slices], or null.
struct PartialSums {
  double* of[kGradientKinds];
  int64_t slices;
};

inline PartialSums sums_from(const PartialSums& sums, int64_t plane) {
  PartialSums from = sums;
  for (double*& of_kind : from.of) {
    if (of_kind != nullptr) of_kind += plane * sums.slices;
  }
  return from;
}

// Of kCount values a lane over so many lanes next to each other, a power of two: these get the sums in turn,
// lanes / kCount of them the same one. A few of them are added in float.
template <int kCount>
__device__ double sum_over_lanes(float (&x)[kCount], int lanes = kWarpThreads) {
  int distance = lanes / 2;
#pragma unroll
  for (int half = kCount / 2; half > 0; half /= 2) {
    const bool is_upper = (threadIdx.x & distance) != 0;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float given = is_upper ? x[i] : x[i + half];
      x[i] = (is_upper ? x[i + half] : x[i]) + __shfl_xor_sync(~0u, given, distance);
    }
    distance /= 2;
  }
  double sum = double(x[0]);
  for (; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
  return sum;
}

// Of a slice, from those of its team's threads. By all threads of a block.
template <unsigned kKinds, class T>
__device__ void write_sums(const Slice& slice, const T (&sums)[kGradientKinds], const PartialSums& to) {
  __shared__ double of_warp[kGradientKinds][kPlaneThreads / kWarpThreads];
  bool any = false;
#pragma unroll
  for (int kind = 0; kind < kGradientKinds; ++kind) {
    if ((kKinds >> kind & 1) == 0 || to.of[kind] == nullptr) continue;
    any = true;
    double sum = double(sums[kind]);
#pragma unroll
    for (int distance = kWarpThreads / 2; distance > 0; distance /= 2)
      sum += __shfl_xor_sync(~0u, sum, distance);
    if (lane_of_thread() == 0) of_warp[kind][threadIdx.x / kWarpThreads] = sum;
  }
  if (!any) return;
  __syncthreads();
  if (!slice.exists || slice.thread > 0) return;
  const int first = threadIdx.x / kWarpThreads;
#pragma unroll
  for (int kind = 0; kind < kGradientKinds; ++kind) {
    if ((kKinds >> kind & 1) == 0 || to.of[kind] == nullptr) continue;
    double sum = of_warp[kind][first];
    for (int warp = 1; warp < slice.team / kWarpThreads; ++warp) sum += of_warp[kind][first + warp];
    to.of[kind][slice.plane * to.slices + slice.index] = sum;
  }
}

// Over a group: see NormGradient. Aligned so that one load gets it.
template <class T>
struct alignas(2 * sizeof(T)) GroupMeans {
  T mean;
  T mean_product;
};

// Queues the means of the groups of so many samples, from the sums behind the norm. norms: without weight and
// bias. means is [samples][groups]. pixels: of a channel. overlaps: see launch.cuh.
cudaError_t launch_group_means(const PartialSums& sums, int64_t samples, int64_t channels, int64_t pixels,
                               const Arguments& arguments, FloatsOrDoubles<Norm> norms,
                               FloatsOrDoubles<GroupMeans> means, bool overlaps, cudaStream_t stream);

// The gradient of a parameter, [C]: what two kernels have summed, or one.
struct ParameterGradient {
  void* to;
  const double* sums[2];
  int64_t slices[2];
};

struct ParameterGradients {
  ParameterGradient of[kGradientKinds];
  bool are_doubles;  // or float
};

// Queues those that have a `to`.
cudaError_t launch_parameter_gradients(const ParameterGradients& gradients, int64_t samples, int64_t channels,
                                       cudaStream_t stream);

// Loads both kernels onto the current device.
cudaError_t load_parameter_sums();

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

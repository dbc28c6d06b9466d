// Kernels for all chains: in a file of their own, so that they are compiled once.
#include "launch.cuh"
#include "plan/sizes.h"
#include "statistics.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {
namespace {

constexpr int kNormThreads = 128;

// A block for each group of each sample. parts is [N][groups][parts_per_group].
__global__ void __launch_bounds__(kNormThreads)
    group_norm_statistics(FloatsOrDoubles<Part> parts, int64_t parts_per_group, int64_t channels,
                          int64_t groups, int64_t group_channels, double share, Arguments arguments,
                          StatisticsOutput to) {
  constexpr int kWarps = kNormThreads / kWarpThreads;
  __shared__ Sums<double> of_warp[kWarps];
  let_next_kernel_start();
  wait_for_earlier_kernels();
  for (int64_t group = blockIdx.x; group < groups; group += gridDim.x) {
    Sums<double> sums{};
    double shift;
    parts.visit([&](const auto* part) {
      part += group * parts_per_group;
      const auto mean = part->mean;  // the first part is never empty
      shift = mean;
#pragma unroll 4
      for (int64_t i = threadIdx.x; i < parts_per_group; i += kNormThreads) sums.add(part[i], mean);
    });
    sums.add_lanes(kWarpThreads);
    if (threadIdx.x % kWarpThreads == 0) of_warp[threadIdx.x / kWarpThreads] = sums;
    __syncthreads();
    Sums<double> all = of_warp[0];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) all.add(of_warp[w]);
    const GroupStatistics found = statistics_of(all, shift, share, arguments.eps);
    if (to.statistics != nullptr && threadIdx.x == 0) to.statistics[group] = found;
    for (int64_t i = threadIdx.x; i < group_channels; i += kNormThreads) {
      const int64_t c = group * group_channels + i;  // counted through all samples
      const double weight = value_of<double>(arguments.parameters[kNormWeight], c % channels, 1.0);
      const double bias = value_of<double>(arguments.parameters[kNormBias], c % channels);
      to.norms.visit([&](auto* norms) { norms[c] = norm_of<decltype(norms->mean)>(found, weight, bias); });
    }
    __syncthreads();
  }
}

// A thread for each channel of each sample.
__global__ void __launch_bounds__(kNormThreads)
    unit_norms(const GroupStatistics* statistics, int64_t channels, int64_t group_channels,
               FloatsOrDoubles<Norm> to) {
  let_next_kernel_start();
  const int64_t first = int64_t(blockIdx.x) * kNormThreads + threadIdx.x;
  for (int64_t c = first; c < channels; c += int64_t(gridDim.x) * kNormThreads) {
    const GroupStatistics& of_group = statistics[c / group_channels];
    to.visit([&](auto* norms) { norms[c] = norm_of<decltype(norms->mean)>(of_group, 1.0, 0.0); });
  }
}

}  // namespace

cudaError_t launch_group_statistics(FloatsOrDoubles<Part> parts, int64_t parts_per_group, int64_t samples,
                                    int64_t channels, int64_t pixels, const Arguments& arguments,
                                    const StatisticsOutput& to, bool overlaps, cudaStream_t stream) {
  const int64_t groups = samples * arguments.num_groups;
  const int64_t group_channels = channels / arguments.num_groups;
  const double share = 1.0 / (double(group_channels) * double(pixels));
  return launch_kernel(group_norm_statistics, {some_blocks(groups), kNormThreads, 0, overlaps}, stream, parts,
                       parts_per_group, channels, groups, group_channels, share, arguments, to);
}

cudaError_t launch_unit_norms(const GroupStatistics* statistics, int64_t samples, int64_t channels,
                              int64_t groups, FloatsOrDoubles<Norm> norms, cudaStream_t stream) {
  const int64_t count = samples * channels;
  const LaunchShape shape{some_blocks(cuda::divide_up(count, kNormThreads)), kNormThreads, 0, false};
  return launch_kernel(unit_norms, shape, stream, statistics, count, channels / groups, norms);
}

cudaError_t load_statistics() {
  if (const cudaError_t status = load_kernel(group_norm_statistics)) return status;
  return load_kernel(unit_norms);
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

// Kernels for all chains: in a file of their own, so that they are compiled once.
#include "launch.cuh"
#include "plan/sizes.h"
#include "statistics.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {
namespace {

constexpr int kNormThreads = 128;

// A block for each group of each sample. parts is [N][groups][parts_per_group].
template <class T, class P>
__global__ void __launch_bounds__(kNormThreads)
    group_norm_statistics(const Part<P>* parts, int64_t parts_per_group, int64_t channels, int64_t groups,
                          int64_t group_channels, double share, Arguments arguments, StatisticsOutput<T> to) {
  constexpr int kWarps = kNormThreads / kWarpThreads;
  __shared__ Sums<double> of_warp[kWarps];
  let_next_kernel_start();
  wait_for_earlier_kernels();
  for (int64_t group = blockIdx.x; group < groups; group += gridDim.x) {
    const Part<P>* of_group = parts + group * parts_per_group;
    const P shift = of_group[0].mean;  // the first part is never empty
    Sums<double> sums{};
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < parts_per_group; i += kNormThreads) sums.add(of_group[i], shift);
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
      to.norms[c] = norm_of<T>(found, value_of<double>(arguments.norm_weight, c % channels, 1.0),
                               value_of<double>(arguments.norm_bias, c % channels));
    }
    __syncthreads();
  }
}

// A thread for each channel of each sample.
template <class T>
__global__ void __launch_bounds__(kNormThreads)
    unit_norms(const GroupStatistics* statistics, int64_t channels, int64_t group_channels, Norm<T>* norms) {
  let_next_kernel_start();
  const int64_t first = int64_t(blockIdx.x) * kNormThreads + threadIdx.x;
  for (int64_t c = first; c < channels; c += int64_t(gridDim.x) * kNormThreads)
    norms[c] = norm_of<T>(statistics[c / group_channels], 1.0, 0.0);
}

}  // namespace

template <class T, class P>
cudaError_t launch_group_statistics(const Part<P>* parts, int64_t parts_per_group, int64_t samples,
                                    int64_t channels, int64_t pixels, const Arguments& arguments,
                                    const StatisticsOutput<T>& to, bool overlaps, cudaStream_t stream) {
  const int64_t groups = samples * arguments.num_groups;
  const int64_t group_channels = channels / arguments.num_groups;
  const double share = 1.0 / (double(group_channels) * double(pixels));
  return launch_kernel(group_norm_statistics<T, P>, {some_blocks(groups), kNormThreads, 0, overlaps}, stream,
                       parts, parts_per_group, channels, groups, group_channels, share, arguments, to);
}

template <class T, class P>
cudaError_t load_group_statistics() {
  return load_kernel(group_norm_statistics<T, P>);
}

template <class T>
cudaError_t launch_unit_norms(const GroupStatistics* statistics, int64_t samples, int64_t channels,
                              int64_t groups, Norm<T>* norms, cudaStream_t stream) {
  const int64_t count = samples * channels;
  const LaunchShape shape{some_blocks(cuda::divide_up(count, kNormThreads)), kNormThreads, 0, false};
  return launch_kernel(unit_norms<T>, shape, stream, statistics, count, channels / groups, norms);
}

template <class T>
cudaError_t load_unit_norms() {
  return load_kernel(unit_norms<T>);
}

#define FUSEDCONV_STATISTICS(T, P)                                                                 \
  template cudaError_t launch_group_statistics(const Part<P>*, int64_t, int64_t, int64_t, int64_t, \
                                               const Arguments&, const StatisticsOutput<T>&, bool, \
                                               cudaStream_t);                                      \
  template cudaError_t load_group_statistics<T, P>();

FUSEDCONV_STATISTICS(float, float)
FUSEDCONV_STATISTICS(float, double)
FUSEDCONV_STATISTICS(double, double)

#define FUSEDCONV_UNIT_NORMS(T)                                                                       \
  template cudaError_t launch_unit_norms(const GroupStatistics*, int64_t, int64_t, int64_t, Norm<T>*, \
                                         cudaStream_t);                                               \
  template cudaError_t load_unit_norms<T>();

FUSEDCONV_UNIT_NORMS(float)
FUSEDCONV_UNIT_NORMS(double)

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

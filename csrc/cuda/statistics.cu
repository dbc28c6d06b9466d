// One kernel for all chains: in a file of its own, so that it is compiled once.
#include "launch.cuh"
#include "statistics.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {
namespace {

constexpr int kNormThreads = 128;

// Of all lanes, added in the same tree by each.
__device__ inline double sum_of_lanes(double x) {
#pragma unroll
  for (int distance = 1; distance < kWarpThreads; distance *= 2) x += __shfl_xor_sync(~0u, x, distance);
  return x;
}

// Counts, sums and sums of squares of values counted from a common shift.
struct Sums {
  double count, sum, squares;
};

// A block for each group of each sample. parts is [N][groups][parts_per_group], norms is [N][C].
template <class T, class P>
__global__ void __launch_bounds__(kNormThreads)
    group_norm_statistics(const Part<P>* parts, int64_t parts_per_group, int64_t channels, int64_t groups,
                          int64_t group_channels, Arguments arguments, Norm<T>* norms) {
  constexpr int kWarps = kNormThreads / kWarpThreads;
  __shared__ Sums of_warp[kWarps];
  wait_for_earlier_kernels();
  for (int64_t group = blockIdx.x; group < groups; group += gridDim.x) {
    // About the mean of the group's first part, which is never empty: no division for each part, and nothing
    // is lost in double where the parts' means differ by a million deviations.
    const Part<P>* of_group = parts + group * parts_per_group;
    const double shift = of_group[0].mean;
    double count = 0, sum = 0, squares = 0;
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < parts_per_group; i += kNormThreads) {
      const Part<P> part = of_group[i];
      const double delta = double(part.mean) - shift;
      count += part.count;
      sum += part.count * delta;
      squares += double(part.m2) + part.count * delta * delta;
    }
    const Sums of_lanes{sum_of_lanes(count), sum_of_lanes(sum), sum_of_lanes(squares)};
    if (threadIdx.x % kWarpThreads == 0) of_warp[threadIdx.x / kWarpThreads] = of_lanes;
    __syncthreads();
    Sums all = of_warp[0];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) {
      all.count += of_warp[w].count;
      all.sum += of_warp[w].sum;
      all.squares += of_warp[w].squares;
    }
    const double offset = all.sum / all.count;
    const double m2 = all.squares - all.sum * offset;
    const double variance = (m2 < 0 ? 0.0 : m2) / all.count;
    const double inverse_deviation = 1.0 / sqrt(variance + arguments.eps);
    for (int64_t i = threadIdx.x; i < group_channels; i += kNormThreads) {
      Channel<T> channel{};
      const int64_t c = group * group_channels + i;  // counted through all samples
      set_norm(channel, arguments, c % channels, shift + offset, inverse_deviation);
      norms[c] = {channel.mean, channel.norm_scale, channel.norm_shift};
    }
    __syncthreads();
  }
}

}  // namespace

template <class T, class P>
cudaError_t launch_group_statistics(const Part<P>* parts, int64_t parts_per_group, int64_t samples,
                                    int64_t channels, const Arguments& arguments, Norm<T>* norms,
                                    bool overlaps, cudaStream_t stream) {
  constexpr int64_t kMostBlocks = 1 << 16;
  const int64_t groups = samples * arguments.num_groups;
  const int blocks = int(groups < kMostBlocks ? groups : kMostBlocks);
  return launch_kernel(group_norm_statistics<T, P>, {dim3(blocks), kNormThreads, 0, overlaps}, stream, parts,
                       parts_per_group, channels, groups, channels / arguments.num_groups, arguments, norms);
}

template <class T, class P>
cudaError_t load_group_statistics() {
  return load_kernel(group_norm_statistics<T, P>);
}

#define FUSEDCONV_STATISTICS(T, P)                                                                          \
  template cudaError_t launch_group_statistics(const Part<P>*, int64_t, int64_t, int64_t, const Arguments&, \
                                               Norm<T>*, bool, cudaStream_t);                               \
  template cudaError_t load_group_statistics<T, P>();

FUSEDCONV_STATISTICS(float, float)
FUSEDCONV_STATISTICS(float, double)
FUSEDCONV_STATISTICS(double, double)

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

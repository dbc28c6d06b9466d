// One kernel for all chains: in a file of its own, so that it is compiled once.
#include "launch.cuh"
#include "statistics.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {
namespace {

constexpr int kNormThreads = 128;

// A block for each group of each sample. parts is [N][groups][parts_per_group], norms is [N][C].
template <class T, class P>
__global__ void __launch_bounds__(kNormThreads)
    group_norm_statistics(const Part<P>* parts, int64_t parts_per_group, int64_t channels, int64_t groups,
                          int64_t group_channels, double share, Arguments arguments, Norm<T>* norms) {
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
    for (int64_t i = threadIdx.x; i < group_channels; i += kNormThreads) {
      const int64_t c = group * group_channels + i;  // counted through all samples
      norms[c] = norm_of<T>(all, shift, share, arguments.eps,
                            value_of<double>(arguments.norm_weight, c % channels, 1.0),
                            value_of<double>(arguments.norm_bias, c % channels));
    }
    __syncthreads();
  }
}

}  // namespace

template <class T, class P>
cudaError_t launch_group_statistics(const Part<P>* parts, int64_t parts_per_group, int64_t samples,
                                    int64_t channels, int64_t pixels, const Arguments& arguments,
                                    Norm<T>* norms, bool overlaps, cudaStream_t stream) {
  constexpr int64_t kMostBlocks = 1 << 16;
  const int64_t groups = samples * arguments.num_groups;
  const int blocks = int(groups < kMostBlocks ? groups : kMostBlocks);
  const int64_t group_channels = channels / arguments.num_groups;
  const double share = 1.0 / (double(group_channels) * double(pixels));
  return launch_kernel(group_norm_statistics<T, P>, {dim3(blocks), kNormThreads, 0, overlaps}, stream, parts,
                       parts_per_group, channels, groups, group_channels, share, arguments, norms);
}

template <class T, class P>
cudaError_t load_group_statistics() {
  return load_kernel(group_norm_statistics<T, P>);
}

#define FUSEDCONV_STATISTICS(T, P)                                                                 \
  template cudaError_t launch_group_statistics(const Part<P>*, int64_t, int64_t, int64_t, int64_t, \
                                               const Arguments&, Norm<T>*, bool, cudaStream_t);    \
  template cudaError_t load_group_statistics<T, P>();

FUSEDCONV_STATISTICS(float, float)
FUSEDCONV_STATISTICS(float, double)
FUSEDCONV_STATISTICS(double, double)

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

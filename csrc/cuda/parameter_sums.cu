// Two kernels for all chains: in a file of their own, so that they are compiled once.
#include "parameter_sums.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {
namespace {

constexpr int kSumThreads = 128;
constexpr int64_t kMostBlocks = 1 << 15;

// The sum of value(i) for all i under count, in the block's first thread.
template <class Value>
__device__ double sum_of_block(int64_t count, const Value& value) {
  constexpr int kWarps = kSumThreads / kWarpThreads;
  __shared__ double of_warp[kWarps];
  double sum = 0;
#pragma unroll 4
  for (int64_t i = threadIdx.x; i < count; i += kSumThreads) sum += value(i);
#pragma unroll
  for (int distance = kWarpThreads / 2; distance > 0; distance /= 2)
    sum += __shfl_xor_sync(~0u, sum, distance);
  if (lane_of_thread() == 0) of_warp[threadIdx.x / kWarpThreads] = sum;
  __syncthreads();
  sum = of_warp[0];
#pragma unroll
  for (int w = 1; w < kWarps; ++w) sum += of_warp[w];
  __syncthreads();
  return sum;
}

struct SumsOfGroups {
  const double* norm_bias;
  const double* norm_weight;
  int64_t slices;
  cuda::WideDivisor by_slices;
  int64_t groups;  // of all samples
  int64_t group_channels;
  int64_t channels;
  double values;  // of a group
  Parameter weight;
};

// A block for each group of each sample.
template <class T>
__global__ void __launch_bounds__(kSumThreads)
    norm_gradient_means(const __grid_constant__ SumsOfGroups sums, const Norm<T>* norms,
                        GroupMeans<T>* means) {
  let_next_kernel_start();
  wait_for_earlier_kernels();
  for (int64_t group = blockIdx.x; group < sums.groups; group += gridDim.x) {
    const int64_t first = group * sums.group_channels;  // counted through all samples
    const int64_t first_channel = first % sums.channels;
    const auto weighted = [&](const double* of) {
      return sum_of_block(sums.group_channels * sums.slices, [&](int64_t i) {
        const double weight = value_of<double>(sums.weight, first_channel + sums.by_slices.divide(i), 1.0);
        return weight * of[first * sums.slices + i];
      });
    };
    const double mean = weighted(sums.norm_bias);
    const double mean_product = weighted(sums.norm_weight);
    const double factor = double(norms[first].scale) / sums.values;
    if (threadIdx.x == 0) means[group] = {T(mean * factor), T(mean_product * factor)};
  }
}

// A row of the grid for each kind, and of that a block for each channel.
template <class T>
__global__ void __launch_bounds__(kSumThreads)
    parameter_gradients(const __grid_constant__ ParameterGradients gradients, int64_t samples,
                        int64_t channels) {
  const ParameterGradient& gradient = gradients.of[blockIdx.y];
  if (gradient.to == nullptr) return;
  for (int64_t c = blockIdx.x; c < channels; c += gridDim.x) {
    double sum = 0;
    for (int source = 0; source < 2; ++source) {
      const double* const sums = gradient.sums[source];
      if (sums == nullptr) continue;
      const int64_t slices = gradient.slices[source];
      sum += sum_of_block(samples * slices, [&](int64_t i) {
        const int64_t sample = i / slices;
        return sums[(sample * channels + c) * slices + (i - sample * slices)];
      });
    }
    if (threadIdx.x == 0) static_cast<T*>(gradient.to)[c] = T(sum);
  }
}

}  // namespace

template <class T>
cudaError_t launch_group_means(const PartialSums& sums, int64_t samples, int64_t channels, int64_t pixels,
                               const Arguments& arguments, const Norm<T>* norms, GroupMeans<T>* means,
                               bool overlaps, cudaStream_t stream) {
  const int64_t groups = samples * arguments.num_groups;
  const int64_t group_channels = channels / arguments.num_groups;
  const SumsOfGroups of_groups{sums.of[kOfNormBias],
                               sums.of[kOfNormWeight],
                               sums.slices,
                               cuda::wide_divisor(sums.slices, group_channels * sums.slices),
                               groups,
                               group_channels,
                               channels,
                               double(group_channels) * double(pixels),
                               arguments.norm_weight};
  return launch_kernel(norm_gradient_means<T>,
                       {dim3(unsigned(std::min(groups, kMostBlocks))), kSumThreads, 0, overlaps}, stream,
                       of_groups, norms, means);
}

template <class T>
cudaError_t launch_parameter_gradients(const ParameterGradients& gradients, int64_t samples, int64_t channels,
                                       cudaStream_t stream) {
  const dim3 grid(unsigned(std::min(channels, kMostBlocks)), kGradientKinds);
  return launch_kernel(parameter_gradients<T>, {grid, kSumThreads, 0, false}, stream, gradients, samples,
                       channels);
}

template <class T>
cudaError_t load_parameter_sums() {
  if (const cudaError_t status = load_kernel(norm_gradient_means<T>)) return status;
  return load_kernel(parameter_gradients<T>);
}

#define FUSEDCONV_PARAMETER_SUMS(T)                                                                        \
  template cudaError_t launch_group_means(const PartialSums&, int64_t, int64_t, int64_t, const Arguments&, \
                                          const Norm<T>*, GroupMeans<T>*, bool, cudaStream_t);             \
  template cudaError_t launch_parameter_gradients<T>(const ParameterGradients&, int64_t, int64_t,          \
                                                     cudaStream_t);                                        \
  template cudaError_t load_parameter_sums<T>();

FUSEDCONV_PARAMETER_SUMS(float)
FUSEDCONV_PARAMETER_SUMS(double)

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

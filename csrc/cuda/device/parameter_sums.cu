// Two kernels for all chains: in a file of their own, so that they are compiled once.
#include "parameter_sums.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {
namespace {

constexpr int kMeanThreads = 128;
constexpr int kParameterThreads = 512;

// kCount sums, of the warps' shares of them, for all threads of a block.
template <int kThreads, int kCount>
__device__ void sum_over_block(double (&sums)[kCount]) {
  constexpr int kWarps = kThreads / kWarpThreads;
  __shared__ double of_warp[kWarps][kCount];
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
#pragma unroll
    for (int distance = kWarpThreads / 2; distance > 0; distance /= 2)
      sums[k] += __shfl_xor_sync(~0u, sums[k], distance);
    if (lane_of_thread() == 0) of_warp[threadIdx.x / kWarpThreads][k] = sums[k];
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    sums[k] = of_warp[0][k];
#pragma unroll
    for (int w = 1; w < kWarps; ++w) sums[k] += of_warp[w][k];
  }
  __syncthreads();
}

// Adds value(line, i, k) for all lines and all i of a line, as a block's threads share them out: lanes next
// to each other have a line.
template <int kThreads, int kCount, class Value>
__device__ void add_lines(int64_t lines, int64_t line_values, double (&sums)[kCount], const Value& value) {
  constexpr int kAtOnce = 8 / kCount;  // lines
  int shift = 0;
  while (1 << shift < kWarpThreads && 1 << shift < line_values) ++shift;
  const int step = kThreads >> shift;
  for (int64_t first = threadIdx.x >> shift; first < lines; first += kAtOnce * step) {
    for (int64_t i = threadIdx.x & ((1 << shift) - 1); i < line_values; i += 1 << shift) {
      double x[kAtOnce][kCount]{};
#pragma unroll
      for (int l = 0; l < kAtOnce; ++l) {
#pragma unroll
        for (int k = 0; k < kCount; ++k) {
          if (first + l * step < lines) x[l][k] = value(first + l * step, i, k);
        }
      }
#pragma unroll
      for (int l = 0; l < kAtOnce; ++l) {
#pragma unroll
        for (int k = 0; k < kCount; ++k) sums[k] += x[l][k];
      }
    }
  }
}

struct SumsOfGroups {
  const double* norm_bias;
  const double* norm_weight;
  int64_t slices;
  int64_t groups;  // of all samples
  int64_t group_channels;
  int64_t channels;
  double values;  // of a group
  Parameter weight;
};

// A block for each group of each sample.
__global__ void __launch_bounds__(kMeanThreads, 1)
    norm_gradient_means(const __grid_constant__ SumsOfGroups sums, FloatsOrDoubles<Norm> norms,
                        FloatsOrDoubles<GroupMeans> means) {
  let_next_kernel_start();
  wait_for_earlier_kernels();
  for (int64_t group = blockIdx.x; group < sums.groups; group += gridDim.x) {
    const int64_t first = group * sums.group_channels;  // counted through all samples
    const int64_t first_channel = first % sums.channels;
    double totals[2]{};  // of the gradient, and of its product with what it is the gradient of
    add_lines<kMeanThreads>(sums.group_channels, sums.slices, totals, [&](int64_t c, int64_t i, int k) {
      const double weight = value_of<double>(sums.weight, first_channel + c, 1.0);
      return weight * (k == 0 ? sums.norm_bias : sums.norm_weight)[(first + c) * sums.slices + i];
    });
    sum_over_block<kMeanThreads>(totals);
    means.visit([&](auto* to) {
      using T = decltype(to->mean);
      const double factor = double(static_cast<const Norm<T>*>(norms.data)[first].scale) / sums.values;
      if (threadIdx.x == 0) to[group] = {T(totals[0] * factor), T(totals[1] * factor)};
    });
  }
}

// A row of the grid for each kind, and of that a block for each channel.
__global__ void __launch_bounds__(kParameterThreads)
    parameter_gradients(const __grid_constant__ ParameterGradients gradients, int64_t samples,
                        int64_t channels) {
  const ParameterGradient& gradient = gradients.of[blockIdx.y];
  if (gradient.to == nullptr) return;
  for (int64_t c = blockIdx.x; c < channels; c += gridDim.x) {
    double sum[1]{};
    for (int source = 0; source < 2; ++source) {
      const double* const sums = gradient.sums[source];
      const int64_t slices = gradient.slices[source];
      if (sums == nullptr) continue;
      add_lines<kParameterThreads>(samples, slices, sum, [&](int64_t sample, int64_t i, int) {
        return sums[(sample * channels + c) * slices + i];
      });
    }
    sum_over_block<kParameterThreads>(sum);
    if (threadIdx.x > 0) continue;
    if (gradients.are_doubles) {
      static_cast<double*>(gradient.to)[c] = sum[0];
    } else {
      static_cast<float*>(gradient.to)[c] = float(sum[0]);
    }
  }
}

}  // namespace

cudaError_t launch_group_means(const PartialSums& sums, int64_t samples, int64_t channels, int64_t pixels,
                               const Arguments& arguments, FloatsOrDoubles<Norm> norms,
                               FloatsOrDoubles<GroupMeans> means, bool overlaps, cudaStream_t stream) {
  const int64_t groups = samples * arguments.num_groups;
  const int64_t group_channels = channels / arguments.num_groups;
  const SumsOfGroups of_groups{sums.of[kNormBias],
                               sums.of[kNormWeight],
                               sums.slices,
                               groups,
                               group_channels,
                               channels,
                               double(group_channels) * double(pixels),
                               arguments.parameters[kNormWeight]};
  return launch_kernel(norm_gradient_means, {some_blocks(groups), kMeanThreads, 0, overlaps}, stream,
                       of_groups, norms, means);
}

cudaError_t launch_parameter_gradients(const ParameterGradients& gradients, int64_t samples, int64_t channels,
                                       cudaStream_t stream) {
  const dim3 grid(some_blocks(channels), kGradientKinds);
  return launch_kernel(parameter_gradients, {grid, kParameterThreads, 0, false}, stream, gradients, samples,
                       channels);
}

cudaError_t load_parameter_sums() {
  if (const cudaError_t status = load_kernel(norm_gradient_means)) return status;
  return load_kernel(parameter_gradients);
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

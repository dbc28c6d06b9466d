// The second step of a pooled chain: the statistics of each group of the norm, and y = Final(Post(Norm(x)))
// for its pooled values.
#pragma once

#include "../core/chain.h"
#include "conv_problem.cuh"
#include "launch.cuh"
#include "vector_access.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

constexpr int kPooledThreads = 64;
constexpr int kPooledValues = 16;  // of a thread: all loads are on their way before the first store
constexpr int kPooledShare = kPooledThreads * kPooledValues;  // of a channel
constexpr int kPooledShares =
    4;  // of a block: more would be few blocks, fewer would add up the same parts more often

// Of one channel of one sample: a thread's values, from `first` in steps of kPooledThreads.
template <class Chain, class Out>
__device__ void apply_norm(const float* from, const Tensor& output, int64_t sample, int c, int first,
                           const Channel<float>& channel) {
  const int cols = int(output.size[3]);
  const int pixels = int(output.size[2]) * cols;
  // Within a sample offsets fit in ints.
  const int row_stride = int(output.stride[2]);
  const int col_stride = int(output.stride[3]);
  const bool is_run = row_stride == cols * col_stride;  // spares a division
  Out* to = static_cast<Out*>(output.data) + sample * output.stride[0] + c * output.stride[1];
  float x[kPooledValues];
#pragma unroll
  for (int i = 0; i < kPooledValues; ++i)
    if (first + i * kPooledThreads < pixels) x[i] = from[first + i * kPooledThreads];
#pragma unroll
  for (int i = 0; i < kPooledValues; ++i) {
    const int pixel = first + i * kPooledThreads;
    if (pixel >= pixels) break;
    const float y = Chain::Post::value(Chain::Norm::value(x[i], channel), x[i], channel);
    const int row = is_run ? 0 : pixel / cols;
    to[row * row_stride + (pixel - row * cols) * col_stride] =
        narrow<Out>(Chain::Final::value(y, y, channel));
  }
}

template <class Chain>
__device__ void apply_norm(const float* from, const Tensor& output, int64_t sample, int c, int first,
                           const Channel<float>& channel) {
  switch (output.dtype) {
    case DType::kBFloat16:
      return apply_norm<Chain, __nv_bfloat16>(from, output, sample, c, first, channel);
    case DType::kFloat16:
      return apply_norm<Chain, __half>(from, output, sample, c, first, channel);
    default:
      return apply_norm<Chain, float>(from, output, sample, c, first, channel);
  }
}

// A block has some shares of the channels of a group of one sample, each of one channel's values. p.pooled is
// [N][C][height][width] of the output.
template <class Chain>
__global__ void __launch_bounds__(kPooledThreads)
    pooled_norm(const __grid_constant__ ConvProblem p, int blocks_per_group) {
  static_assert(!Chain::Post::kReadsConv, "the conv's output is not here");
  wait_for_earlier_kernels();
  const ConvTiling& t = p.tiling;
  const int64_t sample = blockIdx.x / blocks_per_group;
  const int block = int(blockIdx.x - sample * blocks_per_group);
  const int group_channels = t.out_channels / int(p.arguments.num_groups);
  const int first_channel = blockIdx.y * group_channels;
  const int64_t first_plane = sample * t.out_channels + first_channel;
  const int parts_of_channel = parts_per_channel(t);
  const Part<float>* const parts = p.parts + first_plane * parts_of_channel;
  const float shift = parts[0].mean;  // the first part is never empty
  const Sums<double> sums =
      sums_of_block<kPooledThreads>(parts, int64_t(group_channels) * parts_of_channel, shift);
  const double share = 1.0 / (double(group_channels) * t.out_size[0] * t.out_size[1]);
  const int pixels = int(p.output.size[2] * p.output.size[3]);
  const int shares_of_channel = (pixels + kPooledShare - 1) / kPooledShare;
  for (int i = block * kPooledShares; i < (block + 1) * kPooledShares; ++i) {
    const int k = i / shares_of_channel;
    if (k >= group_channels) return;
    const int c = first_channel + k;
    Channel<float> channel = make_channel<float>(p.arguments, c);
    set_norm(channel, norm_of<float>(sums, shift, share, p.arguments.eps,
                                     value_of<double>(p.arguments.norm_weight, c, 1.0),
                                     value_of<double>(p.arguments.norm_bias, c)));
    apply_norm<Chain>(p.pooled + (first_plane + k) * pixels, p.output, sample, c,
                      (i - k * shares_of_channel) * kPooledShare + threadIdx.x, channel);
  }
}

template <class Chain>
cudaError_t launch_pooled_norm(const ConvProblem& p, bool overlaps, cudaStream_t stream) {
  const int64_t pixels = p.output.size[2] * p.output.size[3];
  const int64_t groups = p.arguments.num_groups;
  const int64_t shares = p.output.size[1] / groups * ((pixels + kPooledShare - 1) / kPooledShare);
  const int blocks_per_group = int((shares + kPooledShares - 1) / kPooledShares);
  const dim3 grid(unsigned(p.output.size[0]) * blocks_per_group, unsigned(groups));
  return launch_kernel(pooled_norm<Chain>, {grid, kPooledThreads, 0, overlaps}, stream, p, blocks_per_group);
}

// Loads its kernel onto the current device.
template <class Chain>
cudaError_t load_pooled_norm() {
  return load_kernel(pooled_norm<Chain>);
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

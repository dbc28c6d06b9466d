// The reductions of a chain straight from memory, for samples too large to be kept on chip: any window, any
// number of channels.
#pragma once

#include "cuda/device/launch.cuh"
#include "cuda/device/reduce.cuh"
#include "piece.cuh"
#include "plan/divisor.h"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

constexpr int kDirectThreads = 128;
// Of the logsumexp on a multiprocessor, by registers: enough loads on their way.
template <class T>
constexpr int kLeastDirectBlocks = sizeof(T) == sizeof(double) ? 4 : 7;

template <class T>
__device__ Channel<T> channel_at(const GivenWork<T>& work, int64_t sample, int64_t c) {
  Channel<T> channel = make_channel<T>(work.arguments, c);
  if (work.norms != nullptr) set_norm(channel, work.norms[sample * work.shape.channels + c]);
  return channel;
}

// A thread for each output; neighbours have outputs that are neighbours in memory.
template <class Chain, class Kind>
__global__ void __launch_bounds__(kDirectThreads, 1)
    given_max_pool(const __grid_constant__ GivenWork<Compute<Kind>> work,
                   const cuda::WideDivisor by_per_sample) {
  using T = Compute<Kind>;
  static_assert(kIsMaxPool<typename Chain::Reduce>);
  wait_for_earlier_kernels();
  const int64_t sample = by_per_sample.divide(block_index());
  if (sample >= work.shape.samples) return;
  const int64_t i = (block_index() - sample * by_per_sample.value) * kDirectThreads + threadIdx.x;
  const Tensor& output = work.output;
  const GivenShape& shape = work.shape;
  const int64_t pooled_cols = output.size[3];
  const int64_t pooled = output.size[2] * pooled_cols;
  if (i >= shape.channels * pooled) return;
  const int64_t c = shape.channels_last ? i % shape.channels : i / pooled;
  const int64_t window = shape.channels_last ? i / shape.channels : i % pooled;
  const int64_t row = window / pooled_cols;
  const int64_t col = window % pooled_cols;
  const int64_t* size = work.arguments.pool;
  const int64_t cols = shape.window_pixels / size[0];
  const int64_t first = row * size[0] * cols + col * size[1];
  const int64_t step = shape.channels_last ? shape.channels : 1;  // from pixel to pixel
  const int64_t at =
      sample * shape.channels * shape.pixels + (shape.channels_last ? c : c * shape.pixels) + first * step;
  const Channel<T> channel = channel_at(work, sample, c);
  T most;
  visit_element<Kind>(work.input.dtype, [&](auto element) {
    const auto* const from = static_cast<const decltype(element)*>(work.input.data) + at;
    most = window_maximum<T>(size[0], size[1], [&](int64_t r, int64_t q) {
      return Chain::value(widen<T>(from[(r * cols + q) * step]), channel);
    });
  });
  const int64_t* stride = output.stride;
  store_values({output.data, output.dtype},
               sample * stride[0] + c * stride[1] + row * stride[2] + col * stride[3],
               Pack<T, 1>{Chain::Final::value(most, most, channel)});
}

template <class Chain, class ThreadLoad, class T>
__device__ void reduce_channels(const GivenWork<T>& work, int64_t sample, int64_t block) {
  constexpr int kCount = ThreadLoad::kCount;
  constexpr int kChannels = ThreadLoad::kChannels;
  constexpr int kPixels = ThreadLoad::kPixels;
  const GivenShape& shape = work.shape;
  const ReducingThread thread(shape.channels_last, work.plan.reducing_lanes);
  const int64_t p = (block * thread.pixels + thread.pixel) * kPixels;
  const bool exists = p < shape.pixels;
  const int64_t first =
      sample * shape.channels * shape.pixels + (shape.channels_last ? p * shape.channels : p);
  const int64_t step = shape.channels_last ? 1 : shape.pixels;
  const auto* const from = static_cast<const typename ThreadLoad::Element*>(work.input.data) + first;
  T y[kPixels];
  thread.logsumexp<Chain, kChannels>(y, exists ? shape.channels : 0, [&](int64_t c, T* x) {
    const auto v = load_pack<kCount>(from + c * step);
    Channel<T> channel;
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      if (k < kChannels) channel = channel_at(work, sample, c + k);
      x[k] = Chain::value(widen<T>(v.element[k]), channel);
    }
  });
  if (exists) thread.store(work.output, sample, p, y);
}

template <class Chain, class Kind>
__global__ void __launch_bounds__(kDirectThreads, kLeastDirectBlocks<Compute<Kind>>)
    given_logsumexp(const __grid_constant__ GivenWork<Compute<Kind>> work,
                    const cuda::WideDivisor by_per_sample) {
  wait_for_earlier_kernels();
  const int64_t sample = by_per_sample.divide(block_index());
  if (sample >= work.shape.samples) return;
  const int64_t block = block_index() - sample * by_per_sample.value;
  visit_load<Chain, Kind>(work,
                          [&](auto load) { reduce_channels<Chain, decltype(load)>(work, sample, block); });
}

template <class Chain, class Kind>
auto direct_kernel() {
  if constexpr (Chain::Reduce::kPools) {
    return given_max_pool<Chain, Kind>;
  } else {
    return given_logsumexp<Chain, Kind>;
  }
}

template <class Chain, class Kind>
cudaError_t launch_direct(const GivenWork<Compute<Kind>>& work, bool overlaps, cudaStream_t stream) {
  const GivenShape& shape = work.shape;
  int64_t results = shape.pixels;
  int results_of_block = kDirectThreads;
  if constexpr (Chain::Reduce::kPools) {
    results = shape.channels * work.output.size[2] * work.output.size[3];
  } else {
    results_of_block /= work.plan.reducing_lanes;
    if (!shape.channels_last) results_of_block *= work.plan.width;
  }
  const int64_t blocks = cuda::divide_up(results, results_of_block);
  const LaunchShape launch{grid_of(shape.samples * blocks, 1), kDirectThreads, 0, overlaps};
  const int64_t end = int64_t(launch.grid.x) * launch.grid.y;
  return launch_kernel(direct_kernel<Chain, Kind>(), launch, stream, work, cuda::wide_divisor(blocks, end));
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

// The table of a logsumexp, a line a pixel: what is subtracted from its channels before exp, and the factor
// after it.
#pragma once

#include "spread.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// Adds the channels of some pixels that a thread has, of those whose parameters are in shared memory.
template <class Chain, class T, int kCount>
__device__ void add_some_channels(const BackwardWork<T>& work, int64_t from, int first, int step, int count,
                                  const Channel<T>* channels, LogSumExp<T> (&sums)[kCount]) {
  constexpr int kLoads = (kCount > 1 ? 16 : 32) / int(sizeof(T));
  for (; first < count; first += kLoads * step) {
    RawPack<T, kCount> raw[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int c = first + i * step;
      if (c < count) raw[i] = load_raw<T, kCount>(work.v, from + c * work.pixels);
    }
    T x[kCount][kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const int c = first + i * step;
#pragma unroll
      for (int k = 0; k < kCount; ++k) x[k][i] = -T(INFINITY);
      if (c >= count) continue;
      const Channel<T> channel = channels[c];
      const Pack<T, kCount> v = values_of(raw[i], work.v.dtype);
#pragma unroll
      for (int k = 0; k < kCount; ++k) x[k][i] = Chain::value(v.element[k], channel);
    }
#pragma unroll
    for (int k = 0; k < kCount; ++k) sums[k].add(x[k]);
  }
}

template <class Chain, class T, int kCount>
__device__ void write_pixels(const BackwardWork<T>& work, Channel<T> (&channels)[kPlaneThreads]) {
  const ReducingThread thread(false, work.blocks.lanes);
  const int64_t sample = work.blocks.by_per_sample.divide(block_index());
  const int64_t block = block_index() - sample * work.blocks.per_sample;
  const int64_t pixel = (block * thread.pixels + thread.pixel) * kCount;
  const bool exists = pixel < work.pixels;
  LogSumExp<T> sums[kCount];
  for (int64_t first = 0; first < work.channels; first += kPlaneThreads) {
    const int count = int(min(work.channels - first, int64_t(kPlaneThreads)));
    __syncthreads();
    if (int(threadIdx.x) < count)
      channels[threadIdx.x] = channel_of_thread<Chain>(work, sample, first + threadIdx.x);
    __syncthreads();
    add_some_channels<Chain>(work, (sample * work.channels + first) * work.pixels + pixel, thread.channel,
                             thread.lanes, exists ? count : 0, channels, sums);
  }
#pragma unroll
  for (int k = 0; k < kCount; ++k) sums[k].add_lanes(thread.lanes, thread.distance);
  if (!exists || thread.channel > 0) return;

  const int64_t at = sample * work.pixels + pixel;
  const Pack<T, kCount> grad = load_values<T, kCount>(work.grad, at);
  Pack<T, kCount> most;
  Pack<T, kCount> factor;
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    most.element[k] = LogSumExp<T>::shift_of(sums[k].most);
    factor.element[k] = softmax_factor<Chain>(grad.element[k], most.element[k], sums[k].sum, work.arguments);
  }
  store_pack(work.most + at, most);
  store_pack(work.factor + at, factor);
}

template <class Chain, class T>
__global__ void __launch_bounds__(kPlaneThreads)
    logsumexp_table(const __grid_constant__ BackwardWork<T> work) {
  __shared__ Channel<T> channels[kPlaneThreads];
  let_next_kernel_start();
  wait_for_earlier_kernels();
  if (block_index() >= work.samples * work.blocks.per_sample) return;
  visit_count(work, [&](auto count) { write_pixels<Chain, T, decltype(count)::value>(work, channels); });
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

// The table of a logsumexp and the sums behind the norm in one, for as many channels as the threads of a
// block hold in registers: v is read once, and the chain computed once.
#pragma once

#include "spread.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

using cuda::kMostSpanWarps;
using cuda::kSpanChannels;
using cuda::kSpanPixels;

constexpr int kSpanWidth = 2;  // elements of a load, or 1

struct SpanMemory {
  SampleChannel channels[kSpanChannels * kMostSpanWarps];
  float most[kMostSpanWarps][kWarpThreads * kSpanWidth];  // of a warp's channels, at each pixel
  float sum[kMostSpanWarps][kWarpThreads * kSpanWidth];
};

// Some pixels of a lane, with a warp's channels.
template <class Chain, int kWidth>
class ChannelSpan {
 public:
  static constexpr unsigned kKinds = kAfterNorm<Chain>;

  __device__ ChannelSpan(const BackwardWork<float>& work, SpanMemory& memory, int64_t sample, int64_t pixel)
      : work_(work),
        memory_(memory),
        warp_(threadIdx.x / kWarpThreads),
        channels_(int(work.channels) - warp_ * kSpanChannels),
        exists_(pixel < work.pixels) {
    pixel = min(pixel, work.pixels - kWidth);
    at_ = sample * work.pixels + pixel;
    grad_ = load_raw<float, kWidth>(work.grad, at_);
    load_values((sample * work.channels + warp_ * kSpanChannels) * work.pixels + pixel);
  }

  // Adds what a lane gets of them to its sums.
  __device__ void add_to(double (&sums)[kGradientKinds]) {
    float most[kWidth];
    float factor[kWidth];
    find_most(most);
    find_factor(most, factor);
    if (warp_ == 0 && exists_) {
      store_pack(work_.most + at_, pack_of(most));
      store_pack(work_.factor + at_, pack_of(factor));
    }
#pragma unroll
    for (int kind = 0; kind < kGradientKinds; ++kind) {
      if ((kKinds >> kind & 1) == 0 || work_.after_norm.of[kind] == nullptr) continue;
      float of_channel[kSpanChannels]{};
#pragma unroll
      for (int i = 0; i < kSpanChannels; ++i) {
#pragma unroll
        for (int k = 0; k < kWidth; ++k) of_channel[i] += x_[i][k] * factor[k] * of_unit_[i][k][kind];
      }
      sums[kind] += sum_over_lanes(of_channel);
    }
  }

 private:
  // Values before the reduction, and the gradients behind the norm where that of a value is 1.
  __device__ void load_values(int64_t first) {
    const float* const from = static_cast<const float*>(work_.v.data) + first;
    Pack<float, kWidth> v[kSpanChannels];
#pragma unroll
    for (int i = 0; i < kSpanChannels; ++i) v[i] = load_pack<kWidth>(from + channel_of(i) * work_.pixels);
    asm volatile("" ::: "memory");
#pragma unroll
    for (int i = 0; i < kSpanChannels; ++i) {
      const SampleChannel& of = memory_.channels[warp_ * kSpanChannels + channel_of(i)];
#pragma unroll
      for (int k = 0; k < kWidth; ++k) set_value(i, k, v[i].element[k], of);
    }
    if (channels_ < kSpanChannels) drop_channels();
  }

  // The last one again, where there is none.
  __device__ int channel_of(int i) const { return min(i, channels_ - 1); }

  __device__ void set_value(int i, int k, float v, const SampleChannel& of) {
    x_[i][k] = Chain::value(v, of.channel);
    float sums[kGradientKinds];
#pragma unroll
    for (float& sum : sums) sum = -0.0f;  // see no_gradients()
    add_after_norm<Chain>(1.0f, v, of.channel, of.norm, sums);
#pragma unroll
    for (int kind = 0; kind < kGradientKinds; ++kind) of_unit_[i][k][kind] = sums[kind];
  }

  __device__ void drop_channels() {
#pragma unroll
    for (int i = 0; i < kSpanChannels; ++i) {
#pragma unroll
      for (int k = 0; k < kWidth; ++k) x_[i][k] = i < channels_ ? x_[i][k] : -INFINITY;
    }
  }

  __device__ static Pack<float, kWidth> pack_of(const float (&x)[kWidth]) {
    Pack<float, kWidth> pack;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) pack.element[k] = x[k];
    return pack;
  }

  // Combines those of all warps, in one order.
  template <class Combine>
  __device__ void combine_warps(float (&x)[kWidth], float (*of_warps)[kWarpThreads * kSpanWidth],
                                const Combine& combine) const {
    const int column = lane_of_thread() * kWidth;
    store_pack(of_warps[warp_] + column, pack_of(x));
    __syncthreads();
    for (int warp = 0; warp < int(blockDim.x) / kWarpThreads; ++warp) {
      const Pack<float, kWidth> other = load_pack<kWidth>(of_warps[warp] + column);
#pragma unroll
      for (int k = 0; k < kWidth; ++k) x[k] = warp == 0 ? other.element[k] : combine(x[k], other.element[k]);
    }
  }

  __device__ void find_most(float (&most)[kWidth]) const {
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      most[k] = x_[0][k];
#pragma unroll
      for (int i = 1; i < kSpanChannels; ++i) most[k] = maximum(most[k], x_[i][k]);
    }
    combine_warps(most, memory_.most, [](float a, float b) { return maximum(a, b); });
#pragma unroll
    for (int k = 0; k < kWidth; ++k) most[k] = LogSumExp<float>::shift_of(most[k]);
  }

  // exp(x - most) takes the place of x.
  __device__ void find_factor(const float (&most)[kWidth], float (&factor)[kWidth]) {
    float sum[kWidth]{};
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
#pragma unroll
      for (int i = 0; i < kSpanChannels; ++i) {
        x_[i][k] = exp(x_[i][k] - most[k]);
        sum[k] += x_[i][k];
      }
    }
    combine_warps(sum, memory_.sum, [](float a, float b) { return a + b; });
    const Pack<float, kWidth> grad = values_of(grad_, work_.grad.dtype);
#pragma unroll
    for (int k = 0; k < kWidth; ++k)
      factor[k] = exists_ ? softmax_factor<Chain>(grad.element[k], most[k], sum[k], work_.arguments) : 0;
  }

  const BackwardWork<float>& work_;
  SpanMemory& memory_;
  const int warp_;
  const int channels_;  // of the warp, or more
  const bool exists_;   // or the last pixels are there again
  int64_t at_;          // of the pixels, in the tables
  RawPack<float, kWidth> grad_;
  float x_[kSpanChannels][kWidth];
  float of_unit_[kSpanChannels][kWidth][kGradientKinds];
};

template <class Chain, int kWidth>
__device__ void add_channel_spans(const BackwardWork<float>& work, SpanMemory& memory, int64_t sample,
                                  int64_t first, double (&sums)[kGradientKinds]) {
  constexpr int kPixels = kWarpThreads * kWidth;
  const int64_t end = min(first + kSpanPixels, work.pixels);
  for (; first < end; first += kPixels)
    ChannelSpan<Chain, kWidth>(work, memory, sample, first + lane_of_thread() * kWidth).add_to(sums);
}

template <class Chain>
__global__ void __launch_bounds__(kMostSpanWarps* kWarpThreads)
    channel_sums(const __grid_constant__ BackwardWork<float> work) {
  __shared__ SpanMemory memory;
  let_next_kernel_start();
  wait_for_earlier_kernels();
  if (block_index() >= work.samples * work.blocks.per_sample) return;
  const int64_t sample = work.blocks.by_per_sample.divide(block_index());
  const int64_t block = block_index() - sample * work.blocks.per_sample;
  if (threadIdx.x < work.channels)
    memory.channels[threadIdx.x] = {channel_of_thread<Chain>(work, sample, threadIdx.x),
                                    norm_gradient_of<Chain, false>(work, sample, threadIdx.x)};
  __syncthreads();
  double sums[kGradientKinds]{};
  if (work.width > 1) {
    add_channel_spans<Chain, kSpanWidth>(work, memory, sample, block * kSpanPixels, sums);
  } else {
    add_channel_spans<Chain, 1>(work, memory, sample, block * kSpanPixels, sums);
  }
  constexpr int kLanes = kWarpThreads / kSpanChannels;  // of a channel
  const int c = threadIdx.x / kLanes;
  if (threadIdx.x % kLanes != 0 || c >= work.channels) return;
#pragma unroll
  for (int kind = 0; kind < kGradientKinds; ++kind) {
    if ((kAfterNorm<Chain> >> kind & 1) != 0 && work.after_norm.of[kind] != nullptr)
      work.after_norm.of[kind][(sample * work.channels + c) * work.after_norm.slices + block] = sums[kind];
  }
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

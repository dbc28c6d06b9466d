// The weight in shared memory, scaled and split, in the words that lanes hand to the tensor cores.
#pragma once

#include "strip_work.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// By all threads of a block, once.
template <int kOutTiles>
class StripWeights {
  using Shared = StripShared<kOutTiles>;
  static constexpr int kTapsOfChannel = kTaps * kTaps;

 public:
  __device__ StripWeights(const StripWork& work, Shared& shared) : work_(work), shared_(shared) {}

  __device__ void load() {
    if (threadIdx.x == 0) {
      shared_.weight_largest = 0;
      shared_.weights_are_finite = 1;
      shared_.weights_are_wide = 0;
    }
    __syncthreads();
    for (int c = threadIdx.x / kWarpThreads; c < Shared::kChannels; c += kStripThreads / kWarpThreads)
      measure(c);
    __syncthreads();
    for (int i = threadIdx.x; i < kTaps * Shared::kChunks * kWarpThreads; i += kStripThreads)
      write_conv(i / kWarpThreads / Shared::kChunks, i / kWarpThreads % Shared::kChunks, i % kWarpThreads);
    const float scale = power_of_two(scale_exponent(shared_.weight_largest));
    for (int i = threadIdx.x; i < kOutTiles * kTapsOfChannel * kWarpThreads; i += kStripThreads)
      write_gradient(i / kWarpThreads / kTapsOfChannel, i / kWarpThreads % kTapsOfChannel, i % kWarpThreads,
                     scale);
  }

 private:
  __device__ float weight(int out_channel, int in_channel, int down, int across) const {
    if (in_channel >= work_.shape.in_channels || out_channel >= work_.shape.out_channels) return 0;
    const int64_t* stride = work_.weight.stride;
    return value_at<float>(work_.weight, out_channel * stride[0] + in_channel * stride[1] + down * stride[2] +
                                             across * stride[3]);
  }

  // By a warp: a channel's scale, and how its weights share it.
  __device__ void measure(int c) {
    const bool exists = c < work_.shape.out_channels;
    const float balance = exists && work_.balance != nullptr ? work_.balance[c] : 1.0f;
    unsigned most = 0;
    unsigned of_channel[kUnitChannels];  // of the input, the largest ones
    bool are_finite = true;
    for (int in_channel = 0; in_channel < kUnitChannels; ++in_channel) {
      const int tap = min(lane_of_thread(), kTapsOfChannel - 1);
      const float x = weight(c, in_channel, tap / kTaps, tap % kTaps);
      are_finite &= is_finite(magnitude_of(x));
      of_channel[in_channel] = largest_of_warp(finite_magnitude(x));
      most = max(most, of_channel[in_channel]);
    }
    are_finite = __all_sync(~0u, are_finite);
    if (lane_of_thread() > 0) return;
    if (!are_finite) shared_.weights_are_finite = 0;
    write_shares(c, of_channel, most);
    atomicMax(&shared_.weight_largest, finite_magnitude(__uint_as_float(most) / balance));
    shared_.balance[c] = balance;
    shared_.conv_channels[c] = {power_of_two(-scale_exponent(most)),
                                exists ? value_of<float>(work_.bias, c) : 0.0f};
  }

  __device__ void write_shares(int c, const unsigned (&of_channel)[kUnitChannels], unsigned most) {
    for (int i = 0; i < kUnitChannels; ++i) {
      const int share = share_of(of_channel[i], most);
      shared_.shares[c][i] = share;
      if (is_wide(share) && work_.operand_parts == kMostOperandParts)
        shared_.weights_are_wide = 1;  // one part loses digits anyway
    }
  }

  // Rows of this operand are channels of the input, two a word; columns those of the output.
  __device__ void write_conv(int down, int chunk, int lane) {
    const int c = chunk * kUnitChannels + lane / 4;
    const float scale = 1.0f / shared_.conv_channels[c].x;
    float x[2 * kTaps];
#pragma unroll
    for (int i = 0; i < 2 * kTaps; ++i) x[i] = scale * weight(c, lane % 4 * 2 + i % 2, down, i / 2);
    SplitPair pair[kTaps];
#pragma unroll
    for (int i = 0; i < kTaps; ++i) pair[i] = split_pair(x[2 * i], x[2 * i + 1]);
    shared_.conv_weights[down][chunk][lane] = {pair[0].high, pair[1].high, pair[0].low, pair[1].low};
    shared_.conv_tails[down][chunk][lane] = {pair[2].high, pair[2].low};
  }

  // Here rows are channels of the output, and columns those of the input.
  __device__ void write_gradient(int tile, int tap, int lane, float scale) {
    float x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int c = tile * kTileChannels + i / 2 * kUnitChannels + lane % 4 * 2 + i % 2;
      x[i] = weight(c, lane / 4, tap / kTaps, tap % kTaps) / shared_.balance[c] * scale;
    }
    const SplitPair first = split_pair(x[0], x[1]);
    const SplitPair second = split_pair(x[2], x[3]);
    shared_.gradient_weights[tile][tap / kTaps][tap % kTaps][lane] = {first.high, second.high, first.low,
                                                                      second.low};
  }

  const StripWork& work_;
  Shared& shared_;
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

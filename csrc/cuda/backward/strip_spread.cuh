// As Spread (cuda/backward/spread.cuh), for a lane's places of a tile: load() what a row takes at once,
// settle() when v is there, then gradients() of a channel's two pixels.
#pragma once

#include "cuda/device/gradient_pairs.cuh"
#include "strip_conv.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// A lane's pixels of a map.
struct TilePlace {
  int64_t sample;
  int col;
  bool exists[2];  // in a row that does
};

struct StripSpreadBase {
  const BackwardWork<float>& work_;
  const ConvShape& shape_;
  const TilePlace& place_;

  __device__ StripSpreadBase(const BackwardWork<float>& work, const ConvShape& shape, const TilePlace& place)
      : work_(work), shape_(shape), place_(place) {}
};

template <class Chain, int kChunks, class Reduce = typename Chain::Reduce>
class StripSpread;

template <class Chain, int kChunks>
class StripSpread<Chain, kChunks, Store> : StripSpreadBase {
 public:
  using StripSpreadBase::StripSpreadBase;

  // Of places that do not exist, others: without a condition, all loads are under way at once.
  __device__ void load(int row) {
    const int64_t offset = (place_.sample * work_.channels * shape_.out_size[0] + row) * shape_.out_size[1];
    if (work_.grad.dtype == DType::kFloat32) {
      load_words<uint32_t>(offset);
    } else {
      load_words<uint16_t>(offset);
    }
  }

  template <class ChannelAt>
  __device__ void settle(const TileValues<kChunks>&, const ChannelAt&) {
    if (work_.grad.dtype == DType::kFloat32) return;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (GradientPair& pair : pair_[c]) pair.widen(work_.has_pairs, work_.grad.dtype == DType::kBFloat16);
    }
  }

  __device__ Pack<float, 2> gradients(int c, int k) const {
    return {{pair_[c][k].value(0), pair_[c][k].value(1)}};
  }

 private:
  // Where rows are whole pairs, two at once.
  template <class Word>
  __device__ void load_words(int64_t offset) {
    const bool is_pair = work_.has_pairs;
    const int last = shape_.out_size[1] - (is_pair ? 2 : 1);
    const int col = min(place_.col, last);
    const int next = min(place_.col + 1, last);
    const Word* from = static_cast<const Word*>(work_.grad.data) + offset + col +
                       uint64_t(uint32_t(tile_channel(0))) * uint32_t(work_.pixels);
    if (shape_.out_channels == kChunks * kUnitChannels) {
      load_chunks<true>(from, next - col, is_pair);
    } else {
      load_chunks<false>(from, next - col, is_pair);
    }
  }

  // from: of the lane's first channel.
  template <bool kHasAll, class Word>
  __device__ void load_chunks(const Word* from, int to_second, bool is_pair) {
    const int64_t plane = work_.pixels;
#pragma unroll
    for (int c = 0; c < kChunks; ++c, from += kUnitChannels * plane) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int beyond = kHasAll ? 0 : max(tile_channel(c) + k - shape_.out_channels + 1, 0);
        const Word* const at = from + (k - beyond) * plane;
        pair_[c][k].load(at, at + to_second, is_pair);
      }
    }
  }

  GradientPair pair_[kChunks][2];
};

// A lane has some of a pixel's channels, three neighbours the others. The softmax is found here, of the very
// v that the gradient is taken at: where one channel is far above the others, its share has to be one.
template <class Chain, int kChunks>
class StripSpread<Chain, kChunks, ChannelLogSumExp> : StripSpreadBase {
 public:
  using StripSpreadBase::StripSpreadBase;

  __device__ void load(int row) {
    const int64_t first = place_.sample * work_.pixels + int64_t(row) * shape_.out_size[1] + place_.col;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      raw_[i] = {};
      if (place_.exists[i]) raw_[i] = load_raw<float, 1>(work_.grad, first + i);
    }
  }

  template <class ChannelAt>
  __device__ void settle(TileValues<kChunks>& v, const ChannelAt& channel_at) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float most = set_values(i, v, channel_at);
      factor_[i] = factor_of(i, most, set_shares(i, most));
    }
    // What is behind this is computed again: there is no room for what the softmax took.
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (float& x : v[c]) asm volatile("" : "+f"(x));
    }
  }

  __device__ Pack<float, 2> gradients(int c, int k) const {
    return {{share_[c][k][0] * factor_[0], share_[c][k][1] * factor_[1]}};
  }

 private:
  // Returns what is subtracted from them before exp.
  template <class ChannelAt>
  __device__ float set_values(int i, const TileValues<kChunks>& v, const ChannelAt& channel_at) {
    float most = -INFINITY;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int channel = tile_channel(c) + k;
        const float x = Chain::value(v[c][2 * i + k], channel_at(channel).channel);
        share_[c][k][i] = channel < shape_.out_channels ? x : -INFINITY;
        most = maximum(most, share_[c][k][i]);
      }
    }
#pragma unroll
    for (int distance = 1; distance < 4; distance *= 2)
      most = maximum(most, __shfl_xor_sync(~0u, most, distance));
    return LogSumExp<float>::shift_of(most);
  }

  // Puts exp of values in their place, and returns its sum.
  __device__ float set_shares(int i, float most) {
    float sum = 0;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        share_[c][k][i] = exp(share_[c][k][i] - most);
        sum += share_[c][k][i];
      }
    }
#pragma unroll
    for (int distance = 1; distance < 4; distance *= 2) sum += __shfl_xor_sync(~0u, sum, distance);
    return sum;
  }

  __device__ float factor_of(int i, float most, float sum) const {
    const float grad = values_of(raw_[i], work_.grad.dtype).element[0];
    return place_.exists[i] ? softmax_factor<Chain>(grad, most, sum, work_.arguments) : 0.0f;
  }

  RawPack<float, 1> raw_[2];
  float share_[kChunks][2][2];  // of a pixel's sum
  float factor_[2];
};

// Where windows are of whole pairs, a lane's two pixels share one, which is loaded ahead.
template <class Chain, int kChunks>
class StripSpread<Chain, kChunks, MaxPool> : StripSpreadBase {
 public:
  __device__ StripSpread(const BackwardWork<float>& work, const ConvShape& shape, const TilePlace& place)
      : StripSpreadBase(work, shape, place),
        are_shared_(work.pool.window_cols % 2 == 0),
        windows_(uint32_t(work.windows.of.values)) {}

  __device__ void load(int row) {
    const PoolShape& pool = work_.pool;
    const int window_row = pool.by_window_rows.divide(row);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int col = place_.col + i;
      const int window_col = pool.by_window_cols.divide(col);
      const bool exists = place_.exists[i] && window_row < pool.pooled_rows && window_col < pool.pooled_cols;
      window_[i] = place_.sample * work_.channels * windows_;
      if (exists) window_[i] += int64_t(window_row) * pool.pooled_cols + window_col;
      place_in_window_[i] = exists ? place_in_window(pool, row, col) : -1;
    }
    if (!are_shared_) return;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (int k = 0; k < 2; ++k) loaded_[c][k] = window_at(0, tile_channel(c) + k);
    }
  }

  template <class ChannelAt>
  __device__ void settle(const TileValues<kChunks>&, const ChannelAt&) const {}

  __device__ Pack<float, 2> gradients(int c, int k) const {
    Pack<float, 2> grad;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const WindowGradient<float> window = are_shared_ ? loaded_[c][k] : window_at(i, tile_channel(c) + k);
      grad.element[i] = window.at(place_in_window_[i]);
    }
    return grad;
  }

 private:
  // Of a channel that does not exist, another one's.
  __device__ WindowGradient<float> window_at(int i, int channel) const {
    const int64_t at = window_[i] + uint64_t(uint32_t(min(channel, shape_.out_channels - 1))) * windows_;
    return window_gradient(work_, at);
  }

  const bool are_shared_;
  const uint32_t windows_;  // of a plane
  int64_t window_[2];       // of the first channel
  int place_in_window_[2];
  WindowGradient<float> loaded_[kChunks][2];
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

// As Spread (tensor_spread.cuh), for a lane's places of a tile: load() what a row takes at once, settle()
// when v is there, then gradients() of a channel's two pixels.
#pragma once

#include "gradient_pairs.cuh"
#include "strip_conv.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// A lane's pixels of a map.
struct TilePlace {
  int64_t sample;
  int col;
  bool exists[2];  // in a row that does
};

template <class Chain, int kChunks, class Reduce = typename Chain::Reduce>
class StripSpread;

template <class Chain, int kChunks>
class StripSpread<Chain, kChunks, Store> {
 public:
  __device__ StripSpread(const BackwardWork<float>& work, const ConvShape& shape, const TilePlace& place)
      : work_(work), shape_(shape), place_(place) {}

  // Of places that do not exist, others: without a condition, all loads are under way at once.
  __device__ void load(int row) {
    const int64_t offset = (place_.sample * work_.channels * shape_.out_size[0] + row) * shape_.out_size[1];
    if (work_.grad.dtype == DType::kFloat32) {
      load_words<uint32_t>(offset);
    } else {
      load_words<uint16_t>(offset);
    }
  }

  __device__ void settle() {
    if (work_.grad.dtype == DType::kFloat32) return;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (GradientPair& pair : pair_[c]) pair.widen(work_.width > 1, work_.grad.dtype == DType::kBFloat16);
    }
  }

  __device__ Pack<float, 2> gradients(int c, int k, const float (&)[2], const Channel<float>&) const {
    return {{pair_[c][k].value(0), pair_[c][k].value(1)}};
  }

 private:
  // Where rows are whole pairs, two at once.
  template <class Word>
  __device__ void load_words(int64_t offset) {
    const bool is_pair = work_.width > 1;
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

  const BackwardWork<float>& work_;
  const ConvShape& shape_;
  const TilePlace& place_;
  GradientPair pair_[kChunks][2];
};

template <class Chain, int kChunks>
class StripSpread<Chain, kChunks, ChannelLogSumExp> {
 public:
  __device__ StripSpread(const BackwardWork<float>& work, const ConvShape& shape, const TilePlace& place)
      : work_(work), shape_(shape), place_(place) {}

  // From the table.
  __device__ void load(int row) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      most_[i] = place_.exists[i] ? work_.most[at(row, i)] : 0.0f;
      factor_[i] = place_.exists[i] ? work_.factor[at(row, i)] : 0.0f;
    }
  }

  __device__ void settle() {}

  __device__ Pack<float, 2> gradients(int, int, const float (&v)[2], const Channel<float>& channel) const {
    Pack<float, 2> grad;
#pragma unroll
    for (int i = 0; i < 2; ++i) grad.element[i] = exp(Chain::value(v[i], channel) - most_[i]) * factor_[i];
    return grad;
  }

 private:
  __device__ int64_t at(int row, int i) const {
    return place_.sample * work_.pixels + int64_t(row) * shape_.out_size[1] + place_.col + i;
  }

  const BackwardWork<float>& work_;
  const ConvShape& shape_;
  const TilePlace& place_;
  float most_[2];
  float factor_[2];
};

// Where windows are of whole pairs, a lane's two pixels share one, which is loaded ahead.
template <class Chain, int kChunks>
class StripSpread<Chain, kChunks, MaxPool> {
 public:
  __device__ StripSpread(const BackwardWork<float>& work, const ConvShape& shape, const TilePlace& place)
      : work_(work),
        shape_(shape),
        place_(place),
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

  __device__ void settle() {}

  __device__ Pack<float, 2> gradients(int c, int k, const float (&)[2], const Channel<float>&) const {
    Pack<float, 2> grad;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const Window window = are_shared_ ? loaded_[c][k] : window_at(i, tile_channel(c) + k);
      grad.element[i] = window.place == place_in_window_[i] ? window.grad : 0.0f;
    }
    return grad;
  }

 private:
  struct Window {
    int place;
    float grad;
  };

  // Of a channel that does not exist, another one's.
  __device__ Window window_at(int i, int channel) const {
    const int64_t at = window_[i] + uint64_t(uint32_t(min(channel, shape_.out_channels - 1))) * windows_;
    return {work_.window_place[at], work_.window_grad[at]};
  }

  const BackwardWork<float>& work_;
  const ConvShape& shape_;
  const TilePlace& place_;
  const bool are_shared_;
  const uint32_t windows_;  // of a plane
  int64_t window_[2];       // of the first channel
  int place_in_window_[2];
  Window loaded_[kChunks][2];
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

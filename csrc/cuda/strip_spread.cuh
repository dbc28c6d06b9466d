// As Spread (tensor_spread.cuh), for a lane's places of a tile: load() what a row takes at once, settle()
// when v is there, then gradients() of a channel's two pixels.
#pragma once

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

  __device__ void load_grad(int row) { load(row); }

  // Of places that do not exist, others: without a condition, all loads are under way at once.
  __device__ void load(int row) {
    const int64_t offset = (place_.sample * work_.channels * shape_.out_size[0] + row) * shape_.out_size[1];
    if (work_.grad.dtype == DType::kFloat32) {
      load_words<uint32_t>(offset);
    } else {
      load_words<uint16_t>(offset);
    }
  }

  // Converts what was loaded: to do so at once would be to wait for each load by itself.
  __device__ void settle() {
    if (work_.grad.dtype == DType::kFloat32) return;
    const bool is_pair = work_.width > 1;
    const bool is_bfloat16 = work_.grad.dtype == DType::kBFloat16;
    const auto widened = [is_bfloat16](uint32_t bits) {
      return __float_as_uint(is_bfloat16 ? from_bfloat16(uint16_t(bits))
                                         : __half2float(__ushort_as_half(uint16_t(bits))));
    };
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        uint32_t (&word)[2] = word_[c][k];
        word[1] = widened(is_pair ? word[0] >> 16 : word[1]);
        word[0] = widened(word[0]);
      }
    }
  }

  __device__ Pack<float, 2> gradients(int c, int k, const float (&)[2], const Channel<float>&) const {
    return {{__uint_as_float(word_[c][k][0]), __uint_as_float(word_[c][k][1])}};
  }

 private:
  // Where rows are whole pairs, two at once: of two bytes each, they stay in one word for now.
  template <class Word>
  __device__ void load_words(int64_t offset) {
    const bool is_pair = work_.width > 1;
    const int last = shape_.out_size[1] - (is_pair ? 2 : 1);
    const int col = min(place_.col, last);
    const int next = min(place_.col + 1, last);
    const Word* const first = static_cast<const Word*>(work_.grad.data) + offset + col;
    const uint32_t plane = uint32_t(work_.pixels);
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const uint32_t channel = min(tile_channel(c) + k, shape_.out_channels - 1);
        const Word* const from = first + uint64_t(channel) * plane;
        load_pair(from, from + (next - col), is_pair, word_[c][k]);
      }
    }
  }

  template <class Word>
  __device__ static void load_pair(const Word* at, const Word* next, bool is_pair, uint32_t (&word)[2]) {
    if (!is_pair) {
      word[0] = *at;
      word[1] = *next;
    } else if constexpr (sizeof(Word) == sizeof(uint32_t)) {
      const uint2 pair = *reinterpret_cast<const uint2*>(at);
      word[0] = pair.x;
      word[1] = pair.y;
    } else {
      word[0] = *reinterpret_cast<const uint32_t*>(at);
    }
  }

  const BackwardWork<float>& work_;
  const ConvShape& shape_;
  const TilePlace& place_;
  uint32_t word_[kChunks][2][2];
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

  // Where there is none yet, what set() takes.
  __device__ void load_grad(int row) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      grad_[i] = {};
      if (place_.exists[i]) grad_[i] = load_raw<float, 1>(work_.grad, at(row, i));
    }
  }

  __device__ void settle() {}

  // sum: of exp(x - most) over the channels. By all lanes of a pixel, of which one writes the table.
  __device__ void set(int row, int i, float most, float sum) {
    Gradients<float> none{};
    const float y = most + log(sum);
    const float grad = values_of(grad_[i], work_.grad.dtype).element[0];
    const float of_y = Chain::Final::vjp(grad, y, y, make_channel<float>(work_.arguments, 0), none);
    most_[i] = most;
    factor_[i] = place_.exists[i] ? of_y * reciprocal(sum) : 0.0f;
    if (lane_of_thread() % 4 != 0 || !place_.exists[i]) return;
    work_.most[at(row, i)] = most_[i];
    work_.factor[at(row, i)] = factor_[i];
  }

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
  RawPack<float, 1> grad_[2];
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

// As Spread (tensor_spread.cuh), for a lane's places of a tile: load() what a row takes at once, then
// gradients() of a channel's two pixels when their values are there.
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

// Two neighbours from `offset` on, of which the second one may not exist.
__device__ inline RawPack<float, 2> load_pair(const Elements& from, int64_t offset, bool is_pair,
                                              bool has_second) {
  if (is_pair) return load_raw<float, 2>(from, offset);
  const uint32_t first = load_raw<float, 1>(from, offset).word[0];
  const uint32_t second = has_second ? load_raw<float, 1>(from, offset + 1).word[0] : 0;
  if (from.dtype == DType::kFloat32) return {{first, second}};
  return {{first | second << 16, 0}};
}

template <class Chain, int kChunks, class Reduce = typename Chain::Reduce>
class StripSpread;

template <class Chain, int kChunks>
class StripSpread<Chain, kChunks, Store> {
 public:
  __device__ StripSpread(const BackwardWork<float>& work, const ConvShape& shape, const TilePlace& place)
      : work_(work), shape_(shape), place_(place) {}

  __device__ void load_grad(int row) { load(row); }

  __device__ void load(int row) {
    const bool is_pair = work_.width > 1;  // rows are whole pairs
    int64_t offset =
        ((place_.sample * work_.channels + tile_channel(0)) * shape_.out_size[0] + row) * shape_.out_size[1] +
        place_.col;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        raw_[c][k] = {};
        if (place_.exists[0] && tile_channel(c) + k < shape_.out_channels)
          raw_[c][k] = load_pair(work_.grad, offset + k * work_.pixels, is_pair, place_.exists[1]);
      }
      offset += kUnitChannels * work_.pixels;
    }
  }

  __device__ Pack<float, 2> gradients(int c, int k, const float (&)[2], const Channel<float>&) const {
    return values_of(raw_[c][k], work_.grad.dtype);
  }

 private:
  const BackwardWork<float>& work_;
  const ConvShape& shape_;
  const TilePlace& place_;
  RawPack<float, 2> raw_[kChunks][2];
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

template <class Chain, int kChunks>
class StripSpread<Chain, kChunks, MaxPool> {
 public:
  __device__ StripSpread(const BackwardWork<float>& work, const ConvShape& shape, const TilePlace& place)
      : work_(work), shape_(shape), place_(place) {}

  __device__ void load(int row) {
    const PoolShape& pool = work_.pool;
    row_ = row;
    const int window_row = pool.by_window_rows.divide(row);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int window_col = pool.by_window_cols.divide(place_.col + i);
      const bool exists = place_.exists[i] && window_row < pool.pooled_rows && window_col < pool.pooled_cols;
      window_[i] = exists ? (place_.sample * work_.channels + tile_channel(0)) * work_.windows.of.values +
                                int64_t(window_row) * pool.pooled_cols + window_col
                          : -1;
    }
  }

  __device__ Pack<float, 2> gradients(int c, int k, const float (&)[2], const Channel<float>&) const {
    Pack<float, 2> grad{};
    if (tile_channel(c) + k >= shape_.out_channels) return grad;
    const int64_t step = (c * kUnitChannels + k) * work_.windows.of.values;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (window_[i] < 0) continue;
      const int2 place = work_.window_place[window_[i] + step];
      const float of_window = work_.window_grad[window_[i] + step];
      grad.element[i] = place.x == row_ && place.y == place_.col + i ? of_window : 0.0f;
    }
    return grad;
  }

 private:
  const BackwardWork<float>& work_;
  const ConvShape& shape_;
  const TilePlace& place_;
  int row_;
  int64_t window_[2];
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

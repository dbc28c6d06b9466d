// As Spread (spread.cuh), for the places of a row of all channels, whose tables come into shared memory.
#pragma once

#include "pack_work.cuh"
#include "spread.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// As Spread, for a row of all channels: all threads prepare() what the row takes, with a barrier after it.
// Then come load(), of an offset in the tensor, and gradients(), of a place in the row's values.
template <class Chain, class Reduce = typename Chain::Reduce>
class RowSpread;

template <class Chain>
class RowSpread<Chain, Store> {
 public:
  template <int kCount>
  using Loaded = RawPack<float, kCount>;

  __device__ RowSpread(const PackWork& pack, const PackRow&, const PackMemory<Chain>&)
      : grad_(pack.work.grad) {}

  __device__ void prepare() const {}

  template <int kCount>
  __device__ Loaded<kCount> load(int64_t offset) const {
    return load_raw<float, kCount>(grad_, offset);
  }

  template <int kCount>
  __device__ Pack<float, kCount> gradients(const Loaded<kCount>& loaded, const float*, int,
                                           const Pack<float, kCount>&, const Channel<float>&) const {
    return values_of(loaded, grad_.dtype);
  }

 private:
  const Elements& grad_;
};

// All that it takes is in shared memory.
struct SpreadFromShared {
  struct Nothing {};
  template <int kCount>
  using Loaded = Nothing;

  template <int kCount>
  __device__ Nothing load(int64_t) const {
    return {};
  }
};

// The row's values are zeros at first, but for the places of maxima.
template <class Chain>
class RowSpread<Chain, MaxPool> : public SpreadFromShared {
 public:
  __device__ RowSpread(const PackWork& pack, const PackRow& row, const PackMemory<Chain>& memory)
      : pack_(pack), row_(row), values_(memory.values) {}

  __device__ void prepare() const {
    const int quads = pack_.to.channels * pack_.shape.pitch / kMostWidth;
    for (int i = threadIdx.x; i < quads; i += kGradientThreads)
      store_pack(values_ + i * kMostWidth, Pack<float, kMostWidth>{});
    __syncthreads();
    const int window_row = pack_.work.pool.by_window_rows.divide(row_.row);
    if (window_row < pack_.work.pool.pooled_rows) place_maxima(window_row);
  }

  template <int kCount>
  __device__ Pack<float, kCount> gradients(const Nothing&, const float* at, int, const Pack<float, kCount>&,
                                           const Channel<float>&) const {
    return load_pack<kCount>(at);
  }

 private:
  __device__ void place_maxima(int window_row) const {
    constexpr int kAtOnce = 4;
    const PoolShape& pool = pack_.work.pool;
    const int channels = pack_.to.channels;
    const int shift = log2_of(pack_.shape.window_lanes);
    const int step = kGradientThreads >> shift;
    const int lane = threadIdx.x & (pack_.shape.window_lanes - 1);
    const int64_t plane_windows = pack_.work.windows.of.values;
    const int first_place = (row_.row - window_row * pool.window_rows) * pool.window_cols;
    const int64_t first_window =
        row_.sample * channels * plane_windows + int64_t(window_row) * pool.pooled_cols;
    for (int first = threadIdx.x >> shift; first < channels; first += kAtOnce * step) {
      for (int col = lane; col < pool.pooled_cols; col += pack_.shape.window_lanes) {
        WindowGradient<float> window[kAtOnce];
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          const int c = first + k * step;
          if (c < channels) window[k] = window_gradient(pack_.work, first_window + c * plane_windows + col);
        }
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          const int c = first + k * step;
          const int in_row = window[k].place - first_place;
          if (c < channels && in_row >= 0 && in_row < pool.window_cols)
            values_[c * pack_.shape.pitch + col * pool.window_cols + in_row] = window[k].grad;
        }
      }
    }
  }

  const PackWork& pack_;
  const PackRow& row_;
  float* const values_;
};

template <class Chain>
class RowSpread<Chain, ChannelLogSumExp> : public SpreadFromShared {
 public:
  __device__ RowSpread(const PackWork& pack, const PackRow& row, const PackMemory<Chain>& memory)
      : pack_(pack), row_(row), most_(memory.of_pixels), factor_(most_ + pack.shape.pitch) {}

  __device__ void prepare() const {
    const int64_t first = row_.index * pack_.to.cols;
    for (int col = threadIdx.x; col < pack_.to.cols; col += kGradientThreads) {
      most_[col] = pack_.work.most[first + col];
      factor_[col] = pack_.work.factor[first + col];
    }
  }

  template <int kCount>
  __device__ Pack<float, kCount> gradients(const Nothing&, const float*, int col,
                                           const Pack<float, kCount>& v,
                                           const Channel<float>& channel) const {
    const Pack<float, kCount> most = load_pack<kCount>(most_ + col);
    const Pack<float, kCount> factor = load_pack<kCount>(factor_ + col);
    return softmax_gradients<Chain>(v, channel, most, factor);
  }

 private:
  const PackWork& pack_;
  const PackRow& row_;
  float* const most_;
  float* const factor_;
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

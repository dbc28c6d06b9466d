// The gradient of a reduction's result spread over what went into it. A kernel of its own finds what it takes
// and writes a table, a window or a pixel a line (pool_table.cuh, softmax_table.cuh); then the gradient at
// each place follows from the table and v: here, for places of a plane; in row_spread.cuh, of a row of all
// channels; in strip_spread.cuh, of a tile that a conv's product gives.
#pragma once

#include "cuda/device/reduce.cuh"
#include "work.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// ---- what is the same for all places ----

// A line of a max pool's table.
template <class T>
struct WindowGradient {
  int place;  // counted row by row in the window
  T grad;

  __device__ T at(int place_in_window) const { return place == place_in_window ? grad : T(0); }
};

template <class T>
__device__ WindowGradient<T> window_gradient(const BackwardWork<T>& work, int64_t window) {
  return {work.window_place[window], work.window_grad[window]};
}

// Counted row by row.
__device__ inline int place_in_window(const PoolShape& pool, int row, int col) {
  const int row_in_window = row - pool.by_window_rows.divide(row) * pool.window_rows;
  const int col_in_window = col - pool.by_window_cols.divide(col) * pool.window_cols;
  return row_in_window * pool.window_cols + col_in_window;
}

// The gradient of a logsumexp's argument x is exp(x - most) * this, where sum is that of all exp(x - most).
template <class Chain, class T>
__device__ T softmax_factor(T grad, T most, T sum, const Arguments& arguments) {
  static_assert(kIsLogSumExp<typename Chain::Reduce>);
  Gradients<T> none{};
  const T y = most + log(sum);
  return Chain::Final::vjp(grad, y, y, make_channel<T>(arguments, 0), none) * reciprocal(sum);
}

template <class Chain, class T, int kCount>
__device__ Pack<T, kCount> softmax_gradients(const Pack<T, kCount>& v, const Channel<T>& channel,
                                             const Pack<T, kCount>& most, const Pack<T, kCount>& factor) {
  Pack<T, kCount> grad;
#pragma unroll
  for (int k = 0; k < kCount; ++k)
    grad.element[k] = exp(Chain::value(v.element[k], channel) - most.element[k]) * factor.element[k];
  return grad;
}

// ---- at the places of a plane ----

// From a table, or from grad itself, for a thread's packs of a slice: load(i) at once, and gradients() when
// v is there too.
template <class Chain, class T, class Reduce = typename Chain::Reduce>
class Spread;

template <class Chain, class T>
class Spread<Chain, T, Store> {
  static_assert(std::is_same_v<typename Chain::Final, Sequence<>>,
                "without a reduction the last stages belong to Post");

 public:
  static constexpr int kBatch = 4;
  template <int kCount>
  using Loaded = RawPack<T, kCount>;

  __device__ Spread(const BackwardWork<T>& work, const Slice& slice)
      : work_(work), first_(slice.plane * work.pixels + slice.first) {}

  template <int kCount>
  __device__ Loaded<kCount> load(int i) const {
    return load_raw<T, kCount>(work_.grad, first_ + i);
  }

  template <int kCount>
  __device__ Pack<T, kCount> gradients(int, const Loaded<kCount>& loaded, const Pack<T, kCount>&,
                                       const Channel<T>&) const {
    return values_of(loaded, work_.grad.dtype);
  }

 private:
  const BackwardWork<T>& work_;
  const int64_t first_;
};

template <class Chain, class T>
class Spread<Chain, T, MaxPool> {
 public:
  static constexpr int kBatch = 2;
  template <int kCount>
  struct Loaded {
    WindowGradient<T> window[kCount];
  };

  __device__ Spread(const BackwardWork<T>& work, const Slice& slice)
      : work_(work), pool_(work.pool), first_window_(slice.plane * work.windows.of.values) {
    const int64_t row = pool_.by_cols.divide(slice.first);
    row_ = int(row);
    col_ = int(slice.first - row * pool_.cols);
  }

  template <int kCount>
  __device__ Loaded<kCount> load(int i) const {
    Loaded<kCount> loaded;
    for_each_pixel<kCount>(i, [&](int k, int row, int col) {
      const int window_row = pool_.by_window_rows.divide(row);
      const int window_col = pool_.by_window_cols.divide(col);
      loaded.window[k] = {-1, T(0)};
      if (window_row < pool_.pooled_rows && window_col < pool_.pooled_cols)
        loaded.window[k] =
            window_gradient(work_, first_window_ + int64_t(window_row) * pool_.pooled_cols + window_col);
    });
    return loaded;
  }

  template <int kCount>
  __device__ Pack<T, kCount> gradients(int i, const Loaded<kCount>& loaded, const Pack<T, kCount>&,
                                       const Channel<T>&) const {
    Pack<T, kCount> grad;
    for_each_pixel<kCount>(i, [&](int k, int row, int col) {
      grad.element[k] = loaded.window[k].at(place_in_window(pool_, row, col));
    });
    return grad;
  }

 private:
  // Calls visit(k, row, col) for kCount pixels, which need not be of one row.
  template <int kCount, class Visit>
  __device__ void for_each_pixel(int i, const Visit& visit) const {
    const int rows = pool_.by_cols.narrow.divide(col_ + i);
    int row = row_ + rows;
    int col = col_ + i - rows * pool_.cols;
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      visit(k, row, col);
      if (++col == pool_.cols) {
        col = 0;
        ++row;
      }
    }
  }

  const BackwardWork<T>& work_;
  const PoolShape& pool_;
  const int64_t first_window_;
  int row_;  // of the slice's first pixel
  int col_;
};

template <class Chain, class T>
class Spread<Chain, T, ChannelLogSumExp> {
 public:
  static constexpr int kBatch = 8 / int(sizeof(T));
  template <int kCount>
  struct Loaded {
    Pack<T, kCount> most;
    Pack<T, kCount> factor;
  };

  __device__ Spread(const BackwardWork<T>& work, const Slice& slice)
      : work_(work), first_(slice.sample * work.pixels + slice.first) {}

  template <int kCount>
  __device__ Loaded<kCount> load(int i) const {
    return {load_pack<kCount>(work_.most + first_ + i), load_pack<kCount>(work_.factor + first_ + i)};
  }

  template <int kCount>
  __device__ Pack<T, kCount> gradients(int, const Loaded<kCount>& loaded, const Pack<T, kCount>& v,
                                       const Channel<T>& channel) const {
    return softmax_gradients<Chain>(v, channel, loaded.most, loaded.factor);
  }

 private:
  const BackwardWork<T>& work_;
  const int64_t first_;
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

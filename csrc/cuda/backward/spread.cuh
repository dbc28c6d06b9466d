// The gradient of a reduction's result spread over what went into it. A kernel of its own finds what it takes
// and writes a table, a window or a pixel a line; then the gradient at each place follows from the table and
// v.
#pragma once

#include "cuda/device/reduce.cuh"
#include "work.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// ---- the tables ----

// The largest value so far, and its row and column in the plane.
template <class T>
struct Maximum {
  T value;
  int2 place;

  // The first one in the order of a window's rows, as PyTorch finds it: the last NaN, if there is one.
  __device__ void add(const Maximum& other) {
    const bool is_later = other.place.x != place.x ? other.place.x > place.x : other.place.y > place.y;
    const bool is_nan = value != value;
    const bool is_better = other.value != other.value
                               ? !is_nan || is_later
                               : other.value > value || (other.value == value && !is_later);
    if (is_better) *this = other;
  }

  // Those of so many neighbouring lanes, of which all get the result.
  __device__ void add_lanes(int lanes) {
    for (int distance = 1; distance < lanes; distance *= 2) {
      const T other = __shfl_xor_sync(~0u, value, distance);
      const int row = __shfl_xor_sync(~0u, place.x, distance);
      const int col = __shfl_xor_sync(~0u, place.y, distance);
      add({other, make_int2(row, col)});
    }
  }
};

// Of every `lanes`-th value of a window, from a lane's own on. corner: the window's first place.
template <class Chain, class T>
__device__ Maximum<T> maximum_of_lane(const BackwardWork<T>& work, int64_t plane, int2 corner, int lane,
                                      const Channel<T>& channel) {
  constexpr int kAtOnce = 32 / int(sizeof(T));
  const PoolShape& pool = work.pool;
  const int rows_of_step = pool.by_window_cols.divide(pool.lanes);
  const int cols_of_step = pool.lanes - rows_of_step * pool.window_cols;
  const auto step = [&](int2& place) {
    place.x += rows_of_step;
    place.y += cols_of_step;
    if (place.y >= corner.y + pool.window_cols) {
      place.y -= pool.window_cols;
      ++place.x;
    }
  };
  const int first_row = pool.by_window_cols.divide(lane);
  int2 next = make_int2(corner.x + first_row, corner.y + lane - first_row * pool.window_cols);
  int2 loaded = next;
  Maximum<T> most{-T(INFINITY), next};
  const int end = corner.x + pool.window_rows;
  while (loaded.x < end) {
    RawPack<T, 1> v[kAtOnce];
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (loaded.x >= end) continue;
      v[k] = load_raw<T, 1>(work.v, plane * work.pixels + int64_t(loaded.x) * pool.cols + loaded.y);
      step(loaded);
    }
#pragma unroll
    for (int k = 0; k < kAtOnce; ++k) {
      if (next.x >= end) continue;
      const T x = Chain::value(values_of(v[k], work.v.dtype).element[0], channel);
      if (x > most.value || x != x) most = {x, next};
      step(next);
    }
  }
  return most;
}

// Of a window of so many columns, by one thread. v holds what is computed in.
template <class Chain, class T, int kCols>
__device__ Maximum<T> maximum_of_pairs(const BackwardWork<T>& work, int64_t plane, int2 corner,
                                       const Channel<T>& channel) {
  constexpr int kRows = 32 / int(sizeof(T)) / 2;  // at once
  const PoolShape& pool = work.pool;
  const T* from =
      static_cast<const T*>(work.v.data) + plane * work.pixels + int64_t(corner.x) * pool.cols + corner.y;
  T most = -T(INFINITY);
  int most_at = 0;
  for (int first = 0; first < pool.window_rows; first += kRows, from += int64_t(kRows) * pool.cols) {
    Pack<T, 2> v[kRows][kCols / 2];
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (first + r >= pool.window_rows) continue;
#pragma unroll
      for (int q = 0; q < kCols / 2; ++q) v[r][q] = load_pack<2>(from + int64_t(r) * pool.cols + 2 * q);
    }
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      if (first + r >= pool.window_rows) continue;
#pragma unroll
      for (int q = 0; q < kCols; ++q) {
        const T x = Chain::value(v[r][q / 2].element[q % 2], channel);
        const bool is_better = x > most || x != x;
        most = is_better ? x : most;
        most_at = is_better ? (first + r) * kCols + q : most_at;
      }
    }
  }
  return {most, make_int2(corner.x + most_at / kCols, corner.y + most_at % kCols)};
}

template <class Chain, class T>
__device__ Maximum<T> maximum_of_window(const BackwardWork<T>& work, int64_t plane, int2 corner, int lane,
                                        const Channel<T>& channel) {
  if (work.pool.has_pairs) {
    if (work.pool.window_cols == 2) return maximum_of_pairs<Chain, T, 2>(work, plane, corner, channel);
    return maximum_of_pairs<Chain, T, 4>(work, plane, corner, channel);
  }
  Maximum<T> most = maximum_of_lane<Chain>(work, plane, corner, lane, channel);
  most.add_lanes(work.pool.lanes);
  return most;
}

// The table of a max pool, and the sums behind the norm: only the places of maxima have a part in them.
template <class Chain, class T>
__global__ void __launch_bounds__(kPlaneThreads)
    max_pool_table(const __grid_constant__ BackwardWork<T> work) {
  let_next_kernel_start();
  wait_for_earlier_kernels();
  const Slice slice(work.windows);
  const Channel<T> channel = channel_of_warp<Chain>(work, slice);
  const NormGradient<T> norm = norm_gradient_of<Chain>(work, slice.sample, slice.channel);
  const PoolShape& pool = work.pool;
  const int shift = log2_of(pool.lanes);
  const int lane = slice.thread & (pool.lanes - 1);
  T sums[kGradientKinds]{};
  for (int first = 0; first < slice.values; first += slice.team >> shift) {  // the same for a whole warp
    const int i = first + (slice.thread >> shift);
    const bool exists = i < slice.values;
    const int64_t window = slice.first + (exists ? i : 0);
    const int64_t row = pool.by_pooled_cols.divide(window);
    const int col = int(window - row * pool.pooled_cols);
    const int2 corner = make_int2(int(row) * pool.window_rows, col * pool.window_cols);
    const Maximum<T> most = maximum_of_window<Chain>(work, slice.plane, corner, lane, channel);
    if (!exists || lane > 0) continue;

    const int64_t at = slice.plane * work.windows.of.values + window;
    const int64_t from = slice.plane * work.pixels + int64_t(most.place.x) * pool.cols + most.place.y;
    const T y = most.value;
    Gradients<T> none{};
    const T grad = Chain::Final::vjp(load_values<T, 1>(work.grad, at).element[0], y, y, channel, none);
    work.window_place[at] = (most.place.x - corner.x) * pool.window_cols + most.place.y - corner.y;
    work.window_grad[at] = grad;
    if constexpr (Chain::kNeedsStatistics)
      add_after_norm<Chain>(grad, load_values<T, 1>(work.v, from).element[0], channel, norm, sums);
  }
  write_sums<kAfterNorm<Chain>>(slice, sums, work.after_norm);
}

// The same where a pass of the conv has found the places and their values.
template <class Whole>
__global__ void __launch_bounds__(kPlaneThreads)
    found_pool_table(const __grid_constant__ BackwardWork<float> work) {
  // What is left of the chain.
  using Rest = Chain<Sequence<>, typename Whole::Norm, typename Whole::Post, typename Whole::Reduce,
                     typename Whole::Final>;
  struct Loaded {
    float x;
    RawPack<float, 1> grad;
  };
  let_next_kernel_start();
  wait_for_earlier_kernels();
  const Slice slice(work.windows);
  const Channel<float> channel = channel_of_warp<Whole>(work, slice);
  const NormGradient<float> norm = norm_gradient_of<Whole>(work, slice.sample, slice.channel);
  const int64_t first = slice.plane * work.windows.of.values + slice.first;
  float sums[kGradientKinds]{};
  for_each_pack<4, 1>(
      slice,
      [&](int i) -> Loaded {
        return {work.window_value[first + i], load_raw<float, 1>(work.grad, first + i)};
      },
      [&](int i, const Loaded& loaded) {
        const float y = Rest::value(loaded.x, channel);
        Gradients<float> none{};
        const float grad =
            Rest::Final::vjp(values_of(loaded.grad, work.grad.dtype).element[0], y, y, channel, none);
        work.window_grad[first + i] = grad;
        if constexpr (Rest::kNeedsStatistics) add_after_norm<Rest>(grad, loaded.x, channel, norm, sums);
      });
  write_sums<kAfterNorm<Rest>>(slice, sums, work.after_norm);
}

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
  const ReducingThread thread(false, work.lanes);
  const int64_t sample = work.by_blocks_per_sample.divide(block_index());
  const int64_t block = block_index() - sample * work.blocks_per_sample;
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
  const Channel<T> channel = make_channel<T>(work.arguments, 0);
  Pack<T, kCount> most;
  Pack<T, kCount> factor;
#pragma unroll
  for (int k = 0; k < kCount; ++k) {
    Gradients<T> none{};
    most.element[k] = LogSumExp<T>::shift_of(sums[k].most);
    const T y = most.element[k] + log(sums[k].sum);
    factor.element[k] = Chain::Final::vjp(grad.element[k], y, y, channel, none) * reciprocal(sums[k].sum);
  }
  store_pack(work.most + at, most);
  store_pack(work.factor + at, factor);
}

// The table of a logsumexp.
template <class Chain, class T>
__global__ void __launch_bounds__(kPlaneThreads)
    logsumexp_table(const __grid_constant__ BackwardWork<T> work) {
  __shared__ Channel<T> channels[kPlaneThreads];
  let_next_kernel_start();
  wait_for_earlier_kernels();
  if (block_index() >= work.samples * work.blocks_per_sample) return;
  visit_count(work, [&](auto count) { write_pixels<Chain, T, decltype(count)::value>(work, channels); });
}

// ---- the gradient at each place ----

// Counted row by row.
__device__ inline int place_in_window(const PoolShape& pool, int row, int col) {
  const int row_in_window = row - pool.by_window_rows.divide(row) * pool.window_rows;
  const int col_in_window = col - pool.by_window_cols.divide(col) * pool.window_cols;
  return row_in_window * pool.window_cols + col_in_window;
}

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
    int place[kCount];
    T grad[kCount];
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
      loaded.place[k] = -1;
      loaded.grad[k] = 0;
      if (window_row < pool_.pooled_rows && window_col < pool_.pooled_cols) {
        const int64_t at = first_window_ + int64_t(window_row) * pool_.pooled_cols + window_col;
        loaded.place[k] = work_.window_place[at];
        loaded.grad[k] = work_.window_grad[at];
      }
    });
    return loaded;
  }

  template <int kCount>
  __device__ Pack<T, kCount> gradients(int i, const Loaded<kCount>& loaded, const Pack<T, kCount>&,
                                       const Channel<T>&) const {
    Pack<T, kCount> grad;
    for_each_pixel<kCount>(i, [&](int k, int row, int col) {
      grad.element[k] = loaded.place[k] == place_in_window(pool_, row, col) ? loaded.grad[k] : T(0);
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
    Pack<T, kCount> grad;
#pragma unroll
    for (int k = 0; k < kCount; ++k)
      grad.element[k] =
          exp(Chain::value(v.element[k], channel) - loaded.most.element[k]) * loaded.factor.element[k];
    return grad;
  }

 private:
  const BackwardWork<T>& work_;
  const int64_t first_;
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

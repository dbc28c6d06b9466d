// The table of a max pool, a line a window: the place of the maximum and the gradient that goes there; with
// it, the sums behind the norm, as only the places of maxima have a part in them.
#pragma once

#include "spread.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

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

// From v.
template <class Chain, class T>
__global__ void __launch_bounds__(kPlaneThreads)
    max_pool_table(const __grid_constant__ BackwardWork<T> work) {
  static_assert(kIsMaxPool<typename Chain::Reduce>);
  let_next_kernel_start();
  wait_for_earlier_kernels();
  const Slice slice(work.windows);
  const Channel<T> channel = channel_of_warp<Chain>(work, slice);
  const NormGradient<T> norm = norm_gradient_of<Chain, false>(work, slice.sample, slice.channel);
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
  const NormGradient<float> norm = norm_gradient_of<Whole, false>(work, slice.sample, slice.channel);
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

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

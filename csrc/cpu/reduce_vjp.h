// The gradient of a reduction's result spread over what went into it, which is computed again from v.
#pragma once

#include "core/chain.h"
#include "lanes.h"
#include "source.h"
#include "statistics.h"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// Rows of the maps that a max pool works with.
template <class T>
struct PoolRows {
  T* most;      // of each column of a row of windows; then the column of each window's maximum
  T* most_row;  // its row in the window; then that of each window's maximum
  T* pooled;    // the maximum of each window, then its gradient
};

// The first maximum of each of some windows in the order of its rows, as PyTorch finds it: the last NaN, if
// there is one. Windows are lanes, from the first one's columns on.
template <class T, class Lanes>
FUSEDCONV_INLINE void find_maxima(const Lanes& lanes, const PoolRows<T>& rows, int64_t window,
                                  int64_t width) {
  const T* most = rows.most + window * width;
  const T* most_row = rows.most_row + window * width;
  Vector<T> best = lanes.load_every(most, width);
  Vector<T> best_row = lanes.load_every(most_row, width);
  Vector<T> best_column{};
  for (int64_t w = 1; w < width; ++w) {
    const Vector<T> x = lanes.load_every(most + w, width);
    const Vector<T> row = lanes.load_every(most_row + w, width);
    const auto is_earlier = row < best_row;
    const auto is_better =
        (x > best) | ((x == best) & is_earlier) | ((x != x) & ((best == best) | ~is_earlier));
    best = select(is_better, x, best);
    best_row = select(is_better, row, best_row);
    best_column = select(is_better, Vector<T>{} + T(w), best_column);
  }
  // No window further on has its columns here.
  lanes.store(rows.pooled + window, best);
  lanes.store(rows.most_row + window, best_row);
  lanes.store(rows.most + window, best_column);
}

// Some rows of a plane of v, from a window's first on. The windows' rows go first, all columns at a time,
// then along each window.
template <class Chain, class T>
void spread_over_windows(const T* v, const T* grad, T* spread, int64_t height, int64_t width, int64_t pitch,
                         const int64_t* window, const Channel<T>& channel, const PoolRows<T>& rows) {
  for_each_lanes<T>(0, height * pitch, [&](auto lanes, int64_t i) { lanes.store(spread + i, Vector<T>{}); });
  const int64_t pooled_width = width / window[1];
  for (int64_t r = 0; r < height / window[0]; ++r) {
    const int64_t corner = r * window[0] * pitch;
    for_each_lanes<T>(0, pooled_width * window[1], [&](auto lanes, int64_t w) {
      Vector<T> most = Chain::value(lanes.load(v + corner + w), channel);
      Vector<T> most_row{};
      for (int64_t k = 1; k < window[0]; ++k) {
        const Vector<T> x = Chain::value(lanes.load(v + corner + k * pitch + w), channel);
        const auto is_better = x > most || x != x;
        most = select(is_better, x, most);
        most_row = select(is_better, Vector<T>{} + T(k), most_row);
      }
      lanes.store(rows.most + w, most);
      lanes.store(rows.most_row + w, most_row);
    });
    for_each_lanes<T>(0, pooled_width,
                      [&](auto lanes, int64_t p) { find_maxima<T>(lanes, rows, p, window[1]); });
    for_each_lanes<T>(0, pooled_width, [&](auto lanes, int64_t p) {
      Gradients<Vector<T>> none{};
      const Vector<T> y = lanes.load(rows.pooled + p);
      lanes.store(rows.pooled + p,
                  Chain::Final::vjp(lanes.load(grad + r * pooled_width + p), y, y, channel, none));
    });
    for (int64_t p = 0; p < pooled_width; ++p) {
      const int64_t w = p * window[1] + int64_t(rows.most[p]);
      spread[corner + int64_t(rows.most_row[p]) * pitch + w] = rows.pooled[p];
    }
  }
}

// So many pixels are spread over all of their channels at a time.
constexpr int64_t kSpreadPixels = 256;

// Some pixels of a sample, whose channels are `plane` elements apart. The weights are those of softmax.
template <class Chain, class T>
void spread_over_channels(const T* v, const T* grad, T* spread, int64_t plane, int64_t pixels,
                          int64_t channel_count, const Channel<T>* channels) {
  static_assert(kIsLogSumExp<typename Chain::Reduce>);
  const Vector<T> infinity = Vector<T>{} + T(__builtin_inf());
  T most[kSpreadPixels];
  T sum[kSpreadPixels];
  for_each_lanes<T>(0, pixels, [&](auto lanes, int64_t i) {
    lanes.store(most + i, -infinity);
    lanes.store(sum + i, Vector<T>{});
  });
  for (int64_t c = 0; c < channel_count; ++c) {
    const Channel<T> channel = channels[c];
    for_each_lanes<T>(0, pixels, [&](auto lanes, int64_t i) {
      const Vector<T> x = Chain::value(lanes.load(v + c * plane + i), channel);
      lanes.store(spread + c * plane + i, x);
      lanes.store(most + i, larger_or_second(lanes.load(most + i), x));  // may lose a NaN; the sum does not
    });
  }
  for_each_lanes<T>(0, pixels, [&](auto lanes, int64_t i) {
    const Vector<T> x = lanes.load(most + i);
    lanes.store(most + i, select((x == infinity) | (x == -infinity), Vector<T>{}, x));
  });
  for (int64_t c = 0; c < channel_count; ++c) {
    for_each_lanes<T>(0, pixels, [&](auto lanes, int64_t i) {
      T* weight = spread + c * plane + i;
      const Vector<T> x = exp(lanes.load(weight) - lanes.load(most + i));
      lanes.store(weight, x);
      lanes.store(sum + i, lanes.load(sum + i) + x);
    });
  }
  for_each_lanes<T>(0, pixels, [&](auto lanes, int64_t i) {
    Gradients<Vector<T>> none{};
    const Vector<T> total = lanes.load(sum + i);
    const Vector<T> y = lanes.load(most + i) + log(total);
    lanes.store(sum + i, Chain::Final::vjp(lanes.load(grad + i), y, y, channels[0], none) / total);
  });
  for (int64_t c = 0; c < channel_count; ++c) {
    for_each_lanes<T>(0, pixels, [&](auto lanes, int64_t i) {
      T* weight = spread + c * plane + i;
      lanes.store(weight, lanes.load(weight) * lanes.load(sum + i));
    });
  }
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

// The gradient of a reduction's result spread over what went into it, which is computed again from v.
#pragma once

#include "../core/chain.h"
#include "lanes.h"
#include "source.h"
#include "statistics.h"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// Rows of the maps that a max pool works with.
template <class T>
struct PoolRows {
  T* most;        // of each column of a row of windows
  T* most_row;    // and its row in the window
  T* pooled;      // the maximum of each window, then its gradient
  int64_t* from;  // where it stands in the plane
};

// The first maximum of a window in the order of its rows, as PyTorch finds it: the last NaN, if there is one.
template <class T>
FUSEDCONV_INLINE int64_t find_column(const T* most, const T* most_row, int64_t count) {
  int64_t best = 0;
  for (int64_t w = 1; w < count; ++w) {
    const T x = most[w];
    const bool is_earlier = most_row[w] < most_row[best];
    const bool is_better =
        x != x ? most[best] == most[best] || !is_earlier : x > most[best] || (x == most[best] && is_earlier);
    if (is_better) best = w;
  }
  return best;
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
    for (int64_t p = 0; p < pooled_width; ++p) {
      const int64_t first = p * window[1];
      const int64_t w = first + find_column(rows.most + first, rows.most_row + first, window[1]);
      rows.pooled[p] = rows.most[w];
      rows.from[p] = corner + int64_t(rows.most_row[w]) * pitch + w;
    }
    for_each_lanes<T>(0, pooled_width, [&](auto lanes, int64_t p) {
      Gradients<Vector<T>> none{};
      const Vector<T> y = lanes.load(rows.pooled + p);
      lanes.store(rows.pooled + p,
                  Chain::Final::vjp(lanes.load(grad + r * pooled_width + p), y, y, channel, none));
    });
    for (int64_t p = 0; p < pooled_width; ++p) spread[rows.from[p]] = rows.pooled[p];
  }
}

// So many pixels are spread over all of their channels at a time.
constexpr int64_t kSpreadPixels = 256;

// Some pixels of a sample, whose channels are `plane` elements apart. The weights are those of softmax.
template <class Chain, class T>
void spread_over_channels(const T* v, const T* grad, T* spread, int64_t plane, int64_t pixels,
                          int64_t channel_count, const Channel<T>* channels) {
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

// The end of a chain on one tile, in place: pointwise stages, reduction, final stages.
#pragma once

#include "core/chain.h"
#include "store_tile.h"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// Applies a pointwise function to vectors in place; count is a multiple of nothing, whole vectors are
// touched.
template <class T, class Stage>
FUSEDCONV_INLINE void transform(T* data, int64_t count, const Stage& stage) {
  for (int64_t i = 0; i < count; i += kLanes<T>) store(data + i, stage(load(data + i)));
}

// Each reduce_tile gives the place in the output of what it left in the tile.
template <class Chain, class T>
Place reduce_tile(Store, const Place& place, const Tile<T>& tile, const Channel<T>* channels,
                  const Arguments&, int64_t, T*) {
  for (int64_t c = 0; c < place.channels; ++c) {
    const Channel<T> channel = channels[c];
    transform(tile.data + c * tile.plane, place.rows * tile.pitch,
              [&](Vector<T> x) { return stored_value<Chain>(x, channel); });
  }
  return place;
}

// Elements of the row buffer that a reduction needs. Whole vectors are written into it, past the last column,
// and the sliding maximum reads a window further.
template <class T>
FUSEDCONV_INLINE int64_t row_buffer_elements(int64_t cols) {
  return 2 * round_up(cols, kLanes<T>) + kLanes<T>;
}

// row[i] becomes the maximum of row[i] to row[i + width - 1], by doubling: a maximum of 2n is one of two of
// n.
template <class T>
void sliding_maximum(T* row, int64_t count, int64_t width) {
  for (int64_t covered = 1; covered < width;) {
    const int64_t shift = smaller(covered, width - covered);
    for (int64_t i = 0; i < count; i += kLanes<T>)
      store(row + i, maximum(load(row + i), load(row + i + shift)));
    covered += shift;
  }
}

template <class Chain, class T>
Place reduce_tile(MaxPool, const Place& place, const Tile<T>& tile, const Channel<T>* channels,
                  const Arguments& arguments, int64_t cols, T* row) {
  const int64_t window_rows = arguments.pool[0];
  const int64_t window_cols = arguments.pool[1];
  const int64_t rows = place.rows / window_rows;
  const int64_t pooled_cols = cols / window_cols;
  for (int64_t c = 0; c < place.channels; ++c) {
    const Channel<T> channel = channels[c];
    T* plane = tile.data + c * tile.plane;
    for (int64_t r = 0; r < rows; ++r) {
      // Down the windows, then along them.
      const T* window = plane + r * window_rows * tile.pitch;
      for (int64_t w = 0; w < cols; w += kLanes<T>) {
        Vector<T> most = Chain::pointwise(load(window + w), channel);
        for (int64_t k = 1; k < window_rows; ++k) {
          most = maximum(most, Chain::pointwise(load(window + k * tile.pitch + w), channel));
        }
        store(row + w, most);
      }
      sliding_maximum(row, cols, window_cols);
      transform(row, cols, [&](Vector<T> x) { return Chain::Final::value(x, x, channel); });
      T* pooled = plane + r * tile.pitch;  // all rows up to there have been read
      for (int64_t w = 0; w < pooled_cols; ++w) pooled[w] = row[w * window_cols];
    }
  }
  return {place.sample, place.channel, place.channels, place.row / window_rows, rows};
}

template <class Chain, class T>
Place reduce_tile(ChannelLogSumExp, const Place& place, const Tile<T>& tile, const Channel<T>* channels,
                  const Arguments&, int64_t, T*) {
  const Vector<T> infinity = Vector<T>{} + T(__builtin_inf());
  for (int64_t i = 0; i < place.rows * tile.pitch; i += kLanes<T>) {
    Vector<T> most = -infinity;
    for (int64_t c = 0; c < place.channels; ++c) {
      T* pixels = tile.data + c * tile.plane + i;
      const Vector<T> x = Chain::pointwise(load(pixels), channels[c]);
      store(pixels, x);
      most = larger_or_second(most, x);  // may lose a NaN; the sum does not
    }
    const auto infinite = (most == infinity) | (most == -infinity);
    const Vector<T> shift = select(infinite, Vector<T>{}, most);
    Vector<T> sum{};
    for (int64_t c = 0; c < place.channels; ++c) sum += exp(load(tile.data + c * tile.plane + i) - shift);
    const Vector<T> y = select(sum != sum, sum, select(infinite, most, shift + log(sum)));
    store(tile.data + i, Chain::Final::value(y, y, channels[0]));
  }
  return {place.sample, 0, 1, place.row, place.rows};
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

// From a tile to the output: rows of any dtype and strides or, faster, runs of whole vectors.
#pragma once

#include "convert.h"
#include "core/chain.h"
#include "source.h"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// What a value becomes where nothing is reduced.
template <class Chain, class T>
FUSEDCONV_INLINE Vector<T> stored_value(Vector<T> x, const Channel<T>& channel) {
  const Vector<T> y = Chain::pointwise(x, channel);
  return Chain::Final::value(y, y, channel);
}

template <class T>
void store_tile(const Place& place, const Tile<T>& tile, const Tensor& output) {
  visit_dtype<T>(output.dtype, [&](auto* element) {
    using Element = Pointee<decltype(element)>;
    Element* corner = static_cast<Element*>(output.data) + place.sample * output.stride[0] +
                      place.channel * output.stride[1] + place.row * output.stride[2];
    const int64_t cols = output.size[3];
    if (output.stride[3] != 1) {
      for (int64_t r = 0; r < place.rows; ++r) {
        store_block(tile.data + r * tile.pitch, tile.plane, corner + r * output.stride[2], output.stride[1],
                    output.stride[3], place.channels, cols);
      }
      return;
    }
    for (int64_t c = 0; c < place.channels; ++c) {
      store_block(tile.data + c * tile.plane, tile.pitch, corner + c * output.stride[1], output.stride[2], 1,
                  place.rows, cols);
    }
  });
}

// Whether the rows of a channel follow each other in the output, in the compute type, in vectors that lie in
// two rows at the most.
template <class T>
bool is_run_of_rows(const Tensor& output) {
  constexpr DType kComputeType = kIsSame<T, double> ? DType::kFloat64 : DType::kFloat32;
  const int64_t cols = output.size[3];
  return output.dtype == kComputeType && output.stride[3] == 1 && output.stride[2] == cols &&
         cols >= kLanes<T>;
}

// Writes stage(x) of rows x cols pixels as one run, by whole vectors aligned in the output; only its two ends
// touch a cache line in part. A vector where a row ends takes the rest of its lanes from the next row. The
// ends are no whole vectors where others are about to be streamed: a line that both go to costs a trip to
// memory.
template <bool kStreams, class T, class Stage>
void write_run(const T* plane, int64_t pitch, int64_t rows, int64_t cols, T* to, const Stage& stage) {
  const int64_t past_line = int64_t(reinterpret_cast<uintptr_t>(to) % kVectorBytes / sizeof(T));
  int64_t w = (kLanes<T> - past_line) % kLanes<T>;
  T* aligned = to + w;
  store_first(to, stage(load(plane)), w);
  const auto write = [&](Vector<T> x) {
    if constexpr (kStreams) {
      stream(aligned, stage(x));
    } else {
      store(aligned, stage(x));
    }
    aligned += kLanes<T>;
  };
  for (int64_t r = 0; r < rows; ++r) {
    const T* row = plane + r * pitch;
    for (; w + kLanes<T> <= cols; w += kLanes<T>) write(load(row + w));
    const int64_t left = cols - w;
    if (left > 0 && r + 1 < rows) {
      write(select(first_lanes<T>(left), load(row + w), load(row + pitch - left)));
      w += kLanes<T>;
    }
    w -= cols;
  }
  const int64_t left = to + rows * cols - aligned;
  store_first(aligned, stage(load(plane + (rows - 1) * pitch + cols - left)), left);
}

// The same as reduce_tile(Store) and store_tile where is_run_of_rows, in one pass.
template <class Chain, class T>
void write_tile(const Place& place, const Tile<T>& tile, const Channel<T>* channels, const Tensor& output,
                bool streams) {
  for (int64_t c = 0; c < place.channels; ++c) {
    const Channel<T> channel = channels[c];
    const auto stage = [&](Vector<T> x) { return stored_value<Chain>(x, channel); };
    const T* plane = tile.data + c * tile.plane;
    T* to = static_cast<T*>(output.data) + place.sample * output.stride[0] +
            (place.channel + c) * output.stride[1] + place.row * output.stride[2];
    const int64_t cols = output.size[3];
    if (streams) {
      write_run<true>(plane, tile.pitch, place.rows, cols, to, stage);
    } else {
      write_run<false>(plane, tile.pitch, place.rows, cols, to, stage);
    }
  }
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

// The view of a tile through which passes see it: what one thread has of it, whatever its registers look
// like.
//
// A thread has kThreadChannels rows of the product, each of which is a channel of the output in one of the
// stacked rows of pixels; and of each row the same columns: pairs next to each other, one of every
// kBlockColumns columns, which lie in one row of pixels. kRowThreads neighbours have all of a row's columns,
// in its half of the tile.
#pragma once

#include "rows.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

constexpr int kBlockColumns = 8;
constexpr int kThreadPairs = kColumns / kBlockColumns;

class Fragment {
 public:
  const Tile& tile;
  const ThreadRows& rows;  // the thread's channels, and which of its columns are pixels

  __device__ Fragment(const ConvTiling& tiling, const Tile& tile, const ThreadRows& rows,
                      float (&values)[kColumns / 2], const Scaling& scaling)
      : tile(tile), rows(rows), tiling_(tiling), values_(values), scaling_(scaling) {}

  // Of the k-th row, the j-th pair and its i-th value: v, or what was put in its place, as a pass left it:
  // value * scaling().factor[k] + scaling().bias[k].
  __device__ float& value(int k, int j, int i) const { return values_[4 * j + 2 * k + i]; }
  __device__ bool exists(int j, int i) const { return i == 0 ? rows.pixels.first(j) : rows.pixels.second(j); }

  __device__ const Scaling& scaling() const { return scaling_; }
  __device__ Scaling& scaling() { return scaling_; }

  // Until then values are the product's, which need a factor and a bias to be v.
  __device__ void unscale() {
    for_each([this](float& x, int k) { x = fmaf(x, scaling_.factor[k], scaling_.bias[k]); });
    scaling_ = {};
  }

  // Calls visit(value, k) for all values.
  template <class Visit>
  __device__ void for_each(const Visit& visit) const {
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) visit(values_[i], i / 2 % 2);
  }

  // Calls visit(j, row, col) for each block of columns: the row of its pixels, where rows are not stacked,
  // and the first one's column, in the tile. The thread's pair is first_of_pair() further on.
  template <class Visit>
  __device__ void for_each_block(const Visit& visit) const {
    int row = tiling_.by_pitch.divide(first_column());
    int col = first_column() - row * tiling_.pitch;
#pragma unroll
    for (int j = 0; j < kThreadPairs; ++j) {
      visit(j, row, col);
      col += kBlockColumns;
      if (col == tiling_.pitch) {
        col = 0;
        ++row;
      }
    }
  }

  // Whether all of a thread's columns lie in one row of pixels: the usual case, and the fastest.
  __device__ bool has_one_row() const { return tiling_.pitch % kColumns == 0; }

  // ---- places ----

  // Of the tile's columns, in shared memory too: the first of the thread's half, and of its first pair.
  __device__ static int half() { return half_of_thread(); }
  __device__ static int first_column() { return half() * kColumns; }
  __device__ static int first_of_pair() { return lane_of_thread() % kRowThreads * 2; }
  // Of a block of rows of the product.
  __device__ static int row(int k) { return row_of_thread() + 8 * k; }

  // The parts into which a channel's statistics come apart: one for each half of a row of the product.
  __device__ int part() const {
    return (tile.part * tiling_.stack + rows.stacked(tiling_)) * cuda::kPartsOfTile + half();
  }

  // ---- the threads that share a row ----

  // One of them, which writes what they found together.
  __device__ static bool is_writer() { return threadIdx.x % kRowThreads == 0; }
  // Each gets it.
  template <class T>
  __device__ static T sum_of_row(T x) {
    static_assert(kRowThreads == 4);
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
  }

 private:
  const ConvTiling& tiling_;
  float (&values_)[kColumns / 2];
  Scaling scaling_;
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

// The view of a tile through which passes see it: what one thread has of it, whatever its registers look
// like. What follows from where accumulators lie stands here and in rows.cuh, and in no pass.
//
// A thread has kThreadChannels rows of the product, each of which is a channel of the output in one of the
// stacked rows of pixels; and of each row the same kThreadPairs pairs of columns, whose two lie in one row of
// pixels. kRowThreads neighbours have all of a row's columns, in its half of the tile.
#pragma once

#include "cuda/device/packs.cuh"
#include "rows.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// Of the staging memory of a tile, from one row of the product to the next.
constexpr int kStagingPitch = kTileColumns + cuda::kStagingPadding;

class Fragment {
  static constexpr int kBlockColumns = 8;  // of which a thread has one pair

 public:
  static constexpr int kThreadPairs = kColumns / kBlockColumns;

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

  // ---- places in the tile ----

  // Calls visit(j, place) for all pairs, with that of the first of each.
  template <class Visit>
  __device__ void for_each_pair(const Visit& visit) const {
    for_each_block([&](int j, int slot, int col) {
      visit(j, Place{slot * tiling_.stack + rows.stacked(tiling_), col + first_of_pair()});
    });
  }

  // Before there are values: calls visit(place) for one of every `step` pixels of a thread's rows, which the
  // threads that have the same rows share out.
  template <class Visit>
  __device__ static void for_each_step(const ConvTiling& t, const Tile& tile, const ThreadRows& rows,
                                       int step, const Visit& visit) {
    for (int column = lane_of_thread() % kRowThreads * step; column < kColumns;
         column += kRowThreads * step) {
      const Place at = place_of(t, first_column() + column, rows.stacked(t));
      if (at.row < tile.rows && at.col < tile.cols) visit(at);
    }
  }

  // The parts into which a channel's statistics come apart: of a tile one for each row of the stack and half
  // of the columns. The thread's,
  __device__ int part() const { return part_of(tile.part, tiling_.stack); }
  // and visit(k, part) with those of its channels, where each has the tile's parts one after the other.
  template <class Visit>
  __device__ void for_each_part(const Visit& visit) const {
    const int stack = tiling_.stack;
#pragma unroll
    for (int k = 0; k < kThreadChannels; ++k) visit(k, part_of(rows.channel(k), stack));
  }

  // ---- the staging memory: a row for each one of the product, and in it a value for each column ----

  __device__ static int row(int k) { return row_of_thread() + 8 * k; }
  // A thread's first pair in a row; the others are pair_offset(j) further on.
  template <class T>
  __device__ static T* first_pair(T* row) {
    return row + first_column() + first_of_pair();
  }
  __device__ static constexpr int pair_offset(int j) { return kBlockColumns * j; }

  // Puts map(value, k) of all values there.
  template <class Map>
  __device__ void stage(float* staging, const Map& map) const {
#pragma unroll
    for (int k = 0; k < kThreadChannels; ++k) {
      float* const to = staging + row(k) * kStagingPitch + first_column() + first_of_pair();
#pragma unroll
      for (int j = 0; j < kThreadPairs; ++j)
        *reinterpret_cast<float2*>(to + pair_offset(j)) = {map(value(k, j, 0), k), map(value(k, j, 1), k)};
    }
  }

  // map(first, second, k) of all pairs: rows have half as many values.
  template <class Map>
  __device__ void stage_pairs(float* staging, const Map& map) const {
#pragma unroll
    for (int k = 0; k < kThreadChannels; ++k) {
      float* const to = staging + row(k) * (kStagingPitch / 2) + (first_column() + first_of_pair()) / 2;
#pragma unroll
      for (int j = 0; j < kThreadPairs; ++j) to[pair_offset(j) / 2] = map(value(k, j, 0), value(k, j, 1), k);
    }
  }

  // ---- memory with strides ----

  // Each value to where it belongs. to: the first channel's first pixel of the tile.
  template <class Out>
  __device__ void scatter(Out* to, int channel_stride, int row_stride, int col_stride) const {
    const ConvTiling& t = tiling_;
    Out* of_row[kThreadChannels];
#pragma unroll
    for (int k = 0; k < kThreadChannels; ++k)
      of_row[k] = to + (rows.channel(k) - tile.row_block * kRows) * channel_stride +
                  rows.stacked(t) * row_stride + first_of_pair() * col_stride;
    const bool pairs = col_stride == 1 && row_stride % 2 == 0 && channel_stride % 2 == 0 &&
                       tile.cols % 2 == 0 && reinterpret_cast<uintptr_t>(to) % (2 * sizeof(Out)) == 0 &&
                       rows.channel(kThreadChannels - 1) < t.out_channels;
    // All of a thread's columns lie in one row of pixels: the usual case, and the fastest.
    if (pairs && t.pitch % kColumns == 0) {
      const int slot = t.by_pitch.divide(first_column());
      const int start = slot * t.stack * row_stride + first_column() - slot * t.pitch;
#pragma unroll
      for (int j = 0; j < kThreadPairs; ++j) {
        if (!exists(j, 0)) continue;
#pragma unroll
        for (int k = 0; k < kThreadChannels; ++k)
          write_pair(of_row[k] + start + pair_offset(j), value(k, j, 0), value(k, j, 1));
      }
      return;
    }
    for_each_block([&](int j, int slot, int col) {
      const int place = slot * t.stack * row_stride + col * col_stride;
#pragma unroll
      for (int k = 0; k < kThreadChannels; ++k) {
        Out* pixel = of_row[k] + place;
        const bool is_used = rows.channel(k) < t.out_channels;
        if (is_used && exists(j, 0)) pixel[0] = narrow<Out>(value(k, j, 0));
        if (is_used && exists(j, 1)) pixel[col_stride] = narrow<Out>(value(k, j, 1));
      }
    });
  }

  // ---- the threads that share a row, in its half of the columns ----

  __device__ static bool has_first_columns() { return first_column() == 0; }

  // One of them, which writes what they found together.
  __device__ static bool is_writer() { return threadIdx.x % kRowThreads == 0; }
  // merge(x, y) of what all of them have: each gets it.
  template <class T, class Merge>
  __device__ static T merge_row(T x, const Merge& merge) {
    static_assert(kRowThreads == 4);
    x = merge(x, __shfl_xor_sync(~0u, x, 1));
    return merge(x, __shfl_xor_sync(~0u, x, 2));
  }
  template <class T>
  __device__ static T sum_of_row(T x) {
    return merge_row(x, [](T a, T b) { return a + b; });
  }

 private:
  // Of the tile's columns: the first of the thread's half. Of a block's: the first of its pair.
  __device__ static int first_column() { return half_of_thread() * kColumns; }
  __device__ static int first_of_pair() { return lane_of_thread() % kRowThreads * 2; }

  __device__ int part_of(int index, int stack) const {
    return (index * stack + rows.stacked(tiling_)) * cuda::kPartsOfTile + half_of_thread();
  }

  // Calls visit(j, slot, col) for each block of columns: the row of its pixels, where rows are not stacked,
  // and the first one's column, in the tile.
  template <class Visit>
  __device__ void for_each_block(const Visit& visit) const {
    int slot = tiling_.by_pitch.divide(first_column());
    int col = first_column() - slot * tiling_.pitch;
#pragma unroll
    for (int j = 0; j < kThreadPairs; ++j) {
      visit(j, slot, col);
      col += kBlockColumns;
      if (col == tiling_.pitch) {
        col = 0;
        ++slot;
      }
    }
  }

  const ConvTiling& tiling_;
  float (&values_)[kColumns / 2];
  Scaling scaling_;
};

constexpr int kThreadPairs = Fragment::kThreadPairs;

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

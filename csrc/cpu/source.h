// Where v comes from: our own convolution, or a tensor that somebody else computed. A schedule asks for v by
// the tile: some channels of some output rows of one sample, in the compute type, pixels side by side.
#pragma once

#include "core/checked.h"
#include "core/problem.h"
#include "core/vector_math.h"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// Of sizes, which are not negative. What is rounded up must fit; Checked's round_up tells where it does not.
FUSEDCONV_INLINE int64_t ceil_div(int64_t n, int64_t d) { return n / d + int64_t(n % d != 0); }
FUSEDCONV_INLINE int64_t round_up(int64_t n, int64_t multiple) { return ceil_div(n, multiple) * multiple; }
FUSEDCONV_INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
FUSEDCONV_INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

// A tile's place in v.
struct Place {
  int64_t sample;
  int64_t channel;
  int64_t channels;
  int64_t row;
  int64_t rows;
};

// Pixel (c, r, w) of a tile is data[c * plane + r * pitch + w], w < cols. What stands between cols and pitch,
// and from the last row to plane, is memory that may be read and written, of no meaning. Where whole vectors
// are read it holds numbers all the same, not what happened to be there: denormal numbers, as which pointers
// and integers are read, take some processors a hundred times as long.
template <class T>
struct Tile {
  T* data;
  int64_t plane;
  int64_t pitch;
};

// Channels that a source computes together. The channels of a Place start at a multiple of it.
constexpr int kBlockChannels = 4;

template <class T>
class Source {
 public:
  Source(int64_t samples, int64_t channels, int64_t rows, int64_t cols, int64_t pitch)
      : samples(samples), channels(channels), rows(rows), cols(cols), pitch(pitch) {}

  const int64_t samples;
  const int64_t channels;
  const int64_t rows;
  const int64_t cols;
  const int64_t pitch;  // of its tiles

  // An odd number of vectors, so that the same pixel of many channels does not fall on few sets of the cache.
  int64_t plane(int64_t tile_rows) const {
    return (Checked(divide_up(Checked(tile_rows) * pitch, kLanes<T>).value() | 1) * kLanes<T>).value();
  }

  // Says, before the first load, how many rows a tile has at most; gives the scratch elements that pack and
  // load need.
  virtual int64_t prepare(int64_t tile_rows) = 0;
  // Once for a tile, before any of its channels is loaded: what they share goes into the scratch.
  virtual void pack(const Place& place, T* scratch) const = 0;
  virtual void load(const Place& place, const Tile<T>& tile, const T* scratch) const = 0;
  // Whether loading v again costs little, so that it need not be kept between the statistics and the rest.
  virtual bool is_cheap() const = 0;
  // Rows that a tile has at the least, where there are so many.
  virtual int64_t least_rows() const = 0;
  // Channels that one pack should serve, or it would take longer than to compute them from it.
  virtual int64_t channels_for_pack() const = 0;
  // Operations for one value and the chain behind it, roughly.
  virtual int64_t cost() const = 0;

 protected:
  ~Source() = default;
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

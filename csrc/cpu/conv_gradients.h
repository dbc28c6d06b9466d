// The gradients of a convolution's weight and input, from a band of v's gradient that lies in the cache.
//
// v's gradient is laid out as v's own tiles are, in planes of the padded input's pitch, with zeros in the
// columns that v does not have. So the pixels that a tap brings to the input's gradient are again all of a
// run, shifted by one constant, and the zeros between two rows are the padding of both: the input's gradient
// is a convolution of that run like v itself. The weight's is a matrix product over pixels, row by row.
#pragma once

#include "conv_block.h"
#include "conv_source.h"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

template <class T>
class ConvGradients {
 public:
  // For bands of up to so many rows. The conv has stride 1. `source` gives its output.
  ConvGradients(const ConvBackward& problem, const Source<T>& source, int64_t band_rows);

  int64_t taps() const { return taps_; }
  // Of a band of v's gradient, with the rows above it that its rows of the input's gradient need too: the
  // halo.
  int64_t plane() const { return plane_; }

  // The memory of a band of v's gradient, and of one of the input's.
  int64_t grad_v_elements() const;
  int64_t grad_input_elements() const;
  // Clears a band, and gives its tile: halo rows, then the band's.
  Tile<T> clear(T* memory) const;
  // Makes the band's last rows the halo of the next one.
  void advance(const Tile<T>& grad_v, int64_t rows) const;

  // Sums, [channel][tap]; there are more channels than the weight has.
  int64_t weight_elements() const { return round_up(channels_, kBlockChannels) * taps_; }
  // Adds what the rows of a band, whose input the taps meet, bring to the weight's gradient.
  void add_to_weight(const Taps<T>& input, const Tile<T>& grad_v, int64_t rows, double* sums) const;
  // Writes rows of the padded input's gradient from a band of as many.
  void write_input(int64_t sample, int64_t row, int64_t rows, const Tile<T>& grad_v, T* memory) const;

 private:
  void pack_weight();
  void set_offsets();
  void multiply(const Taps<T>& input, const Tile<T>& grad_v, int64_t rows, int64_t cols, double* sums) const;

  const ConvBackward& problem_;
  const int64_t channels_;
  const int64_t in_channels_;
  const int64_t taps_;  // in_channels * kernel height * kernel width
  const int64_t cols_;
  const int64_t pitch_;
  const int64_t reach_[2];  // rows and columns from a filter's first tap to its last
  const int64_t plane_;
  const int64_t input_plane_;
  const int64_t kernel_taps_;  // channels * kernel height * kernel width
  Buffer<T> weight_;           // [input channel block][channel, tap][input channel of the block]
  Buffer<T> no_bias_;
  Buffer<int64_t> offset_;  // of each tap's first pixel from the band's
};

extern template class ConvGradients<float>;

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

// v as a direct convolution, by an implicit matrix product without im2col.
//
// The input rows under a tile are packed, with their padding, into planes of one pitch. In such a plane the
// pixels that a filter tap meets are the output's pixels, all shifted by one constant; so a tap is an offset,
// the output is computed as one run of pixels over all rows, and the few columns that wrap around are never
// looked at. A stride s splits a plane into s x s planes of every s-th row and column, in which the same
// holds. An unpadded input of stride 1 has that layout already and is read in place.
#pragma once

#include "buffer.h"
#include "conv_block.h"
#include "core/checked.h"
#include "core/parameter.h"
#include "source.h"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

template <class T>
class ConvSource final : public Source<T> {
 public:
  ConvSource(const Tensor& input, const Conv& conv);

  int64_t prepare(int64_t tile_rows) override;
  bool is_cheap() const override { return false; }
  // A pack has the rows that the filter reaches beyond a tile's: hardly more than those of the tile.
  int64_t least_rows() const override { return has_packed_layout() ? 1 : larger(1, vertical_.reach()); }
  int64_t channels_for_pack() const override;
  int64_t cost() const override { return 32 + taps_; }
  void pack(const Place& place, T* packed) const override;
  void load(const Place& place, const Tile<T>& tile, const T* packed) const override;

  // What the taps, [input channel][row][column], meet at a packed place: at pixel r * pitch + w, they meet
  // the input of v's pixel (r, w).
  Taps<T> taps(const Place& place, const T* packed) const;

 private:
  // What a kernel axis does to an input axis: the taps fall on `phases` packed planes, and reach `reach`
  // further than one output pixel does.
  struct Axis {
    int64_t kernel, stride, dilation, padding, size;

    int64_t outputs() const {
      return ((Checked(size) + Checked(2) * padding - Checked(dilation) * (kernel - 1) - 1).value()) /
                 stride +
             1;
    }
    int64_t phases() const { return smaller(stride, (kernel - 1) * dilation + 1); }
    int64_t reach() const { return (kernel - 1) * dilation / stride; }
    int64_t phase(int64_t tap) const { return tap * dilation % stride; }
    int64_t shift(int64_t tap) const { return tap * dilation / stride; }
  };

  ConvSource(const Tensor& input, const Conv& conv, const Axis& vertical, const Axis& horizontal);
  static Axis axis(const Tensor& input, const Conv& conv, int dim);
  void pack_weight();
  void set_offsets(const Buffer<int64_t>& offset, int64_t channel_stride) const;
  bool has_packed_layout() const;
  bool reads_in_place(const Place& place) const;
  void clear_columns(T* row, int64_t begin, int64_t end) const;

  const Tensor& input_;
  const Conv& conv_;
  const Axis vertical_;
  const Axis horizontal_;
  const int64_t in_channels_;
  const int64_t taps_;             // in_channels * kernel height * kernel width
  Buffer<T> weight_;               // [channel block][tap][channel of the block], filled up with zeros
  Buffer<T> bias_;                 // [channel block][channel of the block]
  Buffer<int64_t> packed_offset_;  // of each tap's first pixel, in the packed input
  Buffer<int64_t> input_offset_;   // the same in the input itself, where it is read in place
  int64_t packed_rows_ = 0;
  int64_t packed_channel_ = 0;  // elements
};

extern template class ConvSource<float>;
extern template class ConvSource<double>;

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

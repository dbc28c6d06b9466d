#include "conv_source.h"

#include "convert.h"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {
template <class T>
typename ConvSource<T>::Axis ConvSource<T>::axis(const Tensor& input, const Conv& conv, int dim) {
  return {conv.weight.size[2 + dim], conv.stride[dim], conv.dilation[dim], conv.padding[dim],
          input.size[2 + dim]};
}

template <class T>
ConvSource<T>::ConvSource(const Tensor& input, const Conv& conv)
    : ConvSource(input, conv, axis(input, conv, 0), axis(input, conv, 1)) {}

template <class T>
ConvSource<T>::ConvSource(const Tensor& input, const Conv& conv, const Axis& vertical, const Axis& horizontal)
    : Source<T>(input.size[0], conv.weight.size[0], vertical.outputs(), horizontal.outputs(),
                horizontal.outputs() + horizontal.reach()),
      input_(input),
      conv_(conv),
      vertical_(vertical),
      horizontal_(horizontal),
      in_channels_(conv.weight.size[1]),
      taps_((Checked(in_channels_) * vertical.kernel * horizontal.kernel).value()),
      weight_(Checked(round_up(this->channels, kBlockChannels)) * taps_),
      bias_(round_up(this->channels, kBlockChannels)),
      packed_offset_(taps_),
      input_offset_(taps_) {
  pack_weight();
}

template <class T>
void ConvSource<T>::pack_weight() {
  const Tensor& weight = conv_.weight;
  const int64_t padded_channels = round_up(this->channels, kBlockChannels);
  for (int64_t c = 0; c < padded_channels; ++c) {
    bias_[c] = c < this->channels ? value_of<T>(conv_.bias, c) : T(0);
  }
  for (int64_t c = 0; c < this->channels; c += kBlockChannels) {
    pack_block(static_cast<const T*>(weight.data) + c * weight.stride[0], weight.stride[0],
               smaller(kBlockChannels, this->channels - c),
               {weight.stride[1], weight.stride[2], weight.stride[3]},
               {in_channels_, vertical_.kernel, horizontal_.kernel}, weight_.data() + c * taps_);
  }
}

template <class T>
void ConvSource<T>::set_offsets(const Buffer<int64_t>& offset, int64_t channel_stride) const {
  const int64_t phase_stride = packed_rows_ * this->pitch;
  const int64_t kernel = vertical_.kernel * horizontal_.kernel;
  for (int64_t kh = 0; kh < vertical_.kernel; ++kh) {
    const int64_t row =
        vertical_.phase(kh) * horizontal_.phases() * phase_stride + vertical_.shift(kh) * this->pitch;
    for (int64_t kw = 0; kw < horizontal_.kernel; ++kw) {
      offset[kh * horizontal_.kernel + kw] =
          row + horizontal_.phase(kw) * phase_stride + horizontal_.shift(kw);
    }
  }
  for (int64_t tap = kernel; tap < taps_; ++tap) offset[tap] = offset[tap - kernel] + channel_stride;
}

template <class T>
int64_t ConvSource<T>::prepare(int64_t tile_rows) {
  packed_rows_ = tile_rows + vertical_.reach();
  packed_channel_ = (Checked(vertical_.phases()) * horizontal_.phases() * packed_rows_ * this->pitch).value();
  set_offsets(packed_offset_, packed_channel_);
  set_offsets(input_offset_, input_.stride[1]);
  // The last vectors of the last plane read past its end: by the taps' reach, and to a whole vector.
  return (Checked(in_channels_) * packed_channel_ + horizontal_.reach() + kLanes<T>).value();
}

// A packed value is used for so many products, or packing it takes more than a tenth of their time; for more
// where values do not lie side by side.
constexpr int64_t kPackProducts = 64;
constexpr int64_t kScatteredPackProducts = 512;

template <class T>
int64_t ConvSource<T>::channels_for_pack() const {
  if (has_packed_layout()) return 1;
  const int64_t products =
      horizontal_.stride * input_.stride[3] == 1 ? kPackProducts : kScatteredPackProducts;
  return ceil_div(products * vertical_.phases() * horizontal_.phases(),
                  vertical_.kernel * horizontal_.kernel);
}

template <class T>
bool ConvSource<T>::has_packed_layout() const {
  return vertical_.stride == 1 && horizontal_.stride == 1 && vertical_.padding == 0 &&
         horizontal_.padding == 0 && input_.stride[3] == 1 && input_.stride[2] == this->pitch;
}

template <class T>
bool ConvSource<T>::reads_in_place(const Place& place) const {
  // What a tile reads past its end must be there: the bottom tile of a sample is packed.
  const int64_t end =
      (place.row + place.rows + vertical_.reach()) * this->pitch + horizontal_.reach() + kLanes<T>;
  return has_packed_layout() && end <= vertical_.size * this->pitch;
}

template <class T>
void ConvSource<T>::pack(const Place& place, T* packed) const {
  if (reads_in_place(place)) return;
  const Axis v = vertical_;
  const Axis h = horizontal_;
  const T* from = static_cast<const T*>(input_.data) + place.sample * input_.stride[0];
  for (int64_t v_phase = 0; v_phase < v.phases(); ++v_phase) {
    for (int64_t h_phase = 0; h_phase < h.phases(); ++h_phase) {
      // Packed column x is input column x * stride + h_phase - padding; from `begin` to `end` it exists.
      const int64_t first = h_phase - h.padding;
      const int64_t begin = smaller(this->pitch, first < 0 ? ceil_div(-first, h.stride) : 0);
      const int64_t end = larger(begin, smaller(this->pitch, ceil_div(larger(h.size - first, 0), h.stride)));
      for (int64_t r = 0; r < packed_rows_; ++r, packed += this->pitch) {
        const int64_t in_row = (place.row + r) * v.stride + v_phase - v.padding;
        const bool exists = r < place.rows + v.reach() && in_row >= 0 && in_row < v.size;
        clear_columns(packed, 0, exists ? begin : this->pitch);
        if (!exists) continue;
        clear_columns(packed, end, this->pitch);
        load_block(from + in_row * input_.stride[2] + (begin * h.stride + first) * input_.stride[3],
                   input_.stride[1], h.stride * input_.stride[3], packed + begin, packed_channel_,
                   in_channels_, end - begin);
      }
    }
  }
  // Behind the last plane, which the last vectors read.
  T* tail = packed + (in_channels_ - 1) * packed_channel_;
  for (int64_t i = 0; i < h.reach() + kLanes<T>; ++i) tail[i] = T(0);
}

// Of a packed row, in all channels.
template <class T>
void ConvSource<T>::clear_columns(T* row, int64_t begin, int64_t end) const {
  for (int64_t i = 0; i < in_channels_; ++i, row += packed_channel_) {
    for (int64_t x = begin; x < end; ++x) row[x] = T(0);
  }
}

template <class T>
Taps<T> ConvSource<T>::taps(const Place& place, const T* packed) const {
  if (!reads_in_place(place)) return {packed, packed_offset_.data(), taps_};
  const T* input = static_cast<const T*>(input_.data);
  return {input + place.sample * input_.stride[0] + place.row * input_.stride[2], input_offset_.data(),
          taps_};
}

template <class T>
void ConvSource<T>::load(const Place& place, const Tile<T>& tile, const T* packed) const {
  multiply_run(taps(place, packed), place.rows * this->pitch, weight_.data() + place.channel * taps_,
               bias_.data() + place.channel, place.channels, tile);
}

template class ConvSource<float>;
template class ConvSource<double>;

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

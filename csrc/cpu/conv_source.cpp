#include "conv_source.h"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {
namespace {

// The register block: 4 channels x 6 vectors of pixels are 24 accumulators of 32 registers, x 3 are 12 of 16.
constexpr int kBlockVectors = kVectorRegisters == 32 ? 6 : 3;

// out[c][pixel] = bias[c] + sum over taps of weight[tap][c] * input[offset[tap] + pixel], for the block's
// channels.
template <int kVectors, class T>
void multiply_block(const T* input, const int64_t* offset, int64_t taps, const T* weight, const T* bias,
                    T* out, int64_t out_stride, int64_t channels) {
  constexpr int kWidth = kLanes<T>;
  Vector<T> sum[kBlockChannels][kVectors];
#pragma GCC unroll 4
  for (int c = 0; c < kBlockChannels; ++c) {
#pragma GCC unroll 6
    for (int j = 0; j < kVectors; ++j) sum[c][j] = broadcast(bias[c]);
  }
  for (int64_t tap = 0; tap < taps; ++tap) {
    const T* pixels = input + offset[tap];
    Vector<T> x[kVectors];
#pragma GCC unroll 6
    for (int j = 0; j < kVectors; ++j) x[j] = load(pixels + j * kWidth);
#pragma GCC unroll 4
    for (int c = 0; c < kBlockChannels; ++c) {
      const Vector<T> w = broadcast(weight[tap * kBlockChannels + c]);
#pragma GCC unroll 6
      for (int j = 0; j < kVectors; ++j) sum[c][j] += w * x[j];
    }
  }
#pragma GCC unroll 4
  for (int c = 0; c < kBlockChannels; ++c) {
    if (c >= channels) return;
#pragma GCC unroll 6
    for (int j = 0; j < kVectors; ++j) store(out + c * out_stride + j * kWidth, sum[c][j]);
  }
}

template <class T>
using MultiplyBlock = void (*)(const T*, const int64_t*, int64_t, const T*, const T*, T*, int64_t, int64_t);

template <class T, int kVectors = kBlockVectors>
FUSEDCONV_INLINE MultiplyBlock<T> multiply_block_of(int64_t vectors) {
  if constexpr (kVectors > 1) {
    if (vectors < kVectors) return multiply_block_of<T, kVectors - 1>(vectors);
  }
  return multiply_block<kVectors, T>;
}

}  // namespace

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
      taps_(in_channels_ * vertical.kernel * horizontal.kernel),
      weight_(round_up(this->channels, kBlockChannels) * taps_),
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
    const bool exists = c < this->channels;
    bias_[c] = exists ? value_of<T>(conv_.bias, c) : T(0);
    T* to = weight_.data() + c / kBlockChannels * kBlockChannels * taps_ + c % kBlockChannels;
    const T* from = static_cast<const T*>(weight.data) + c * weight.stride[0];
    for (int64_t i = 0; i < in_channels_; ++i) {
      for (int64_t kh = 0; kh < vertical_.kernel; ++kh) {
        for (int64_t kw = 0; kw < horizontal_.kernel; ++kw, to += kBlockChannels) {
          *to = exists ? from[i * weight.stride[1] + kh * weight.stride[2] + kw * weight.stride[3]] : T(0);
        }
      }
    }
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
  const int64_t packed_channel = vertical_.phases() * horizontal_.phases() * packed_rows_ * this->pitch;
  set_offsets(packed_offset_, packed_channel);
  set_offsets(input_offset_, input_.stride[1]);
  // The last vectors of the last plane read past its end: by the taps' reach, and to a whole vector.
  return in_channels_ * packed_channel + horizontal_.reach() + kLanes<T>;
}

template <class T>
bool ConvSource<T>::reads_in_place(const Place& place) const {
  const bool has_packed_layout = vertical_.stride == 1 && horizontal_.stride == 1 && vertical_.padding == 0 &&
                                 horizontal_.padding == 0 && input_.stride[3] == 1 &&
                                 input_.stride[2] == this->pitch;
  // What a tile reads past its end must be there: the bottom tile of a sample is packed.
  const int64_t end =
      (place.row + place.rows + vertical_.reach()) * this->pitch + horizontal_.reach() + kLanes<T>;
  return has_packed_layout && end <= vertical_.size * this->pitch;
}

template <class T>
void ConvSource<T>::pack(const Place& place, T* packed) const {
  if (reads_in_place(place)) return;
  const Axis v = vertical_;
  const Axis h = horizontal_;
  const T* from = static_cast<const T*>(input_.data) + place.sample * input_.stride[0];
  for (int64_t i = 0; i < in_channels_; ++i) {
    for (int64_t v_phase = 0; v_phase < v.phases(); ++v_phase) {
      for (int64_t h_phase = 0; h_phase < h.phases(); ++h_phase) {
        // Packed column x is input column x * stride + h_phase - padding; from `begin` to `end` it exists.
        const int64_t first = h_phase - h.padding;
        const int64_t begin = smaller(this->pitch, first < 0 ? ceil_div(-first, h.stride) : 0);
        const int64_t end =
            larger(begin, smaller(this->pitch, ceil_div(larger(h.size - first, 0), h.stride)));
        for (int64_t r = 0; r < packed_rows_; ++r, packed += this->pitch) {
          const int64_t in_row = (place.row + r) * v.stride + v_phase - v.padding;
          const bool exists = r < place.rows + v.reach() && in_row >= 0 && in_row < v.size;
          if (!exists) {
            for (int64_t x = 0; x < this->pitch; ++x) packed[x] = T(0);
            continue;
          }
          const T* row = from + i * input_.stride[1] + in_row * input_.stride[2];
          for (int64_t x = 0; x < begin; ++x) packed[x] = T(0);
          if (h.stride == 1 && input_.stride[3] == 1) {
            for (int64_t x = begin; x < end; ++x) packed[x] = row[x + first];
          } else {
            for (int64_t x = begin; x < end; ++x) packed[x] = row[(x * h.stride + first) * input_.stride[3]];
          }
          for (int64_t x = end; x < this->pitch; ++x) packed[x] = T(0);
        }
      }
    }
  }
}

template <class T>
void ConvSource<T>::load(const Place& place, const Tile<T>& tile, const T* packed) const {
  const bool in_place = reads_in_place(place);
  const T* pixels = in_place ? static_cast<const T*>(input_.data) + place.sample * input_.stride[0] +
                                   place.row * input_.stride[2]
                             : packed;
  const int64_t* offset = in_place ? input_offset_.data() : packed_offset_.data();
  const int64_t vectors = ceil_div(place.rows * this->pitch, kLanes<T>);
  // All channels of a run of pixels before the next run: the input that they share stays in L1.
  for (int64_t j = 0; j < vectors; j += kBlockVectors) {
    const int64_t pixel = j * kLanes<T>;
    const MultiplyBlock<T> multiply = multiply_block_of<T>(smaller(kBlockVectors, vectors - j));
    for (int64_t c = 0; c < place.channels; c += kBlockChannels) {
      const int64_t channel = place.channel + c;
      multiply(pixels + pixel, offset, taps_, weight_.data() + channel * taps_, bias_.data() + channel,
               tile.data + c * tile.plane + pixel, tile.plane, place.channels - c);
    }
  }
}

template class ConvSource<float>;
template class ConvSource<double>;

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

#include "conv_gradients.h"

#include <cstring>

#include "lanes.h"
#include "statistics.h"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {
namespace {

// Adds up the lanes of each vector: sum i becomes lane i % kLanes of vector i / kLanes.
template <class T, int kCount, int kWidth = 1>
FUSEDCONV_INLINE void add_lanes(Vector<T>* sum) {
  if constexpr (kWidth < kLanes<T>) {
#pragma GCC unroll 12
    for (int i = 0; i < kCount / 2; ++i) sum[i] = add_neighbours<T>(sum[2 * i], sum[2 * i + 1]);
    if constexpr (kCount % 2 == 1) sum[kCount / 2] = add_neighbours<T>(sum[kCount - 1], sum[kCount - 1]);
    add_lanes<T, (kCount + 1) / 2, 2 * kWidth>(sum);
  }
}

// sums[c][tap] += sum over pixels of grad_v[c][pixel] * pixels[offset[tap] + pixel], for a block of channels
// and of taps. Each lane's sum is in the compute type, so the pixels are few.
template <int kTaps, class T>
void multiply_pixels(const T* pixels, const int64_t* offset, const Tile<T>& grad_v, int64_t rows,
                     int64_t cols, double* sums, int64_t sums_stride) {
  Vector<T> sum[kBlockChannels * kTaps]{};
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t row = r * grad_v.pitch;
    for_each_lanes<T>(row, row + cols, [&](auto lanes, int64_t i) {
      Vector<T> g[kBlockChannels];
#pragma GCC unroll 4
      for (int c = 0; c < kBlockChannels; ++c) g[c] = lanes.load(grad_v.data + c * grad_v.plane + i);
#pragma GCC unroll 6
      for (int tap = 0; tap < kTaps; ++tap) {
        const Vector<T> x = lanes.load(pixels + offset[tap] + i);
#pragma GCC unroll 4
        for (int c = 0; c < kBlockChannels; ++c) sum[c * kTaps + tap] += g[c] * x;
      }
    });
  }
  add_lanes<T, kBlockChannels * kTaps>(sum);
  T total[kBlockChannels * kTaps + kLanes<T>];
#pragma GCC unroll 6
  for (int i = 0; i < kBlockChannels * kTaps; i += kLanes<T>) store(total + i, sum[i / kLanes<T>]);
  for (int c = 0; c < kBlockChannels; ++c) {
    for (int tap = 0; tap < kTaps; ++tap) sums[c * sums_stride + tap] += double(total[c * kTaps + tap]);
  }
}

template <class T>
using MultiplyPixels = void (*)(const T*, const int64_t*, const Tile<T>&, int64_t, int64_t, double*, int64_t);

template <class T, int kTaps = kBlockVectors>
FUSEDCONV_INLINE MultiplyPixels<T> multiply_pixels_of(int64_t taps) {
  if constexpr (kTaps > 1) {
    if (taps < kTaps) return multiply_pixels_of<T, kTaps - 1>(taps);
  }
  return multiply_pixels<kTaps, T>;
}

}  // namespace

template <class T>
ConvGradients<T>::ConvGradients(const ConvBackward& problem, const Source<T>& source, int64_t band_rows)
    : problem_(problem),
      channels_(source.channels),
      in_channels_(problem.conv.weight.size[1]),
      taps_((Checked(in_channels_) * problem.conv.weight.size[2] * problem.conv.weight.size[3]).value()),
      cols_(source.cols),
      pitch_(source.pitch),
      reach_{(Checked(problem.conv.weight.size[2] - 1) * problem.conv.dilation[0]).value(),
             (Checked(problem.conv.weight.size[3] - 1) * problem.conv.dilation[1]).value()},
      plane_(source.plane(band_rows + reach_[0])),
      input_plane_(source.plane(band_rows)),
      kernel_taps_((Checked(channels_) * problem.conv.weight.size[2] * problem.conv.weight.size[3]).value()),
      weight_(Checked(round_up(in_channels_, kBlockChannels)) * kernel_taps_),
      no_bias_(round_up(in_channels_, kBlockChannels)),
      offset_(kernel_taps_) {
  pack_weight();
  set_offsets();
}

template <class T>
void ConvGradients<T>::pack_weight() {
  const Tensor& weight = problem_.conv.weight;
  for (int64_t i = 0; i < round_up(in_channels_, kBlockChannels); ++i) no_bias_[i] = T(0);
  for (int64_t i = 0; i < in_channels_; i += kBlockChannels) {
    pack_block(static_cast<const T*>(weight.data) + i * weight.stride[1], weight.stride[1],
               smaller(kBlockChannels, in_channels_ - i),
               {weight.stride[0], weight.stride[2], weight.stride[3]},
               {channels_, weight.size[2], weight.size[3]}, weight_.data() + i * kernel_taps_);
  }
}

template <class T>
void ConvGradients<T>::set_offsets() {
  const Conv& conv = problem_.conv;
  int64_t* offset = offset_.data();
  for (int64_t c = 0; c < channels_; ++c) {
    for (int64_t kh = 0; kh < conv.weight.size[2]; ++kh) {
      for (int64_t kw = 0; kw < conv.weight.size[3]; ++kw) {
        *offset++ = c * plane_ - kh * conv.dilation[0] * pitch_ - kw * conv.dilation[1];
      }
    }
  }
}

// In front, the last tap reads before the first row; at the end, vectors reach past the last one.
template <class T>
int64_t ConvGradients<T>::grad_v_elements() const {
  return (Checked(round_up(channels_, kBlockChannels)) * plane_ + round_up(reach_[1], kLanes<T>) + kLanes<T>)
      .value();
}

template <class T>
int64_t ConvGradients<T>::grad_input_elements() const {
  return (Checked(in_channels_) * input_plane_).value();
}

template <class T>
Tile<T> ConvGradients<T>::clear(T* memory) const {
  std::memset(memory, 0, size_t(grad_v_elements()) * sizeof(T));
  return {memory + round_up(reach_[1], kLanes<T>), plane_, pitch_};
}

template <class T>
void ConvGradients<T>::advance(const Tile<T>& grad_v, int64_t rows) const {
  for (int64_t c = 0; c < channels_; ++c) {
    T* plane = grad_v.data + c * plane_;
    std::memmove(plane, plane + rows * pitch_, size_t(reach_[0] * pitch_) * sizeof(T));
  }
}

template <class T>
void ConvGradients<T>::add_to_weight(const Taps<T>& input, const Tile<T>& grad_v, int64_t rows,
                                     double* sums) const {
  for_each_few<T>(rows, cols_, [&](int64_t top, int64_t left, int64_t some_rows, int64_t some_cols) {
    const int64_t pixel = top * pitch_ + left;
    const Tile<T> some{grad_v.data + reach_[0] * pitch_ + pixel, plane_, pitch_};
    multiply({input.pixels + pixel, input.offset, taps_}, some, some_rows, some_cols, sums);
  });
}

template <class T>
void ConvGradients<T>::multiply(const Taps<T>& input, const Tile<T>& grad_v, int64_t rows, int64_t cols,
                                double* sums) const {
  for (int64_t c = 0; c < channels_; c += kBlockChannels) {
    const Tile<T> block{grad_v.data + c * plane_, plane_, pitch_};
    for (int64_t tap = 0; tap < taps_; tap += kBlockVectors) {
      const MultiplyPixels<T> multiply = multiply_pixels_of<T>(smaller(kBlockVectors, taps_ - tap));
      multiply(input.pixels, input.offset + tap, block, rows, cols, sums + c * taps_ + tap, taps_);
    }
  }
}

template <class T>
void ConvGradients<T>::write_input(int64_t sample, int64_t row, int64_t rows, const Tile<T>& grad_v,
                                   T* memory) const {
  const Taps<T> taps{grad_v.data + reach_[0] * pitch_, offset_.data(), kernel_taps_};
  multiply_run(taps, rows * pitch_, weight_.data(), no_bias_.data(), in_channels_,
               Tile<T>{memory, input_plane_, pitch_});
  // The padding has no gradient.
  const Tensor& to = problem_.grad_input;
  const int64_t* padding = problem_.conv.padding;
  const int64_t begin = larger(row, padding[0]);
  const int64_t end = smaller(row + rows, padding[0] + to.size[2]);
  for (int64_t i = 0; i < in_channels_; ++i) {
    T* plane = static_cast<T*>(to.data) + (sample * in_channels_ + i) * to.size[2] * to.size[3];
    for (int64_t r = begin; r < end; ++r) {
      std::memcpy(plane + (r - padding[0]) * to.size[3],
                  memory + i * input_plane_ + (r - row) * pitch_ + padding[1],
                  size_t(to.size[3]) * sizeof(T));
    }
  }
}

template class ConvGradients<float>;

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

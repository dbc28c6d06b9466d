// A convolution's register block: a few channels times a run of pixels.
#pragma once

#include "source.h"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// 4 channels x 6 vectors of pixels are 24 accumulators of 32 registers, x 3 are 12 of 16.
constexpr int kBlockVectors = kVectorRegisters == 32 ? 6 : 3;

// What the taps of a filter meet: at pixel p, pixels[offset[tap] + p].
template <class T>
struct Taps {
  const T* pixels;
  const int64_t* offset;
  int64_t count;
};

// Weights of a few channels side by side: to[tap][channel], zeros where there are fewer than a block has. A
// tap has three places, and the channels and the places lie in strides.
template <class T>
void pack_block(const T* from, int64_t channel_stride, int64_t channels, const int64_t (&stride)[3],
                const int64_t (&size)[3], T* to) {
  for (int64_t i = 0; i < size[0]; ++i) {
    for (int64_t j = 0; j < size[1]; ++j) {
      const T* row = from + i * stride[0] + j * stride[1];
      for (int64_t k = 0; k < size[2]; ++k, row += stride[2], to += kBlockChannels) {
        for (int64_t c = 0; c < kBlockChannels; ++c) to[c] = c < channels ? row[c * channel_stride] : T(0);
      }
    }
  }
}

// So many products are summed one after the other. A sum rounds each to the last place of what it has become:
// sums of few, added up, stay nearer to the products than one long sum, and the bias, which may be much
// larger than all of them, comes last.
constexpr int64_t kSumTaps = 64;

// out[c][pixel] = bias[c] + sum over taps of weight[tap][c] * pixels[offset[tap] + pixel], for the block's
// channels.
template <int kVectors, class T>
void multiply_block(const T* input, const int64_t* offset, int64_t taps, const T* weight, const T* bias,
                    T* out, int64_t out_stride, int64_t channels) {
  constexpr int kWidth = kLanes<T>;
  for (int64_t first = 0; first < taps; first += kSumTaps) {
    const int64_t end = smaller(taps, first + kSumTaps);
    Vector<T> sum[kBlockChannels][kVectors]{};
    for (int64_t tap = first; tap < end; ++tap) {
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
      if (c >= channels) break;
      const Vector<T> last = end == taps ? broadcast(bias[c]) : Vector<T>{};
#pragma GCC unroll 6
      for (int j = 0; j < kVectors; ++j) {
        T* to = out + c * out_stride + j * kWidth;
        const Vector<T> before = first > 0 ? load(to) : Vector<T>{};
        store(to, (before + sum[c][j]) + last);
      }
    }
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

// The same for all channels of a tile and a run of whole vectors of its pixels. weight is
// [channel block][tap][channel of the block].
template <class T>
void multiply_run(const Taps<T>& taps, int64_t pixels, const T* weight, const T* bias, int64_t channels,
                  const Tile<T>& out) {
  const int64_t vectors = ceil_div(pixels, kLanes<T>);
  // All channels of a run of pixels before the next run: the input that they share stays in L1.
  for (int64_t j = 0; j < vectors; j += kBlockVectors) {
    const int64_t pixel = j * kLanes<T>;
    const MultiplyBlock<T> multiply = multiply_block_of<T>(smaller(kBlockVectors, vectors - j));
    for (int64_t c = 0; c < channels; c += kBlockChannels) {
      multiply(taps.pixels + pixel, taps.offset, taps.count, weight + c * taps.count, bias + c,
               out.data + c * out.plane + pixel, out.plane, channels - c);
    }
  }
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

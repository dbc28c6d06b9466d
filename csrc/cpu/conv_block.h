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

// out[c][pixel] = bias[c] + sum over taps of weight[tap][c] * pixels[offset[tap] + pixel], for the block's
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

// The same for all channels of a tile and a run of whole vectors of its pixels. weight is [channel
// block][tap] [channel of the block].
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

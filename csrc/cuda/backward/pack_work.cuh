// How a block shares out a row of a sample, of all channels: what it gets, and its shared memory.
#pragma once

#include "cuda/gradients/packed_rows.cuh"
#include "work.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

using cuda::kGradientThreads;
using cuda::kGradientWarps;
using cuda::kPackItems;
using cuda::kPackWidth;
using cuda::PackShape;

constexpr int kGradientBlocks = 4;  // on a multiprocessor, for registers

// Elements of a load, of which every row is made; a whole warp has one then.
template <class Chain>
int pack_width(const BackwardWork<float>& work, int cols) {
  const bool is_wide = cols > kWarpThreads && cols % kPackWidth == 0 && is_aligned_to(work.v, kPackWidth) &&
                       (!Chain::Reduce::kStores || is_aligned_to(work.grad, kPackWidth));
  return is_wide ? kPackWidth : 1;
}

// work's planes and grad_v are not used.
struct PackWork {
  BackwardWork<float> work;
  PackedRows to;  // without units where nobody wants it: then only sums are left
  PackShape shape;
};

// A block's shared memory, of pack_shared_bytes().
template <class Chain>
struct PackMemory {
  float* values;            // [channels][pitch]
  float* of_pixels;         // [2][pitch], where channels are reduced
  SampleChannel* channels;  // [channels], where there is anything to be known of them
  unsigned* largest;        // [2][warps]
  double* sums;             // [kinds][channels]

  static constexpr int kPixelRows = Chain::Reduce::kReducesChannels ? 2 : 0;

  __device__ PackMemory(void* memory, int of_channels, int pitch)
      : values(static_cast<float*>(memory)),
        of_pixels(values + of_channels * pitch),
        channels(reinterpret_cast<SampleChannel*>(of_pixels + kPixelRows * pitch)),
        largest(reinterpret_cast<unsigned*>(channels + (kHasChannels<Chain> ? of_channels : 0))),
        sums(reinterpret_cast<double*>(largest + 2 * kGradientWarps)) {}

  // Of a kind of kOfAll.
  __device__ double* sums_of(int kind, int of_channels) const {
    return sums + __popc(kOfAll<Chain> & ((1u << kind) - 1)) * of_channels;
  }
};

// A block's row.
struct PackRow {
  int64_t index;  // through all samples
  int64_t sample;
  int row;

  __device__ explicit PackRow(const PackWork& pack) : index(block_index()) {
    sample = pack.shape.by_rows.divide(index);
    row = int(index - sample * pack.to.rows);
  }
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

// What the kernels of a conv's chain are given.
#pragma once

#include "core/problem.h"
#include "cuda/device/elements.cuh"
#include "cuda/device/parameter_sums.cuh"
#include "cuda/device/scales.cuh"
#include "cuda/device/statistics.cuh"
#include "plan/conv_tiling.h"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

using cuda::ConvTiling;
using cuda::kRows;
using cuda::kUnitBytes;
using cuda::kUnitElements;
using cuda::NormShape;

// The moments of a tile in one of the norm's groups, for samples that stay in shared memory. It is read while
// others write: as long as it has no pixels, it is not there.
struct alignas(sizeof(float4)) TilePart : Part<float> {};

// What the pass of backward gets besides.
struct ConvGradientSums {
  Elements grad;           // of the chain's output, contiguous
  bool has_pairs;          // its rows are whole pairs
  PartialSums after_norm;  // as many slices as parts_per_channel()
};

struct ConvProblem {
  Tensor input, weight, output;
  int operand_parts;  // of a value, for the tensor cores: see split.cuh
  Parameter conv_bias;
  Arguments arguments;
  ConvTiling tiling;
  // Workspace.
  uint4* weights = nullptr;         // as cuda/conv/pack_weights.cuh packs them
  int* weight_exponents = nullptr;  // [row_blocks * kRows], of their scales
  float* row_bias = nullptr;        // [row_blocks * kRows], the conv's
  int* shares = nullptr;  // [row_blocks * kRows][in_channels], exponents: of the largest weight, or kNoShare
  int* is_unusual = nullptr;  // [row_blocks * kRows]: not finite, or some share is less than 2^-kExactBits
  uint4* pixels = nullptr;    // as cuda/conv/pack_pixels.cuh packs them
  int* pixel_exponents = nullptr;         // [panels], of their scales
  unsigned* magnitudes = nullptr;         // [panels][in_channels], bits of the largest ones
  Part<float>* parts = nullptr;           // [N][C][parts of a channel]
  TilePart* tile_parts = nullptr;         // [N][groups of the norm][tiles of a sample]
  NormShape norm_shape{};                 // where there are tile_parts
  Norm<float>* norms = nullptr;           // [N][C]
  GroupStatistics* statistics = nullptr;  // [N][groups of the norm], the caller's, or null
  float* pooled = nullptr;                // [N][C][pooled height][pooled width]
  int* pooled_places = nullptr;           // the same, if they are kept
  ConvGradientSums backward{};
};

static_assert(sizeof(ConvProblem) + sizeof(int) <= 4096, "older drivers take no more parameters of a kernel");

// Of a chunk: its first block of channels, and its first tap.
struct ChunkPlace {
  int block, kernel_row, kernel_col;

  __device__ ChunkPlace(const ConvTiling& t, int chunk) {
    const int of_rows = t.by_chunks_across.divide(chunk);
    const int of_channels = t.by_chunks_down.divide(of_rows);
    block = of_channels * t.blocks_per_chunk;
    kernel_row = (of_rows - of_channels * t.by_chunks_down.value) * t.kernel_rows;
    kernel_col = (chunk - of_rows * t.by_chunks_across.value) * t.tap_groups * t.unit_taps;
  }
};

// Two groups of eight warps. Of a tile's columns the first four warps of a group have the first half.
using cuda::kGroups;
using cuda::kGroupWarps;
constexpr int kGroupThreads = kGroupWarps * kWarpThreads;
constexpr int kHalfThreads = kGroupThreads / 2;
constexpr int kConvThreads = kGroups * kGroupThreads;

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

// What the kernels of a conv's chain are given.
#pragma once

#include "../core/problem.h"
#include "conv_tiling.h"
#include "statistics.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

using cuda::ConvTiling;
using cuda::kRows;
using cuda::kUnitBytes;
using cuda::kUnitElements;

constexpr int kNonFinite = 1 << 20;  // in place of an exponent: the tensor cores' arithmetic would not do

struct ConvProblem {
  Tensor input, weight, output;
  const float* conv_bias;
  Arguments arguments;
  ConvTiling tiling;
  int samples;
  // Workspace.
  uint4* packed;       // weights as conv_weights.cuh packs them
  int* exponents;      // [row_blocks * kRows], of the weights' scales
  Part<float>* parts;  // [N][C][parts of a channel]
  Norm<float>* norms;  // [N][C]
  float* pooled;       // [N][C][pooled height][pooled width]
};

__host__ __device__ inline int parts_per_channel(const ConvTiling& t) {
  return t.bands * t.tiles_across * t.sub_tiles * t.stack;
}

// Groups of four warps: two multiply and finish tiles, in turns; the third fills the stages.
constexpr int kGroupThreads = 128;
constexpr int kConsumers = 2;
constexpr int kConvThreads = (kConsumers + 1) * kGroupThreads;

// Units that a filling thread loads together and keeps until their scale is known.
constexpr int kThreadUnits = cuda::kMostChunkUnits / kGroupThreads;

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

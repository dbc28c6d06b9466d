// What both gradients of a conv share: products of packed rows, copies of these to shared memory, windows of
// the kernel, and slots of the weight's gradient.
#pragma once

#include "conv_gradients.cuh"
#include "cuda/device/barriers.cuh"
#include "cuda/device/elements.cuh"
#include "cuda/device/mma_sync.cuh"
#include "cuda/device/split.cuh"
#include "cuda/device/warp.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// Of two operands of so many parts: of two low * high, high * low, then high * high. Small ones come first,
// as the tensor cores cut off what does not fit beside a larger sum.
template <class Mode>
constexpr int kProducts = Mode::kParts == 2 ? 3 : 1;

template <class Mode>
__device__ void multiply_parts(int product, float* d, const uint32_t (&a)[Mode::kParts][4],
                               const uint32_t (&b)[Mode::kParts][2]) {
  const int of_a = Mode::kParts == 2 && product == 0;
  const int of_b = Mode::kParts == 2 && product == 1;
  multiply_add<typename Mode::Element>(d, a[of_a], b[of_b][0], b[of_b][1]);
}

// Copies some columns of planes, one a warp at a time: a plane is one part of 8 channels of a row.
template <int kWarps>
__device__ void copy_planes(uint4* to, int to_pitch, const uint4* from, int from_pitch, int planes,
                            int cols) {
  const int warp = threadIdx.x / kWarpThreads;
  const int lane = lane_of_thread();
  from += warp * from_pitch + lane;
  to += warp * to_pitch + lane;
  for (int plane = warp; plane < planes; plane += kWarps) {
#pragma unroll 4
    for (int col = lane; col < cols; col += kWarpThreads)
      copy_pack<1>(to + (col - lane), from + (col - lane));
    from += kWarps * from_pitch;
    to += kWarps * to_pitch;
  }
}

// By a warp: its sums of products, into its slot or to what stands there.
__device__ inline void store_slot(float* slot, const float (&sums)[kTaps][kTaps][4], bool adds) {
  const int lane = lane_of_thread();
#pragma unroll
  for (int tap = 0; tap < kTaps * kTaps; ++tap) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int out_channel = lane / 4 + i / 2 * 8;
      const int in_channel = lane % 4 * 2 + i % 2;
      float* const to = slot + (out_channel * kUnitChannels + in_channel) * kTaps * kTaps + tap;
      const float sum = sums[tap / kTaps][tap % kTaps][i];
      *to = adds ? *to + sum : sum;
    }
  }
}

// A slab: its sample, and its first row and column.
struct Slab {
  int sample, row, col;

  __device__ Slab(const cuda::Slabs& slabs, int index)
      : sample(index / slabs.down / slabs.across),
        row(index % slabs.down * slabs.rows),
        col(index / slabs.down % slabs.across * slabs.cols) {}
};

// The first taps of a window of the kernel.
struct WindowPlace {
  int down, across;

  __device__ WindowPlace(const ConvShape& shape, int window)
      : down(window / shape.windows[1] * kTaps), across(window % shape.windows[1] * kTaps) {}
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

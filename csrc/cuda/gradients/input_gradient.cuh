// The gradient of a conv's input: the output's gradient times the weight, turned around. A row of the
// output's gradient adds to as many rows of the input's as the kernel has taps down, whose sums go along in
// registers while warps walk down a slab.
#pragma once

#include "products.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

using cuda::InputLayout;
using cuda::kInputWarps;
using cuda::kStageChunks;
using cuda::kStages;
using cuda::kStageSteps;
using cuda::kStepWords;
using cuda::kWarpBlocks;
using cuda::kWarpPixels;

constexpr int kInputThreads = kInputWarps * kWarpThreads;

struct InputGradientWork {
  ConvShape shape;
  InputGradientPlan plan;
  PackedRows grads;  // of this step's samples
  Tensor weight;
  Elements grad_input;  // contiguous
  int slabs;            // of all samples
};

template <class Mode>
class InputGradientBlock {
  static constexpr int kParts = Mode::kParts;

 public:
  __device__ InputGradientBlock(const InputGradientWork& work, uint8_t* shared)
      : work_(work),
        layout_(work.plan, kParts),
        stages_(reinterpret_cast<uint4*>(shared)),
        weights_(reinterpret_cast<uint2*>(shared + layout_.weights_at)),
        cols_(work.plan.stage_cols()),
        lane_(threadIdx.x % kWarpThreads),
        warp_(threadIdx.x / kWarpThreads),
        slabs_at_once_(work.plan.slabs_at_once()),
        slab_of_warp_(warp_ / work.plan.slab_warps),
        warp_col_(warp_ % work.plan.slab_warps * kWarpPixels) {}

  __device__ void run() {
    if (is_scaled<Mode>(work_.grads.dtype)) weight_exponent_ = scale_exponent(largest_weight());
    for (int i = 0; i < work_.shape.count_windows(); ++i) {
      const WindowPlace window(work_.shape, i);
      __syncthreads();  // of the window before, all is read
      load_weights(window);
      const int step = gridDim.x * slabs_at_once_;
      for (int first = blockIdx.x * slabs_at_once_; first < work_.slabs; first += step)
        walk(first, window, i > 0);
    }
  }

 private:
  // ---- the weight ----

  // As lanes take it: of the column lane / 4, which is a channel of the input, rows 2 * (lane % 4) and the
  // next, and 8 further down, which are channels of the output.
  __device__ void load_weights(const WindowPlace& window) {
    const float scale = power_of_two(weight_exponent_);
    const int count = work_.plan.stages * kStageSteps * kStepWords;
    for (int i = threadIdx.x; i < count; i += kInputThreads) {
      const int lane = i % kWarpThreads;
      const int down = i / kWarpThreads % kTaps;
      const int across = i / kWarpThreads / kTaps % kTaps;
      const int step = i / kStepWords;
      const int channel = step * 2 * kUnitChannels + lane % 4 * 2;
      float x[4];
#pragma unroll
      for (int k = 0; k < 4; ++k)
        x[k] = scale * weight(channel + k / 2 * kUnitChannels + k % 2, lane / 4, window.down + down,
                              window.across + across);
      uint32_t first[kParts], second[kParts];
      pack_pair<Mode>(x[0], x[1], first);
      pack_pair<Mode>(x[2], x[3], second);
      uint2* const to = weights_ + step * kParts * kStepWords + i % kStepWords;
#pragma unroll
      for (int p = 0; p < kParts; ++p) to[p * kStepWords] = {first[p], second[p]};
    }
  }

  // As it meets the output's gradient, whose channels are balanced.
  __device__ float weight(int out_channel, int in_lane, int down, int across) const {
    const int in_channel = blockIdx.y * kUnitChannels + in_lane;
    if (in_channel >= work_.shape.in_channels || out_channel >= work_.shape.out_channels ||
        down >= work_.shape.kernel[0] || across >= work_.shape.kernel[1])
      return 0;
    const int64_t* stride = work_.weight.stride;
    const int64_t at =
        out_channel * stride[0] + in_channel * stride[1] + down * stride[2] + across * stride[3];
    float x;
    visit_held<Mode>(work_.weight.dtype, [&](auto element) {
      x = widen<float>(static_cast<const decltype(element)*>(work_.weight.data)[at]);
    });
    return is_scaled<Mode>(work_.grads.dtype) ? x / work_.grads.balance[out_channel] : x;
  }

  // Of this block's channels.
  __device__ unsigned largest_weight() const {
    __shared__ unsigned most;
    if (threadIdx.x == 0) most = 0;
    __syncthreads();
    const int rows = work_.shape.kernel[0];
    const int cols = work_.shape.kernel[1];
    unsigned of_thread = 0;
    for (int i = threadIdx.x; i < work_.shape.out_channels * kUnitChannels * rows * cols;
         i += kInputThreads) {
      const int rest = i / (rows * cols);
      const float x = weight(rest / kUnitChannels, rest % kUnitChannels, i / cols % rows, i % cols);
      of_thread = max(of_thread, finite_magnitude(x));
    }
    atomicMax(&most, of_thread);
    __syncthreads();
    return most;
  }

  // ---- down a slab ----

  // A step is a stage of a row, which comes in while the one before is multiplied. adds: to what windows
  // before left.
  __device__ void walk(int first_slab, const WindowPlace& window, bool adds) {
    const int steps = (work_.plan.slabs.rows + kTaps - 1) * work_.plan.stages;
    const int index = first_slab + slab_of_warp_;
    const Slab slab(work_.plan.slabs, index);
    __syncthreads();  // of the slabs before, all is read, and the weights are written
    load(first_slab, window, 0);
    Sums sums{};
    int stage = 0;
    int row = 0;
    for (int step = 0; step < steps; ++step) {
      wait_for_copies();
      __syncthreads();
      if (step + 1 < steps) load(first_slab, window, step + 1);
      const int y = grad_row(slab, window, row);
      if (has_row(index, y)) multiply(window, stage, step % kStages, exponent_of_row(slab, y), sums);
      if (++stage < work_.plan.stages) continue;
      if (row >= kTaps - 1 && index < work_.slabs) store(slab, slab.row + row - (kTaps - 1), sums, adds);
      move_rows(sums);
      stage = 0;
      ++row;
    }
  }

  // Of the output's gradient, counted from the first that the slab's first row meets.
  __device__ int grad_row(const Slab& slab, const WindowPlace& window, int row) const {
    return slab.row + row + work_.shape.padding[0] - window.down - (kTaps - 1);
  }
  __device__ bool has_row(int slab, int y) const {
    return slab < work_.slabs && y >= 0 && y < work_.grads.rows;
  }
  __device__ int exponent_of_row(const Slab& slab, int y) const {
    return is_scaled<Mode>(work_.grads.dtype) ? work_.grads.exponents[slab.sample * work_.grads.rows + y] : 0;
  }

  __device__ void load(int first_slab, const WindowPlace& window, int step) const {
    const int row = step / work_.plan.stages;
    for (int s = 0; s < slabs_at_once_; ++s) {
      const Slab slab(work_.plan.slabs, first_slab + s);
      const int y = grad_row(slab, window, row);
      if (has_row(first_slab + s, y))
        load_row(slab, y, window, (step - row * work_.plan.stages) * kStageChunks,
                 stages_ + step % kStages * layout_.stage_units + s * kStageChunks * kParts * cols_);
    }
  }

  // What stands before a row and behind its end are zeros, as many as taps reach.
  __device__ void load_row(const Slab& slab, int y, const WindowPlace& window, int first_chunk,
                           uint4* to) const {
    const PackedRows& grads = work_.grads;
    const uint4* const from = grads.row(slab.sample * grads.rows + y) + first_chunk * kParts * grads.pitch +
                              slab.col + work_.shape.padding[1] - window.across - (kTaps - 1);
    copy_planes<kInputWarps>(to, cols_, from, grads.pitch,
                             min(grads.chunks - first_chunk, kStageChunks) * kParts, cols_);
  }

  using Sums = float[kWarpBlocks][kTaps][4];  // of the rows that tap 0 adds to, tap 1, tap 2

  // The sums of a stage are rounded by themselves: the tensor cores cut off what they add up.
  // Taps that the kernel lacks are left out: NaN times zero would be NaN.
  __device__ void multiply(const WindowPlace& window, int stage, int place, int exponent, Sums& sums) const {
    const int steps = min(work_.grads.chunks / 2 - stage * kStageSteps, kStageSteps);
    const int taps_down = work_.shape.kernel[0] - window.down;
    const int taps_across = work_.shape.kernel[1] - window.across;
    float d[kWarpBlocks][kTaps][4]{};
    const uint4* const units = stages_ + place * layout_.stage_units +
                               (slab_of_warp_ * kStageChunks + lane_ / 16) * kParts * cols_ + warp_col_ +
                               lane_ % 16 + kTaps - 1;
    const uint2* const weights = weights_ + stage * kStageSteps * kParts * kStepWords + lane_;
#pragma unroll
    for (int step = 0; step < kStageSteps; ++step) {
      if (step >= steps) break;
#pragma unroll
      for (int across = 0; across < kTaps; ++across) {
        if (across >= taps_across) break;
        uint32_t a[kWarpBlocks][kParts][4];
        uint32_t b[kTaps][kParts][2];
#pragma unroll
        for (int part = 0; part < kParts; ++part) {
#pragma unroll
          for (int block = 0; block < kWarpBlocks; ++block)
            load_matrices(a[block][part],
                          shared_address(units + (step * 2 * kParts + part) * cols_ + block * 16 - across));
#pragma unroll
          for (int down = 0; down < kTaps; ++down) {
            const uint2 words =
                weights[(step * kParts + part) * kStepWords + (across * kTaps + down) * kWarpThreads];
            b[down][part][0] = words.x;
            b[down][part][1] = words.y;
          }
        }
#pragma unroll
        for (int product = 0; product < kProducts<Mode>; ++product) {
#pragma unroll
          for (int block = 0; block < kWarpBlocks; ++block) {
#pragma unroll
            for (int down = 0; down < kTaps; ++down)
              if (down < taps_down) multiply_parts<Mode>(product, d[block][down], a[block], b[down]);
          }
        }
      }
    }
    exponent += weight_exponent_;
    add_unscaled({exponent, exponent}, d, sums);
  }

  // What the row's first tap adds to is complete.
  __device__ void store(const Slab& slab, int row, const Sums& sums, bool adds) const {
    visit_held<Mode>(work_.grad_input.dtype,
                     [&](auto element) { store_as<decltype(element)>(slab, row, sums, adds); });
  }

  template <class In>
  __device__ void store_as(const Slab& slab, int row, const Sums& sums, bool adds) const {
    const ConvShape& shape = work_.shape;
    if (row >= shape.in_size[0]) return;
    const int map = shape.in_size[0] * shape.in_size[1];
    In* const to = static_cast<In*>(work_.grad_input.data) + int64_t(slab.sample) * shape.in_channels * map +
                   row * shape.in_size[1];
#pragma unroll
    for (int block = 0; block < kWarpBlocks; ++block) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int col = slab.col + warp_col_ + block * 16 + i / 2 * 8 + lane_ / 4;
        const int channel = blockIdx.y * kUnitChannels + lane_ % 4 * 2 + i % 2;
        if (col >= shape.in_size[1] || channel >= shape.in_channels) continue;
        In* const place = to + channel * map + col;
        *place = narrow<In>(adds ? widen<float>(*place) + sums[block][0][i] : sums[block][0][i]);
      }
    }
  }

  // The next row of the output's gradient adds to rows one further down.
  __device__ static void move_rows(Sums& sums) {
#pragma unroll
    for (int block = 0; block < kWarpBlocks; ++block) {
#pragma unroll
      for (int down = 0; down < kTaps; ++down) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums[block][down][i] = down + 1 < kTaps ? sums[block][down + 1][i] : 0;
      }
    }
  }

  const InputGradientWork& work_;
  const InputLayout layout_;
  uint4* const stages_;
  uint2* const weights_;
  const int cols_, lane_, warp_, slabs_at_once_, slab_of_warp_, warp_col_;
  int weight_exponent_ = 0;
};

template <class Mode>
__global__ void __launch_bounds__(kInputThreads, 4)
    conv_input_gradient(const __grid_constant__ InputGradientWork work) {
  extern __shared__ __align__(128) uint8_t shared[];
  InputGradientBlock<Mode>(work, shared).run();
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

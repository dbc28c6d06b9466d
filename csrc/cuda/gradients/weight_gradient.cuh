// The gradient of a conv's weight: for each tap the products of the output's gradient, whose rows are
// channels, with the input, shifted by the tap, summed over pixels. Sums of blocks stand apart, in slots, and
// are added up in one order at the end.
#pragma once

#include "products.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

using cuda::kBlockChunks;
using cuda::kInputCols;
using cuda::kInputRows;
using cuda::kMostSlabCols;
using cuda::kStepPixels;
using cuda::kWeightWarps;

constexpr int kWeightThreads = kWeightWarps * kWarpThreads;

// Of a multiprocessor, at the least: the registers of a thread follow.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int kWeightBlocks = 3;
#else
constexpr int kWeightBlocks = 4;
#endif

struct WeightGradientWork {
  ConvShape shape;
  WeightGradientPlan plan;
  PackedRows grads;  // of this step's samples
  PackedRows input;
  float* slots;  // [slots][out_blocks][in_blocks][windows][channel_warps][kSlotValues]
  bool adds;     // to what earlier steps left there
  int slabs;     // of all samples
};

template <int kParts>
struct WeightShared {
  uint4 grads[2][kBlockChunks][kParts][kMostSlabCols];
  uint4 input[kInputRows][kParts][kInputCols];
};

static_assert(sizeof(WeightShared<1>) == cuda::weight_shared_bytes(1));
static_assert(sizeof(WeightShared<2>) == cuda::weight_shared_bytes(2));

template <class Mode>
class WeightGradientBlock {
  static constexpr int kParts = Mode::kParts;
  using Shared = WeightShared<kParts>;

 public:
  __device__ WeightGradientBlock(const WeightGradientWork& work, Shared& shared)
      : work_(work),
        shared_(shared),
        lane_(threadIdx.x % kWarpThreads),
        warp_(threadIdx.x / kWarpThreads),
        channel_warp_(warp_ % work.plan.channel_warps),
        turn_(warp_ / work.plan.channel_warps),
        turns_(kWeightWarps / work.plan.channel_warps),
        window_(work.shape, int(blockIdx.y) % work.shape.count_windows()),
        first_chunk_(int(blockIdx.y) / work.shape.count_windows() / work.plan.in_blocks * kBlockChunks),
        chunks_(min(work.grads.chunks - first_chunk_, kBlockChunks)),
        in_chunk_(int(blockIdx.y) / work.shape.count_windows() % work.plan.in_blocks) {}

  __device__ void run() {
    for (int index = blockIdx.x; index < work_.slabs; index += gridDim.x) add_slab({work_.plan.slabs, index});
    write();
  }

 private:
  // Rows come in while those before are multiplied.
  __device__ void add_slab(const Slab& slab) {
    const int rows = min(work_.plan.slabs.rows, work_.shape.out_size[0] - slab.row);
    for (int tap = 0; tap < kTaps; ++tap) load_input(slab, tap);
    load_grads(slab, 0);
    for (int row = 0; row < rows; ++row) {
      wait_for_copies();
      __syncthreads();
      if (row + 1 < rows) {
        load_input(slab, row + kTaps);
        load_grads(slab, row + 1);
      }
      if (channel_warp_ * 2 < chunks_) add_row(slab, row);
    }
    __syncthreads();  // the next slab writes where this one's rows stand
  }

  // What stands behind a row's end are zeros, as many as slabs have columns too many.
  __device__ void load_grads(const Slab& slab, int row) const {
    const PackedRows& grads = work_.grads;
    const uint4* const from =
        grads.row(slab.sample * grads.rows + slab.row + row) + first_chunk_ * kParts * grads.pitch + slab.col;
    copy_planes<kWeightWarps>(&shared_.grads[row % 2][0][0][0], kMostSlabCols, from, grads.pitch,
                              chunks_ * kParts, work_.plan.slabs.cols);
  }

  __device__ void load_input(const Slab& slab, int row) const {
    const PackedRows& input = work_.input;
    const bool exists = has_input(slab, row);
    const uint4* const from = input.row(slab.sample * input.rows + input_row(slab, row)) +
                              in_chunk_ * kParts * input.pitch + slab.col + window_.across -
                              work_.shape.padding[1];
    for (int part = warp_; part < kParts; part += kWeightWarps) {
      for (int col = lane_; col < work_.plan.slabs.cols + kTaps - 1; col += kWarpThreads) {
        uint4* const to = &shared_.input[row % kInputRows][part][col];
        if (exists) {
          copy_pack<1>(to, from + part * input.pitch + col);
        } else {
          *to = {};
        }
      }
    }
  }

  // Of the input, counted from the first one that the slab's first row meets.
  __device__ int input_row(const Slab& slab, int row) const {
    return slab.row + row + window_.down - work_.shape.padding[0];
  }
  __device__ bool has_input(const Slab& slab, int row) const {
    const int y = input_row(slab, row);
    return y >= 0 && y < work_.input.rows;
  }

  // Of the products of a row of the output's gradient and the row of the input that a tap meets.
  __device__ int exponent_of(const Slab& slab, int row, int tap) const {
    if (!is_scaled<Mode>(work_.grads.dtype) || !has_input(slab, row + tap)) return 0;
    return work_.grads.exponents[slab.sample * work_.grads.rows + slab.row + row] +
           work_.input.exponents[slab.sample * work_.input.rows + input_row(slab, row + tap)];
  }

  // The sums of a row are rounded by themselves: the tensor cores cut off what they add up.
  __device__ void add_row(const Slab& slab, int row) {
    float d[kTaps][kTaps][4]{};
#pragma unroll 1
    for (int col = turn_ * kStepPixels; col < work_.plan.slabs.cols; col += turns_ * kStepPixels) {
      uint32_t a[kParts][4];
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
        // Channels 0 to 7 and 8 to 15 of the first pixels, then of the next.
        const uint4* const from =
            &shared_
                 .grads[row % 2][channel_warp_ * 2 + lane_ / 8 % 2][part][col + lane_ / 16 * 8 + lane_ % 8];
        load_transposed(a[part], shared_address(from));
      }
#pragma unroll
      for (int y = 0; y < kTaps; ++y) {
        uint32_t b[kTaps][kParts][2];
        load_input_steps(b, row + y, col);
#pragma unroll
        for (int product = 0; product < kProducts<Mode>; ++product) {
#pragma unroll
          for (int x = 0; x < kTaps; ++x) multiply_parts<Mode>(product, d[y][x], a, b[x]);
        }
      }
    }
    int exponents[kTaps];
#pragma unroll
    for (int y = 0; y < kTaps; ++y) exponents[y] = exponent_of(slab, row, y);
    add_unscaled(exponents, d, sums_);
  }

  // Of 16 pixels of a row, shifted by each tap.
  __device__ void load_input_steps(uint32_t (&b)[kTaps][kParts][2], int row, int col) const {
    const auto address = [&](int part, int tap, int half) {
      return shared_address(&shared_.input[row % kInputRows][part][col + tap + half * 8 + lane_ % 8]);
    };
    uint32_t words[4];
    if constexpr (kParts == 2) {
#pragma unroll
      for (int tap = 0; tap < kTaps; ++tap) {
        load_transposed(words, address(lane_ / 16, tap, lane_ / 8 % 2));
#pragma unroll
        for (int i = 0; i < 4; ++i) b[tap][i / 2][i % 2] = words[i];
      }
    } else {
#pragma unroll
      for (int tap = 0; tap < kTaps; tap += 2) {  // two at a time; the last one twice
        load_transposed(words, address(0, min(tap + lane_ / 16, kTaps - 1), lane_ / 8 % 2));
#pragma unroll
        for (int i = 0; i < 4; ++i)
          if (tap + i / 2 < kTaps) b[tap + i / 2][0][i % 2] = words[i];
      }
    }
  }

  __device__ void write() const {
    const int64_t slot = blockIdx.x * turns_ + turn_;
    float* const to =
        work_.slots +
        ((slot * gridDim.y + blockIdx.y) * work_.plan.channel_warps + channel_warp_) * kSlotValues;
    store_slot(to, sums_, work_.adds);
  }

  const WeightGradientWork& work_;
  Shared& shared_;
  const int lane_, warp_, channel_warp_, turn_, turns_;
  const WindowPlace window_;
  const int first_chunk_, chunks_;  // of the output's channels
  const int in_chunk_;
  float sums_[kTaps][kTaps][4]{};
};

template <class Mode>
__global__ void __launch_bounds__(kWeightThreads, kWeightBlocks)
    conv_weight_gradient(const __grid_constant__ WeightGradientWork work) {
  extern __shared__ __align__(128) uint8_t shared[];
  WeightGradientBlock<Mode>(work, *reinterpret_cast<WeightShared<Mode::kParts>*>(shared)).run();
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

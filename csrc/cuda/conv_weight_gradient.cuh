// The gradient of a conv's weight: for each tap the products of the output's gradient, whose rows are
// channels, with the input, shifted by the tap, summed over pixels. Sums of blocks stand apart, in slots, and
// are added up in one order at the end.
#pragma once

#include "conv_gradient_products.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

constexpr int kWeightThreads = 128;
constexpr int kWeightWarps = kWeightThreads / kWarpThreads;
constexpr int kWarpChannels = 16;  // of the output, that a product has
constexpr int kBlockChannels = kWeightWarps * kWarpChannels;
constexpr int kBlockChunks = kBlockChannels / kUnitChannels;
constexpr int kStepPixels = 16;
constexpr int kMostStripCols = 64;
constexpr int kInputCols = kMostStripCols + kTaps - 1;
constexpr int kInputRows = 4;  // that stand in shared memory: those of the taps and the next one
constexpr int kSlotValues = kWarpChannels * kUnitChannels * kTaps * kTaps;  // of a warp's sums

struct WeightGradientWork {
  ConvShape shape;
  WeightGradientPlan plan;
  PackedRows grads;  // of this step's samples
  PackedRows input;
  float* slots;  // [slots][out_blocks][in_blocks][channel_warps][kSlotValues]
  bool adds;     // to what earlier steps left there
  int units;     // strips of all samples
};

template <class Mode>
struct WeightShared {
  uint4 grads[2][kBlockChunks][Mode::kParts][kMostStripCols];
  uint4 input[kInputRows][Mode::kParts][kInputCols];
  int grad_exponents[2];
  int input_exponents[kInputRows];
};

template <class Mode>
class WeightGradientBlock {
  static constexpr int kParts = Mode::kParts;
  using Shared = WeightShared<Mode>;

 public:
  __device__ WeightGradientBlock(const WeightGradientWork& work, Shared& shared)
      : work_(work),
        shared_(shared),
        lane_(threadIdx.x % kWarpThreads),
        warp_(threadIdx.x / kWarpThreads),
        channel_warp_(warp_ % work.plan.channel_warps),
        part_(warp_ / work.plan.channel_warps),
        parts_(kWeightWarps / work.plan.channel_warps),
        first_chunk_(int(blockIdx.y) / work.plan.in_blocks * kBlockChunks),
        chunks_(min(work.grads.chunks - first_chunk_, kBlockChunks)),
        in_chunk_(blockIdx.y % work.plan.in_blocks) {}

  __device__ void run() {
    for (int unit = blockIdx.x; unit < work_.units; unit += gridDim.x) add_strip(unit);
    write();
  }

 private:
  struct Strip {
    int64_t sample;
    int first_row, rows, col;
  };

  __device__ Strip strip_of(int unit) const {
    const WeightGradientPlan& plan = work_.plan;
    const int first_row = unit % plan.segments * plan.strip_rows;
    return {unit / plan.segments / plan.strips, first_row,
            min(plan.strip_rows, work_.shape.out_size[0] - first_row),
            unit / plan.segments % plan.strips * plan.strip_cols};
  }

  // Rows come in while those before are multiplied.
  __device__ void add_strip(int unit) {
    const Strip strip = strip_of(unit);
    for (int k = 0; k < kTaps; ++k) load_input(strip, k);
    load_grads(strip, 0);
    for (int row = 0; row < strip.rows; ++row) {
      wait_for_copies();
      __syncthreads();
      if (row + 1 < strip.rows) {
        load_input(strip, row + kTaps);
        load_grads(strip, row + 1);
      }
      if (channel_warp_ * 2 < chunks_) add_row(row);
    }
    __syncthreads();  // the next strip writes where this one's rows stand
  }

  __device__ void load_grads(const Strip& strip, int row) const {
    const PackedRows& grads = work_.grads;
    const int64_t at = strip.sample * grads.rows + strip.first_row + row;
    const uint4* from = grads.units + at * packed_row_units(grads) + strip.col +
                        int64_t(first_chunk_ * kParts + warp_) * grads.cols + lane_;
    uint4* to = &shared_.grads[row % 2][0][0][0] + warp_ * kMostStripCols + lane_;
    const int cols = grads.cols - strip.col - lane_;  // that are left of the row
    for (int plane = warp_; plane < chunks_ * kParts; plane += kWeightWarps) {
      for (int col = 0; col < work_.plan.strip_cols; col += kWarpThreads)
        copy_unit(to + col, from + col, col < cols);
      from += kWeightWarps * grads.cols;
      to += kWeightWarps * kMostStripCols;
    }
    if (Mode::kScales && threadIdx.x == 0)
      copy_exponent(&shared_.grad_exponents[row % 2], grads.exponents + at, true);
  }

  // A row of the padded input, counted from the first one that the strip's first row meets.
  __device__ void load_input(const Strip& strip, int row) const {
    const PackedRows& input = work_.input;
    const int y = strip.first_row + row - work_.shape.padding[0];
    const bool has_row = y >= 0 && y < input.rows;
    const int64_t at = strip.sample * input.rows + y;
    const int left = strip.col - work_.shape.padding[1];
    const int cols = work_.plan.strip_cols + kTaps - 1;
    for (int i = threadIdx.x; i < kParts * kInputCols; i += kWeightThreads) {
      const int part = i / kInputCols;
      const int col = i % kInputCols;
      const int x = left + col;
      if (col >= cols) continue;
      const uint4* const from =
          input.units + at * packed_row_units(input) + int64_t(in_chunk_ * kParts + part) * input.cols + x;
      copy_unit(&shared_.input[row % kInputRows][part][col], from, has_row && x >= 0 && x < input.cols);
    }
    if (Mode::kScales && threadIdx.x == kWarpThreads)
      copy_exponent(&shared_.input_exponents[row % kInputRows], input.exponents + at, has_row);
  }

  // The sums of a row are rounded by themselves: the tensor cores cut off what they add up.
  __device__ void add_row(int row) {
    float d[kTaps][kTaps][4]{};
#pragma unroll 1
    for (int col = part_ * kStepPixels; col < work_.plan.strip_cols; col += parts_ * kStepPixels) {
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
#pragma unroll
    for (int y = 0; y < kTaps; ++y) {
      const Unscale unscale(Mode::kScales ? shared_.grad_exponents[row % 2] +
                                                shared_.input_exponents[(row + y) % kInputRows]
                                          : 0);
#pragma unroll
      for (int x = 0; x < kTaps; ++x) {
#pragma unroll
        for (int i = 0; i < 4; ++i) sums_[y][x][i] += Mode::kScales ? unscale(d[y][x][i]) : d[y][x][i];
      }
    }
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
    const int64_t slot = blockIdx.x * parts_ + part_;
    float* const to =
        work_.slots +
        ((slot * gridDim.y + blockIdx.y) * work_.plan.channel_warps + channel_warp_) * kSlotValues;
#pragma unroll
    for (int tap = 0; tap < kTaps * kTaps; ++tap) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int out_channel = lane_ / 4 + i / 2 * 8;
        const int in_channel = lane_ % 4 * 2 + i % 2;
        float* const sum = to + (out_channel * kUnitChannels + in_channel) * kTaps * kTaps + tap;
        const float mine = sums_[tap / kTaps][tap % kTaps][i];
        *sum = work_.adds ? *sum + mine : mine;
      }
    }
  }

  const WeightGradientWork& work_;
  Shared& shared_;
  const int lane_, warp_, channel_warp_, part_, parts_;
  const int first_chunk_, chunks_;  // of the output's channels
  const int in_chunk_;
  float sums_[kTaps][kTaps][4]{};
};

template <class Mode>
__global__ void __launch_bounds__(kWeightThreads, 3)
    conv_weight_gradient(const __grid_constant__ WeightGradientWork work) {
  if constexpr (kConvCompiles) {
    extern __shared__ __align__(128) uint8_t shared[];
    WeightGradientBlock<Mode>(work, *reinterpret_cast<WeightShared<Mode>*>(shared)).run();
  }
}

constexpr int kSlotThreads = 256;

// Adds up the slots in double: so many neighbouring weights a block, each by a few threads.
__global__ void __launch_bounds__(kSlotThreads)
    sum_weight_gradient(const float* slots, WeightGradientPlan plan, ConvShape shape, float* grad) {
  constexpr int kLines = kSlotThreads / kWarpThreads;
  __shared__ double of_line[kLines][kWarpThreads];
  const int line = threadIdx.x / kWarpThreads;
  const int lane = threadIdx.x % kWarpThreads;
  const int64_t values = int64_t(plan.out_blocks) * plan.in_blocks * plan.channel_warps * kSlotValues;
  const int64_t value = int64_t(blockIdx.x) * kWarpThreads + lane;  // the blocks divide them
  double sum = 0;
#pragma unroll 4
  for (int slot = line; slot < plan.slots; slot += kLines) sum += slots[slot * values + value];
  of_line[line][lane] = sum;
  __syncthreads();
  if (line > 0) return;
  for (int i = 1; i < kLines; ++i) sum += of_line[i][lane];
  const int tap = int(value % (kTaps * kTaps));
  int64_t rest = value / (kTaps * kTaps);
  const int in_lane = int(rest % kUnitChannels);
  rest /= kUnitChannels;
  const int out_lane = int(rest % (kWarpChannels * plan.channel_warps));
  rest /= kWarpChannels * plan.channel_warps;
  const int in_channel = int(rest % plan.in_blocks) * kUnitChannels + in_lane;
  const int out_channel = int(rest / plan.in_blocks) * kBlockChannels + out_lane;
  if (in_channel >= shape.in_channels || out_channel >= shape.out_channels) return;
  grad[(int64_t(out_channel) * shape.in_channels + in_channel) * kTaps * kTaps + tap] = float(sum);
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

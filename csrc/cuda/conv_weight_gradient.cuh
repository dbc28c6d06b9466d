// The gradient of a conv's weight: for each tap the products of the output's gradient, whose rows are
// channels, with the input, shifted by the tap, summed over pixels. Sums of blocks stand apart, in slots, and
// are added up in one order at the end.
#pragma once

#include "conv_gradient_operands.cuh"
#include "conv_gradients.h"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

using cuda::ConvShape;
using cuda::kTaps;

constexpr int kWeightThreads = 128;
constexpr int kWeightWarps = kWeightThreads / kWarpThreads;
constexpr int kWarpChannels16 = 16;  // of the output, that a product of a warp has
constexpr int kBlockChannels = kWeightWarps * kWarpChannels16;
constexpr int kInChannels = 8;  // of the input
constexpr int kGroupPixels = 16;
constexpr int kMostStripCols = 64;
// Of a row in shared memory, in values: rows a lane apart do not meet in the same banks.
constexpr int kStripPitch = 80;
constexpr int kInputRows = 4;  // that stand in shared memory: those of the taps and the next one
constexpr int kSlotValues = kWarpChannels16 * kInChannels * kTaps * kTaps;  // of a warp's sums

struct WeightGradientWork {
  ConvShape shape;
  cuda::WeightGradientPlan plan;
  Tensor input;        // of this step's samples
  const void* grad_v;  // contiguous
  float* slots;        // [slots][out_blocks][in_blocks][channel_warps][kSlotValues]
  bool adds;           // to what earlier steps left there
  int units;           // strips of all samples
};

template <class In>
struct WeightShared {
  alignas(16) In grads[2][kBlockChannels][kStripPitch];
  alignas(16) In input[kInputRows][kInChannels][kStripPitch];
};

template <class Mode>
class WeightGradientBlock {
  using In = typename Mode::In;
  using W = Word<Mode>;
  static constexpr bool kIsFloat = std::is_same_v<In, float>;
  static constexpr int kSteps = kIsFloat ? 2 : 1;  // along the sum, for a group of pixels

 public:
  __device__ WeightGradientBlock(const WeightGradientWork& work, WeightShared<In>& shared)
      : work_(work),
        shared_(shared),
        lane_(threadIdx.x % kWarpThreads),
        warp_(threadIdx.x / kWarpThreads),
        channel_warp_(warp_ % work.plan.channel_warps),
        part_(warp_ / work.plan.channel_warps),
        parts_(kWeightWarps / work.plan.channel_warps),
        copy_lanes_(work.plan.copy_lanes),
        channels_at_once_(kWarpThreads / copy_lanes_),
        out_block_(blockIdx.y / work.plan.in_blocks),
        in_block_(blockIdx.y % work.plan.in_blocks),
        out_channels_(min(work.shape.out_channels - out_block_ * kBlockChannels, kBlockChannels)),
        in_channels_(work.shape.in_channels - in_block_ * kInChannels) {}

  __device__ void run() {
    clear_missing_channels();
    for (int unit = blockIdx.x; unit < work_.units; unit += gridDim.x) add_strip(unit);
    write();
  }

 private:
  struct Strip {
    int first_row, rows, col;
    const In* grads;  // of the lane's first channel and column, row 0
    const In* input;
  };

  __device__ Strip strip_of(int unit) const {
    const ConvShape& shape = work_.shape;
    const cuda::WeightGradientPlan& plan = work_.plan;
    const int first_row = unit % plan.segments * plan.strip_rows;
    const int col = unit / plan.segments % plan.strips * plan.strip_cols;
    const int64_t sample = unit / plan.segments / plan.strips;
    const int64_t* stride = work_.input.stride;
    const int64_t grad =
        (sample * shape.out_channels + out_block_ * kBlockChannels + first_channel()) * map() + col +
        first_grad_col();
    const int64_t input = sample * stride[0] + (in_block_ * kInChannels + warp_) * stride[1] +
                          (col + lane_ - shape.padding[1]) * stride[3];
    return {first_row, min(plan.strip_rows, shape.out_size[0] - first_row), col,
            static_cast<const In*>(work_.grad_v) + grad, static_cast<const In*>(work_.input.data) + input};
  }

  // Nothing is copied there.
  __device__ void clear_missing_channels() const {
    const int first = out_channels_ * kStripPitch;
    const int end = work_.plan.channel_warps * kWarpChannels16 * kStripPitch;
    for (int i = first + threadIdx.x; i < end; i += kWeightThreads)
      shared_.grads[0][0][i] = shared_.grads[1][0][i] = In(0.0f);
  }

  __device__ int map() const { return work_.shape.out_size[0] * work_.shape.out_size[1]; }

  // Where rows are short, lanes have several channels at a time.
  __device__ int first_channel() const { return warp_ * channels_at_once_ + lane_ / copy_lanes_; }
  __device__ int first_grad_col() const { return lane_ % copy_lanes_ * work_.plan.copy_values; }

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
      add_row(row);
    }
    __syncthreads();  // the next strip writes where this one's rows stand
  }

  __device__ void load_grads(const Strip& strip, int row) const {
    visit_copy_bytes<In>(work_.plan.copy_values, [&](auto bytes) {
      constexpr int kBytes = decltype(bytes)::value;
      constexpr int kSpan = kWarpThreads * kBytes / int(sizeof(In));
      const ConvShape& shape = work_.shape;
      const int step = kWeightWarps * channels_at_once_;
      for (int col = first_grad_col(); col < work_.plan.strip_cols; col += kSpan) {
        const bool exists = strip.col + col < shape.out_size[1];
        const In* from = strip.grads + (strip.first_row + row) * shape.out_size[1] + (col - first_grad_col());
        In* to = &shared_.grads[row % 2][first_channel()][col];
#pragma unroll 4
        for (int c = first_channel(); c < out_channels_;
             c += step, from += step * map(), to += step * kStripPitch)
          copy_or_clear<kBytes>(to, from, exists);
      }
    });
  }

  // A row of the padded input, counted from the first one that the strip's first row meets.
  __device__ void load_input(const Strip& strip, int row) const {
    constexpr int kRounds = kInChannels / kWeightWarps;
    constexpr int kSpans = (kMostStripCols + kTaps - 1 + kWarpThreads - 1) / kWarpThreads;
    const ConvShape& shape = work_.shape;
    const int64_t* stride = work_.input.stride;
    const int y = strip.first_row + row - shape.padding[0];
    const bool has_row = y >= 0 && y < shape.in_size[0];
    const auto for_each = [&](const auto& visit) {
#pragma unroll
      for (int span = 0; span < kSpans; ++span) {
        const int col = span * kWarpThreads + lane_;
        const int x = strip.col + col - shape.padding[1];
        const bool is_inside = has_row && x >= 0 && x < shape.in_size[1];
        if (col >= work_.plan.strip_cols + kTaps - 1) continue;
#pragma unroll
        for (int round = 0; round < kRounds; ++round) {
          const int c = round * kWeightWarps + warp_;
          visit(span * kRounds + round, &shared_.input[row % kInputRows][c][col],
                strip.input + y * stride[2] + round * kWeightWarps * stride[1] +
                    span * kWarpThreads * stride[3],
                is_inside && c < in_channels_);
        }
      }
    };
    if constexpr (kIsFloat) {
      for_each([](int, In* to, const In* from, bool exists) { copy_or_clear<sizeof(In)>(to, from, exists); });
    } else {  // too few bytes for an asynchronous copy: all loads, then all stores
      In values[kSpans * kRounds];
      for_each([&](int i, In*, const In* from, bool exists) { values[i] = exists ? *from : In(0.0f); });
      for_each([&](int i, In* to, const In*, bool) { *to = values[i]; });
    }
  }

  // The sums of a row are rounded by themselves: the tensor cores cut off what they add up.
  __device__ void add_row(int row) {
    float d[kTaps * kTaps][4]{};
    const int first_row = channel_warp_ * kWarpChannels16 + lane_ / 4;
    const int pixel = lane_ % 4 * 4;
    for (int group = part_; group < work_.plan.strip_cols / kGroupPixels; group += parts_) {
      const int col = group * kGroupPixels + pixel;
      StepOfA<Mode> a[kSteps];
      load_a(a, &shared_.grads[row % 2][first_row][col], 0);
      load_a(a, &shared_.grads[row % 2][first_row + 8][col], 1);
#pragma unroll
      for (int y = 0; y < kTaps; ++y) {
        W window[kWindowWords];
        load_window(window, &shared_.input[(row + y) % kInputRows][lane_ / 4][col]);
#pragma unroll
        for (int product = 0; product < W::kProducts; ++product) {
#pragma unroll
          for (int step = 0; step < kSteps; ++step) {
#pragma unroll
            for (int x = 0; x < kTaps; ++x)
              multiply_step(product, d[y * kTaps + x], a[step], window[2 * step + x],
                            window[2 * step + x + kNextWord]);
          }
        }
      }
    }
#pragma unroll
    for (int tap = 0; tap < kTaps * kTaps; ++tap) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums_[tap][i] += d[tap][i];
    }
  }

  // A lane's four pixels of a row of a: along the sum a word of float is a pixel, another word two of them.
  __device__ static void load_a(StepOfA<Mode> (&a)[kSteps], const In* from, int row) {
    if constexpr (kIsFloat) {
      const uint4 words = *reinterpret_cast<const uint4*>(from);
      a[0].set(row, words.x);
      a[0].set(2 + row, words.y);
      a[1].set(row, words.z);
      a[1].set(2 + row, words.w);
    } else {
      const uint2 words = *reinterpret_cast<const uint2*>(from);
      a[0].set(row, words.x);
      a[0].set(2 + row, words.y);
    }
  }

  // The lane's four pixels and the next ones, one or, of half precision, two a word: then words of all
  // shifts.
  static constexpr int kWindowWords = kIsFloat ? 6 : 5;
  static constexpr int kNextWord = kIsFloat ? 1 : 2;

  __device__ static void load_window(W (&window)[kWindowWords], const In* from) {
    if constexpr (kIsFloat) {
      const uint4 words = *reinterpret_cast<const uint4*>(from);
      const uint2 next = *reinterpret_cast<const uint2*>(from + 4);
      const uint32_t bits[] = {words.x, words.y, words.z, words.w, next.x, next.y};
#pragma unroll
      for (int i = 0; i < kWindowWords; ++i) window[i].set(bits[i]);
    } else {
      const uint2 words = *reinterpret_cast<const uint2*>(from);
      const uint32_t next = *reinterpret_cast<const uint32_t*>(from + 4);
      constexpr uint32_t kMiddle = 0x5432;  // the second half of one word, the first of the next
      window[0].set(words.x);
      window[1].set(__byte_perm(words.x, words.y, kMiddle));
      window[2].set(words.y);
      window[3].set(__byte_perm(words.y, next, kMiddle));
      window[4].set(next);
    }
  }

  __device__ void write() const {
    const cuda::WeightGradientPlan& plan = work_.plan;
    const int64_t slot = blockIdx.x * parts_ + part_;
    float* const to =
        work_.slots + ((slot * gridDim.y + blockIdx.y) * plan.channel_warps + channel_warp_) * kSlotValues;
#pragma unroll
    for (int tap = 0; tap < kTaps * kTaps; ++tap) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int out_channel = lane_ / 4 + i / 2 * 8;
        const int in_channel = lane_ % 4 * 2 + i % 2;
        float* const sum = to + (out_channel * kInChannels + in_channel) * kTaps * kTaps + tap;
        *sum = work_.adds ? *sum + sums_[tap][i] : sums_[tap][i];
      }
    }
  }

  const WeightGradientWork& work_;
  WeightShared<In>& shared_;
  const int lane_, warp_, channel_warp_, part_, parts_, copy_lanes_, channels_at_once_;
  const int out_block_, in_block_;
  const int out_channels_, in_channels_;  // of this block
  float sums_[kTaps * kTaps][4]{};
};

template <class Mode>
__global__ void __launch_bounds__(kWeightThreads, 3)
    conv_weight_gradient(const __grid_constant__ WeightGradientWork work) {
  if constexpr (kConvCompiles) {
    extern __shared__ __align__(16) uint8_t shared[];
    WeightGradientBlock<Mode>(work, *reinterpret_cast<WeightShared<typename Mode::In>*>(shared)).run();
  }
}

constexpr int kSlotThreads = 256;

// Adds up the slots in double: so many neighbouring weights a block, each by a few threads.
__global__ void __launch_bounds__(kSlotThreads)
    sum_weight_gradient(const float* slots, cuda::WeightGradientPlan plan, ConvShape shape, float* grad) {
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
  const int in_lane = int(rest % kInChannels);
  rest /= kInChannels;
  const int out_lane = int(rest % (kWarpChannels16 * plan.channel_warps));
  rest /= kWarpChannels16 * plan.channel_warps;
  const int in_channel = int(rest % plan.in_blocks) * kInChannels + in_lane;
  const int out_channel = int(rest / plan.in_blocks) * kBlockChannels + out_lane;
  if (in_channel >= shape.in_channels || out_channel >= shape.out_channels) return;
  grad[(int64_t(out_channel) * shape.in_channels + in_channel) * kTaps * kTaps + tap] = float(sum);
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

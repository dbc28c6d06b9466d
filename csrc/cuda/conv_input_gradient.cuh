// The gradient of a conv's input: the output's gradient times the weight, turned around. A row of the
// output's gradient adds to as many rows of the input's as the kernel has, whose sums go along in registers
// while warps walk down a strip: rows of the weight's operand are 8 channels of the input for each.
#pragma once

#include "conv_gradient_operands.cuh"
#include "conv_gradients.h"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

using cuda::ConvShape;
using cuda::kTaps;

constexpr int kInputThreads = 256;
constexpr int kInputWarps = kInputThreads / kWarpThreads;
constexpr int kGradChannels = 8;  // of the input, that a block has
constexpr int kWarpPixels = 16;
constexpr int kColumnBlocks = kWarpPixels / 8;  // that a product has
constexpr int kStageRows = 32;                  // words of a pixel in a stage: see channels_of_word()
constexpr int kStepRows = 8;                    // of a product
constexpr int kStages = 3;
constexpr int kStageSteps = kStageRows / kStepRows;
constexpr int kTapRows = 2;  // of the weight's operand: taps 0 and 1 down, then tap 2
constexpr int kStepWeights = kTaps * kTapRows * kWarpThreads;  // of one step: four words for each lane

// Values of a row of a stage: a strip's, and what its taps and whole copies add. Rows that lanes read at a
// time do not meet in the same banks.
FUSEDCONV_INLINE int stage_pitch(int strip_warps) { return strip_warps * kWarpPixels + 8; }
// A word of the operand holds a float or the same pixel of two channels of half precision.
FUSEDCONV_INLINE constexpr int channels_of_word(int value_bytes) { return 4 / value_bytes; }

FUSEDCONV_INLINE int stage_words(int strip_warps) {
  return kInputWarps / strip_warps * kStageRows * stage_pitch(strip_warps);
}
// parts: of a word of the weight.
inline int input_gradient_bytes(int strip_warps, int chunks, int parts) {
  return parts * chunks * kStageSteps * kStepWeights * int(sizeof(WordsOfA)) +
         kStages * stage_words(strip_warps) * 4;
}

struct InputGradientWork {
  ConvShape shape;
  cuda::InputGradientPlan plan;
  Tensor weight;
  const void* grad_v;  // contiguous
  void* grad_input;    // contiguous
  int units;           // strips of all samples
};

template <class Mode>
class InputGradientBlock {
  using In = typename Mode::In;
  using W = Word<Mode>;
  static constexpr int kChannels = channels_of_word(sizeof(In));  // of a word
  static constexpr int kStageChannels = kStageRows * kChannels;

  struct Strip {
    bool exists;
    int row, col;  // the first ones of the input
    int64_t sample;
  };

 public:
  __device__ InputGradientBlock(const InputGradientWork& work, WordsOfA* shared)
      : work_(work),
        weights_(shared),
        part_weights_(work.plan.chunks * kStageSteps * kStepWeights),
        stages_(reinterpret_cast<In*>(shared + W::kParts * part_weights_)),
        stage_values_(stage_words(work.plan.strip_warps) * kChannels),
        pitch_(stage_pitch(work.plan.strip_warps)),
        lane_(threadIdx.x % kWarpThreads),
        warp_(threadIdx.x / kWarpThreads),
        strips_at_once_(kInputWarps / work.plan.strip_warps),
        strip_of_warp_(warp_ / work.plan.strip_warps),
        warp_col_(warp_ % work.plan.strip_warps * kWarpPixels),
        shift_(work.plan.shift) {}

  __device__ void run() {
    load_weights();
    const int step = gridDim.x * strips_at_once_;
    for (int first = blockIdx.x * strips_at_once_; first < work_.units; first += step) walk(first);
  }

 private:
  __device__ Strip strip_of(int unit) const {
    const cuda::InputGradientPlan& plan = work_.plan;
    const int rest = unit / plan.segments;
    return {unit < work_.units, unit % plan.segments * plan.strip_rows,
            rest % plan.strips * plan.strip_warps * kWarpPixels, rest / plan.strips};
  }

  // As lanes take them for operands.
  __device__ void load_weights() const {
    for (int i = threadIdx.x; i < part_weights_; i += kInputThreads) {
      const int lane = i % kWarpThreads;
      const int tap_row = i / kWarpThreads % kTapRows;
      const int tap_col = i / kWarpThreads / kTapRows % kTaps;
      const int word = i / kStepWeights * kStepRows + lane % 4;
      const int upper = tap_row * 2;
      StepOfA<Mode> a;
#pragma unroll
      for (int k = 0; k < 4; ++k) a.set(k, weight(word + k / 2 * 4, lane / 4, upper + k % 2, tap_col));
#pragma unroll
      for (int part = 0; part < W::kParts; ++part) weights_[part * part_weights_ + i] = a.part[part];
    }
  }

  __device__ uint32_t weight(int word, int of_block, int tap_row, int tap_col) const {
    const int in_channel = blockIdx.y * kGradChannels + of_block;
    uint32_t bits = 0;
#pragma unroll
    for (int k = 0; k < kChannels; ++k) {
      const int out_channel = word * kChannels + k;
      if (tap_row >= kTaps || in_channel >= work_.shape.in_channels ||
          out_channel >= work_.shape.out_channels)
        continue;
      const int64_t* stride = work_.weight.stride;
      const In value =
          static_cast<const In*>(work_.weight.data)[out_channel * stride[0] + in_channel * stride[1] +
                                                    tap_row * stride[2] + tap_col * stride[3]];
      if constexpr (kChannels == 1) {
        bits = __float_as_uint(value);
      } else {
        uint16_t half;
        memcpy(&half, &value, sizeof(half));
        bits |= uint32_t(half) << (16 * k);
      }
    }
    return bits;
  }

  // Down some strips: a step is a chunk of a row, which comes in two steps before its turn.
  __device__ void walk(int first_unit) {
    const int steps = (work_.plan.strip_rows + kTaps - 1) * work_.plan.chunks;
    const Strip strip = strip_of(first_unit + strip_of_warp_);
    __syncthreads();  // of the strips before, all is read, and the weights are written
    load(first_unit, 0);
    load(first_unit, 1);
    clear(sums_);
    int chunk = 0;
    int row = 0;
    for (int step = 0; step < steps; ++step) {
      __pipeline_wait_prior(1);
      __syncthreads();
      load(first_unit, step + 2 < steps ? step + 2 : -1);
      multiply(chunk, stages_ + step % kStages * stage_values_);
      if (++chunk < work_.plan.chunks) continue;
      if (row >= kTaps - 1) store(strip, strip.row + row - (kTaps - 1));
      move_rows();
      chunk = 0;
      ++row;
    }
  }

  // step < 0: nothing, but for the count of the copies under way.
  __device__ void load(int first_unit, int step) const {
    if (step >= 0) {
      const int row = step / work_.plan.chunks;
      const int chunk = step - row * work_.plan.chunks;
      In* const stage = stages_ + step % kStages * stage_values_;
      for (int s = 0; s < strips_at_once_; ++s)
        load_rows(strip_of(first_unit + s), row, chunk, stage + s * kStageChannels * pitch_);
    }
    __pipeline_commit();
  }

  // A row of the padded gradient of the output, counted from the first that the strip's first row meets. It
  // starts where copies may.
  __device__ void load_rows(const Strip& strip, int row, int chunk, In* stage) const {
    const ConvShape& shape = work_.shape;
    const int y = strip.row + row + shape.padding[0] - (kTaps - 1);
    const int left = strip.col + shape.padding[1] - (kTaps - 1) - shift_;
    const int cols = work_.plan.strip_warps * kWarpPixels + kTaps - 1 + shift_;
    const bool has_row = strip.exists && y >= 0 && y < shape.out_size[0];
    const int64_t map = int64_t(shape.out_size[0]) * shape.out_size[1];
    const int first_channel = chunk * kStageChannels;
    const In* const grads = static_cast<const In*>(work_.grad_v);
    const In* const from = grads + (strip.sample * shape.out_channels + first_channel) * map +
                           int64_t(y) * shape.out_size[1] + left;
    const int rows = has_row ? min(shape.out_channels - first_channel, kStageChannels) : 0;
    visit_copy_bytes<In>(work_.plan.copy_values, [&](auto bytes) {
      constexpr int kBytes = decltype(bytes)::value;
      constexpr int kValues = kBytes / int(sizeof(In));
      const auto copy_column = [&](int col, int first, int step) {
        const int existing = left + col >= 0 && left + col < shape.out_size[1] ? rows : 0;
        const In* at = from + first * map + col;
        In* to = stage + first * pitch_ + col;
#pragma unroll 4
        for (int c = first; c < kStageChannels; c += step, at += step * map, to += step * pitch_)
          copy_or_clear<kBytes>(to, at, c < existing);
      };
      int col = lane_ * kValues;
      for (; col - lane_ * kValues + kWarpThreads * kValues <= cols; col += kWarpThreads * kValues)
        copy_column(col, warp_, kInputWarps);
      // The rest of a row, of several channels at a time.
      const int lanes = work_.plan.rest_lanes;
      const int channels = kWarpThreads / lanes;
      col += (lane_ % lanes - lane_) * kValues;
      if (col < cols) copy_column(col, warp_ * channels + lane_ / lanes, kInputWarps * channels);
    });
  }

  // The same pixel of a word's channels.
  __device__ uint32_t word_at(const In* from) const {
    if constexpr (kChannels == 1) {
      return __float_as_uint(*from);
    } else {
      const uint16_t* const half = reinterpret_cast<const uint16_t*>(from);
      return half[0] | uint32_t(half[pitch_]) << 16;
    }
  }

  // The sums of a chunk are rounded by themselves: the tensor cores cut off what they add up. Small products
  // have sums of their own.
  __device__ void multiply(int chunk, const In* stage) {
    float d[W::kParts][kTapRows][kColumnBlocks][4]{};
    const WordsOfA* weights = weights_ + chunk * kStageSteps * kStepWeights + lane_;
    const In* from = stage + (strip_of_warp_ * kStageChannels + lane_ % 4 * kChannels) * pitch_ + warp_col_ +
                     lane_ / 4 + kTaps - 1 + shift_;
#pragma unroll
    for (int step = 0; step < kStageSteps; ++step) {
#pragma unroll
      for (int tap = 0; tap < kTaps; ++tap) {
        StepOfA<Mode> a[kTapRows];
#pragma unroll
        for (int r = 0; r < kTapRows; ++r) {
          const int at = ((step * kTaps + tap) * kTapRows + r) * kWarpThreads;
#pragma unroll
          for (int part = 0; part < W::kParts; ++part) a[r].part[part] = weights[part * part_weights_ + at];
        }
        W b[kColumnBlocks][2];
#pragma unroll
        for (int n = 0; n < kColumnBlocks; ++n) {
          const In* at = from + step * kStepRows * kChannels * pitch_ + n * 8 - tap;
          b[n][0].set(word_at(at));
          b[n][1].set(word_at(at + 4 * kChannels * pitch_));
        }
#pragma unroll
        for (int product = 0; product < W::kProducts; ++product) {
          const int part = product + 1 < W::kProducts ? 1 : 0;
#pragma unroll
          for (int r = 0; r < kTapRows; ++r) {
#pragma unroll
            for (int n = 0; n < kColumnBlocks; ++n)
              multiply_step(product, d[part][r][n], a[r], b[n][0], b[n][1]);
          }
        }
      }
    }
#pragma unroll
    for (int n = 0; n < kColumnBlocks; ++n) {
#pragma unroll
      for (int tap = 0; tap < kTaps; ++tap) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float sum = d[0][tap / 2][n][tap % 2 * 2 + i];
          if constexpr (W::kParts == 2) sum += d[1][tap / 2][n][tap % 2 * 2 + i];
          sums_[n][tap][i] += sum;
        }
      }
    }
  }

  // What the row's first tap adds to is complete.
  __device__ void store(const Strip& strip, int row) const {
    const ConvShape& shape = work_.shape;
    const int channel = blockIdx.y * kGradChannels + lane_ / 4;
    if (!strip.exists || row >= shape.in_size[0] || channel >= shape.in_channels) return;
    const int64_t at =
        ((strip.sample * shape.in_channels + channel) * shape.in_size[0] + row) * shape.in_size[1];
    In* const to = static_cast<In*>(work_.grad_input) + at;
#pragma unroll
    for (int n = 0; n < kColumnBlocks; ++n) {
      const int col = strip.col + warp_col_ + n * 8 + lane_ % 4 * 2;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (col + i < shape.in_size[1]) to[col + i] = narrow<In>(sums_[n][0][i]);
      }
    }
  }

  // The next row of the output's gradient adds to rows one further down.
  __device__ void move_rows() {
#pragma unroll
    for (int n = 0; n < kColumnBlocks; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int tap = 0; tap < kTaps; ++tap) sums_[n][tap][i] = tap + 1 < kTaps ? sums_[n][tap + 1][i] : 0;
      }
    }
  }

  using Sums = float[kColumnBlocks][kTaps][2];  // of the rows that tap 0 adds to, tap 1, tap 2

  __device__ static void clear(Sums& sums) {
#pragma unroll
    for (int n = 0; n < kColumnBlocks; ++n) {
#pragma unroll
      for (int tap = 0; tap < kTaps; ++tap) sums[n][tap][0] = sums[n][tap][1] = 0;
    }
  }

  const InputGradientWork& work_;
  WordsOfA* const weights_;  // [parts][part_weights_]
  const int part_weights_;
  In* const stages_;
  const int stage_values_;
  const int pitch_, lane_, warp_, strips_at_once_, strip_of_warp_, warp_col_;
  const int shift_;
  Sums sums_;
};

template <class Mode>
__global__ void __launch_bounds__(kInputThreads, 2)
    conv_input_gradient(const __grid_constant__ InputGradientWork work) {
  if constexpr (kConvCompiles) {
    extern __shared__ __align__(16) uint8_t shared[];
    InputGradientBlock<Mode>(work, reinterpret_cast<WordsOfA*>(shared)).run();
  }
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

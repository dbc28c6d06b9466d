// The pass that finds what the vjp of a GroupNorm takes: sums over each channel of the gradient behind the
// norm, and of its product with the normed value.
#pragma once

#include "cuda/device/gradient_pairs.cuh"
#include "cuda/passes/pass.cuh"
#include "plan/card.h"
#include "spread.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// All of the output's channels are in one block of rows.
template <class Chain, class Mode>
class GradientSumsPass : public PassBase {
  static constexpr bool kReducesChannels = Chain::Reduce::kReducesChannels;
  // Blocks of 8 columns whose gradients are on their way: as many as there are registers for.
  static constexpr int kBlocksAtOnce = Mode::kParts == 2 ? 8 : 4;

 public:
  static constexpr bool kAllRowBlocks = false;
  using PassBase::PassBase;

  __device__ void prepare(const Tile& tile, const ThreadRows& rows) {
    if constexpr (!kReducesChannels) ask_for_gradients(tile, rows);
#pragma unroll
    for (int k = 0; k < kThreadChannels; ++k) {
      const int c = rows.channel(k);
      if (c >= p_.tiling.out_channels) continue;
      double values[kChainParameters];
#pragma unroll
      for (int kind = 0; kind < kChainParameters; ++kind) values[kind] = channel_value(p_.arguments, kind, c);
      const Norm<float> norm = p_.norms[tile.sample * p_.tiling.out_channels + c];
      channel_[k] = {channel_from(values, norm, p_.arguments), {norm.scale, norm.shift, 0, 0}};
    }
  }

  __device__ void finish(Fragment v) {
    v.unscale();
    float sums[kThreadChannels][kGradientKinds]{};
    if constexpr (kReducesChannels) {
      stage_softmax(v);
      // All is computed again from here on: there is no room for what the softmax took.
      v.for_each([](float& x, int) { asm volatile("" : "+f"(x)); });
      add_softmax(v, sums);
    } else {
      if (Mode::kParts == 2 || p_.backward.grad.dtype == DType::kFloat32) {
        add_gradients<uint32_t>(v, sums);
      } else {
        add_gradients<uint16_t>(v, sums);
      }
    }
    write_sums(v, sums);
  }

 private:
  __device__ void add(float grad, float v, int k, bool exists,
                      float (&sums)[kThreadChannels][kGradientKinds]) const {
    float of_pixel[kGradientKinds]{};
    add_after_norm<Chain>(grad, v, channel_[k].channel, channel_[k].norm, of_pixel);
#pragma unroll
    for (int kind = 0; kind < kGradientKinds; ++kind)
      if (kAfterNorm<Chain> >> kind & 1) sums[k][kind] += exists ? of_pixel[kind] : 0.0f;
  }

  // ---- gradients from memory ----

  // Brings most of the tile's into the L2 cache while products are under way.
  __device__ void ask_for_gradients(const Tile& tile, const ThreadRows& rows) const {
    const ConvTiling& t = p_.tiling;
    const int bytes = p_.backward.grad.dtype == DType::kFloat32 ? 4 : 2;
    const int line = cuda::kLineBytes / bytes;
    Fragment::for_each_step(t, tile, rows, line, [&](const Place& place) {
#pragma unroll
      for (int k = 0; k < kThreadChannels; ++k) {
        if (rows.channel(k) >= t.out_channels) continue;
        const int64_t plane = tile.sample * t.out_channels + rows.channel(k);
        const int64_t at =
            (plane * t.out_size[0] + tile.row + place.row) * t.out_size[1] + tile.col + place.col;
        asm volatile(
            "prefetch.global.L2 [%0];" ::"l"(static_cast<const char*>(p_.backward.grad.data) + at * bytes));
      }
    });
  }

  template <class Word>
  __device__ void add_gradients(const Fragment& v, float (&sums)[kThreadChannels][kGradientKinds]) const {
    const Tile& tile = v.tile;
    // Whether all of the tile's are whole pairs in memory.
    const bool is_pair = p_.backward.has_pairs && tile.col % 2 == 0 && tile.cols % 2 == 0;
    const ConvTiling& t = p_.tiling;
    const int cols = t.out_size[1];
    const int pixels = t.out_size[0] * cols;
    // Within a sample offsets fit in ints.
    const Word* const of_tile = static_cast<const Word*>(p_.backward.grad.data) +
                                tile.sample * t.out_channels * pixels + tile.row * cols + tile.col;
    const Word* from[kThreadChannels];
#pragma unroll
    for (int k = 0; k < kThreadChannels; ++k)
      from[k] = of_tile + min(v.rows.channel(k), t.out_channels - 1) * pixels;
    GradientPair pair[kBlocksAtOnce][kThreadChannels];
    v.for_each_pair([&](int j, const Place& place) {
      // Of a pixel that does not exist, the tile's first one's: without a condition, all are on their way.
      const bool exists = v.exists(j, 0);
      const int at = exists ? place.row * cols + place.col : 0;
      const int second = v.exists(j, 1) ? at + 1 : at;
#pragma unroll
      for (int k = 0; k < kThreadChannels; ++k)
        pair[j % kBlocksAtOnce][k].load(from[k] + at, from[k] + second, is_pair);
      if (j % kBlocksAtOnce + 1 < kBlocksAtOnce) return;
#pragma unroll
      for (int i = j + 1 - kBlocksAtOnce; i <= j; ++i) add_pairs<Word>(v, i, pair, is_pair, sums);
    });
  }

  template <class Word>
  __device__ void add_pairs(const Fragment& v, int j, GradientPair (&pairs)[kBlocksAtOnce][kThreadChannels],
                            bool is_pair, float (&sums)[kThreadChannels][kGradientKinds]) const {
#pragma unroll
    for (int k = 0; k < kThreadChannels; ++k) {
      GradientPair& pair = pairs[j % kBlocksAtOnce][k];
      if constexpr (sizeof(Word) == sizeof(uint16_t))
        pair.widen(is_pair, p_.backward.grad.dtype == DType::kBFloat16);
      add(pair.value(0), v.value(k, j, 0), k, v.exists(j, 0), sums);
      add(pair.value(1), v.value(k, j, 1), k, v.exists(j, 1), sums);
    }
  }

  // ---- gradients from the softmax over channels ----

  // Values go through staging memory, where a thread has a column of all channels. In the place of its first
  // two it leaves what the gradient at each of them takes.
  __device__ void stage_softmax(const Fragment& v) {
    const ConvTiling& t = p_.tiling;
    const Tile& tile = v.tile;
    v.stage(staging(), [this](float x, int k) { return Chain::value(x, channel_[k].channel); });
    sync();
    const int column = thread();
    if (column < kTileColumns) {
      for (int f = 0; f < t.stack; ++f) {
        float* const of_column = staged_column(column, f);
        LogSumExp<float> sum[1];
        add_channels<16, 1, 1>(sum, 0, 1, min(t.stack_channels, t.out_channels),
                               [&](int c, float* x) { *x = of_column[c * kStagingPitch]; });
        const float2 line = softmax_of(tile, column, f, sum[0]);
        of_column[0] = line.x;
        of_column[kStagingPitch] = line.y;
      }
    }
    sync();
  }

  // What is subtracted before exp, and the factor after it.
  __device__ float2 softmax_of(const Tile& tile, int column, int stacked, const LogSumExp<float>& sum) const {
    const ConvTiling& t = p_.tiling;
    const Place place = place_of(t, column, stacked);
    if (place.row >= tile.rows || place.col >= tile.cols) return {0, 0};
    const int64_t at =
        (tile.sample * t.out_size[0] + tile.row + place.row) * t.out_size[1] + tile.col + place.col;
    const float most = LogSumExp<float>::shift_of(sum.most);
    const float grad = load_values<float, 1>(p_.backward.grad, at).element[0];
    return {most, softmax_factor<Chain>(grad, most, sum.sum, p_.arguments)};
  }

  __device__ void add_softmax(const Fragment& v, float (&sums)[kThreadChannels][kGradientKinds]) const {
    const float* const first = Fragment::first_pair(staged_column(0, v.rows.stacked(p_.tiling)));
#pragma unroll
    for (int j = 0; j < kThreadPairs; ++j) {
      const float2 most = *reinterpret_cast<const float2*>(first + Fragment::pair_offset(j));
      const float2 factor =
          *reinterpret_cast<const float2*>(first + kStagingPitch + Fragment::pair_offset(j));
#pragma unroll
      for (int k = 0; k < kThreadChannels; ++k) {
        const float x = v.value(k, j, 0);
        const float y = v.value(k, j, 1);
        const Channel<float>& channel = channel_[k].channel;
        add(exp(Chain::value(x, channel) - most.x) * factor.x, x, k, v.exists(j, 0), sums);
        add(exp(Chain::value(y, channel) - most.y) * factor.y, y, k, v.exists(j, 1), sums);
      }
    }
  }

  // ---- the sums ----

  __device__ void write_sums(const Fragment& v, const float (&sums)[kThreadChannels][kGradientKinds]) const {
    const int channels = p_.tiling.out_channels;
    const PartialSums& to = p_.backward.after_norm;
#pragma unroll
    for (int kind = 0; kind < kGradientKinds; ++kind) {
      if ((kAfterNorm<Chain> >> kind & 1) == 0 || to.of[kind] == nullptr) continue;
#pragma unroll
      for (int k = 0; k < kThreadChannels; ++k) {
        const float sum = Fragment::sum_of_row(sums[k][kind]);
        if (Fragment::is_writer() && v.rows.channel(k) < channels)
          to.of[kind][(v.tile.sample * channels + v.rows.channel(k)) * to.slices + v.part()] = double(sum);
      }
    }
  }

  SampleChannel channel_[kThreadChannels];
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

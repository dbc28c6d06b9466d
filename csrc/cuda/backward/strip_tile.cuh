// What tile warps do with a row: the gradient of v, and from it the input's.
#pragma once

#include "strip_spread.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// Sums of a lane's channels over the pixels of a segment. Lanes with the same lane % 4 share channels: each
// gets a few of them.
template <int kChunks, unsigned kKinds>
class TileSums {
  static constexpr int kValues = 2 * kChunks;  // a lane's channels
  static constexpr int kLanes = kWarpThreads / 4;
  static constexpr int kKept = kValues / kLanes;

 public:
  // Of a row.
  struct Row {
    float of[kGradientKinds][kValues]{};

    __device__ void add(int value, const float (&sums)[kGradientKinds]) {
#pragma unroll
      for (int kind = 0; kind < kGradientKinds; ++kind)
        if (kKinds >> kind & 1) of[kind][value] += sums[kind];
    }
  };

  __device__ void add(Row& row, const PartialSums& to) {
#pragma unroll
    for (int kind = 0; kind < kGradientKinds; ++kind) {
      if ((kKinds >> kind & 1) == 0 || to.of[kind] == nullptr) continue;
      share(row.of[kind]);
#pragma unroll
      for (int k = 0; k < kKept; ++k) total_[kind][k] += double(row.of[kind][k]);
    }
  }

  __device__ void write(const BackwardWork<float>& work, const PartialSums& to, const StripSegment& segment) {
    const int lane = lane_of_thread();
    const int first = (lane / 16 * 4 + lane / 8 % 2 * 2 + lane / 4 % 2) * kKept;
#pragma unroll
    for (int kind = 0; kind < kGradientKinds; ++kind) {
      if ((kKinds >> kind & 1) == 0 || to.of[kind] == nullptr) continue;
#pragma unroll
      for (int k = 0; k < kKept; ++k) {
        const int c = tile_channel((first + k) / 2) + (first + k) % 2;
        if (c < work.channels)
          to.of[kind][(segment.sample * work.channels + c) * to.slices + segment.slice * kTileWarps +
                      threadIdx.x / kWarpThreads] = total_[kind][k];
        total_[kind][k] = 0;
      }
    }
  }

 private:
  // Leaves kKept sums over the lanes at the front.
  template <int kHalf = kValues / 2>
  __device__ static void share(float (&x)[kValues]) {
    constexpr int kDistance = 4 * kHalf / kKept;
    const bool is_upper = (threadIdx.x & kDistance) != 0;
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const float given = is_upper ? x[i] : x[i + kHalf];
      x[i] = (is_upper ? x[i + kHalf] : x[i]) + __shfl_xor_sync(~0u, given, kDistance);
    }
    if constexpr (kHalf > kKept) share<kHalf / 2>(x);
  }

  double total_[kGradientKinds][kKept]{};
};

// A warp's tile in the rows of a segment: the gradient of v, and from it the input's.
template <class Chain, int kOutTiles>
class StripTile {
  using Shared = StripShared<kOutTiles>;
  static constexpr int kChunks = Shared::kChunks;
  static constexpr unsigned kKinds = kOfAll<Chain>;

 public:
  __device__ StripTile(const StripProblem<Chain>& problem, Shared& shared)
      : work_(problem.work), strip_(problem.strip), shared_(shared), conv_(problem.strip, shared) {}

  // By all tile warps, before the barrier of the first step.
  __device__ void start(const StripSegment& segment) {
    const int col = segment.col + tile_pixel();
    place_ = {segment.sample, col, {col < strip_.shape.out_size[1], col + 1 < strip_.shape.out_size[1]}};
    if constexpr (kHasChannels<Chain>) {
      for (int c = threadIdx.x; c < work_.channels; c += kTileThreads)
        shared_.channels[c] = {channel_of_thread<Chain>(work_, segment.sample, c),
                               norm_gradient_of<Chain, true>(work_, segment.sample, c)};
    }
  }

  __device__ void step(const StripSegment& segment, int row) {
    if (row < 0 || row >= segment.last_row) return;
    if (row < segment.rows) add_row(segment, row);
    complete_row(row);
  }

  __device__ void end(const StripSegment& segment) {
    sums_.write(work_, work_.of_all, segment);
    for_each_tap([this](int down, int across) {
#pragma unroll
      for (float& x : input_[down][across]) x = 0;
    });
  }

 private:
  __device__ SampleChannel channel_at(int c) const {
    if constexpr (kHasChannels<Chain>) return shared_.channels[c];
    return {};
  }

  // Whether a pixel's sums count in this segment.
  __device__ bool owns(const StripSegment& segment, int row, int pixel) const {
    return place_.exists[pixel] && row >= segment.own_row && tile_pixel() + pixel >= segment.own_col;
  }

  // A chunk's halves: of pixel i, [i], two channels a word.
  using Words = uint32_t[kChunks][2];

  __device__ void add_row(const StripSegment& segment, int row) {
    StripSpread<Chain, kChunks> spread(work_, strip_.shape, place_);
    spread.load(segment.row + row);
    TileValues<kChunks> v;
    conv_.compute(segment, row, v);
    spread.settle(v, [this](int c) { return channel_at(c); });
    typename TileSums<kChunks, kKinds>::Row sums;
    float largest = 0;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const float2 balance = *reinterpret_cast<const float2*>(&shared_.balance[tile_channel(c)]);
      make_gradient(segment, row, c, 0, balance.x, spread, v[c], sums);
      make_gradient(segment, row, c, 1, balance.y, spread, v[c], sums);
#pragma unroll
      for (float x : v[c]) largest = fmaxf(largest, fabsf(x));  // NaN has no say
    }
    sums_.add(sums, work_.of_all);
    unsigned of_warp = largest_of_warp(__float_as_uint(largest));
    if (!is_finite(of_warp)) of_warp = largest_of_warp(largest_finite(v));
    const int exponent = scale_exponent(of_warp);
    Words high, low;
    split(v, power_of_two(exponent), high, low);
    share(segment, row, exponent, high, low);
    if (strip_.grad_input.data != nullptr) multiply(exponent, high, low);
  }

  // v's gradient takes v's place.
  __device__ void make_gradient(const StripSegment& segment, int row, int c, int k, float balance,
                                const StripSpread<Chain, kChunks>& spread, float (&v)[4],
                                typename TileSums<kChunks, kKinds>::Row& sums) const {
    const int channel = tile_channel(c) + k;
    const SampleChannel of = channel_at(channel);
    const bool has_channel = channel < work_.channels;
    const Pack<float, 2> grad = spread.gradients(c, k);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float of_pixel[kGradientKinds]{};
      const float x = gradient_of_v<Chain>(grad.element[i], v[2 * i + k], of.channel, of.norm, of_pixel);
      if (owns(segment, row, i) && has_channel) sums.add(2 * c + k, of_pixel);
      v[2 * i + k] = place_.exists[i] && has_channel ? x * balance : 0.0f;
    }
  }

  // For the rare tile that has an infinity.
  __device__ static unsigned largest_finite(const TileValues<kChunks>& grad) {
    unsigned largest = 0;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (float x : grad[c]) largest = max(largest, finite_magnitude(x));
    }
    return largest;
  }

  __device__ static void split(const TileValues<kChunks>& grad, float scale, Words& high, Words& low) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const SplitPair pair = split_pair(grad[c][2 * i] * scale, grad[c][2 * i + 1] * scale);
        high[c][i] = pair.high;
        low[c][i] = pair.low;
      }
    }
  }

  // For the sum warps: what others sum too is zeros.
  __device__ void share(const StripSegment& segment, int row, int exponent, const Words& high,
                        const Words& low) {
    if (lane_of_thread() == 0) shared_.grad_exponents[row % 2][threadIdx.x / kWarpThreads] = exponent;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int pixel = tile_pixel() + i;
      const bool owned = owns(segment, row, i);
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const int place = Shared::chunk_place(c, pixel);
        const auto write = [&](int part, uint32_t word) {
          reinterpret_cast<uint32_t*>(&shared_.grads[row % 2][part][pixel][place])[lane_of_thread() % 4] =
              owned ? word : 0;
        };
        write(0, high[c][i]);
        if (strip_.operand_parts == kMostOperandParts) write(1, low[c][i]);
      }
    }
  }

  // Adds the row's products with each tap to the rows of the input's gradient that they belong to.
  __device__ void multiply(int exponent, const Words& high, const Words& low) {
    const bool is_exact = strip_.operand_parts == kMostOperandParts;
    float d[kTaps][kTaps][4]{};
#pragma unroll
    for (int tile = 0; tile < kOutTiles; ++tile) {
      const Operand4 a = operand(high, tile);
      const Operand4 a_low = operand(low, tile);
#pragma unroll
      for (int across = 0; across < kTaps; ++across) {
        uint4 b[kTaps];
#pragma unroll
        for (int down = 0; down < kTaps; ++down)
          b[down] = shared_.gradient_weights[tile][down][across][lane_of_thread()];
        if (is_exact) {
#pragma unroll
          for (int down = 0; down < kTaps; ++down)
            multiply_add<__half>(d[down][across], a_low.word, b[down].x, b[down].y);
#pragma unroll
          for (int down = 0; down < kTaps; ++down)
            multiply_add<__half>(d[down][across], a.word, b[down].z, b[down].w);
        }
#pragma unroll
        for (int down = 0; down < kTaps; ++down)
          multiply_add<__half>(d[down][across], a.word, b[down].x, b[down].y);
      }
    }
    exponent += scale_exponent(shared_.weight_largest);
    add_unscaled({exponent, exponent, exponent}, d, input_);
  }

  struct Operand4 {
    uint32_t word[4];
  };

  __device__ static Operand4 operand(const Words& words, int tile) {
    return {{words[2 * tile][0], words[2 * tile][1], words[2 * tile + 1][0], words[2 * tile + 1][1]}};
  }

  // The row of the input's gradient that no further row adds to goes to the sum warps; the others move up.
  __device__ void complete_row(int row) {
#pragma unroll
    for (int across = 0; across < kTaps; ++across) {
      const float (&d)[4] = input_[0][across];
#pragma unroll
      for (int k = 0; k < 2; ++k)
        store_pack(&shared_.sums[row % 2][across][tile_channel(0) + k][tile_pixel()],
                   Pack<float, 2>{{d[k], d[2 + k]}});
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        input_[0][across][i] = input_[1][across][i];
        input_[1][across][i] = input_[2][across][i];
        input_[2][across][i] = 0;
      }
    }
  }

  const BackwardWork<float>& work_;
  const StripWork& strip_;
  Shared& shared_;
  const StripConv<kOutTiles> conv_;
  TilePlace place_;
  TileSums<kChunks, kKinds> sums_;
  float input_[kTaps][kTaps][4]{};  // of rows of the input's gradient, from the current one on
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

// What tile warps do with a row: two passes. SumsPass finds what the vjp of a GroupNorm takes, GradientPass
// the gradient of v and from it the input's.
#pragma once

#include "strip_spread.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// Sums of a lane's channels over the pixels of a unit. Lanes with the same lane % 4 share channels: each gets
// a few of them.
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

  __device__ void write(const BackwardWork<float>& work, const PartialSums& to, const StripUnit& unit) {
    const int lane = lane_of_thread();
    const int first = (lane / 16 * 4 + lane / 8 % 2 * 2 + lane / 4 % 2) * kKept;
#pragma unroll
    for (int kind = 0; kind < kGradientKinds; ++kind) {
      if ((kKinds >> kind & 1) == 0 || to.of[kind] == nullptr) continue;
#pragma unroll
      for (int k = 0; k < kKept; ++k) {
        const int c = tile_channel((first + k) / 2) + (first + k) % 2;
        if (c < work.channels)
          to.of[kind][(unit.sample * work.channels + c) * to.slices + unit.slice * kTileWarps +
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

// What both passes have: a warp's tile in the rows of a unit. kKnowsMeans: whether the vjp of the norm does.
template <class Chain, int kOutTiles, bool kKnowsMeans>
class TilePass {
 public:
  using Shared = StripShared<kOutTiles>;
  static constexpr int kChunks = Shared::kChunks;

  __device__ TilePass(const StripProblem<Chain>& problem, Shared& shared)
      : work_(problem.work), strip_(problem.strip), shared_(shared), conv_(problem.strip, shared) {}

  // By all tile warps, before the barrier of the first step.
  __device__ void start(const StripUnit& unit) {
    const int64_t col = unit.col + tile_pixel();
    place_ = {unit.sample, int(col), {col < strip_.shape.out_size[1], col + 1 < strip_.shape.out_size[1]}};
    if constexpr (kHasChannels<Chain>) {
      for (int c = threadIdx.x; c < work_.channels; c += kTileThreads)
        shared_.channels[c] = {channel_of_thread<Chain>(work_, unit.sample, c),
                               kKnowsMeans ? whole_norm_gradient_of<Chain>(work_, unit.sample, c)
                                           : norm_gradient_of<Chain>(work_, unit.sample, c)};
    }
  }

 protected:
  __device__ SampleChannel channel_at(int c) const {
    if constexpr (kHasChannels<Chain>) return shared_.channels[c];
    return {};
  }

  // Whether a pixel's sums count in this unit.
  __device__ bool owns(const StripUnit& unit, int row, int pixel) const {
    return place_.exists[pixel] && row >= unit.own_row && tile_pixel() + pixel >= unit.own_col;
  }

  const BackwardWork<float>& work_;
  const StripWork& strip_;
  Shared& shared_;
  const StripConv<kOutTiles> conv_;
  TilePlace place_;
};

template <class Chain, int kOutTiles>
class SumsPass : public TilePass<Chain, kOutTiles, false> {
  using Base = TilePass<Chain, kOutTiles, false>;
  static constexpr int kChunks = Base::kChunks;
  static constexpr unsigned kKinds = kAfterNorm<Chain>;
  static constexpr bool kReducesChannels = Chain::Reduce::kReducesChannels;

 public:
  static constexpr bool kMakesGradients = false;
  using Base::Base;

  __device__ void step(const StripUnit& unit, int row) {
    if (row < 0 || row >= unit.rows) return;
    StripSpread<Chain, kChunks> spread(this->work_, this->strip_.shape, this->place_);
    spread.load_grad(unit.row + row);
    TileValues<kChunks> v;
    this->conv_.compute(unit, row, v);
    spread.settle();
    if constexpr (kReducesChannels) {
#pragma unroll
      for (int i = 0; i < 2; ++i) write_table(unit.row + row, i, v, spread);
    }
    typename TileSums<kChunks, kKinds>::Row sums;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (int k = 0; k < 2; ++k) add(unit, row, c, k, {v[c][k], v[c][2 + k]}, spread, sums);
    }
    sums_.add(sums, this->work_.after_norm);
  }

  __device__ void end(const StripUnit& unit) { sums_.write(this->work_, this->work_.after_norm, unit); }

 private:
  __device__ void add(const StripUnit& unit, int row, int c, int k, const float (&v)[2],
                      const StripSpread<Chain, kChunks>& spread,
                      typename TileSums<kChunks, kKinds>::Row& sums) const {
    const SampleChannel of = this->channel_at(tile_channel(c) + k);
    const Pack<float, 2> grad = spread.gradients(c, k, v, of.channel);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float of_pixel[kGradientKinds]{};
      add_after_norm<Chain>(grad.element[i], v[i], of.channel, of.norm, of_pixel);
      if (this->owns(unit, row, i) && tile_channel(c) + k < this->work_.channels)
        sums.add(2 * c + k, of_pixel);
    }
  }

  // Of the logsumexp over channels: a lane has some of them, three neighbours the others.
  __device__ void write_table(int row, int i, const TileValues<kChunks>& v,
                              StripSpread<Chain, kChunks>& spread) const {
    float x[kChunks][2];
    float most = -INFINITY;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const int channel = tile_channel(c) + k;
        x[c][k] = channel < this->work_.channels
                      ? Chain::value(v[c][2 * i + k], this->channel_at(channel).channel)
                      : -INFINITY;
        most = maximum(most, x[c][k]);
      }
    }
#pragma unroll
    for (int distance = 1; distance < 4; distance *= 2)
      most = maximum(most, __shfl_xor_sync(~0u, most, distance));
    most = LogSumExp<float>::shift_of(most);
    float sum = 0;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) sum += exp(x[c][0] - most) + exp(x[c][1] - most);
#pragma unroll
    for (int distance = 1; distance < 4; distance *= 2) sum += __shfl_xor_sync(~0u, sum, distance);
    spread.set(row, i, most, sum);
  }

  TileSums<kChunks, kKinds> sums_;
};

template <class Chain, int kOutTiles>
class GradientPass : public TilePass<Chain, kOutTiles, true> {
  using Base = TilePass<Chain, kOutTiles, true>;
  static constexpr int kChunks = Base::kChunks;
  static constexpr unsigned kKinds = kOfAll<Chain>;

 public:
  static constexpr bool kMakesGradients = true;
  using Base::Base;

  __device__ void step(const StripUnit& unit, int row) {
    if (row < 0 || row >= unit.last_row) return;
    if (row < unit.rows) add_row(unit, row);
    complete_row(row);
  }

  __device__ void end(const StripUnit& unit) {
    sums_.write(this->work_, this->work_.of_all, unit);
#pragma unroll
    for (int down = 0; down < kTaps; ++down) {
#pragma unroll
      for (int across = 0; across < kTaps; ++across) {
#pragma unroll
        for (int i = 0; i < 4; ++i) input_[down][across][i] = 0;
      }
    }
  }

 private:
  // A chunk's halves: of pixel i, [i], two channels a word.
  using Words = uint32_t[kChunks][2];

  __device__ void add_row(const StripUnit& unit, int row) {
    StripSpread<Chain, kChunks> spread(this->work_, this->strip_.shape, this->place_);
    spread.load(unit.row + row);
    TileValues<kChunks> v;
    this->conv_.compute(unit, row, v);
    spread.settle();
    typename TileSums<kChunks, kKinds>::Row sums;
    unsigned largest = 0;
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
      const float2 balance = *reinterpret_cast<const float2*>(&this->shared_.balance[tile_channel(c)]);
      make_gradient(unit, row, c, 0, balance.x, spread, v[c], sums);
      make_gradient(unit, row, c, 1, balance.y, spread, v[c], sums);
#pragma unroll
      for (float x : v[c]) largest = max(largest, finite_magnitude(x));
    }
    sums_.add(sums, this->work_.of_all);
    const int exponent = scale_exponent(largest_of_warp(largest));
    Words high, low;
    split(v, power_of_two(exponent), high, low);
    share(unit, row, exponent, high, low);
    if (this->strip_.grad_input.data == nullptr) return;
    this->strip_.parts == kMostParts ? multiply<true>(exponent, high, low)
                                     : multiply<false>(exponent, high, low);
  }

  // v's gradient takes v's place.
  __device__ void make_gradient(const StripUnit& unit, int row, int c, int k, float balance,
                                const StripSpread<Chain, kChunks>& spread, float (&v)[4],
                                typename TileSums<kChunks, kKinds>::Row& sums) const {
    const int channel = tile_channel(c) + k;
    const SampleChannel of = this->channel_at(channel);
    const bool has_channel = channel < this->work_.channels;
    const Pack<float, 2> grad = spread.gradients(c, k, {v[k], v[2 + k]}, of.channel);
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float of_pixel[kGradientKinds]{};
      const float x = gradient_of_v<Chain>(grad.element[i], v[2 * i + k], of.channel, of.norm, of_pixel);
      if (this->owns(unit, row, i) && has_channel) sums.add(2 * c + k, of_pixel);
      v[2 * i + k] = this->place_.exists[i] && has_channel ? x * balance : 0.0f;
    }
  }

  __device__ static void split(const TileValues<kChunks>& grad, float scale, Words& high, Words& low) {
#pragma unroll
    for (int c = 0; c < kChunks; ++c) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float first = grad[c][2 * i] * scale;
        const float second = grad[c][2 * i + 1] * scale;
        high[c][i] = narrow_pair<__half>(first, second);
        const float2 rounded = half_values(high[c][i]);
        low[c][i] = narrow_pair<__half>(first - rounded.x, second - rounded.y);
      }
    }
  }

  // For the sum warps: what others sum too is zeros.
  __device__ void share(const StripUnit& unit, int row, int exponent, const Words& high, const Words& low) {
    if (lane_of_thread() == 0) this->shared_.grad_exponents[row % 2][threadIdx.x / kWarpThreads] = exponent;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int pixel = tile_pixel() + i;
      const bool owns = this->owns(unit, row, i);
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const int place = Base::Shared::chunk_place(c, pixel);
        const auto write = [&](int part, uint32_t word) {
          reinterpret_cast<uint32_t*>(
              &this->shared_.grads[row % 2][part][pixel][place])[lane_of_thread() % 4] = owns ? word : 0;
        };
        write(0, high[c][i]);
        if (this->strip_.parts == kMostParts) write(1, low[c][i]);
      }
    }
  }

  // Adds the row's products with each tap to the rows of the input's gradient that they belong to.
  template <bool kIsExact>
  __device__ void multiply(int exponent, const Words& high, const Words& low) {
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
          b[down] = this->shared_.gradient_weights[tile][down][across][lane_of_thread()];
        if constexpr (kIsExact) {
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
    exponent += scale_exponent(this->shared_.weight_largest);
    unscale_taps({exponent, exponent, exponent}, d, input_);
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
        store_pack(&this->shared_.sums[row % 2][across][tile_channel(0) + k][tile_pixel()],
                   Pack<float, 2>{{d[k], d[2 + k]}});
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        input_[0][across][i] = input_[1][across][i];
        input_[1][across][i] = input_[2][across][i];
        input_[2][across][i] = 0;
      }
    }
  }

  TileSums<kChunks, kKinds> sums_;
  float input_[kTaps][kTaps][4]{};  // of rows of the input's gradient, from the current one on
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

// The one pass of a chain with a norm, where all blocks together hold a sample in shared memory: a tile stays
// there until its sample's statistics are known, and is finished then. So each value of the conv is computed
// once.
//
// Tiles tell each other their moments by parts in memory, which the packing kernel has cleared: a part that
// has pixels is there. So this kernel may not overlap with that one, and starts as a cooperative launch: all
// blocks run at the same time. A sample may have no more tiles than there are groups of threads. Then nobody
// waits forever: a group finishes its tile before it keeps the next one, whose sample is a later one; so a
// tile waits only for tiles of its sample, whose groups wait only for earlier samples.
#pragma once

#include "conv_pass.cuh"
#include "conv_runs.cuh"
#include "tensor_reduce.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// One access of 16 bytes, at the L2, where all blocks meet: whoever reads a part sees all of it, or nothing.
__device__ inline void write_part(TilePart* to, const TilePart& part) {
  uint64_t words[2];
  memcpy(words, &part, sizeof(part));
  asm volatile("{ .reg .b128 x; mov.b128 x, {%1, %2}; st.relaxed.gpu.global.b128 [%0], x; }" ::"l"(to),
               "l"(words[0]), "l"(words[1])
               : "memory");
}

__device__ inline TilePart read_part(const TilePart* from) {
  uint64_t words[2];
  asm volatile("{ .reg .b128 x; ld.relaxed.gpu.global.b128 x, [%2]; mov.b128 {%0, %1}, x; }"
               : "=l"(words[0]), "=l"(words[1])
               : "l"(from)
               : "memory");
  TilePart part;
  memcpy(&part, words, sizeof(part));
  return part;
}

// What a group of threads has in its memory besides a tile's values.
struct KeptTile {
  float2 affine[kRows];  // the norm's weight and bias
  Norm<float> norms[kRows];
  Part<float> parts[2 * kRows];  // [channel][stacked row][half of the columns]
};

static_assert(sizeof(KeptTile) <= cuda::kKeptTileBytes);

// A thread's part in the statistics of samples whose tiles are spread over all blocks: its warp writes a
// tile's moments in a group of the norm, and adds up those of all tiles of a sample, always in the same
// order.
class SampleStatistics {
 public:
  __device__ SampleStatistics(const ConvProblem& p, KeptTile& kept, int64_t sample)
      : p_(p), kept_(kept), shape_(p.norm_shape) {
    const int warp = threadIdx.x % kGroupThreads / kWarpThreads;
    const int group = lane_of_thread() / shape_.lanes * kGroupWarps + warp;
    exists_ = group < shape_.groups;
    first_channel_ = exists_ ? group * shape_.channels : 0;
    parts_ = p.tile_parts + (sample * shape_.groups + (exists_ ? group : 0)) * shape_.tiles;
  }

  // Of a tile, from the kept parts, which all threads of the group wrote.
  __device__ void write(const Tile& tile) const {
    const int parts_per_channel = 2 * p_.tiling.stack;
    const Part<float>* const parts = kept_.parts + first_channel_ * parts_per_channel;
    const float shift = parts[0].mean;  // every tile has pixels of its first row in the first half
    // In double, for that part may be far from the others, in deviations.
    Sums<double> sums{};
    for (int i = lane(); i < shape_.channels * parts_per_channel; i += shape_.lanes)
      sums.add(parts[i], shift);
    __syncwarp();
    sums.add_lanes(shape_.lanes);
    const float count = float(shape_.channels * tile.rows * tile.cols);
    const double offset = sums.sum / count;
    const float m2 = maximum(0.0f, float(sums.squares - sums.sum * offset));
    if (exists_ && lane() == 0) write_part(parts_ + tile.part, TilePart{{count, float(shift + offset), m2}});
  }

  // Once all tiles of the sample have been measured. No lane goes a way of its own.
  __device__ void find_norms() const {
    constexpr int kBatch = 4;  // loads on their way at a time
    const int last = shape_.tiles - 1;
    // It is likely to come last: until then one line is asked for, not all.
    while (!__all_sync(~0u, is_there(read_part(parts_ + last)))) {
    }
    Sums<double> sums{};
    float shift;
    for (int first = 0; first <= last; first += kBatch * shape_.lanes) {
      TilePart part[kBatch];
      bool are_there;
      do {
        are_there = true;
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          part[k] = read_part(parts_ + min(first + k * shape_.lanes + lane(), last));
          are_there &= is_there(part[k]);
        }
      } while (!__all_sync(~0u, are_there));
      if (first == 0) shift = __shfl_sync(~0u, part[0].mean, lane_of_thread() & -shape_.lanes);
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        if (first + k * shape_.lanes + lane() > last) part[k].count = part[k].m2 = 0;
        sums.add(part[k], shift);
      }
    }
    sums.add_lanes(shape_.lanes);
    for (int i = lane(); exists_ && i < shape_.channels; i += shape_.lanes) {
      const int c = first_channel_ + i;
      const float2 affine = kept_.affine[c];
      kept_.norms[c] = norm_of<float>(sums, shift, shape_.share, p_.arguments.eps, affine.x, affine.y);
    }
  }

 private:
  // No tile has a part without pixels.
  __device__ static bool is_there(const TilePart& part) { return part.count != 0; }
  __device__ int lane() const { return lane_of_thread() & (shape_.lanes - 1); }

  const ConvProblem& p_;
  KeptTile& kept_;
  const NormShape& shape_;
  // Of this thread's group of the norm; where there is none it does the first one's work, and writes nothing.
  bool exists_;
  int first_channel_;
  TilePart* parts_;
};

template <class Chain, class Mode>
class ResidentPass : public PassBase {
 public:
  static constexpr bool kAllRowBlocks = false;
  static constexpr bool kMayFold = false;

  __device__ ResidentPass(const ConvProblem& problem, uint8_t* staging, uint8_t* carry, int barrier)
      : PassBase(problem, staging, carry, barrier) {
    const int c = thread();
    if (c < p_.tiling.out_channels)
      kept().affine[c] = {value_of<float>(p_.arguments.norm_weight, c, 1.0f),
                          value_of<float>(p_.arguments.norm_bias, c)};
  }

  __device__ void set_rows(const ThreadRows& rows) { channels_.load(p_, rows); }

  // The tile that stands in the memory has to leave it.
  __device__ void before_staging() {
    if (kept_tile_ != nullptr) finish_kept(*kept_tile_);
  }

  __device__ void end() { before_staging(); }

  // Keeps a tile and its moments.
  template <int kColumns>
  __device__ void finish(const Tile& tile, const ThreadRows& rows, float (&d)[kColumns / 2],
                         Scaling scaling) {
    kept_tile_ = &tile;
    compose<typename Chain::Start>(scaling, channels_);
    unscale(d, scaling);
    using Rest = typename Chain::Left::Pre;
    constexpr bool kKeepsFirst = Chain::kKeepsConv && !std::is_same_v<Rest, Sequence<>>;
    if constexpr (kKeepsFirst) keep<kColumns>(tile, rows, d);
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) d[i] = Rest::value(d[i], d[i], channels_.channel[i / 2 % 2]);
    measure(rows, d);
    sync();
    SampleStatistics(p_, kept(), tile.sample).write(tile);  // as early as may be: others wait for it
    if constexpr (!kKeepsFirst) keep<kColumns>(tile, rows, d);
  }

 private:
  using Channels = ThreadChannels<kReadChannel<typename Chain::Pre>>;
  static constexpr bool kReadsLater = kReadChannel<typename Chain::Post, typename Chain::Final> ||
                                      (Chain::kKeepsConv && kReadChannel<typename Chain::Pre>);

  __device__ KeptTile& kept() const { return *reinterpret_cast<KeptTile*>(carry_); }

  template <int kColumns>
  __device__ void keep(const Tile& tile, const ThreadRows& rows, const float (&d)[kColumns / 2]) {
    scatter<kColumns>(p_.tiling, tile, rows, d, staging(), run_pitch<float>(p_.tiling), tile.cols, 1);
  }

  template <int kCount>
  __device__ void measure(const ThreadRows& rows, float (&d)[kCount]) {
    const RowMoments moments(rows.pixels, d);
    if (threadIdx.x % 4 != 0) return;
    const int stack = p_.tiling.stack;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int part = (rows.channel(k) * stack + rows.stacked(p_.tiling)) * 2 + half_of_thread();
      kept().parts[part] = {moments.count, moments.mean[k], moments.m2[k]};
    }
  }

  __device__ void finish_kept(const Tile& tile) {
    SampleStatistics(p_, kept(), tile.sample).find_norms();
    sync();
    if constexpr (Chain::Reduce::kReducesChannels) {
      reduce(tile);
    } else if (has_runs(p_.output)) {
      store(tile);
    } else {
      store_pixels(tile);
    }
    sync();  // before others write there
  }

  __device__ Channel<float> channel_at(int c) const {
    Channel<float> channel{};
    if constexpr (kReadsLater) channel = make_channel<float>(p_.arguments, c);
    set_norm(channel, kept().norms[c]);
    return channel;
  }

  __device__ void store(const Tile& tile) {
    const Tensor& output = p_.output;
    const int64_t size = output.dtype == DType::kFloat32 ? sizeof(float) : sizeof(typename Mode::In);
    const int64_t address = reinterpret_cast<intptr_t>(output.data) / size;
    for_each_run(p_, tile, [&](int first, int64_t offset, int length) {
      const int64_t steps = first | (address + offset) | output.stride[1] | length;
      if (steps % 4 == 0) {
        store_runs<4>(first, offset, length);
      } else if (steps % 2 == 0) {
        store_runs<2>(first, offset, length);
      } else {
        store_runs<1>(first, offset, length);
      }
    });
  }

  template <int kVector>
  __device__ void store_runs(int first, int64_t offset, int length) {
    const int last = p_.tiling.out_channels - 1;
#pragma unroll 1
    for (int i = thread() % kTeamThreads * kVector; i < length; i += kTeamThreads * kVector) {
      // Two channels at a time, for their loads to wait together; the last one may be there twice.
#pragma unroll 1
      for (int c = team_of_thread(); c <= last; c += 2 * kTeams) {
        const int other = min(c + kTeams, last);
        const float* const run = staging() + first + i;
        const int pitch = run_pitch<float>(p_.tiling);
        Pack<float, kVector> values[2]{load_pack<kVector>(run + c * pitch),
                                       load_pack<kVector>(run + other * pitch)};
        finish_vector(values[0], c, offset + i);
        finish_vector(values[1], other, offset + i);
      }
    }
  }

  // offset: of the vector's place in the first channel.
  template <int kVector>
  __device__ void finish_vector(Pack<float, kVector>& values, int c, int64_t offset) {
    const Channel<float> channel = channel_at(c);
#pragma unroll
    for (float& x : values.element) {
      const float y = Chain::pointwise(x, channel);
      x = Chain::Final::value(y, y, channel);
    }
    OutputMemory<typename Mode::In>(p_.output).store(offset + c * p_.output.stride[1], values);
  }

  // For channels that follow each other in memory: lanes have 8 channels of 4 pixels. They meet in banks
  // twice, and in float32 write whole sectors.
  __device__ void store_pixels(const Tile& tile) {
    constexpr int kPixels = 4;
    const OutputMemory<typename Mode::In> memory(p_.output);
    const int pitch = run_pitch<float>(p_.tiling);
    const int first = warp() * kPixels + lane_of_thread() % kPixels;
#pragma unroll 1
    for (int c = lane_of_thread() / kPixels; c < p_.tiling.out_channels; c += kWarpThreads / kPixels) {
      const Channel<float> channel = channel_at(c);
      for (int pixel = first; pixel < tile.rows * tile.cols; pixel += kWarps * kPixels) {
        const float y = Chain::pointwise(staging()[c * pitch + pixel], channel);
        memory.store(offset_of(tile, pixel) + c * p_.output.stride[1],
                     Pack<float, 1>{Chain::Final::value(y, y, channel)});
      }
    }
  }

  // Of a pixel's first channel, in the output.
  __device__ int64_t offset_of(const Tile& tile, int pixel) const {
    const int row = pixel / tile.cols;
    return offset_in_output(p_, tile, row) + (pixel - row * tile.cols) * p_.output.stride[3];
  }

  // Two neighbouring lanes have two pixels, and half of the channels each: in turns of two, which lie in
  // other banks than the other lane's.
  __device__ void reduce(const Tile& tile) {
    constexpr int kBatch = 8;  // channels of a lane
    constexpr int kTurn = 2 * kBatch;
    const int channels = p_.tiling.out_channels;
    const int pixels = tile.rows * tile.cols;
    const int share = lane_of_thread() % 2;
    const OutputMemory<typename Mode::In> memory(p_.output);
#pragma unroll 1
    for (int first = warp() * kWarpThreads; first < pixels; first += kGroupThreads) {
      const int pixel = first + lane_of_thread() / 2 * 2;
      LogSumExp<float> sums[2];
      int c = 0;
#pragma unroll 1
      for (; c + kTurn <= channels; c += kTurn) {
        float x[2][kBatch];
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          const float2 y = value_of_pixels(pixel, c + 2 * share + k / 2 * 4 + k % 2);
          x[0][k] = y.x;
          x[1][k] = y.y;
        }
        sums[0].add(x[0]);
        sums[1].add(x[1]);
      }
#pragma unroll 1
      for (c += share; c < channels; c += 2) {
        const float2 y = value_of_pixels(pixel, c);
        sums[0].add({y.x});
        sums[1].add({y.y});
      }
      __syncwarp();
      sums[0].add_lanes(2);
      sums[1].add_lanes(2);
      const float sum = share == 0 ? sums[0].value() : sums[1].value();
      if (pixel + share < pixels)
        memory.store(offset_of(tile, pixel + share),
                     Pack<float, 1>{Chain::Final::value(sum, sum, Channel<float>{})});
    }
  }

  // Of a pixel and the next.
  __device__ float2 value_of_pixels(int pixel, int c) const {
    const float2 x = *reinterpret_cast<const float2*>(staging() + c * run_pitch<float>(p_.tiling) + pixel);
    const Channel<float> channel = channel_at(c);
    return {Chain::pointwise(x.x, channel), Chain::pointwise(x.y, channel)};
  }

  Channels channels_;
  const Tile* kept_tile_ = nullptr;
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

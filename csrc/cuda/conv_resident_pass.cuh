// The one pass of a chain with a norm, where all blocks together hold a sample in shared memory: a tile stays
// there until its sample's statistics are known, and is finished then. So each value of the conv is computed
// once.
//
// All blocks must run at the same time, and a sample may have no more tiles than there are groups of threads.
// Then nobody waits forever: a group finishes its tile before it keeps the next one, whose sample is a later
// one; so a tile waits only for tiles of its sample, whose groups wait only for earlier samples.
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

// Once it has been written: no tile has a part without pixels.
__device__ inline TilePart wait_for_part(const TilePart* from) {
  TilePart part;
  do {
    part = read_part(from);
  } while (part.count == 0);
  return part;
}

// What a group of threads has of a tile besides its values, in its memory.
struct KeptTile {
  Tile tile;
  Norm<float> norms[kRows];
  Part<float> parts[kRows][2];  // of the rows of accumulators, in each half of the columns
};

static_assert(sizeof(KeptTile) <= cuda::kKeptTileBytes);

// Statistics of samples whose tiles are spread over all blocks. Each warp has some of the norm's groups: it
// writes a tile's moments in them, and adds up those of all tiles of a sample, always in the same order.
class SampleStatistics {
 public:
  __device__ explicit SampleStatistics(const ConvProblem& problem)
      : p_(problem), groups_(int(problem.arguments.num_groups)) {
    constexpr int kWarps = kGroupThreads / kWarpThreads;
    while (lanes_ * ((groups_ + kWarps - 1) / kWarps) > kWarpThreads) lanes_ /= 2;
    group_ = lane_of_thread() / lanes_ * kWarps + threadIdx.x % kGroupThreads / kWarpThreads;
    lane_ = lane_of_thread() % lanes_;
  }

  // parts: the tile's, written by all threads of the group.
  __device__ void write(const Tile& tile, const Part<float> (&parts)[kRows][2]) const {
    const ConvTiling& t = p_.tiling;
    const int first = exists() ? group_ * group_channels() : 0;
    const float shift = parts[first][0].mean;  // every tile has pixels of its first row in the first half
    Sums<float> sums{};
    for (int i = lane_; i < 2 * t.stack * group_channels(); i += lanes_) {
      const int row = i / 2;
      const int stacked = row & (t.stack - 1);
      sums.add(parts[stacked * t.stack_channels + first + row / t.stack][i % 2], shift);
    }
    sums.add_lanes(lanes_);
    const float offset = sums.sum * reciprocal(sums.count);
    const float m2 = maximum(0.0f, fmaf(-sums.sum, offset, sums.squares));
    if (exists() && lane_ == 0)
      write_part(parts_of(tile.sample) + tile.part, TilePart{{sums.count, shift + offset, m2}});
  }

  // Writes the norms of this warp's groups, once all tiles of the sample have been measured.
  __device__ void find_norms(int64_t sample, Norm<float>* norms) const {
    const TilePart* const parts = parts_of(sample);
    const int tiles = tiles_per_sample(p_.tiling);
    Sums<double> sums{};
    double shift = 0;
    if (exists()) {
      wait_for_part(parts + tiles - 1);  // likely to be the last: until then one line is asked for, not all
      shift = wait_for_part(parts).mean;
#pragma unroll 4
      for (int i = lane_; i < tiles; i += lanes_) sums.add(wait_for_part(parts + i), shift);
    }
    sums.add_lanes(lanes_);
    if (!exists()) return;
    for (int i = lane_; i < group_channels(); i += lanes_) {
      const int c = group_ * group_channels() + i;
      norms[c] = norm_of<float>(sums, shift, p_.arguments, c);
    }
  }

 private:
  __device__ bool exists() const { return group_ < groups_; }
  __device__ int group_channels() const { return p_.tiling.out_channels / groups_; }
  __device__ TilePart* parts_of(int64_t sample) const {
    return p_.tile_parts + (sample * groups_ + group_) * tiles_per_sample(p_.tiling);
  }

  const ConvProblem& p_;
  const int groups_;
  int lanes_ = kWarpThreads;  // that share a group
  int group_, lane_;          // this thread's, which need not exist, and its place among those lanes
};

template <class Chain, class Mode>
class ResidentPass : public PassBase {
 public:
  static constexpr bool kAllRowBlocks = false;
  static constexpr bool kMayFold = false;

  __device__ ResidentPass(const ConvProblem& problem, uint8_t* staging, uint8_t* carry, int barrier)
      : PassBase(problem, staging, carry, barrier), statistics_(problem) {}

  __device__ void prepare(const Tile& tile, const ThreadRows& rows) {
    channels_.load(p_, tile, rows, nullptr);
  }

  // The tile that stands in the memory has to leave it.
  __device__ void before_staging() {
    if (keeps_) finish_kept();
  }

  __device__ void end() { before_staging(); }

  // Keeps a tile and its moments.
  template <int kColumns>
  __device__ void finish(const Tile& tile, const ThreadRows& rows, float (&d)[kColumns / 2],
                         Scaling scaling) {
    keeps_ = true;
    if (thread() == 0) kept().tile = tile;
    compose<typename Chain::Start>(scaling, channels_);
    unscale(d, scaling);
    using Rest = typename Chain::Left::Pre;
    constexpr bool kKeepsFirst = Chain::kKeepsConv && !std::is_same_v<Rest, Sequence<>>;
    if constexpr (kKeepsFirst) keep<kColumns>(tile, rows, d);
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) d[i] = Rest::value(d[i], d[i], channels_.channel[i / 2 % 2]);
    measure(rows, d);
    sync();
    statistics_.write(tile, kept().parts);  // as early as may be: others wait for it
    if constexpr (!kKeepsFirst) keep<kColumns>(tile, rows, d);
  }

 private:
  using Channels = ThreadChannels<kReadChannel<typename Chain::Pre>>;
  static constexpr bool kReadsLater = kReadChannel<typename Chain::Post, typename Chain::Final>;

  __device__ KeptTile& kept() const { return *reinterpret_cast<KeptTile*>(carry_); }

  template <int kColumns>
  __device__ void keep(const Tile& tile, const ThreadRows& rows, const float (&d)[kColumns / 2]) {
    scatter<kColumns>(p_.tiling, tile, rows, d, staging(), run_pitch<float>(p_.tiling), tile.cols, 1);
  }

  template <int kCount>
  __device__ void measure(const ThreadRows& rows, float (&d)[kCount]) {
    const RowMoments moments(rows.pixels, d);
    if (threadIdx.x % 4 != 0) return;
#pragma unroll
    for (int k = 0; k < 2; ++k)
      kept().parts[staging_row(k)][half_of_thread()] = {moments.count, moments.mean[k], moments.m2[k]};
  }

  __device__ void finish_kept() {
    const Tile tile = kept().tile;
    statistics_.find_norms(tile.sample, kept().norms);
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
    for_each_run(p_, tile, [&](int first, int64_t offset, int length) {
      const int64_t steps = first | offset | output.stride[1] | length;
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
    const OutputMemory<typename Mode::In> memory(p_.output);
    const int pitch = run_pitch<float>(p_.tiling);
#pragma unroll 1
    for (int c = team_of_thread(); c < p_.tiling.out_channels; c += kTeams) {
      const Channel<float> channel = channel_at(c);
      const float* run = staging() + c * pitch + first;
      const int64_t to = offset + c * p_.output.stride[1];
#pragma unroll 2
      for (int i = thread() % kTeamThreads * kVector; i < length; i += kTeamThreads * kVector) {
        Pack<float, kVector> values = load_pack<kVector>(run + i);
#pragma unroll
        for (float& x : values.element) {
          const float y = Chain::pointwise(x, channel);
          x = Chain::Final::value(y, y, channel);
        }
        memory.store(to + i, values);
      }
    }
  }

  // For channels that follow each other in memory: lanes have 8 channels of 4 pixels, which lie in few banks
  // twice, and are whole sectors of the output.
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

  // A thread has some pixels, all channels of them.
  __device__ void reduce(const Tile& tile) {
    const int pitch = run_pitch<float>(p_.tiling);
    const OutputMemory<typename Mode::In> memory(p_.output);
#pragma unroll 1
    for (int pixel = thread(); pixel < tile.rows * tile.cols; pixel += kGroupThreads) {
      const float* of_pixel = staging() + pixel;
      const float x = channel_logsumexp<float>(p_.tiling.out_channels, 0, 1, [&](int c) {
                        return Chain::pointwise(of_pixel[c * pitch], channel_at(c));
                      }).value();
      const Pack<float, 1> y{Chain::Final::value(x, x, Channel<float>{})};
      memory.store(offset_of(tile, pixel), y);
    }
  }

  const SampleStatistics statistics_;
  Channels channels_;
  bool keeps_ = false;
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

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

// Adds 1; returns what was there. What this warp wrote before is seen by who reads the sum, and the reverse.
__device__ inline int arrive_globally(int* counter) {
  int before = 0;
  __syncwarp();
  if (lane_of_thread() == 0)
    asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return __shfl_sync(~0u, before, 0);
}

__device__ inline void wait_globally(const int* counter, int arrivals) {
  if (lane_of_thread() == 0) {
    int arrived;
    do {
      asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(arrived) : "l"(counter) : "memory");
    } while (arrived < arrivals);
  }
  __syncwarp();
}

// Around the L1: another block wrote it.
template <class T>
__device__ T load_from_l2(const T* from) {
  static_assert(sizeof(T) == sizeof(float4), "one load");
  const float4 x = __ldcg(reinterpret_cast<const float4*>(from));
  T result;
  memcpy(&result, &x, sizeof(T));
  return result;
}

// What a group of threads has of a tile besides its values, in its memory.
struct KeptTile {
  Tile tile;
  Norm<float> norms[kRows];
  Part<float> parts[kRows][2];  // of the rows of accumulators, in each half of the columns
};

static_assert(sizeof(KeptTile) <= cuda::kKeptTileBytes);

// Statistics of samples whose tiles are spread over all blocks. Each warp has some of the norm's groups: of a
// tile it writes their moments, and whichever warp comes last of all that have the same groups finds their
// norm.
class SampleStatistics {
 public:
  __device__ explicit SampleStatistics(const ConvProblem& problem)
      : p_(problem), groups_(int(problem.arguments.num_groups)) {
    while (lanes_ * ((groups_ + kWarps - 1) / kWarps) > kWarpThreads) lanes_ /= 2;
    group_ = lane_of_thread() / lanes_ * kWarps + warp();
    lane_ = lane_of_thread() % lanes_;
  }

  // parts: the tile's, written by all threads of the group.
  __device__ void add(const Tile& tile, const Part<float> (&parts)[kRows][2]) const {
    if (warp() >= groups_) return;
    const int tiles = tiles_per_sample(p_.tiling);
    TilePart* const of_sample = p_.tile_parts + int64_t(tile.sample) * groups_ * tiles;
    const TilePart sums = part_of(parts);
    if (group_ < groups_ && lane_ == 0) of_sample[group_ * tiles + tile.part] = sums;
    int* const arrivals = p_.arrivals + tile.sample * kArrivals;
    if (arrive_globally(arrivals + warp()) + 1 < tiles) return;
    write_norms(tile.sample, of_sample + group_ * tiles, tiles);
    arrive_globally(arrivals + kWarps);
  }

  __device__ void wait(int64_t sample) const {
    wait_globally(p_.arrivals + sample * kArrivals + kWarps, min(kWarps, groups_));
  }

  static constexpr int kWarps = kGroupThreads / kWarpThreads;
  // Arrivals: tiles at each warp's groups, then warps whose groups' norm is written.
  static_assert(kArrivals == kWarps + 1);

 private:
  __device__ static int warp() { return threadIdx.x % kGroupThreads / kWarpThreads; }

  // In the group that these lanes have; each gets it.
  __device__ TilePart part_of(const Part<float> (&parts)[kRows][2]) const {
    const ConvTiling& t = p_.tiling;
    const int group_channels = t.out_channels / groups_;
    const int first = min(group_, groups_ - 1) * group_channels;
    const float shift = parts[first][0].mean;  // every tile has pixels of its first row in the first half
    Sums<float> sums{};
    for (int i = lane_; i < 2 * t.stack * group_channels; i += lanes_) {
      const int row = i / 2;
      const int stacked = row & (t.stack - 1);
      sums.add(parts[stacked * t.stack_channels + first + row / t.stack][i % 2], shift);
    }
    sums.add_lanes(lanes_);
    const float offset = sums.sum * reciprocal(sums.count);
    return {sums.count, shift + offset, maximum(0.0f, fmaf(-sums.sum, offset, sums.squares))};
  }

  __device__ void write_norms(int64_t sample, const TilePart* parts, int tiles) const {
    const bool exists = group_ < groups_;
    const double shift = exists ? load_from_l2(parts).mean : 0;
    Sums<double> sums{};
    if (exists) {
#pragma unroll 4
      for (int i = lane_; i < tiles; i += lanes_) sums.add(load_from_l2(parts + i), shift);
    }
    sums.add_lanes(lanes_);
    if (!exists) return;
    const int channels = p_.tiling.out_channels;
    const int group_channels = channels / groups_;
    for (int i = lane_; i < group_channels; i += lanes_) {
      const int c = group_ * group_channels + i;
      p_.norms[sample * channels + c] = norm_of<float>(sums, shift, p_.arguments, c);
    }
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
    if constexpr (Chain::kKeepsConv) keep<kColumns>(tile, rows, d);
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i)
      d[i] = Chain::Left::Pre::value(d[i], d[i], channels_.channel[i / 2 % 2]);
    if constexpr (!Chain::kKeepsConv) keep<kColumns>(tile, rows, d);
    measure(rows, d);
    sync();
    statistics_.add(tile, kept().parts);
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
    const int channels = p_.tiling.out_channels;
    statistics_.wait(tile.sample);
    if (thread() < channels)
      kept().norms[thread()] = load_from_l2(p_.norms + tile.sample * channels + thread());
    sync();
    if constexpr (Chain::Reduce::kReducesChannels) {
      reduce(tile);
    } else {
      store(tile);
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

  // A thread has some pixels, all channels of them.
  __device__ void reduce(const Tile& tile) {
    const int pitch = run_pitch<float>(p_.tiling);
    const int64_t* stride = p_.output.stride;
    const OutputMemory<typename Mode::In> memory(p_.output);
#pragma unroll 1
    for (int pixel = thread(); pixel < tile.rows * tile.cols; pixel += kGroupThreads) {
      const float* of_pixel = staging() + pixel;
      const float x = channel_logsumexp<float>(p_.tiling.out_channels, 0, 1, [&](int c) {
                        return Chain::pointwise(of_pixel[c * pitch], channel_at(c));
                      }).value();
      const Pack<float, 1> y{Chain::Final::value(x, x, Channel<float>{})};
      const int row = pixel / tile.cols;
      const int col = pixel - row * tile.cols;
      memory.store(tile.sample * stride[0] + (tile.row + row) * stride[2] + (tile.col + col) * stride[3], y);
    }
  }

  const SampleStatistics statistics_;
  Channels channels_;
  bool keeps_ = false;
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

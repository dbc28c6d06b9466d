// The one pass of a chain with a norm, where all blocks together hold a sample in shared memory: a tile stays
// there until its sample's statistics are known, and is finished then. So each value of the conv is computed
// once.
//
// Tiles wait for each other's moments, in memory that the packing kernel has cleared. So this kernel may not
// overlap with that one, and starts as a cooperative launch: all blocks run at the same time. A sample may
// have no more tiles than there are groups of threads. Then nobody waits forever: a group finishes its tile
// before it keeps the next one, whose sample is a later one; so a tile waits only for tiles of its sample,
// whose groups wait only for earlier samples.
#pragma once

#include "cuda/device/reduce.cuh"
#include "pass.cuh"
#include "runs.cuh"
#include "sample_statistics.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

template <class Chain, class Mode>
class ResidentPass : public PassBase {
 public:
  static constexpr bool kAllRowBlocks = false;
  static constexpr bool kMayFold = false;

  __device__ ResidentPass(const ConvProblem& problem, uint8_t* staging, uint8_t* carry, int barrier)
      : PassBase(problem, staging, carry, barrier) {
    const int c = thread();
    if (c < p_.tiling.out_channels)
      kept().affine[c] = {value_of<float>(p_.arguments.parameters[kNormWeight], c, 1.0f),
                          value_of<float>(p_.arguments.parameters[kNormBias], c)};
  }

  __device__ void set_rows(const ThreadRows& rows) { channels_.load(p_, rows); }

  // The tile that stands in the memory has to leave it.
  __device__ void before_staging() {
    if (kept_tile_ != nullptr) finish_kept(*kept_tile_);
  }

  __device__ void end() { before_staging(); }

  // Keeps a tile and its moments.
  __device__ void finish(Fragment v) {
    kept_tile_ = &v.tile;
    compose<typename Chain::Start>(v, channels_);
    v.unscale();
    using Rest = typename Chain::Left::Pre;
    constexpr bool kKeepsFirst = Chain::kKeepsConv && !std::is_same_v<Rest, Sequence<>>;
    if constexpr (kKeepsFirst) keep(v);
    v.for_each([this](float& x, int k) { x = Rest::value(x, x, channels_.channel[k]); });
    measure(v);
    sync();
    SampleStatistics(p_, kept(), v.tile.sample).write(v.tile);  // as early as may be: others wait for it
    if constexpr (!kKeepsFirst) keep(v);
  }

 private:
  using Channels = ThreadChannels<kReadChannel<typename Chain::Pre>>;
  static constexpr bool kReadsLater = kReadChannel<typename Chain::Post, typename Chain::Final> ||
                                      (Chain::kKeepsConv && kReadChannel<typename Chain::Pre>);

  __device__ KeptTile& kept() const { return *reinterpret_cast<KeptTile*>(carry_); }

  __device__ void keep(const Fragment& v) {
    v.scatter(staging(), run_pitch<float>(p_.tiling), v.tile.cols, 1);
  }

  __device__ void measure(const Fragment& v) {
    const RowMoments moments(v);
    if (!Fragment::is_writer()) return;
    v.for_each_part(
        [&](int k, int part) { kept().parts[part] = {moments.count, moments.mean[k], moments.m2[k]}; });
  }

  __device__ void finish_kept(const Tile& tile) {
    SampleStatistics(p_, kept(), tile.sample).find_norms(tile);
    sync();
    if constexpr (Chain::Reduce::kReducesChannels) {
      reduce(tile);
    } else if (p_.output.dtype == DType::kFloat32) {
      store<float>(tile);
    } else if constexpr (Mode::kParts == 1) {
      store<typename Mode::Element>(tile);
    }
    sync();  // before others write there
  }

  template <class Out>
  __device__ void store(const Tile& tile) {
    has_runs(p_.output) ? store_runs<Out>(tile) : store_pixels<Out>(tile);
  }

  __device__ Channel<float> channel_at(int c) const {
    Channel<float> channel{};
    if constexpr (kReadsLater) channel = make_channel<float>(p_.arguments, c);
    set_norm(channel, kept().norms[c]);
    return channel;
  }

  template <class Out>
  __device__ void store_runs(const Tile& tile) {
    const Tensor& output = p_.output;
    const int64_t address = reinterpret_cast<intptr_t>(output.data) / sizeof(Out);
    for_each_run(p_, tile, [&](int first, int64_t offset, int length) {
      const int64_t steps = first | (address + offset) | output.stride[1] | length;
      if (steps % 4 == 0) {
        store_vectors<Out, 4>(first, offset, length);
      } else if (steps % 2 == 0) {
        store_vectors<Out, 2>(first, offset, length);
      } else {
        store_vectors<Out, 1>(first, offset, length);
      }
    });
  }

  template <class Out, int kVector>
  __device__ void store_vectors(int first, int64_t offset, int length) {
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
        finish_vector<Out>(values[0], c, offset + i);
        finish_vector<Out>(values[1], other, offset + i);
      }
    }
  }

  // offset: of the vector's place in the first channel.
  template <class Out, int kVector>
  __device__ void finish_vector(Pack<float, kVector>& values, int c, int64_t offset) {
    const Channel<float> channel = channel_at(c);
#pragma unroll
    for (float& x : values.element) {
      const float y = Chain::pointwise(x, channel);
      x = Chain::Final::value(y, y, channel);
    }
    store_as<Out>(p_.output.data, offset + c * p_.output.stride[1], values);
  }

  // For channels that follow each other in memory: lanes have 8 channels of 4 pixels. They meet in banks
  // twice, and in float32 write whole sectors. A lane's next pixel is found by sums: a division for each
  // would take longer than all else of a value.
  template <class Out>
  __device__ void store_pixels(const Tile& tile) {
    constexpr int kPixels = 4;
    constexpr int kStep = kWarps * kPixels;
    const int64_t* stride = p_.output.stride;
    const int cols = tile.cols;
    const int pixels = tile.rows * cols;
    const int first = warp() * kPixels + lane_of_thread() % kPixels;
    const int64_t first_offset = offset_of(tile, first);
    const int64_t step = kStep / cols * stride[2] + kStep % cols * stride[3];
    const int64_t to_next_row = stride[2] - cols * stride[3];
#pragma unroll 1
    for (int c = lane_of_thread() / kPixels; c < p_.tiling.out_channels; c += kWarpThreads / kPixels) {
      const Channel<float> channel = channel_at(c);
      const float* const values = staging() + c * run_pitch<float>(p_.tiling);
      int64_t offset = first_offset + c * stride[1];
      int col = first % cols;
      for (int pixel = first; pixel < pixels; pixel += kStep) {
        const float y = Chain::pointwise(values[pixel], channel);
        store_as<Out>(p_.output.data, offset, Pack<float, 1>{Chain::Final::value(y, y, channel)});
        offset += step;
        col += kStep % cols;
        if (col >= cols) {
          col -= cols;
          offset += to_next_row;
        }
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
    static_assert(kIsLogSumExp<typename Chain::Reduce>);
    constexpr int kBatch = 8;  // channels of a lane
    constexpr int kTurn = 2 * kBatch;
    const int channels = p_.tiling.out_channels;
    const int pixels = tile.rows * tile.cols;
    const int share = lane_of_thread() % 2;
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
        store_output<NarrowOutput<Mode>>(p_.output, offset_of(tile, pixel + share),
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

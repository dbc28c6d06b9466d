// The pass that stores every value of a chain.
#pragma once

#include <type_traits>

#include "conv_pass.cuh"
#include "vector_access.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// Stores every value of the chain.
template <class Chain, class Mode>
class StorePass : public PassBase {
 public:
  static constexpr bool kAllRowBlocks = false;
  using PassBase::PassBase;

  __device__ void prepare(const Tile& tile, const ThreadRows& rows) {
    channels_.load(p_, tile, rows, Chain::kNeedsStatistics ? p_.norms : nullptr);
  }

  template <int kColumns>
  __device__ void finish(const Tile& tile, const ThreadRows& rows, float (&d)[kColumns / 2],
                         Scaling scaling) {
    compose<typename Chain::Start>(scaling, channels_);
    unscale(d, scaling);
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
      const Channel<float>& channel = channels_.channel[i / 2 % 2];
      const float y = Chain::Left::value(d[i], channel);
      d[i] = Chain::Final::value(y, y, channel);
    }
    using In = typename Mode::In;
    if (std::is_same_v<In, float> || p_.output.dtype == DType::kFloat32) {
      store<kColumns, float>(tile, rows, d);
    } else {
      store<kColumns, In>(tile, rows, d);
    }
  }

  __device__ void end() { wait_for_bulk_copies(); }

 private:
  // Where the rows of a channel follow each other in the output, a tile's are one run of each channel: it is
  // put together in shared memory and written as whole lines. Else each thread writes what it has.
  template <int kColumns, class Out>
  __device__ void store(const Tile& tile, const ThreadRows& rows, const float (&d)[kColumns / 2]) {
    const Tensor& output = p_.output;
    if (output.stride[3] != 1 || output.stride[2] != output.size[3]) {
      // Within a sample offsets fit in ints.
      return scatter<kColumns, Out>(tile, rows, d, static_cast<Out*>(output.data) + offset_of(tile, 0),
                                    int(output.stride[1]), int(output.stride[2]), int(output.stride[3]));
    }
    const ConvTiling& t = p_.tiling;
    Out* run = reinterpret_cast<Out*>(staging_);
    const int pitch = run_pitch<Out>();
    scatter<kColumns, Out>(tile, rows, d, run, pitch, tile.cols, 1);
    fence_async_proxy();
    sync();
    const int channels = min(t.stack_channels, t.out_channels - tile.row_block * kRows);
    const bool whole_rows = tile.cols == t.out_size[1];
    const int runs = whole_rows ? 1 : tile.rows;
    const int length = whole_rows ? tile.rows * tile.cols : tile.cols;
    for (int r = 0; r < runs; ++r) {
      Out* to = static_cast<Out*>(output.data) + offset_of(tile, r);
      write_runs(run + r * tile.cols, pitch, to, output.stride[1], channels, length);
    }
  }

  __device__ int64_t offset_of(const Tile& tile, int row) const {
    const int64_t* stride = p_.output.stride;
    return tile.sample * stride[0] + int64_t(tile.row_block) * kRows * stride[1] +
           (tile.row + row) * stride[2] + tile.col * stride[3];
  }

  // Elements from one channel's run to the next: whole vectors, and so many that neighbours lie in other
  // banks.
  template <class Out>
  __device__ int run_pitch() const {
    constexpr int kBanks = 128 / int(sizeof(Out));
    constexpr int kShift = 16 / int(sizeof(Out)) * 2;
    const int length = p_.tiling.tile_rows * p_.tiling.tile_cols;
    return (length - kShift + kBanks - 1) / kBanks * kBanks + kShift;
  }

  // Each thread's values to where they belong.
  template <int kColumns, class Out>
  __device__ void scatter(const Tile& tile, const ThreadRows& rows, const float (&d)[kColumns / 2], Out* to,
                          int channel_stride, int row_stride, int col_stride) {
    const ConvTiling& t = p_.tiling;
    Out* of_row[2];
#pragma unroll
    for (int k = 0; k < 2; ++k)
      of_row[k] = to + (rows.channel(k) - tile.row_block * kRows) * channel_stride +
                  rows.stacked(t) * row_stride + lane_of_thread() % 4 * 2 * col_stride;
    const bool pairs = col_stride == 1 && row_stride % 2 == 0 && channel_stride % 2 == 0 &&
                       tile.cols % 2 == 0 && reinterpret_cast<uintptr_t>(to) % (2 * sizeof(Out)) == 0 &&
                       rows.channel(1) < t.out_channels;
    if (pairs && t.pitch % kColumns == 0) {
      // A thread's columns lie in one row: the usual case, and the fastest.
      const int slot = t.by_pitch.divide(half_of_thread() * kColumns);
      const int start = slot * t.stack * row_stride + half_of_thread() * kColumns - slot * t.pitch;
#pragma unroll
      for (int j = 0; j < kColumns / 8; ++j) {
        if (!rows.pixels.first(j)) continue;
#pragma unroll
        for (int k = 0; k < 2; ++k)
          write_pair(of_row[k] + start + 8 * j, d[4 * j + 2 * k], d[4 * j + 2 * k + 1]);
      }
      return;
    }
    for_each_block<kColumns>(t, [&](int j, int row, int col) {
      const int place = row * t.stack * row_stride + col * col_stride;
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        Out* pixel = of_row[k] + place;
        const bool exists = rows.channel(k) < t.out_channels;
        if (exists && rows.pixels.first(j)) pixel[0] = narrow<Out>(d[4 * j + 2 * k]);
        if (exists && rows.pixels.second(j)) pixel[col_stride] = narrow<Out>(d[4 * j + 2 * k + 1]);
      }
    });
  }

  __device__ static void write_pair(float* to, float x, float y) {
    *reinterpret_cast<float2*>(to) = make_float2(x, y);
  }
  __device__ static void write_pair(__half* to, float x, float y) {
    *reinterpret_cast<__half2*>(to) = __floats2half2_rn(x, y);
  }
  __device__ static void write_pair(__nv_bfloat16* to, float x, float y) {
    *reinterpret_cast<__nv_bfloat162*>(to) = __floats2bfloat162_rn(x, y);
  }

  // A run of each channel, from shared memory to the output: by the copy engine, while this group goes on, or
  // by the widest vectors that all runs are made of.
  template <class Out>
  __device__ void write_runs(const Out* from, int pitch, Out* to, int64_t stride, int channels, int length) {
    const uintptr_t bytes = reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to) |
                            uintptr_t(stride * sizeof(Out)) | uintptr_t(length * sizeof(Out));
    if (bytes % 16 == 0) {
#if __CUDA_ARCH__ >= 900
      bulk_copy_runs(from, pitch, to, stride, channels, length * int(sizeof(Out)));
#else
      copy_runs<16 / sizeof(Out)>(from, pitch, to, stride, channels, length);
#endif
    } else if (bytes % 8 == 0) {
      copy_runs<8 / sizeof(Out)>(from, pitch, to, stride, channels, length);
    } else {
      copy_runs<1>(from, pitch, to, stride, channels, length);
    }
  }

  // Lanes of a warp are served one after the other: each warp has a few channels.
  template <class Out>
  __device__ void bulk_copy_runs(const Out* from, int pitch, Out* to, int64_t stride, int channels,
                                 int bytes) {
    const int c = warp() * kWarpChannels + lane_of_thread();
    if (lane_of_thread() >= kWarpChannels || c >= channels) return;
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to + c * stride),
                 "r"(shared_address(from + c * pitch)), "r"(bytes)
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
  }

  // Two warps have every kTeams-th channel: one vector each of most runs.
  template <int kVector, class Out>
  __device__ void copy_runs(const Out* from, int pitch, Out* to, int64_t stride, int channels, int length) {
    constexpr int kTeamThreads = 2 * kWarpThreads;
    constexpr int kTeams = kGroupThreads / kTeamThreads;
    const int team = thread() / kTeamThreads;
    from += team * pitch;
    to += team * stride;
#pragma unroll 1
    for (int i = thread() % kTeamThreads * kVector; i < length; i += kTeamThreads * kVector) {
      const Out* run = from + i;
      Out* out = to + i;
#pragma unroll 4
      for (int c = team; c < channels; c += kTeams, run += kTeams * pitch, out += kTeams * stride)
        store_pack(out, load_pack<kVector>(run));
    }
  }

  ThreadChannels<kReadChannel<typename Chain::Pre, typename Chain::Post, typename Chain::Final>> channels_;
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

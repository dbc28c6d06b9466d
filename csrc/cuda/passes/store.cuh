// The pass that stores every value of a chain.
#pragma once

#include <type_traits>

#include "cuda/device/packs.cuh"
#include "pass.cuh"
#include "runs.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// Stores every value of the chain.
template <class Chain, class Mode>
class StorePass : public PassBase {
 public:
  static constexpr bool kAllRowBlocks = false;
  using PassBase::PassBase;

  __device__ void set_rows(const ThreadRows& rows) { channels_.load(p_, rows); }

  __device__ void prepare(const Tile& tile, const ThreadRows& rows) {
    if (Chain::kNeedsStatistics) channels_.load_norms(p_, tile, rows);
  }

  __device__ void finish(Fragment v) {
    compose<typename Chain::Start>(v, channels_);
    v.unscale();
    v.for_each([this](float& x, int k) {
      const Channel<float>& channel = channels_.channel[k];
      const float y = Chain::Left::value(x, channel);
      x = Chain::Final::value(y, y, channel);
    });
    if (p_.output.dtype == DType::kFloat32) {
      store<float>(v);
    } else if constexpr (Mode::kParts == 1) {
      store<typename Mode::Element>(v);
    }
  }

  __device__ void end() { wait_for_bulk_copies(); }

 private:
  // Where the rows of a channel follow each other in the output, a tile's are one run of each channel: it is
  // put together in shared memory and written as whole lines. Else each thread writes what it has.
  template <class Out>
  __device__ void store(const Fragment& v) {
    const Tile& tile = v.tile;
    const Tensor& output = p_.output;
    Out* const to = static_cast<Out*>(output.data);
    if (!has_runs(output)) {
      // Within a sample offsets fit in ints.
      return v.scatter(to + offset_in_output(p_, tile, 0), int(output.stride[1]), int(output.stride[2]),
                       int(output.stride[3]));
    }
    const ConvTiling& t = p_.tiling;
    Out* const staged = reinterpret_cast<Out*>(staging_);
    const int pitch = run_pitch<Out>(t);
    v.scatter(staged, pitch, tile.cols, 1);
    fence_async_proxy();
    sync();
    const int channels = min(t.stack_channels, t.out_channels - tile.row_block * kRows);
    for_each_run(p_, tile, [&](int first, int64_t offset, int length) {
      write_runs(staged + first, pitch, to + offset, output.stride[1], channels, length);
    });
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

  template <int kVector, class Out>
  __device__ void copy_runs(const Out* from, int pitch, Out* to, int64_t stride, int channels, int length) {
    const int team = team_of_thread();
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

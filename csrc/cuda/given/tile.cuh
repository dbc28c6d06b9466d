// A block's piece of a tensor, in shared memory with its channels' parameters.
#pragma once

#include "cuda/device/launch.cuh"
#include "piece.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

extern __shared__ __align__(128) uint8_t shared_memory[];

template <class Chain, class In, int kCount, bool kOfChannels>
struct GivenTile {
  using T = Compute<In>;

  static constexpr int kChannels = kOfChannels ? kCount : 1;  // that one wide load meets
  static constexpr int kPixels = kOfChannels ? 1 : kCount;
  __device__ static int channel_of(int k) { return kOfChannels ? k : 0; }

  const GivenWork<T>& work;
  const GivenPlan& plan;
  const Piece piece;
  const ThreadShare<kCount, kOfChannels> share;

  __device__ explicit GivenTile(const GivenWork<T>& work)
      : work(work), plan(work.plan), piece(piece_of_block(work.shape, work.plan)), share(work.plan) {}

  // Known when compiled, unless each load takes one element.
  __device__ bool channels_last() const {
    if constexpr (kCount > 1) return kOfChannels;
    return work.shape.channels_last;
  }

  __device__ In* values() const { return reinterpret_cast<In*>(shared_memory + plan.tile_at); }
  // Of the piece's channels, one kind after the other.
  enum Kind { kBias, kScale, kNormScale, kNormShift, kMean };
  static_assert(kMean + 1 == cuda::kParameterKinds);
  __device__ T& parameter(int kind, int c) const {
    return reinterpret_cast<T*>(shared_memory)[kind * plan.unit_channels + c];
  }
  __device__ Channel<T> channel_at(int c) const {
    return {parameter(kBias, c),        parameter(kScale, c),     parameter(kMean, c),
            parameter(kNormScale, c),   parameter(kNormShift, c), T(work.arguments.clamp_min),
            T(work.arguments.clamp_max)};
  }

  __device__ int offset(int c, int p) const {
    return channels_last() ? p * plan.unit_channels + c : c * plan.slice_pixels + p;
  }
  // In the tensor. The output has the same place where all values are stored.
  __device__ int64_t memory_offset(int c, int p) const {
    const GivenShape& shape = work.shape;
    const int64_t channel = piece.channel + c;
    const int64_t pixel = piece.pixel + p;
    return piece.sample * shape.channels * shape.pixels +
           (channels_last() ? pixel * shape.channels + channel : channel * shape.pixels + pixel);
  }

  __device__ const In* values_in_memory(int c, int p) const {
    return static_cast<const In*>(work.input) + memory_offset(c, p);
  }
  // From one of a thread's channels and pixels to the next.
  __device__ int channel_step() const { return plan.run_threads * kChannels; }
  __device__ int pixel_step() const { return plan.pixel_threads * kPixels; }
  __device__ int step() const { return channels_last() ? pixel_step() * plan.unit_channels : pixel_step(); }
  __device__ int64_t memory_step() const {
    return channels_last() ? pixel_step() * work.shape.channels : pixel_step();
  }

  // Calls visit(c) for the thread's channels of a run.
  template <class Visit>
  __device__ void for_each_channel(int run, const Visit& visit) const {
    const int first = run * plan.run_channels;
    const int end = min(first + plan.run_channels, piece.channels);
    for (int c = first + share.channel; share.exists && c < end; c += channel_step()) visit(c);
  }
  // Of all its runs.
  template <class Visit>
  __device__ void for_each_channel(const Visit& visit) const {
    for (int run = share.run; run * plan.run_channels < piece.channels; run += plan.runs_at_once)
      for_each_channel(run, visit);
  }

  // ---- load ----

  __device__ void load() const {
    copy_values();
    load_parameters(true);
    wait_for_copies();
    __syncthreads();
  }

  // with_affine: the norm's weight and bias too, which stand in its place until it is known. Each thread asks
  // for another parameter: one after the other, they would take longer than a small piece.
  __device__ void load_parameters(bool with_affine) const {
    const Arguments& arguments = work.arguments;
    const int kind = threadIdx.x % 4;
    if (kind == kBias || kind == kScale ? !Chain::kReadsChannel : !with_affine) return;
    const Parameter source = kind == kBias        ? arguments.bias
                             : kind == kScale     ? arguments.scale
                             : kind == kNormScale ? arguments.norm_weight
                                                  : arguments.norm_bias;
#pragma unroll 1
    for (int c = threadIdx.x / 4; c < piece.channels; c += blockDim.x / 4)
      parameter(kind, c) = value_of<T>(source, piece.channel + c, T(kind == kNormScale));
  }

  // Those that an earlier kernel found.
  __device__ void load_norms() const {
    wait_for_earlier_kernels();
    const Norm<T>* const norms = work.norms + piece.sample * work.shape.channels + piece.channel;
    for (int c = threadIdx.x; c < piece.channels; c += blockDim.x) set_parameters(c, norms[c]);
  }

  __device__ void set_parameters(int c, const Norm<T>& norm) const {
    parameter(kMean, c) = norm.mean;
    parameter(kNormScale, c) = norm.scale;
    parameter(kNormShift, c) = norm.shift;
  }

  __device__ void copy_values() const {
    if (kCount == 1 && is_run()) return copy_run(values_in_memory(0, 0));
    for_each_channel([&](int c) {
      const In* from = values_in_memory(c, share.pixel);
      In* to = values() + offset(c, share.pixel);
      for (int p = share.pixel; p < piece.pixels; p += pixel_step()) {
        copy_pack<kCount>(to, from);
        from += memory_step();
        to += step();
      }
    });
  }

  // Whether the piece is one run of memory that wide loads may start with.
  __device__ bool is_run() const {
    const bool whole_rows =
        channels_last() ? piece.channels == work.shape.channels : piece.pixels == work.shape.pixels;
    return whole_rows && reinterpret_cast<uintptr_t>(values_in_memory(0, 0)) % kVectorBytes == 0;
  }

  __device__ void copy_run(const In* from) const {
    constexpr int kWide = kVectorBytes / int(sizeof(In));
    const int count = piece.channels * piece.pixels;
    const int wide_count = count / kWide * kWide;
    for (int i = threadIdx.x * kWide; i < wide_count; i += blockDim.x * kWide)
      copy_pack<kWide>(values() + i, from + i);
    for (int i = wide_count + threadIdx.x; i < count; i += blockDim.x) copy_pack<1>(values() + i, from + i);
  }
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

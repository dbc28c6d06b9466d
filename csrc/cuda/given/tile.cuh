// The values of a block's piece, as a thread loads them: in the tensor and in shared memory.
#pragma once

#include "piece.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// first, first + step, ... up to end.
struct ChannelSteps {
  int first, end, step;
};

template <class ThreadLoad>
class GivenTile : public ThreadLoad {
 public:
  using T = typename ThreadLoad::T;
  using Element = typename ThreadLoad::Element;
  using ThreadLoad::kCount;
  static constexpr int kChannels = ThreadLoad::kChannels;

  const GivenPiece<T>& block;
  const GivenWork<T>& work;
  const GivenPlan& plan;
  const Piece& piece;
  const ThreadShare& share;
  const int first_pixel;  // of the thread

  __device__ explicit GivenTile(const GivenPiece<T>& block)
      : block(block),
        work(block.work),
        plan(block.plan),
        piece(block.piece),
        share(block.share),
        first_pixel(share.pixel * ThreadLoad::kPixels) {}

  // Known when compiled, unless each load takes one element.
  __device__ bool channels_last() const {
    if constexpr (kCount > 1) return ThreadLoad::kOfChannels;
    return work.shape.channels_last;
  }

  __device__ Element* values() const { return reinterpret_cast<Element*>(shared_memory + plan.tile_at); }
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
  __device__ const Element* values_in_memory(int c, int p) const {
    return static_cast<const Element*>(work.input.data) + memory_offset(c, p);
  }

  // From one of a thread's pixels to the next.
  __device__ int pixel_step() const { return plan.pixel_threads * ThreadLoad::kPixels; }
  __device__ int step() const { return channels_last() ? pixel_step() * plan.unit_channels : pixel_step(); }
  __device__ int64_t memory_step() const {
    return channels_last() ? pixel_step() * work.shape.channels : pixel_step();
  }

  // The thread's channels of a run.
  __device__ ChannelSteps channels_of(int run) const {
    const int first = run * plan.run_channels;
    const int end = share.exists ? min(first + plan.run_channels, piece.channels) : 0;
    return {first + share.run_thread * kChannels, end, plan.run_threads * kChannels};
  }

  // Calls visit(c) for those of all its runs.
  template <class Visit>
  __device__ void for_each_channel(const Visit& visit) const {
    for (int run = share.run; run * plan.run_channels < piece.channels; run += plan.runs_at_once) {
      const ChannelSteps channels = channels_of(run);
      for (int c = channels.first; c < channels.end; c += channels.step) visit(c);
    }
  }

  // Into shared memory, without waiting for them: see wait_for_copies().
  __device__ void copy_values() const {
    if (kCount == 1 && is_run()) return copy_run(values_in_memory(0, 0));
    for_each_channel([&](int c) {
      const Element* from = values_in_memory(c, first_pixel);
      Element* to = values() + offset(c, first_pixel);
      for (int p = first_pixel; p < piece.pixels; p += pixel_step()) {
        copy_pack<kCount>(to, from);
        from += memory_step();
        to += step();
      }
    });
  }

 private:
  // Whether the piece is one run of memory that wide loads may start with.
  __device__ bool is_run() const {
    const bool whole_rows =
        channels_last() ? piece.channels == work.shape.channels : piece.pixels == work.shape.pixels;
    return whole_rows && reinterpret_cast<uintptr_t>(values_in_memory(0, 0)) % kVectorBytes == 0;
  }

  __device__ void copy_run(const Element* from) const {
    constexpr int kWide = kVectorBytes / int(sizeof(Element));
    const int count = piece.channels * piece.pixels;
    const int wide_count = count / kWide * kWide;
    for (int i = threadIdx.x * kWide; i < wide_count; i += blockDim.x * kWide)
      copy_pack<kWide>(values() + i, from + i);
    for (int i = wide_count + threadIdx.x; i < count; i += blockDim.x) copy_pack<1>(values() + i, from + i);
  }
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

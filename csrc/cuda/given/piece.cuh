// A block's piece of a dense tensor, how its threads share it out, and the parameters of its channels.
#pragma once

#include "core/chain.h"
#include "cuda/device/elements.cuh"
#include "cuda/device/launch.cuh"
#include "cuda/device/statistics.cuh"
#include "plan/given_plan.h"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

using cuda::GivenPlan;
using cuda::GivenShape;

enum class GivenStep {
  kMoments,  // the moments of every piece go to memory
  kFinish,   // the output, from norms that are known or where there are none
  kWhole,    // both in one: the pieces of a group are on chip at the same time
};

// What a launch gets. input is dense; norms and parts are null where the step has none.
template <class T>
struct GivenWork {
  GivenStep step;
  GivenShape shape;
  GivenPlan plan;
  Elements input;
  Tensor output;  // of the input's dtype or, if that has two bytes, float32
  Arguments arguments;
  Part<double>* parts;          // [samples][groups][units_per_group * slices]
  const Norm<T>* norms;         // [samples][channels]
  GroupStatistics* statistics;  // [samples][groups], or null
  double share_of_value;        // in a group's mean
  int64_t pieces;
};

// What a thread loads at once: so many pixels of a channel or, kIsOfChannels, channels of a pixel.
template <class Type, int kElements, bool kIsOfChannels>
struct Load {
  using Element = Type;
  using T = Compute<Type>;
  static constexpr int kCount = kElements;
  static constexpr bool kOfChannels = kIsOfChannels;
  static constexpr int kChannels = kOfChannels ? kCount : 1;
  static constexpr int kPixels = kOfChannels ? 1 : kCount;
  __device__ static constexpr int channel_of(int k) { return kOfChannels ? k : 0; }
};

// Whether pixels, channels and samples are all the same to a chain: it gets v as one run of pixels.
template <class Chain>
constexpr bool kIsFlat = Chain::Reduce::kStores && !Chain::kReadsChannel && !Chain::kNeedsStatistics;

// Calls visit with the Load of the plan, known when compiled. What comes last here stands first in the
// kernel: the widest loads.
template <class Chain, class Kind, class T, class Visit>
__device__ void visit_load(const GivenWork<T>& work, const Visit& visit) {
  visit_element<Kind>(work.input.dtype, [&](auto element) {
    using Element = decltype(element);
    constexpr int kWide = kVectorBytes / int(sizeof(Element));
    constexpr int kWideChannels = kWide < cuda::kMostWideChannels ? kWide : cuda::kMostWideChannels;
    const int width = work.plan.width;
    const bool of_channels = !kIsFlat<Chain> && work.shape.channels_last;
    if (width == 1) return visit(Load<Element, 1, false>{});
    if constexpr (kWide > 2) {
      if (width == kWide / 2 && !of_channels) return visit(Load<Element, kWide / 2, false>{});
    }
    if (of_channels) return visit(Load<Element, kWideChannels, true>{});
    visit(Load<Element, kWide, false>{});
  });
}

struct Piece {
  int64_t sample;
  int unit_of_group;
  int slice;
  int64_t channel;  // the first one
  int64_t pixel;
  int channels;
  int pixels;
};

__device__ inline Piece piece_of_block(const GivenShape& shape, const GivenPlan& plan) {
  Piece piece;
  int64_t unit;
  if (gridDim.y == 1) {
    const int rest = plan.by_slices.divide(blockIdx.x);
    piece.slice = int(blockIdx.x) - rest * plan.by_slices.value;
    piece.sample = plan.by_units.divide(rest);
    unit = rest - int(piece.sample) * plan.by_units.value;
  } else {
    const int64_t rest = block_index() / plan.slices;
    piece.slice = int(block_index() % plan.slices);
    piece.sample = rest / plan.units;
    unit = rest % plan.units;
  }
  int64_t end = shape.channels;
  if (plan.units_per_group == 1) {
    piece.unit_of_group = 0;
    piece.channel = unit * plan.unit_channels;
  } else {
    const int64_t of_group = shape.channels / shape.groups;
    const int64_t group = unit / plan.units_per_group;
    piece.unit_of_group = int(unit % plan.units_per_group);
    piece.channel = group * of_group + int64_t(piece.unit_of_group) * plan.unit_channels;
    end = (group + 1) * of_group;
  }
  piece.pixel = int64_t(piece.slice) * plan.slice_pixels;
  piece.channels = int(min(end - piece.channel, int64_t(plan.unit_channels)));
  piece.pixels = int(min(shape.pixels - piece.pixel, int64_t(plan.slice_pixels)));
  return piece;
}

// A thread's place among those that share out the channels and pixels, both counted in loads.
struct ThreadShare {
  int run;
  int run_thread;  // among those that have a run's channels
  int lane;        // among those that have the same channels and pixels next to each other
  int line;        // those lanes' place among all that have the same channels
  int pixel;
  bool exists;  // some threads may be left over

  __device__ explicit ThreadShare(const GivenPlan& plan) {
    lane = threadIdx.x & (plan.lanes - 1);
    const int group = threadIdx.x >> log2_of(plan.lanes);
    line = plan.by_channel_threads.divide(group);
    const int channel_thread = group - line * plan.channel_threads;
    run = plan.by_run_threads.divide(channel_thread);
    run_thread = channel_thread - run * plan.run_threads;
    pixel = line * plan.lanes + lane;
    exists = pixel < plan.pixel_threads;
  }
};

extern __shared__ __align__(128) uint8_t shared_memory[];

template <class T>
struct GivenPiece {
  const GivenWork<T>& work;
  const GivenPlan& plan;
  const Piece piece;
  const ThreadShare share;

  __device__ explicit GivenPiece(const GivenWork<T>& work)
      : work(work), plan(work.plan), piece(piece_of_block(work.shape, work.plan)), share(work.plan) {}

  // In shared memory: of the piece's channels, one kind after the other. The norm's scale and shift take the
  // places of its weight and bias.
  static constexpr int kMean = kChainParameters;
  static_assert(kMean + 1 == cuda::kParameterKinds);
  __device__ T& parameter(int kind, int c) const {
    return reinterpret_cast<T*>(shared_memory)[kind * plan.unit_channels + c];
  }
  __device__ Channel<T> channel_at(int c) const {
    Channel<T> channel;
#pragma unroll
    for (int k = 0; k < kStageParameters; ++k) channel.of[k] = parameter(k, c);
    channel.mean = parameter(kMean, c);
    channel.norm_scale = parameter(kNormWeight, c);
    channel.norm_shift = parameter(kNormBias, c);
    channel.clamp_min = T(work.arguments.clamp_min);
    channel.clamp_max = T(work.arguments.clamp_max);
    return channel;
  }

  __device__ void set_parameters(int c, const Norm<T>& norm) const {
    parameter(kMean, c) = norm.mean;
    parameter(kNormWeight, c) = norm.scale;
    parameter(kNormBias, c) = norm.shift;
  }

  // with_affine: the norm's weight and bias too. Each thread asks for another parameter: one after the other,
  // they would take longer than a small piece.
  template <class Chain>
  __device__ void load_parameters(bool with_affine) const {
    constexpr int kLanes = cuda::kParameterLanes;
    const int kind = threadIdx.x % kLanes;
    if (kind >= kChainParameters || !(kind < kStageParameters ? Chain::kReadsChannel : with_affine)) return;
    const Parameter source = parameter_of(work.arguments, kind);
#pragma unroll 1
    for (int c = threadIdx.x / kLanes; c < piece.channels; c += blockDim.x / kLanes)
      parameter(kind, c) = value_of<T>(source, piece.channel + c, T(kind == kNormWeight));
  }

  // Those that an earlier kernel found.
  __device__ void load_norms() const {
    wait_for_earlier_kernels();
    const Norm<T>* const norms = work.norms + piece.sample * work.shape.channels + piece.channel;
    for (int c = threadIdx.x; c < piece.channels; c += blockDim.x) set_parameters(c, norms[c]);
  }
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

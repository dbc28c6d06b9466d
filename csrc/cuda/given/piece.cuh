// A block's piece of a dense tensor, and how its threads share it out.
#pragma once

#include "core/chain.h"
#include "cuda/device/launch.cuh"
#include "cuda/device/packs.cuh"
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
  const void* input;
  Tensor output;
  Arguments arguments;
  Part<double>* parts;          // [samples][groups][units_per_group * slices]
  const Norm<T>* norms;         // [samples][channels]
  GroupStatistics* statistics;  // [samples][groups], or null
  double share_of_value;        // in a group's mean
  int64_t pieces;
};

// Calls visit(count, of_channels), both known when compiled: a wide load holds so many pixels of a channel
// or, of_channels, so many channels of a pixel.
template <class In, class Work, class Visit>
__device__ void visit_width(const Work& work, const Visit& visit) {
  constexpr int kWide = kVectorBytes / int(sizeof(In));
  constexpr int kWideChannels = kWide < cuda::kMostWideChannels ? kWide : cuda::kMostWideChannels;
  const int width = work.plan.width;
  if (width == 1) {
    visit(std::integral_constant<int, 1>{}, std::false_type{});
  } else if (work.shape.channels_last) {
    visit(std::integral_constant<int, kWideChannels>{}, std::true_type{});
  } else if (width == kWide) {
    visit(std::integral_constant<int, kWide>{}, std::false_type{});
  } else {
    visit(std::integral_constant<int, kWide / 2>{}, std::false_type{});
  }
}

struct Piece {
  int64_t sample;
  int64_t unit;
  int64_t slice;
  int64_t channel;  // the first one
  int64_t pixel;
  int channels;
  int pixels;
};

__device__ inline Piece piece_of_block(const GivenShape& shape, const GivenPlan& plan) {
  Piece piece;
  if (gridDim.y == 1) {
    const int rest = plan.by_slices.divide(blockIdx.x);
    piece.slice = int(blockIdx.x) - rest * plan.by_slices.value;
    piece.sample = plan.by_units.divide(rest);
    piece.unit = rest - int(piece.sample) * plan.by_units.value;
  } else {
    const int64_t rest = block_index() / plan.slices;
    piece.slice = block_index() % plan.slices;
    piece.sample = rest / plan.units;
    piece.unit = rest % plan.units;
  }
  int64_t end = shape.channels;
  if (plan.units_per_group == 1) {
    piece.channel = piece.unit * plan.unit_channels;
  } else {
    const int64_t of_group = shape.channels / shape.groups;
    const int64_t group = piece.unit / plan.units_per_group;
    piece.channel = group * of_group + piece.unit % plan.units_per_group * plan.unit_channels;
    end = (group + 1) * of_group;
  }
  piece.pixel = piece.slice * plan.slice_pixels;
  piece.channels = int(min(end - piece.channel, int64_t(plan.unit_channels)));
  piece.pixels = int(min(shape.pixels - piece.pixel, int64_t(plan.slice_pixels)));
  return piece;
}

// The first of the channels and pixels of one thread. A wide load holds kCount pixels of a channel or,
// kOfChannels, kCount channels of a pixel.
template <int kCount, bool kOfChannels>
struct ThreadShare {
  int run;
  int channel;  // of a run
  int pixel;
  int lane;        // among those that have the same channels and pixels next to each other
  int line;        // those lanes' place among all that have the same channels
  int run_thread;  // among those that have a run's channels
  bool exists;     // some threads may be left over

  __device__ explicit ThreadShare(const GivenPlan& plan) {
    lane = threadIdx.x & (plan.lanes - 1);
    const int group = threadIdx.x >> log2_of(plan.lanes);
    line = plan.by_channel_threads.divide(group);
    const int channel_thread = group - line * plan.channel_threads;
    run = plan.by_run_threads.divide(channel_thread);
    run_thread = channel_thread - run * plan.run_threads;
    const int pixel_index = line * plan.lanes + lane;
    exists = pixel_index < plan.pixel_threads;
    constexpr int kChannels = kOfChannels ? kCount : 1;
    constexpr int kPixels = kOfChannels ? 1 : kCount;
    channel = run_thread * kChannels;
    pixel = pixel_index * kPixels;
  }
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

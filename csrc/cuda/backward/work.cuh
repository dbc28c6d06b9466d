// What the kernels of a chain's backward get, and the parameters of their channels.
#pragma once

#include "core/chains.h"
#include "cuda/device/elements.cuh"
#include "cuda/device/parameter_sums.cuh"
#include "plan/step_plan.h"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

using cuda::PoolShape;

// Of a step's samples. Tables are null where the chain has none.
template <class T>
struct BackwardWork {
  SlicedPlanes planes;
  SlicedPlanes windows;  // in place of pixels
  int64_t samples;
  int64_t channels;
  int64_t pixels;  // of a plane
  int width;       // elements of a load: kWidth or 1
  bool has_pairs;  // rows of grad are whole pairs; known in strips only
  Elements v;
  Elements grad;    // of the chain's output
  Elements grad_v;  // without memory where nobody wants it
  Arguments arguments;
  Norm<T>* norms;        // [samples][C], without weight and bias
  GroupMeans<T>* means;  // [samples][groups]
  cuda::WideDivisor by_group_channels;
  PoolShape pool;
  int* window_place;         // [samples][C][windows]: of the maximum, counted row by row in its window
  T* window_grad;            // and the gradient that goes there
  T* window_value;           // Pre(v) there, if a pass of the conv has found it
  T* most;                   // [samples][pixels]: the gradient at each place x is
  T* factor;                 // exp(x - most) * factor
  cuda::PixelBlocks blocks;  // that find these two
  PartialSums after_norm;
  PartialSums of_all;  // that after_norm lacks
};

template <class T>
constexpr int kWidth = kVectorBytes / int(sizeof(T));
static_assert(kWidth<float> == kMostWidth);

// Calls visit(count): the elements of a load, known when compiled.
template <class T, class Visit>
__device__ void visit_count(const BackwardWork<T>& work, const Visit& visit) {
  if (work.width > 1) {
    visit(std::integral_constant<int, kWidth<T>>{});
  } else {
    visit(std::integral_constant<int, 1>{});
  }
}

// Whether there is anything to be known of a channel.
template <class Chain>
constexpr bool kHasChannels = Chain::kReadsChannel || Chain::kNeedsStatistics;

__device__ inline double channel_value(const Arguments& arguments, int kind, int64_t c) {
  return value_of<double>(parameter_of(arguments, kind), c, kind == kNormWeight ? 1.0 : 0.0);
}

template <class T>
__device__ Channel<T> channel_from(const double (&values)[kChainParameters], const Norm<T>& norm,
                                   const Arguments& arguments) {
  const double weight = values[kNormWeight];
  Channel<T> channel;
#pragma unroll
  for (int k = 0; k < kStageParameters; ++k) channel.of[k] = T(values[k]);
  channel.mean = norm.mean;
  channel.norm_scale = T(weight * double(norm.scale));
  channel.norm_shift = T(weight * double(norm.shift) + values[kNormBias]);
  channel.clamp_min = T(arguments.clamp_min);
  channel.clamp_max = T(arguments.clamp_max);
  return channel;
}

template <class Chain, class T>
__device__ Norm<T> norm_at(const BackwardWork<T>& work, int64_t sample, int64_t c) {
  if constexpr (Chain::kNeedsStatistics) return work.norms[sample * work.channels + c];
  return {};
}

// By a thread for itself.
template <class Chain, class T>
__device__ Channel<T> channel_of_thread(const BackwardWork<T>& work, int64_t sample, int64_t c) {
  double values[kChainParameters]{};
  if constexpr (kHasChannels<Chain>) {
#pragma unroll
    for (int kind = 0; kind < kChainParameters; ++kind) values[kind] = channel_value(work.arguments, kind, c);
  }
  return channel_from(values, norm_at<Chain>(work, sample, c), work.arguments);
}

// By a warp that has one channel: each lane asks for another value. One after the other, they would take
// longer than the slice.
template <class Chain, class T>
__device__ Channel<T> channel_of_warp(const BackwardWork<T>& work, const Slice& slice) {
  const Norm<T> norm = norm_at<Chain>(work, slice.sample, slice.channel);
  double values[kChainParameters]{};
  if constexpr (kHasChannels<Chain>) {
    const double of_lane = channel_value(work.arguments, lane_of_thread() % kChainParameters, slice.channel);
#pragma unroll
    for (int kind = 0; kind < kChainParameters; ++kind) values[kind] = __shfl_sync(~0u, of_lane, kind);
  }
  return channel_from(values, norm, work.arguments);
}

// kHasMeans: they are known already.
template <class Chain, bool kHasMeans, class T>
__device__ NormGradient<T> norm_gradient_of(const BackwardWork<T>& work, int64_t sample, int64_t c) {
  const Norm<T> norm = norm_at<Chain>(work, sample, c);
  if constexpr (!Chain::kNeedsStatistics || !kHasMeans) return {norm.scale, norm.shift, T(0), T(0)};
  const int64_t group = work.by_group_channels.divide(c);
  const GroupMeans<T> means = work.means[sample * work.arguments.num_groups + group];
  return {norm.scale, norm.shift, means.mean, means.mean_product};
}

// What is known of a channel of a sample. Aligned so that few loads get it.
struct alignas(16) SampleChannel {
  Channel<float> channel;
  NormGradient<float> norm;
};
static_assert(sizeof(SampleChannel) == cuda::kSampleChannelBytes);

// What comes after the norm reads or makes, summed before the gradient of the norm is known.
template <class Chain>
constexpr unsigned kAfterNorm =
    Chain::kNeedsStatistics ? kOfNorm | (Chain::Post::kReadsChannel ? kOfStages : 0) : 0;

// What is left to be summed with the gradient of v.
template <class Chain>
constexpr unsigned kOfAll =
    kOfConv |
    (Chain::Pre::kReadsChannel || (!Chain::kNeedsStatistics && Chain::Post::kReadsChannel) ? kOfStages : 0);

// To be added to: x + -0 is x for every x, so that nothing is left of what no stage has.
template <class T>
__device__ Gradients<T> no_gradients() {
  Gradients<T> gradients;
#pragma unroll
  for (T& of_kind : gradients.of) of_kind = T(-0.0);
  gradients.v = T(-0.0);
  return gradients;
}

// grad: of what comes out of Post.
template <class Chain, class T>
__device__ void add_after_norm(T grad, T v, const Channel<T>& channel, const NormGradient<T>& norm,
                               T (&sums)[kGradientKinds]) {
  Gradients<T> gradients = no_gradients<T>();
  const T x = Chain::Pre::value(v, v, channel);
  grad = Chain::Post::vjp(grad, Chain::Norm::value(x, channel), v, channel, gradients);
#pragma unroll
  for (int k = 0; k < kStageParameters; ++k) sums[k] += gradients.of[k];
  sums[kNormBias] += grad;
  sums[kNormWeight] += grad * Chain::Norm::normed(x, channel, norm);
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

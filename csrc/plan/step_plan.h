// How a chain's backward is shared out among blocks: in slices of planes and of pooling windows, in blocks of
// pixels, or in rows. All of it follows from the size of a sample, so that a sample's bits do not depend on
// its batch.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/problem.h"
#include "gradient_plan.h"
#include "plane_slices.h"

namespace fusedconv {
namespace cuda {

// What a plan needs to know of a chain.
struct BackwardTraits {
  bool has_conv;  // kernels that compute v again
  bool needs_statistics;
  bool pools;
  bool reduces_channels;
  bool has_channels;  // there is anything to be known of a channel
  int kinds_of_all;   // of the sums that are found with the gradient of v
};

// What steps give: the gradient of v in a tensor, or as packed rows; or v's gradient is nowhere, and they
// give what follows from it (cuda/backward/strip_work.cuh).
enum class StepKind { kTensor, kPackedRows, kStrips };

struct StepPlan {
  StepKind kind;
  int64_t step_samples;  // of a step, at the most
  int64_t samples;
  int64_t channels;
  int64_t pixels;  // of a plane
  int64_t pooled[2];
  int64_t windows;           // of a plane; its pixels where nothing is pooled
  int64_t results;           // of a sample, of the chain
  int window_lanes;          // that share a window
  PlaneSlices plane;         // of pixels
  PlaneSlices window_plane;  // of windows
  bool sums_channels;        // one kernel does what two do elsewhere
  // In which a sample's sums come apart: those behind the norm, and the others.
  int64_t after_norm_slices, slices;
  int pack_bytes;  // of shared memory, where steps give packed rows
};

// ---- channels that are reduced ----

constexpr int kSpanChannels = 8;    // of a warp, where one kernel sums all channels
constexpr int kMostSpanWarps = 24;  // so many that three blocks of 8 fit onto a multiprocessor
constexpr int kSpanPixels = 256;    // of a block, which has a few of them at a time

inline int channel_sums_threads(int64_t channels) {
  return int(divide_up(channels, kSpanChannels)) * kWarpLanes;
}

// A sample's pixels in blocks.
struct PixelBlocks {
  int lanes;  // that share a pixel's channels
  int64_t per_sample;
  WideDivisor by_per_sample;
};

// Of loads of so many elements. Lanes next to each other have a line of memory; more of them share a pixel if
// threads would be left over.
inline PixelBlocks pixel_blocks(const StepPlan& steps, int64_t samples, int width, int element_bytes) {
  const int line = std::min(kLineBytes / (width * element_bytes), kWarpLanes / 2);
  const int64_t loads = divide_up(steps.pixels, width);
  const int lanes = sharing_lanes(kWarpLanes / power_of_two_from(loads, line), loads, kPlaneThreads);
  const int64_t blocks =
      steps.sums_channels ? steps.after_norm_slices : divide_up(loads, kPlaneThreads / lanes);
  return {lanes, blocks, wide_divisor(blocks, ((Checked(samples) + 1) * blocks).value())};
}

// ---- pools ----

// Rows and columns of a plane and of its windows: so many that a row and a slice together fit into 31 bits.
struct PoolShape {
  int cols;
  int window_rows, window_cols;
  int pooled_rows, pooled_cols;
  int lanes;                   // that share a window: a power of two
  bool has_pairs;              // windows are 2 or 4 columns of whole pairs, and lanes share none
  WideDivisor by_cols;         // pixels of a plane
  WideDivisor by_pooled_cols;  // windows of a plane
  Divisor by_window_rows, by_window_cols;
};

inline int64_t window_pixels(const Arguments& arguments) {
  return (Checked(arguments.pool[0]) * arguments.pool[1]).value();
}

// Whether they are.
inline bool counts_windows(const BackwardProblem& problem) {
  constexpr int64_t kMost = INT32_MAX - kPlaneThreads * kThreadValues;
  return std::max(problem.v.size[2], problem.v.size[3]) < kMost &&
         window_pixels(problem.arguments) <= INT32_MAX;
}

// About as many pixels a thread as elsewhere.
inline int lanes_of_window(const Arguments& arguments) {
  return power_of_two_from(window_pixels(arguments) / kThreadValues, kWarpLanes);
}

inline PlaneSlices slice_windows(const Arguments& arguments, int64_t windows) {
  constexpr int64_t kLeast = 2;  // windows: what a thread does once takes as long
  const int lanes = lanes_of_window(arguments);
  const int64_t of_thread = std::max(kThreadValues / window_pixels(arguments), lanes == 1 ? kLeast : 1);
  return slice_planes(windows, of_thread, lanes);
}

// has_pairs: if memory is aligned.
inline PoolShape pool_shape(const BackwardProblem& problem, const StepPlan& steps) {
  const auto narrow = [](int64_t size) { return int(std::min<int64_t>(size, INT32_MAX)); };
  const int64_t* const size = problem.v.size + 2;
  const int64_t* const window = problem.arguments.pool;
  const bool has_pairs = steps.window_lanes == 1 && bytes_of(problem.v.dtype) >= int(sizeof(float)) &&
                         (window[1] == 2 || window[1] == 4) && size[1] % 2 == 0;
  return {narrow(size[1]),
          narrow(window[0]),
          narrow(window[1]),
          int(steps.pooled[0]),
          int(steps.pooled[1]),
          steps.window_lanes,
          has_pairs,
          wide_divisor(size[1], steps.pixels),
          wide_divisor(std::max<int64_t>(steps.pooled[1], 1), steps.windows),
          divisor(narrow(window[0])),
          divisor(narrow(window[1]))};
}

// ---- rows that are packed ----

constexpr int kGradientThreads = 256;
constexpr int kGradientWarps = kGradientThreads / kWarpLanes;
constexpr int kPackItems = 4;  // loads of v that a lane has under way
constexpr int kPackWidth = 2;  // elements of such a load, or 1: many rows are no multiple of 4

// How a block shares out its row.
struct PackShape {
  int pitch;         // floats between channels in shared memory
  int width;         // elements of a load: kPackWidth or 1
  int lanes;         // of a warp, that share a row of a channel: a power of two, kPackItems at least
  int pass_shift;    // log2 of the loads of a lane that are of one channel, of kPackItems
  int window_lanes;  // that share a row of windows: a power of two
  WideDivisor by_rows;
};

inline int pack_pitch(int64_t cols) { return int(round_up(cols, kMostWidth)); }

inline PackShape pack_shape(const PackedRows& to, const StepPlan& steps, int64_t samples, int width) {
  PackShape shape{};
  shape.pitch = pack_pitch(to.cols);
  shape.width = width;
  const int64_t loads = divide_up(to.cols, width);
  shape.lanes = std::max(power_of_two_from(loads, kWarpLanes), kPackItems);
  const int passes = power_of_two_from(divide_up(loads, shape.lanes), kPackItems);
  while (1 << shape.pass_shift < passes) ++shape.pass_shift;
  shape.window_lanes = power_of_two_from(std::max<int64_t>(steps.pooled[1], 1), kWarpLanes);
  shape.by_rows = wide_divisor(to.rows, (samples + 1) * to.rows);
  return shape;
}

// A block's shared memory, as PackMemory (cuda/backward/pack_work.cuh) lays it out.
inline int64_t pack_shared_bytes(const BackwardTraits& traits, int64_t channels, int64_t cols) {
  const int64_t rows = channels + (traits.reduces_channels ? 2 : 0);
  return int64_t(sizeof(float)) * rows * pack_pitch(cols) +
         (traits.has_channels ? kSampleChannelBytes * channels : 0) +
         int64_t(sizeof(unsigned)) * 2 * kGradientWarps +
         int64_t(sizeof(double)) * traits.kinds_of_all * channels;
}

inline bool fits_packed_rows(const BackwardProblem& problem, const BackwardTraits& traits, const Card& card) {
  const int64_t* const size = problem.v.size;
  const int64_t most = card.shared_bytes / int64_t(sizeof(float));
  return problem.v.dtype == DType::kFloat32 && size[1] <= most && size[3] <= most &&
         Checked(size[2]) * size[3] < INT32_MAX / (kPackItems + 1) &&
         pack_shared_bytes(traits, size[1], size[3]) <= card.shared_bytes;
}

// ---- the plan ----

// Where v is given and neither its channels nor its planes are anything of their own, all pixels are one
// plane's.
inline StepPlan plan_steps(const BackwardProblem& problem, const BackwardTraits& traits, StepKind kind,
                           int64_t step_samples) {
  const int64_t* const size = problem.v.size;
  const Arguments& arguments = problem.arguments;
  StepPlan plan{};
  plan.kind = kind;
  plan.step_samples = step_samples;
  plan.samples = size[0];
  plan.channels = size[1];
  plan.pixels = (Checked(size[2]) * size[3]).value();
  if (kind == StepKind::kTensor && !traits.pools && !traits.reduces_channels && !traits.has_channels &&
      !problem.wants.parameters[kConvBias]) {
    plan.pixels = (Checked(plan.pixels) * plan.samples * plan.channels).value();
    plan.step_samples = plan.samples = plan.channels = 1;
  }
  plan.plane = plan.window_plane = slice_planes(plan.pixels);
  plan.windows = plan.pixels;
  if (traits.pools) {
    for (int d = 0; d < 2; ++d) plan.pooled[d] = size[2 + d] / arguments.pool[d];
    plan.windows = plan.pooled[0] * plan.pooled[1];
    plan.window_lanes = lanes_of_window(arguments);
    // Before strips a pass finds what is in windows.
    plan.window_plane =
        kind == StepKind::kStrips ? slice_planes(plan.windows) : slice_windows(arguments, plan.windows);
  }
  plan.results = traits.reduces_channels ? plan.pixels : plan.channels * plan.windows;
  plan.sums_channels = traits.reduces_channels && traits.needs_statistics &&
                       problem.v.dtype == DType::kFloat32 && plan.channels <= kSpanChannels * kMostSpanWarps;
  plan.after_norm_slices =
      plan.sums_channels ? divide_up(plan.pixels, kSpanPixels) : plan.window_plane.slices;
  plan.slices = plan.plane.slices;
  if (kind == StepKind::kPackedRows) {
    plan.slices = size[2];
    plan.pack_bytes = int(pack_shared_bytes(traits, size[1], size[3]));
  }
  return plan;
}

}  // namespace cuda
}  // namespace fusedconv

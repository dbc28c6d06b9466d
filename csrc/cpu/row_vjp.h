// The vjp of a chain's pointwise stages and its norm, over some rows of one channel. What it takes is
// computed again from v and the norm's statistics: that costs less than to write it to memory and read it.
#pragma once

#include "core/chain.h"
#include "lanes.h"
#include "statistics.h"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// What some rows add to the gradients of their channel's parameters.
template <class X>
struct ParameterSums {
  X of[kGradientKinds];
};

FUSEDCONV_INLINE void add(const ParameterSums<double>& some, ParameterSums<double>& total) {
  for (int k = 0; k < kGradientKinds; ++k) total.of[k] += some.of[k];
}

// Rows of v, and the gradient at each of their places of what went into the reduction.
template <class T>
struct Rows {
  const T* v;
  int64_t v_pitch;
  const T* spread;
  int64_t spread_pitch;
  int64_t count;
  int64_t cols;
};

// Calls visit(lanes, r, w, sums) for the vectors of the rows; few pixels are summed in the compute type, more
// in double.
template <class T, class Visit>
FUSEDCONV_INLINE void sum_rows(const Rows<T>& rows, ParameterSums<double>& total, const Visit& visit) {
  for_each_few<T>(rows.count, rows.cols, [&](int64_t top, int64_t left, int64_t count, int64_t cols) {
    ParameterSums<Vector<T>> sums{};
    for (int64_t r = top; r < top + count; ++r) {
      for_each_lanes<T>(left, left + cols, [&](auto lanes, int64_t w) { visit(lanes, r, w, sums); });
    }
    unroll<kGradientKinds>([&](auto k) { total.of[k.value] += sum_of_lanes(sums.of[k.value]); });
  });
}

template <class T, class Lanes>
FUSEDCONV_INLINE void add(const Lanes& lanes, const Gradients<Vector<T>>& gradients,
                          ParameterSums<Vector<T>>& sums) {
  unroll<kStageParameters>([&](auto k) { sums.of[k.value] += lanes.keep(gradients.of[k.value]); });
}

// Whether anything is wanted of write_gradient().
template <class Chain>
bool wants_last_pass(const BackwardProblem& problem) {
  bool wants = problem.wants.v || !Chain::kNeedsStatistics;  // then no sums were made yet
  if constexpr (Chain::Pre::kReadsChannel) {
    for (int k = 0; k < kStageParameters; ++k) wants |= problem.wants.parameters[k];
  }
  return wants;
}

// The sums of what comes after the norm.
template <class Chain, class T>
void sum_after_norm(const Rows<T>& rows, const Channel<T> channel, const NormGradient<T> norm,
                    ParameterSums<double>& total) {
  using V = Vector<T>;
  sum_rows(rows, total, [&](auto lanes, int64_t r, int64_t w, ParameterSums<V>& sums) {
    Gradients<V> gradients{};
    const V v = lanes.load(rows.v + r * rows.v_pitch + w);
    const V x = Chain::Pre::value(v, v, channel);
    const V grad = Chain::Post::vjp(lanes.load(rows.spread + r * rows.spread_pitch + w),
                                    Chain::Norm::value(x, channel), v, channel, gradients);
    add<T>(lanes, gradients, sums);
    sums.of[kNormBias] += lanes.keep(grad);
    sums.of[kNormWeight] += lanes.keep(grad * Chain::Norm::normed(x, channel, norm));
  });
}

// The gradient of v, and the sums that no one made before.
template <class Chain, class T>
void write_gradient(const Rows<T>& rows, const Channel<T> channel, const NormGradient<T> norm, T* to,
                    int64_t to_pitch, ParameterSums<double>& total) {
  using V = Vector<T>;
  sum_rows(rows, total, [&](auto lanes, int64_t r, int64_t w, ParameterSums<V>& sums) {
    Gradients<V> of_post{};
    Gradients<V> of_pre{};
    const V v = lanes.load(rows.v + r * rows.v_pitch + w);
    const V x = Chain::Pre::value(v, v, channel);
    V grad = Chain::Post::vjp(lanes.load(rows.spread + r * rows.spread_pitch + w),
                              Chain::Norm::value(x, channel), v, channel, of_post);
    grad = Chain::Pre::vjp(Chain::Norm::vjp(grad, x, channel, norm), v, v, channel, of_pre);
    grad = grad + of_post.v + of_pre.v;
    lanes.store(to + r * to_pitch + w, grad);
    sums.of[kConvBias] += lanes.keep(grad);
    add<T>(lanes, of_pre, sums);
    if constexpr (!Chain::kNeedsStatistics) add<T>(lanes, of_post, sums);
  });
}

// The parameters of a sample's channel, but for what set_norm_gradient() finds.
template <class Chain, class T>
void set_channel(const BackwardProblem& problem, int64_t sample, int64_t c, Channel<T>& channel,
                 NormGradient<T>& norm) {
  const Arguments& arguments = problem.arguments;
  channel = make_channel<T>(arguments, c);
  norm = {};
  if constexpr (Chain::kNeedsStatistics) {
    const int64_t group = c / (problem.v.size[1] / arguments.num_groups);
    const GroupStatistics& statistics = problem.statistics[sample * arguments.num_groups + group];
    set_norm(channel, arguments, c, statistics);
    const double mean_rest = statistics.mean - double(channel.mean);
    norm.inverse_deviation = T(statistics.inverse_deviation);
    norm.normed_shift = T(-mean_rest * statistics.inverse_deviation);
  }
}

// What the norm's vjp takes besides, from the sums of each of the group's channels, which have `pixels`.
template <class T>
void set_norm_gradient(const Arguments& arguments, const ParameterSums<double>* sums, int64_t first,
                       int64_t count, int64_t pixels, NormGradient<T>* norms) {
  double mean = 0;
  double mean_product = 0;
  for (int64_t c = 0; c < count; ++c) {
    const double weight = value_of<double>(arguments.parameters[kNormWeight], first + c, 1.0);
    mean += weight * sums[c].of[kNormBias];
    mean_product += weight * sums[c].of[kNormWeight];
  }
  for (int64_t c = 0; c < count; ++c) {
    const double factor = double(norms[c].inverse_deviation) / (double(count) * double(pixels));
    norms[c].mean = T(mean * factor);
    norms[c].mean_product = T(mean_product * factor);
  }
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

// The entries of a chain on the CPU. Each cpu/<chain>.cpp is one line: FUSEDCONV_CPU_CHAIN(name,
// composition).
#pragma once

#include "backward.h"
#include "conv_backward.h"
#include "conv_source.h"
#include "core/chains.h"
#include "kernels.h"
#include "layout.h"
#include "pixel_schedule.h"
#include "schedule.h"
#include "tensor_source.h"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// The same problem, of v that is given, in rows that are longer: a row costs something by itself, and leaves
// lanes idle at its end. Where all channels are treated alike, those of a pixel are a run of pixels; small
// maps are one row.
template <class Chain>
Problem with_long_rows(Problem problem) {
  Tensor& input = problem.input;
  Tensor& output = problem.output;
  if constexpr (Chain::Reduce::kStores && !Chain::kNeedsStatistics && !Chain::kReadsChannel) {
    if (is_channels_last(input) && is_channels_last(output)) {
      take_channels_for_pixels(input);
      take_channels_for_pixels(output);
    }
  }
  const bool is_small = input.size[2] * input.size[3] <= kTilePixels;
  if (!Chain::Reduce::kPools && is_small && has_joined_rows(input) && has_joined_rows(output)) {
    join_rows(input);
    join_rows(output);
  }
  return problem;
}

template <class Chain, class T>
void run_chain_in(const Problem& problem, int threads) {
  if (problem.conv == nullptr) {
    const Problem given = with_long_rows<Chain>(problem);
    if constexpr (Chain::Reduce::kStores) {
      const bool has_channels = given.input.size[1] > 1;
      if (has_channels && has_channels_side_by_side(given.input) && has_channels_side_by_side(given.output))
        return PixelSchedule<Chain, T>(given, threads).run();
    }
    TensorSource<T> source(given.input);
    Schedule<Chain, T>(source, given, threads).run();
  } else {
    ConvSource<T> source(problem.input, *problem.conv);
    Schedule<Chain, T>(source, problem, threads).run();
  }
}

template <class Chain>
void run_chain(const Problem& problem, int threads) {
  if (problem.input.dtype == DType::kFloat64) {
    run_chain_in<Chain, double>(problem, threads);
  } else {
    run_chain_in<Chain, float>(problem, threads);
  }
}

template <class Chain>
void run_backward(const BackwardProblem& problem, int threads) {
  if (problem.conv != nullptr) {
    ConvBackwardSchedule<Chain, float>(problem, threads).run();
  } else if (problem.v.dtype == DType::kFloat64) {
    BackwardSchedule<Chain, double>(problem, threads).run();
  } else {
    BackwardSchedule<Chain, float>(problem, threads).run();
  }
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

#define FUSEDCONV_CPU_CHAIN(name, Composition)                                                 \
  namespace fusedconv {                                                                        \
  inline namespace FUSEDCONV_TARGET {                                                          \
  void name(const Problem& problem, int threads) { run_chain<Composition>(problem, threads); } \
  void name##_backward(const BackwardProblem& problem, int threads) {                          \
    run_backward<Composition>(problem, threads);                                               \
  }                                                                                            \
  }                                                                                            \
  }

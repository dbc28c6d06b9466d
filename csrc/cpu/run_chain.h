// The entries of a chain on the CPU. Each cpu/<chain>.cpp is one line: FUSEDCONV_CPU_CHAIN(name,
// composition).
#pragma once

#include "../core/chains.h"
#include "backward.h"
#include "conv_backward.h"
#include "conv_source.h"
#include "kernels.h"
#include "schedule.h"
#include "tensor_source.h"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

template <class Chain, class T>
void run_chain_in(const Problem& problem, int threads) {
  if (problem.conv == nullptr) {
    TensorSource<T> source(problem.input);
    Schedule<Chain, T>(source, problem, threads).run();
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

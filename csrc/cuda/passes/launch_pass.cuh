// Launches of one pass over a conv, and the memory that every pass takes.
#pragma once

#include "cuda/conv/kernel.cuh"
#include "cuda/conv/pack.cuh"
#include "cuda/device/packs.cuh"
#include "plan/conv_plan.h"
#include "plan/workspace.h"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

using cuda::Card;
using cuda::ConvPlan;

// With memory for what every pass takes.
inline ConvProblem packed_problem(const Problem& problem, const ConvPlan& plan, Workspace& workspace) {
  const ConvTiling& t = plan.tiling;
  ConvProblem p{problem.input,
                problem.conv->weight,
                problem.output,
                plan.operand_parts,
                problem.conv->bias,
                problem.arguments,
                t};
  p.tiling.reads_vectors &= is_aligned(problem.input.data, kVectorBytes);
  const Checked panels = Checked(problem.input.size[0]) * panels_per_sample(t);
  p.weights = workspace.take<uint4>(Checked(plan.operand_parts) * t.row_blocks * t.chunks *
                                    (t.weights_bytes / kUnitBytes));
  p.weight_exponents = workspace.take<int>(t.row_blocks * kRows);
  p.row_bias = workspace.take<float>(t.row_blocks * kRows);
  p.shares = workspace.take<int>(Checked(t.row_blocks) * kRows * t.in_channels);
  p.is_unusual = workspace.take<int>(t.row_blocks * kRows);
  p.pixels = workspace.take<uint4>(plan.operand_parts * panels * t.chunks * chunk_units(t));
  p.pixel_exponents = workspace.take<int>(panels);
  p.magnitudes = workspace.take<unsigned>(panels * t.in_channels);
  return p;
}

// Persistent blocks, one a multiprocessor.
template <class Mode, class Pass, bool kIsCooperative = false>
cudaError_t launch_pass(const ConvProblem& p, const Card& card, cudaStream_t stream) {
  const ConvTiling& t = p.tiling;
  const int items =
      int(p.input.size[0]) * t.bands * t.tiles_across * (Pass::kAllRowBlocks ? 1 : t.row_blocks);
  const int blocks = items < card.multiprocessors ? items : card.multiprocessors;
  const LaunchShape shape{dim3(blocks), kConvThreads, t.shared_bytes,
                          card.overlaps_kernels && !kIsCooperative, kIsCooperative};
  return launch_kernel(conv_kernel<Mode, Pass>, shape, stream, p, items);
}

// Loads a pass's kernel onto the current device and lets it use all of its shared memory.
template <class Mode, class Pass>
cudaError_t load_pass(const Card& card) {
  return load_kernel(conv_kernel<Mode, Pass>, card.shared_bytes);
}

// Pass<Mode> of each mode, which several chains take: so that it is compiled once, shared_passes.cu has it,
// and to others it is extern.
#define FUSEDCONV_SHARED_PASS_OF(qualifier, Pass, Mode)                                         \
  qualifier template cudaError_t launch_pass<Mode, Pass<Mode>>(const ConvProblem&, const Card&, \
                                                               cudaStream_t);                   \
  qualifier template cudaError_t load_pass<Mode, Pass<Mode>>(const Card&);
#define FUSEDCONV_SHARED_PASS(qualifier, Pass)           \
  FUSEDCONV_SHARED_PASS_OF(qualifier, Pass, SplitHalves) \
  FUSEDCONV_SHARED_PASS_OF(qualifier, Pass, Halves)      \
  FUSEDCONV_SHARED_PASS_OF(qualifier, Pass, BFloat16s)

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

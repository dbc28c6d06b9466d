// The kernel of strips: see strip_work.cuh.
#pragma once

#include "strip_sums.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// Calls step(segment, row) for all steps of a block's segments, with a barrier of all threads after each, and
// start(segment), end(segment) before and after them. In step `row`, tile warps have this row; sum warps the
// one before, and bring in what the next ones take.
template <class Start, class Step, class End>
__device__ void walk_strips(const StripWork& work, const Start& start, const Step& step, const End& end) {
  for (int index = blockIdx.x; index < work.segments; index += gridDim.x) {
    const StripSegment segment(work, index);
    start(segment);
    for (int row = kFirstStep; row <= segment.last_row; ++row) {
      step(segment, row);
      sync_threads(0, kStripThreads);
    }
    end(segment);
  }
}

template <class Chain, int kOutTiles>
__device__ void run_tile_warps(const StripProblem<Chain>& problem, StripShared<kOutTiles>& shared) {
  StripTile<Chain, kOutTiles> tile(problem, shared);
  walk_strips(
      problem.strip, [&](const StripSegment& segment) { tile.start(segment); },
      [&](const StripSegment& segment, int row) { tile.step(segment, row); },
      [&](const StripSegment& segment) { tile.end(segment); });
}

template <int kOutTiles>
__device__ void run_sum_warps(const StripWork& work, StripShared<kOutTiles>& shared) {
  StripInput<kOutTiles> input(work, shared);
  StripWeightGradient<kOutTiles> weight(work, shared);
  walk_strips(
      work, [](const StripSegment&) {},
      [&](const StripSegment& segment, int row) {
        const int inputs = segment.rows + kHalo;
        const int next = row + kTaps;  // row of the input
        if (next >= 0 && next < inputs) input.write(next);
        if (next + 1 < inputs) input.load(segment, next + 1);
        if (row > 0) {
          if (work.slots != nullptr && row <= segment.rows) weight.add_row(row - 1);
          if (work.grad_input.data != nullptr) store_input_row(work, shared, segment, row - 1);
        }
        if (next + 1 < inputs) input.measure(next + 1);
      },
      [&](const StripSegment&) {
        if (work.slots != nullptr) weight.end_segment();
      });
}

template <class Chain, int kOutTiles>
__global__ void __launch_bounds__(kStripThreads, 1)
    strip_kernel(const __grid_constant__ StripProblem<Chain> problem) {
  extern __shared__ __align__(128) uint8_t strip_memory[];
  auto& shared = *reinterpret_cast<StripShared<kOutTiles>*>(strip_memory);
  let_next_kernel_start();
  wait_for_earlier_kernels();
  StripWeights<kOutTiles>(problem.strip, shared).load();
  __syncthreads();
  if (threadIdx.x < kTileThreads) {
    run_tile_warps<Chain>(problem, shared);
  } else {
    run_sum_warps(problem.strip, shared);
  }
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

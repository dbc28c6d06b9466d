// The kernel of strips: see strip_work.cuh.
#pragma once

#include "strip_sums.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// Calls step(unit, row) for all steps of a block's units, with a barrier of all threads after each, and
// start(unit), end(unit) before and after them. In step `row`, tile warps have this row; sum warps the one
// before, and bring in what the next ones take.
template <class Start, class Step, class End>
__device__ void walk_strips(const StripWork& work, const Start& start, const Step& step, const End& end) {
  for (int index = blockIdx.x; index < work.units; index += gridDim.x) {
    const StripUnit unit(work, index);
    start(unit);
    for (int row = kFirstStep; row <= unit.last_row; ++row) {
      step(unit, row);
      sync_threads(0, kStripThreads);
    }
    end(unit);
  }
}

template <class Chain, int kOutTiles>
__device__ void run_tile_warps(const StripProblem<Chain>& problem, StripShared<kOutTiles>& shared) {
  StripTile<Chain, kOutTiles> tile(problem, shared);
  walk_strips(
      problem.strip, [&](const StripUnit& unit) { tile.start(unit); },
      [&](const StripUnit& unit, int row) { tile.step(unit, row); },
      [&](const StripUnit& unit) { tile.end(unit); });
}

template <int kOutTiles>
__device__ void run_sum_warps(const StripWork& work, StripShared<kOutTiles>& shared) {
  StripInput<kOutTiles> input(work, shared);
  StripWeightGradient<kOutTiles> weight(work, shared);
  walk_strips(
      work, [](const StripUnit&) {},
      [&](const StripUnit& unit, int row) {
        const int inputs = unit.rows + kHalo;
        const int next = row + kTaps;  // row of the input
        if (next >= 0 && next < inputs) input.write(next);
        if (next + 1 < inputs) input.load(unit, next + 1);
        if (row > 0) {
          if (work.slots != nullptr && row <= unit.rows) weight.add_row(row - 1);
          if (work.grad_input.data != nullptr) store_input_row(work, shared, unit, row - 1);
        }
        if (next + 1 < inputs) input.measure(next + 1);
      },
      [&](const StripUnit&) {
        if (work.slots != nullptr) weight.end_unit();
      });
}

template <class Chain, int kOutTiles>
__global__ void __launch_bounds__(kStripThreads, 1)
    strip_kernel(const __grid_constant__ StripProblem<Chain> problem) {
  extern __shared__ __align__(128) uint8_t strip_memory[];
  auto& shared = *reinterpret_cast<StripShared<kOutTiles>*>(strip_memory);
  start_overlapping();
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

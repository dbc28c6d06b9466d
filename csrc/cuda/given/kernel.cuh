// One piece of a given v, one block: it keeps its values in shared memory, takes their moments, and ends the
// chain, or does one of both.
#pragma once

#include "ends.cuh"
#include "part_moments.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

template <class Chain, class T>
class PieceOfChain {
 public:
  __device__ explicit PieceOfChain(const GivenWork<T>& work) : block_(work) {}

  __device__ void run() const {
    if constexpr (Chain::kNeedsStatistics) {
      if (block_.work.step == GivenStep::kWhole) return run_whole();
      if (block_.work.step == GivenStep::kMoments) return write_moments();
    }
    if constexpr (Chain::Reduce::kStores) finish();
  }

 private:
  __device__ void run_whole() const {
    const GroupMoments<T> moments(block_);
    moments.arrive_at_cluster();
    take_moments();
    moments.wait_for_cluster();  // every block of it has started: its memory may be written
    moments.share();
    moments.sync_cluster();
    moments.set_norms();
    __syncthreads();
    if constexpr (Chain::Reduce::kStores) {
      visit_load<Chain>(block_.work,
                        [&](auto load) { store_piece<Chain, false>(GivenTile<decltype(load)>(block_)); });
    } else if constexpr (Chain::Reduce::kPools) {
      pool_piece<Chain>(block_);
    } else {
      visit_raw_load<Chain>(block_.work,
                            [&](auto load) { reduce_piece<Chain>(GivenTile<decltype(load)>(block_)); });
    }
  }

  __device__ void write_moments() const {
    let_next_kernel_start();
    take_moments();
    const GivenWork<T>& work = block_.work;
    const GivenPlan& plan = block_.plan;
    const Piece& piece = block_.piece;
    const int64_t parts_per_group = plan.units_per_group * plan.slices;
    const int64_t first_group = piece.channel / (work.shape.channels / work.shape.groups);
    const int64_t part = piece.unit % plan.units_per_group * plan.slices + piece.slice;
    GroupMoments<T>(block_).sum_groups([&](int g, int lane, int, const Deviations<double>& d) {
      if (lane > 0) return;
      const double offset = d.sum / d.count;
      const double m2 = d.squares - d.sum * offset;
      work.parts[(piece.sample * work.shape.groups + first_group + g) * parts_per_group + part] = {
          d.count, d.shift + offset, m2 < 0 ? 0 : m2};  // keeps NaN
    });
  }

  // Straight from memory to memory.
  __device__ void finish() const {
    if constexpr (Chain::kReadsChannel || Chain::kNeedsStatistics) {
      block_.template load_parameters<Chain>(false);
      if constexpr (Chain::kNeedsStatistics) block_.load_norms();
      __syncthreads();
    }
    visit_raw_load<Chain>(block_.work,
                          [&](auto load) { store_piece<Chain, true>(GivenTile<decltype(load)>(block_)); });
  }

  // Of the values, which are in shared memory then.
  __device__ void take_moments() const {
    visit_raw_load<Chain>(block_.work, [&](auto load) {
      const GivenTile<decltype(load)> tile(block_);
      tile.copy_values();
      block_.template load_parameters<Chain>(true);
      wait_for_copies();
      __syncthreads();
      PartMoments<Chain, decltype(load)>(tile).take();
    });
  }

  const GivenPiece<T> block_;
};

// Of a multiprocessor, by registers: while one loads, another computes. Doubles take too many.
template <class T>
constexpr int kLeastBlocks = sizeof(T) == sizeof(double) ? 1 : 2;

template <class Chain, class T>
__global__ void __launch_bounds__(cuda::kMostThreads, kLeastBlocks<T>)
    given_chain(const __grid_constant__ GivenWork<T> work) {
  if (block_index() < work.pieces) PieceOfChain<Chain, T>(work).run();
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

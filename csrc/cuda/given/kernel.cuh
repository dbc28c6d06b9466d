// One piece of a given v, one block: it keeps its values in shared memory, takes their moments, and ends the
// chain, or does one of both.
#pragma once

#include "ends.cuh"
#include "part_moments.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

template <class Chain, class ThreadLoad>
class PieceOfChain {
 public:
  using T = typename ThreadLoad::T;

  __device__ explicit PieceOfChain(const GivenPiece<T>& block) : block_(block), tile_(block) {}

  __device__ void run() const {
    if constexpr (Chain::kNeedsStatistics) {
      if (block_.work.step != GivenStep::kFinish) return run_from_moments();
    }
    if constexpr (Chain::Reduce::kStores) finish();
  }

 private:
  // One code takes and adds up moments for both steps that begin with them.
  __device__ void run_from_moments() const {
    const bool is_whole = block_.work.step == GivenStep::kWhole;
    const GroupMoments<T> moments(block_);
    if (is_whole) {
      moments.arrive_at_cluster();
    } else {
      let_next_kernel_start();
    }
    keep_values();
    PartMoments<Chain, ThreadLoad>(tile_).take();
    if (!is_whole) return moments.write();
    moments.wait_for_cluster();  // every block of it has started: its memory may be written
    moments.share();
    end_whole(moments);
  }

  // The values and the parameters, in shared memory.
  __device__ void keep_values() const {
    tile_.copy_values();
    block_.template load_parameters<Chain>(true);
    wait_for_copies();
    __syncthreads();
  }

  __device__ void end_whole(const GroupMoments<T>& moments) const {
    moments.sync_cluster();
    moments.set_norms();
    __syncthreads();
    if constexpr (Chain::Reduce::kStores) {
      store_piece<Chain, false>(tile_);
    } else if constexpr (Chain::Reduce::kPools) {
      pool_piece<Chain>(tile_);
    } else {
      reduce_piece<Chain>(tile_);
    }
  }

  // Straight from memory to memory.
  __device__ void finish() const {
    if constexpr (Chain::kReadsChannel || Chain::kNeedsStatistics) {
      block_.template load_parameters<Chain>(false);
      if constexpr (Chain::kNeedsStatistics) block_.load_norms();
      __syncthreads();
    }
    store_piece<Chain, true>(tile_);
  }

  const GivenPiece<T>& block_;
  const GivenTile<ThreadLoad> tile_;
};

// Of a multiprocessor, by registers: while one loads, another computes. Doubles take too many.
template <class T>
constexpr int kLeastBlocks = sizeof(T) == sizeof(double) ? 1 : 2;

// What depends on the load, and that is nearly all, stands together: a small piece waits longest for its
// instructions, and again after each jump.
template <class Chain, class Kind>
__global__ void __launch_bounds__(cuda::kMostThreads, kLeastBlocks<Compute<Kind>>)
    given_chain(const __grid_constant__ GivenWork<Compute<Kind>> work) {
  if (block_index() >= work.pieces) return;
  const GivenPiece<Compute<Kind>> block(work);
  visit_load<Chain, Kind>(work, [&](auto load) { PieceOfChain<Chain, decltype(load)>(block).run(); });
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

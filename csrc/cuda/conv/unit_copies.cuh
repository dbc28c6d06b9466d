// Copies of whole units from global to shared memory by a warp, which does not wait for them: those who use
// them wait at a barrier. By the copy engine, or by asynchronous loads where there is none.
#pragma once

#include "cuda/device/barriers.cuh"
#include "cuda/device/packs.cuh"
#include "problem.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

class UnitCopies {
 public:
#if __CUDA_ARCH__ >= 900
  static constexpr int kArrivals = 1;  // at the barrier, in each round

  // All lanes make the same calls. bytes: of all copies together.
  __device__ UnitCopies(uint64_t* barrier, int bytes) : barrier_(barrier) {
    if (lane_of_thread() == 0)
      asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(shared_address(barrier_)),
                   "r"(bytes)
                   : "memory");
  }
  __device__ void copy(void* to, const uint4* from, int units) const {
    if (lane_of_thread() == 0)
      asm volatile(
          "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
              shared_address(to)),
          "l"(from), "r"(units * kUnitBytes), "r"(shared_address(barrier_))
          : "memory");
  }
  __device__ void end() const {}
#else
  static constexpr int kArrivals = kWarpThreads + 1;

  __device__ UnitCopies(uint64_t* barrier, int) : barrier_(barrier) {}
  __device__ void copy(void* to, const uint4* from, int units) const {
    for (int i = lane_of_thread(); i < units; i += kWarpThreads)
      __pipeline_memcpy_async(static_cast<uint4*>(to) + i, from + i, kUnitBytes);
  }
  // Each lane arrives once its own copies have, and one for what it wrote itself.
  __device__ void end() const {
    if (lane_of_thread() == 0) arrive(barrier_);
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier_))
                 : "memory");
  }
#endif

 private:
  uint64_t* const barrier_;
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

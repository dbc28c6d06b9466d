// Barriers in shared memory (mbarrier), barriers of some warps, and the order between ordinary accesses to
// shared memory and those of the tensor cores and the copy engine.
#pragma once

#include <cstdint>

#include "core/target.h"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

__device__ inline void init_barrier(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

__device__ inline void arrive(uint64_t* barrier) {
  asm volatile("{ .reg .b64 state; mbarrier.arrive.shared.b64 state, [%0]; }" ::"r"(shared_address(barrier))
               : "memory");
}

__device__ inline bool has_passed(uint64_t* barrier, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
#define FUSEDCONV_WAIT "mbarrier.try_wait.parity.shared.b64"
#else
#define FUSEDCONV_WAIT "mbarrier.test_wait.parity.shared.b64"
#endif
  uint32_t passed;
  asm volatile("{ .reg .pred p; " FUSEDCONV_WAIT " p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(passed)
               : "r"(shared_address(barrier)), "r"(parity)
               : "memory");
#undef FUSEDCONV_WAIT
  return passed != 0;
}

__device__ inline void wait(uint64_t* barrier, uint32_t parity) {
  while (!has_passed(barrier, parity)) {
  }
}

// A barrier of the named threads only. 0 is __syncthreads' own.
__device__ inline void sync_threads(int name, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(name), "r"(threads) : "memory");
}

// The same; tells whether some thread's flag is set.
__device__ inline bool any_of_threads(int name, int threads, bool flag) {
  int any;
  asm volatile(
      "{ .reg .pred p, q; setp.ne.b32 p, %3, 0; barrier.red.or.pred q, %1, %2, p; selp.b32 %0, 1, 0, q; }"
      : "=r"(any)
      : "r"(name), "r"(threads), "r"(int(flag))
      : "memory");
  return any != 0;
}

// What this thread wrote to shared memory may be read by the tensor cores or the copy engine after the next
// barrier.
__device__ inline void fence_async_proxy() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

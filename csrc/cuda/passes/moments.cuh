// The pass that only measures.
#pragma once

#include "launch_pass.cuh"
#include "pass.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// Statistics of Pre(v), and nothing else.
template <class Pre>
class MomentsPass : public PassBase {
 public:
  static constexpr bool kAllRowBlocks = false;
  using PassBase::PassBase;

  __device__ void set_rows(const ThreadRows& rows) { channels_.load(p_, rows); }
  __device__ void before_staging() {}  // it stages nothing; sums of chunks are each thread's own

  __device__ void finish(Fragment v) {
    apply<Pre>(v, channels_);
    write_moments(p_, v);
  }

 private:
  ThreadChannels<kReadChannel<Pre>> channels_;
};

// Those of v itself.
template <class>
using MomentsOfV = MomentsPass<Sequence<>>;
FUSEDCONV_SHARED_PASS(extern, MomentsOfV)

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

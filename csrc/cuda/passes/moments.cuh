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

// That of v itself serves several chains: moments.cu has it.
#define FUSEDCONV_MOMENTS_OF_V(qualifier, Mode)                                                              \
  qualifier template cudaError_t launch_pass<Mode, MomentsPass<Sequence<>>>(const ConvProblem&, const Card&, \
                                                                            cudaStream_t);                   \
  qualifier template cudaError_t load_pass<Mode, MomentsPass<Sequence<>>>(const Card&);

FUSEDCONV_MOMENTS_OF_V(extern, SplitHalves)
FUSEDCONV_MOMENTS_OF_V(extern, Halves)
FUSEDCONV_MOMENTS_OF_V(extern, BFloat16s)

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

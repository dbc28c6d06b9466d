// The pointwise part of backward, from the gradient at each place of what went into the reduction: the sums
// behind the norm, then the gradient of v with the sums that are left. v is read for each, and the chain
// computed again.
#pragma once

#include "spread.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// Calls use(offset, v, grad) for a thread's packs of a slice; offset is in the tensor.
template <int kCount, class Chain, class T, class Use>
__device__ void for_each_spread(const BackwardWork<T>& work, const Slice& slice, const Channel<T>& channel,
                                const Use& use) {
  using ChainSpread = Spread<Chain, T>;
  struct Loaded {
    RawPack<T, kCount> v;
    typename ChainSpread::template Loaded<kCount> spread;
  };
  const ChainSpread spread(work, slice);
  const int64_t first = slice.plane * work.pixels + slice.first;
  for_each_pack<ChainSpread::kBatch, kCount>(
      slice,
      [&](int i) -> Loaded {
        return {load_raw<T, kCount>(work.v, first + i), spread.template load<kCount>(i)};
      },
      [&](int i, const Loaded& loaded) {
        const Pack<T, kCount> v = values_of(loaded.v, work.v.dtype);
        use(first + i, v, spread.gradients(i, loaded.spread, v, channel));
      });
}

template <class Chain, class T>
__global__ void __launch_bounds__(kPlaneThreads)
    sums_after_norm(const __grid_constant__ BackwardWork<T> work) {
  let_next_kernel_start();
  wait_for_earlier_kernels();
  const Slice slice(work.planes);
  const Channel<T> channel = channel_of_warp<Chain>(work, slice);
  const NormGradient<T> norm = norm_gradient_of<Chain, false>(work, slice.sample, slice.channel);
  T sums[kGradientKinds]{};
  visit_count(work, [&](auto count) {
    for_each_spread<decltype(count)::value, Chain>(
        work, slice, channel, [&](int64_t, const auto& v, const auto& grad) {
#pragma unroll
          for (int k = 0; k < decltype(count)::value; ++k)
            add_after_norm<Chain>(grad.element[k], v.element[k], channel, norm, sums);
        });
  });
  write_sums<kAfterNorm<Chain>>(slice, sums, work.after_norm);
}

// The gradient of v from that of what came out of Post.
template <class Chain, class T>
__device__ T gradient_of_v(T grad, T v, const Channel<T>& channel, const NormGradient<T>& norm,
                           T (&sums)[kGradientKinds]) {
  Gradients<T> of_post = no_gradients<T>();
  Gradients<T> of_pre = no_gradients<T>();
  const T x = Chain::Pre::value(v, v, channel);
  grad = Chain::Post::vjp(grad, Chain::Norm::value(x, channel), v, channel, of_post);
  grad = Chain::Pre::vjp(Chain::Norm::vjp(grad, x, channel, norm), v, v, channel, of_pre);
  grad += of_post.v + of_pre.v;
#pragma unroll
  for (int k = 0; k < kStageParameters; ++k)
    sums[k] += Chain::kNeedsStatistics ? of_pre.of[k] : of_pre.of[k] + of_post.of[k];
  sums[kConvBias] += grad;
  return grad;
}

template <class Chain, class T>
__global__ void __launch_bounds__(kPlaneThreads)
    write_gradient(const __grid_constant__ BackwardWork<T> work) {
  let_next_kernel_start();
  wait_for_earlier_kernels();
  const Slice slice(work.planes);
  const Channel<T> channel = channel_of_warp<Chain>(work, slice);
  const NormGradient<T> norm = norm_gradient_of<Chain, true>(work, slice.sample, slice.channel);
  T sums[kGradientKinds]{};
  visit_count(work, [&](auto count) {
    constexpr int kCount = decltype(count)::value;
    for_each_spread<kCount, Chain>(
        work, slice, channel, [&](int64_t offset, const Pack<T, kCount>& v, const Pack<T, kCount>& grad) {
          Pack<T, kCount> grad_v;
#pragma unroll
          for (int k = 0; k < kCount; ++k)
            grad_v.element[k] = gradient_of_v<Chain>(grad.element[k], v.element[k], channel, norm, sums);
          if (work.grad_v.data != nullptr) store_values(work.grad_v, offset, grad_v);
        });
  });
  write_sums<kOfAll<Chain>>(slice, sums, work.of_all);
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

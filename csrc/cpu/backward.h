// Backward of a chain over a whole problem, written once for the algebra.
//
// The reduction spreads the output's gradient over v's places, in the memory of v's own gradient. From there
// on all is pointwise in v and in what was spread, but for two sums over each group of a GroupNorm. Each sum
// is over one plane, and planes are added up in one order, so the number of threads changes no bit.
#pragma once

#include <type_traits>

#include "buffer.h"
#include "core/chain.h"
#include "parallel_for.h"
#include "reduce_vjp.h"
#include "row_vjp.h"
#include "tiling.h"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// So much of v is taken through all steps of a reduction over channels before the next is begun.
constexpr int64_t kStepBytes = 8 * 1024 * 1024;

template <class Chain, class T>
class BackwardSchedule {
  using Reduce = typename Chain::Reduce;
  static_assert(!Reduce::kStores || std::is_same_v<typename Chain::Final, Sequence<>>,
                "without a reduction the last stages belong to Post");

 public:
  BackwardSchedule(const BackwardProblem& problem, int threads)
      : problem_(problem),
        v_(static_cast<const T*>(problem.v.data)),
        grad_(static_cast<const T*>(problem.grad)),
        grad_v_(static_cast<T*>(problem.grad_v)),
        samples_(problem.v.size[0]),
        channel_count_(problem.v.size[1]),
        plane_(problem.v.size[2] * problem.v.size[3]),
        group_channels_(Chain::kNeedsStatistics ? channel_count_ / problem.arguments.num_groups : 1),
        groups_(channel_count_ / group_channels_),
        threads_(threads_worth_waking(threads, element_count(problem.v), kOperations)),
        row_elements_(round_up(problem.v.size[3], kLanes<T>)),
        channels_(samples_, channel_count_),
        norms_(samples_, channel_count_),
        sums_(samples_, channel_count_),
        pool_rows_(Reduce::kPools ? 3 : 0, threads_, row_elements_) {}

  void run() const {
    if constexpr (Reduce::kReducesChannels) {
      const int64_t step = larger(1, kStepBytes / (channel_count_ * plane_ * int64_t(sizeof(T))));
      for (int64_t n = 0; n < samples_; n += step) run_step_by_step(n, smaller(step, samples_ - n));
    } else {
      parallel_for(samples_ * groups_, threads_, [&](int64_t group, int worker) {
        set_channels(group);
        if constexpr (Reduce::kPools) unpool(group, worker);
        finish(group);
      });
    }
    for (int k = 0; k < kGradientKinds; ++k) write(k);
  }

 private:
  static constexpr int64_t kOperations = 32;  // for one value, roughly

  // A group is numbered over all samples, and so is a channel, which is a plane.
  template <class Visit>
  FUSEDCONV_INLINE void for_each_plane(int64_t group, const Visit& visit) const {
    for (int64_t p = group * group_channels_; p < (group + 1) * group_channels_; ++p) visit(p);
  }

  void run_step_by_step(int64_t first_sample, int64_t samples) const {
    const int64_t first_group = first_sample * groups_;
    for (int64_t i = 0; i < samples * groups_; ++i) set_channels(first_group + i);
    const int64_t blocks = ceil_div(plane_, kSpreadPixels);
    parallel_for(samples * blocks, threads_, [&](int64_t i, int) {
      const int64_t first_plane = (first_sample + i / blocks) * channel_count_;
      const int64_t pixel = i % blocks * kSpreadPixels;
      const int64_t corner = first_plane * plane_ + pixel;
      spread_over_channels<Chain>(v_ + corner, grad_ + (first_sample + i / blocks) * plane_ + pixel,
                                  grad_v_ + corner, plane_, smaller(kSpreadPixels, plane_ - pixel),
                                  channel_count_, channels_.data() + first_plane);
    });
    parallel_for(samples * groups_, threads_, [&](int64_t i, int) { finish(first_group + i); });
  }

  // The parameters of a group's planes.
  void set_channels(int64_t group) const {
    for_each_plane(group, [&](int64_t p) {
      set_channel<Chain>(problem_, p / channel_count_, p % channel_count_, channels_[p], norms_[p]);
      sums_[p] = {};
    });
  }

  void unpool(int64_t group, int worker) const {
    static_assert(kIsMaxPool<Reduce>);
    T* row = pool_rows_.data() + 3 * worker * row_elements_;
    const PoolRows<T> rows{row, row + row_elements_, row + 2 * row_elements_};
    const int64_t height = problem_.v.size[2];
    const int64_t width = problem_.v.size[3];
    const int64_t* window = problem_.arguments.pool;
    const int64_t pooled_plane = (height / window[0]) * (width / window[1]);
    for_each_plane(group, [&](int64_t p) {
      spread_over_windows<Chain>(v_ + p * plane_, grad_ + p * pooled_plane, grad_v_ + p * plane_, height,
                                 width, width, window, channels_[p], rows);
    });
  }

  void finish(int64_t group) const {
    if constexpr (Chain::kNeedsStatistics) {
      for_each_plane(group,
                     [&](int64_t p) { sum_after_norm<Chain>(rows(p), channels_[p], norms_[p], sums_[p]); });
      const int64_t first = group * group_channels_;
      set_norm_gradient(problem_.arguments, sums_.data() + first, first % channel_count_, group_channels_,
                        plane_, norms_.data() + first);
    }
    if (!wants_last_pass<Chain>(problem_)) return;
    for_each_plane(group, [&](int64_t p) {
      write_gradient<Chain>(rows(p), channels_[p], norms_[p], grad_v_ + p * plane_, plane_, sums_[p]);
    });
  }

  // A plane as one row.
  Rows<T> rows(int64_t plane) const {
    const T* spread = Reduce::kStores ? grad_ : grad_v_;
    return {v_ + plane * plane_, plane_, spread + plane * plane_, plane_, 1, plane_};
  }

  // A parameter's gradient: the sum over all samples.
  void write(int parameter) const {
    T* to = static_cast<T*>(problem_.grad_parameters[parameter]);
    if (to == nullptr) return;
    for (int64_t c = 0; c < channel_count_; ++c) {
      double sum = 0;
      for (int64_t n = 0; n < samples_; ++n) sum += sums_[n * channel_count_ + c].of[parameter];
      to[c] = T(sum);
    }
  }

  const BackwardProblem& problem_;
  const T* v_;
  const T* grad_;
  T* grad_v_;
  const int64_t samples_;
  const int64_t channel_count_;
  const int64_t plane_;
  const int64_t group_channels_;
  const int64_t groups_;
  const int threads_;
  const int64_t row_elements_;
  // For each sample and channel.
  const Buffer<Channel<T>> channels_;
  const Buffer<NormGradient<T>> norms_;
  const Buffer<ParameterSums<double>> sums_;
  // For each thread.
  const Buffer<T> pool_rows_;
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

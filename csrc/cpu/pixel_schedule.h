// How a chain that stores all it computes runs over a tensor whose channels lie side by side: channels in the
// lanes.
//
// A block is some pixels of one sample with all of their channels. Blocks, and the order in which their
// moments are combined, follow from the shape of one sample only: so neither the batch nor the number of
// threads changes a bit.
#pragma once

#include "buffer.h"
#include "convert.h"
#include "core/chain.h"
#include "layout.h"
#include "parallel_for.h"
#include "statistics.h"
#include "tiling.h"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// Pixels of a block: so many values, which stay in L1, and no more than a lane sums in the compute type.
constexpr int64_t kBlockValues = 4096;
constexpr int64_t kLeastBlockPixels = 16;

template <class Chain, class T>
class PixelSchedule {
 public:
  PixelSchedule(const Problem& problem, int threads)
      : problem_(problem),
        samples_(problem.input.size[0]),
        channel_count_(problem.input.size[1]),
        pixels_(problem.input.size[2] * problem.input.size[3]),
        vectors_(ceil_div(channel_count_, kLanes<T>)),
        group_channels_(Chain::kNeedsStatistics ? channel_count_ / problem.arguments.num_groups : 1),
        groups_(channel_count_ / group_channels_),
        block_pixels_(larger(kLeastBlockPixels, smaller(kLanePixels, kBlockValues / channel_count_))),
        blocks_(ceil_div(pixels_, block_pixels_)),
        threads_(threads_worth_waking(smaller(threads, samples_ * blocks_), element_count(problem.input),
                                      kOperations)),
        by_thread_(samples_ % threads_ == 0 || samples_ >= 4 * threads_),
        lanes_(vectors_) {
    set_lanes(lanes_.data(), nullptr);
  }

  void run() const {
    if constexpr (Chain::kNeedsStatistics) {
      run_with_statistics();
    } else {
      parallel_for(samples_ * blocks_, threads_,
                   [&](int64_t i, int) { write(i / blocks_, i % blocks_, lanes_.data()); });
    }
  }

 private:
  static constexpr int64_t kOperations = 32;  // for one value, roughly

  using Lanes = Channel<T, Vector<T>>;

  // A sample's memory between its statistics and the rest.
  struct Sample {
    int64_t index;
    Moments* moments;             // [block][group]
    GroupStatistics* statistics;  // [group]
    Lanes* lanes;                 // [vector of channels]
  };

  // Many samples: each thread takes whole ones. Few: all threads share the blocks of one.
  void run_with_statistics() const {
    const int64_t slots = by_thread_ ? threads_ : 1;
    const Buffer<Moments> moments(slots, blocks_, groups_);
    const Buffer<Moments> channels(threads_, channel_count_);
    const Buffer<GroupStatistics> statistics(slots, groups_);
    const Buffer<Lanes> lanes(slots, vectors_);
    const auto sample = [&](int64_t n, int64_t slot) {
      GroupStatistics* own = statistics.data() + slot * groups_;
      return Sample{n, moments.data() + slot * blocks_ * groups_,
                    problem_.statistics == nullptr ? own : problem_.statistics + n * groups_,
                    lanes.data() + slot * vectors_};
    };
    const auto measure_block = [&](const Sample& of, int64_t block, int worker) {
      measure(of, block, channels.data() + worker * channel_count_);
    };
    if (by_thread_) {
      parallel_for(samples_, threads_, [&](int64_t n, int worker) {
        const Sample mine = sample(n, worker);
        for (int64_t b = 0; b < blocks_; ++b) measure_block(mine, b, worker);
        set_norms(mine);
        for (int64_t b = 0; b < blocks_; ++b) write(n, b, mine.lanes);
      });
      return;
    }
    for (int64_t n = 0; n < samples_; ++n) {
      const Sample shared = sample(n, 0);
      parallel_for(blocks_, threads_, [&](int64_t b, int worker) { measure_block(shared, b, worker); });
      set_norms(shared);
      parallel_for(blocks_, threads_, [&](int64_t b, int) { write(n, b, shared.lanes); });
    }
  }

  int64_t pixels_of(int64_t block) const { return smaller(block_pixels_, pixels_ - block * block_pixels_); }
  int64_t channels_of(int64_t vector) const {
    return smaller(kLanes<T>, channel_count_ - vector * kLanes<T>);
  }

  template <class Element>
  static Element* first_pixel(const Tensor& tensor, int64_t sample, int64_t pixel) {
    return static_cast<Element*>(tensor.data) + sample * tensor.stride[0] + pixel * tensor.stride[3];
  }

  // The parameters of all channels, and of their norms once these are known.
  void set_lanes(Lanes* lanes, const GroupStatistics* statistics) const {
    for (int64_t c = 0; c < vectors_ * kLanes<T>; ++c) {
      Channel<T> channel{};
      if (c < channel_count_) {
        channel = make_channel<T>(problem_.arguments, c);
        if (statistics != nullptr) set_norm(channel, problem_.arguments, c, statistics[c / group_channels_]);
      }
      Lanes& to = lanes[c / kLanes<T>];
      const int64_t lane = c % kLanes<T>;
      for (int k = 0; k < kStageParameters; ++k) to.of[k][lane] = channel.of[k];
      to.mean[lane] = channel.mean;
      to.norm_scale[lane] = channel.norm_scale;
      to.norm_shift[lane] = channel.norm_shift;
      to.clamp_min[lane] = channel.clamp_min;
      to.clamp_max[lane] = channel.clamp_max;
    }
  }

  // Leaves the moments of Pre(v) of a block's groups.
  void measure(const Sample& sample, int64_t block, Moments* of_channels) const {
    const int64_t count = pixels_of(block);
    visit_dtype<T>(problem_.input.dtype, [&](auto* element) {
      using Element = Pointee<decltype(element)>;
      const Element* pixel = first_pixel<Element>(problem_.input, sample.index, block * block_pixels_);
      for (int64_t j = 0; j < vectors_; ++j) {
        measure_lanes(pixel + j * kLanes<T>, count, channels_of(j), lanes_[j], of_channels + j * kLanes<T>);
      }
    });
    for (int64_t g = 0; g < groups_; ++g) {
      sample.moments[block * groups_ + g] =
          combine_channels(of_channels + g * group_channels_, group_channels_);
    }
  }

  // Of channels that all have as many pixels.
  static Moments combine_channels(const Moments* channels, int64_t count) {
    Moments all{};
    for (int64_t c = 0; c < count; ++c) all.mean += channels[c].mean;
    all.mean /= double(count);
    for (int64_t c = 0; c < count; ++c) {
      const double distance = channels[c].mean - all.mean;
      all.m2 += channels[c].m2 + distance * distance * channels[c].count;
    }
    all.count = channels[0].count * double(count);
    return all;
  }

  // By their deviations from the mean of an eighth of the pixels or more: see moments_of_few().
  template <class Element>
  void measure_lanes(const Element* from, int64_t count, int64_t channels, const Lanes& lanes,
                     Moments* to) const {
    constexpr int64_t kShare = 8;
    const int64_t stride = problem_.input.stride[3];
    const auto at = [&](int64_t p) {
      const Vector<T> v = load_vector<T>(from + p * stride, channels);
      return Chain::Pre::value(v, v, lanes);
    };
    const int64_t some = ceil_div(count, kShare);
    Vector<T> shift{};
    for (int64_t p = 0; p < some; ++p) shift += at(p);
    shift = shift / T(some);
    Vector<T> deviation[kSums]{};
    Vector<T> square[kSums]{};
    int64_t p = 0;
    for (; p + kSums <= count; p += kSums) {
#pragma GCC unroll 4
      for (int i = 0; i < kSums; ++i) {
        const Vector<T> d = at(p + i) - shift;
        deviation[i] += d;
        square[i] += d * d;
      }
    }
    for (; p < count; ++p) {
      const Vector<T> d = at(p) - shift;
      deviation[0] += d;
      square[0] += d * d;
    }
    const Vector<T> deviations = total<T>(deviation);
    const Vector<T> squares = total<T>(square);
    const double one_over_count = 1.0 / double(count);
    for (int64_t c = 0; c < channels; ++c) {
      const double distance = double(deviations[c]) * one_over_count;
      to[c] = {double(count), double(shift[c]) + distance,
               double(squares[c]) - distance * double(deviations[c])};
    }
  }

  void set_norms(const Sample& sample) const {
    for (int64_t g = 0; g < groups_; ++g) {
      Moments all = sample.moments[g];
      for (int64_t b = 1; b < blocks_; ++b) all = combine(all, sample.moments[b * groups_ + g]);
      sample.statistics[g] = statistics_of(all, problem_.arguments.eps);
    }
    set_lanes(sample.lanes, sample.statistics);
  }

  void write(int64_t sample, int64_t block, const Lanes* lanes) const {
    visit_dtype<T>(problem_.input.dtype, [&](auto* input) {
      visit_dtype<T>(problem_.output.dtype, [&](auto* output) {
        write_pixels(first_pixel<Pointee<decltype(input)>>(problem_.input, sample, block * block_pixels_),
                     first_pixel<Pointee<decltype(output)>>(problem_.output, sample, block * block_pixels_),
                     pixels_of(block), lanes);
      });
    });
  }

  static FUSEDCONV_INLINE Vector<T> value(Vector<T> v, const Lanes& lanes) {
    const Vector<T> y = Chain::value(v, lanes);
    return Chain::Final::value(y, y, lanes);
  }

  template <class From, class To>
  void write_pixels(const From* from, To* to, int64_t count, const Lanes* lanes) const {
    const int64_t whole = channel_count_ / kLanes<T>;
    const int64_t left = channel_count_ % kLanes<T>;
    for (int64_t p = 0; p < count; ++p) {
      const From* v = from + p * problem_.input.stride[3];
      To* y = to + p * problem_.output.stride[3];
      for (int64_t j = 0; j < whole; ++j, v += kLanes<T>, y += kLanes<T>) {
        store_vector<T>(y, value(load_vector<T>(v, kLanes<T>), lanes[j]), kLanes<T>);
      }
      if (left > 0) store_vector<T>(y, value(load_vector<T>(v, left), lanes[whole]), left);
    }
  }

  const Problem& problem_;
  const int64_t samples_;
  const int64_t channel_count_;
  const int64_t pixels_;
  const int64_t vectors_;
  const int64_t group_channels_;
  const int64_t groups_;
  const int64_t block_pixels_;
  const int64_t blocks_;
  const int threads_;
  const bool by_thread_;
  const Buffer<Lanes> lanes_;  // before any norm is known
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

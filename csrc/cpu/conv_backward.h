// Backward of a conv with its chain over a whole problem, written once for the algebra.
//
// A band is some rows of all channels of one sample, and stays in L2: v of the band by our conv, the chain's
// vjp, and from that the gradients of the conv's weight and input, so that v's gradient never leaves the
// cache. Where the chain needs sums over the whole sample first, or reduces, v is kept between two passes: v,
// what the reduction spreads, and the sums behind the norm; the rest. A strip is a few bands one after the
// other, which one thread takes. It starts with the rows above that the filter reaches from the input's
// gradient of its first row. Strips follow from the problem's shape, and their sums are added up in one
// order: so the number of threads changes no bit.
#pragma once

#include "buffer.h"
#include "conv_gradients.h"
#include "conv_source.h"
#include "parallel_for.h"
#include "reduce_vjp.h"
#include "row_vjp.h"
#include "tiling.h"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

constexpr int64_t kBandBytes = 256 * 1024;  // of v's gradient; beside it, its halo and the input stay in L2
constexpr int64_t kStripRows = 32;          // at least, and so many times what the filter reaches
constexpr int64_t kStripReaches = 8;
constexpr int64_t kThreadStrips = 16;         // that a thread takes, roughly, before sums are added up
constexpr int64_t kSumsBytes = 32 << 20;      // of their weight's sums; but one strip a thread
constexpr int64_t kKeptStrips = 2;            // the same where all threads wait for each other between passes
constexpr int64_t kKeptBytes = 8 << 20;       // so much is kept then, at least
constexpr int64_t kMostKeptBytes = 64 << 20;  // of all threads' samples, where each thread takes whole ones

template <class Chain, class T>
class ConvBackwardSchedule {
  using Reduce = typename Chain::Reduce;
  using Sums = ParameterSums<double>;
  static constexpr bool kKeeps = Chain::kNeedsStatistics || !Reduce::kStores;

 public:
  ConvBackwardSchedule(const BackwardProblem& problem, int threads)
      : problem_(problem),
        source_(problem.conv->input, problem.conv->conv),
        grad_(static_cast<const T*>(problem.grad)),
        samples_(source_.samples),
        channel_count_(source_.channels),
        group_channels_(Chain::kNeedsStatistics ? channel_count_ / problem.arguments.num_groups : 1),
        reach_((problem.conv->conv.weight.size[2] - 1) * problem.conv->conv.dilation[0]),
        band_rows_(rows_of_band()),
        bands_(ceil_div(source_.rows + reach_, band_rows_)),
        strip_bands_(ceil_div(larger(kStripRows, kStripReaches * reach_), band_rows_)),
        strips_(ceil_div(bands_, strip_bands_)),
        threads_(threads_worth_waking(threads, element_count(problem.v), source_.cost())),
        gradients_(*problem.conv, source_, band_rows_),
        plane_(source_.plane(band_rows_)),
        tile_elements_((Checked(channel_count_) * plane_ + kLanes<T>).value()),
        by_thread_(takes_whole_samples()),
        step_samples_(smaller(samples_, samples_of_step())),
        slots_(by_thread_ ? threads_ : step_samples_),
        row_elements_(round_up(source_.cols, kLanes<T>)),
        packed_elements_(whole_vectors(source_.prepare(band_rows_))),
        grad_v_elements_(whole_vectors(gradients_.grad_v_elements())),
        scratch_elements_((Checked(packed_elements_) + grad_v_elements_ +
                           larger(kBlockChannels * plane_ + kLanes<T>, gradients_.grad_input_elements()))
                              .value()),
        scratch_(threads_, scratch_elements_),
        pool_rows_(Reduce::kPools ? 3 : 0, threads_, row_elements_),
        v_(kKeeps ? slots_ : 0, bands_, tile_elements_),
        spread_(Reduce::kStores ? 0 : slots_, bands_, tile_elements_),
        channels_(slots_, channel_count_),
        norms_(slots_, channel_count_),
        sample_sums_(Chain::kNeedsStatistics ? slots_ : 0, channel_count_),
        sums_(step_samples_, strips_, channel_count_),
        weight_sums_(wants_weight() ? step_samples_ : 0, strips_, gradients_.weight_elements()),
        total_(channel_count_),
        weight_total_(wants_weight() ? gradients_.weight_elements() : 0) {}

  void run() const {
    for (int64_t c = 0; c < channel_count_; ++c) total_[c] = {};
    if (wants_weight()) clear(weight_total_.data(), gradients_.weight_elements());
    for (int64_t first = 0; first < samples_; first += step_samples_) {
      run_step(first, smaller(step_samples_, samples_ - first));
    }
    write_weight();
    for (int k = 0; k < kGradientKinds; ++k) write(k);
  }

 private:
  // Samples that are taken through all passes together.
  struct Samples {
    int64_t first;
    int64_t count;
    int64_t slot;   // of the first one: where all that is kept of it stands
    int64_t strip;  // the first one of the first sample: where its sums stand
  };

  // Some bands of one sample.
  struct Strip {
    int64_t sample;
    int64_t slot;
    int64_t index;  // where its sums stand
    int64_t begin;
    int64_t end;
  };

  int64_t rows_of_band() const {
    const int64_t window = Reduce::kPools ? problem_.arguments.pool[0] : 1;
    const int64_t height = source_.rows + reach_;
    const int64_t fitting = kBandBytes / (channel_count_ * source_.pitch * int64_t(sizeof(T)));
    const int64_t most = larger(1, larger(reach_, smaller(fitting, height)));  // a halo is of one band
    return round_up(larger(reach_, ceil_div(height, ceil_div(height, most))), window);
  }

  static int64_t whole_vectors(Checked elements) { return round_up(elements, kLanes<T>).value(); }

  int64_t kept_bytes() const {
    return (Checked(bands_) * tile_elements_ * int64_t(sizeof(T)) * (Reduce::kStores ? 1 : 2)).value();
  }

  // Otherwise all threads share a sample's strips, and wait for each other after each pass.
  bool takes_whole_samples() const {
    const bool shares_are_even = samples_ % threads_ == 0 || samples_ >= 4 * threads_;
    return kKeeps && shares_are_even && Checked(threads_) * kept_bytes() <= kMostKeptBytes;
  }

  int64_t samples_of_step() const {
    if (by_thread_ || !kKeeps) {
      const int64_t fitting = kSumsBytes / (gradients_.weight_elements() * int64_t(sizeof(double)));
      return ceil_div(smaller(kThreadStrips * threads_, larger(threads_, fitting)), strips_);
    }
    return larger(kKeptBytes / kept_bytes(), ceil_div(kKeptStrips * threads_, strips_));
  }

  bool wants_weight() const { return problem_.conv->grad_weight != nullptr; }
  bool wants_input() const { return problem_.conv->grad_input.data != nullptr; }

  static void clear(double* sums, int64_t count) {
    for (int64_t i = 0; i < count; ++i) sums[i] = 0;
  }

  void run_step(int64_t first, int64_t count) const {
    if (by_thread_) {
      parallel_for(count, threads_, [&](int64_t n, int worker) {
        run_passes({first + n, 1, worker, n * strips_}, [&](int64_t strips, const auto& pass) {
          for (int64_t i = 0; i < strips; ++i) pass(i, worker);
        });
      });
    } else {
      run_passes({first, count, 0, 0},
                 [&](int64_t strips, const auto& pass) { parallel_for(strips, threads_, pass); });
    }
    add_up(count * strips_);
  }

  // `loop(count, pass)` calls pass(i, worker) for each of so many strips.
  template <class Loop>
  void run_passes(const Samples& some, const Loop& loop) const {
    for (int64_t i = 0; i < some.count * channel_count_; ++i) {
      const int64_t at = some.slot * channel_count_ + i;
      set_channel<Chain>(problem_, some.first + i / channel_count_, i % channel_count_, channels_[at],
                         norms_[at]);
    }
    for (int64_t i = 0; i < some.count * strips_ * channel_count_; ++i) {
      sums_[some.strip * channel_count_ + i] = {};
    }
    const auto for_each_strip = [&](const auto& pass) {
      loop(some.count * strips_, [&](int64_t i, int worker) { pass(strip(some, i), worker); });
    };
    if constexpr (kKeeps) {
      for_each_strip([&](const Strip& strip, int worker) { prepare(strip, worker); });
      if constexpr (Chain::kNeedsStatistics) set_norm_gradients(some);
    }
    if (wants_last_pass<Chain>(problem_))
      for_each_strip([&](const Strip& strip, int worker) { finish(strip, worker); });
  }

  // ---- places

  Strip strip(const Samples& some, int64_t i) const {
    const int64_t n = i / strips_;
    const int64_t begin = i % strips_ * strip_bands_;
    return {some.first + n, some.slot + n, some.strip + i, begin, smaller(bands_, begin + strip_bands_)};
  }
  Place place(const Strip& strip, int64_t row, int64_t rows) const {
    return {strip.sample, 0, channel_count_, row, larger(0, smaller(rows, source_.rows - row))};
  }
  Place band(const Strip& strip, int64_t index) const { return place(strip, index * band_rows_, band_rows_); }

  // From a row on, which stands in one of the bands that are kept.
  Tile<T> kept(const Buffer<T>& tiles, const Strip& strip, int64_t row) const {
    const int64_t tile = strip.slot * bands_ + row / band_rows_;
    return {tiles.data() + tile * tile_elements_ + row % band_rows_ * source_.pitch, plane_, source_.pitch};
  }

  T* packed(int worker) const { return scratch_.data() + worker * scratch_elements_; }
  T* grad_v(int worker) const { return packed(worker) + packed_elements_; }
  // v of a few channels, where it is not kept; then the input's gradient.
  T* tile(int worker) const { return grad_v(worker) + grad_v_elements_; }

  // Calls visit(part, c) for a band's channels from c on, so many as the conv computes together.
  template <class Visit>
  void for_each_part(const Place& where, const Visit& visit) const {
    for (int64_t c = 0; c < where.channels; c += kBlockChannels) {
      visit(Place{where.sample, c, smaller(kBlockChannels, where.channels - c), where.row, where.rows}, c);
    }
  }

  // ---- passes

  // v, what the reduction spreads, and the sums behind the norm.
  void prepare(const Strip& strip, int worker) const {
    for (int64_t b = strip.begin; b < strip.end; ++b) {
      const Place where = band(strip, b);
      if (where.rows == 0) return;
      const Tile<T> v = kept(v_, strip, where.row);
      source_.pack(where, packed(worker));
      for_each_part(where, [&](const Place& part, int64_t first) {
        source_.load(part, Tile<T>{v.data + first * plane_, plane_, v.pitch}, packed(worker));
        if constexpr (!Reduce::kReducesChannels) prepare_channels(strip, part, worker);
      });
      if constexpr (Reduce::kReducesChannels) {
        spread_to_channels(strip, where);
        prepare_channels(strip, where, worker);
      }
    }
  }

  void prepare_channels(const Strip& strip, const Place& where, int worker) const {
    for (int64_t c = where.channel; c < where.channel + where.channels; ++c) {
      const int64_t at = strip.slot * channel_count_ + c;
      if constexpr (Reduce::kPools) unpool(strip, where, c, worker);
      if constexpr (Chain::kNeedsStatistics) {
        const Tile<T> v = kept(v_, strip, where.row);
        sum_after_norm<Chain>(rows(strip, where, c, v.data + c * plane_), channels_[at], norms_[at],
                              sums_[strip.index * channel_count_ + c]);
      }
    }
  }

  void spread_to_channels(const Strip& strip, const Place& where) const {
    const Tile<T> v = kept(v_, strip, where.row);
    const Tile<T> to = kept(spread_, strip, where.row);
    for (int64_t r = 0; r < where.rows; ++r) {
      const T* grad = grad_ + (where.sample * source_.rows + where.row + r) * source_.cols;
      for (int64_t w = 0; w < source_.cols; w += kSpreadPixels) {
        const int64_t at = r * source_.pitch + w;
        spread_over_channels<Chain>(v.data + at, grad + w, to.data + at, plane_,
                                    smaller(kSpreadPixels, source_.cols - w), channel_count_,
                                    channels_.data() + strip.slot * channel_count_);
      }
    }
  }

  void unpool(const Strip& strip, const Place& where, int64_t c, int worker) const {
    static_assert(kIsMaxPool<Reduce>);
    T* row = pool_rows_.data() + 3 * worker * row_elements_;
    const PoolRows<T> pool_rows{row, row + row_elements_, row + 2 * row_elements_};
    const int64_t* window = problem_.arguments.pool;
    const int64_t first_row = (where.sample * channel_count_ + c) * (source_.rows / window[0]);
    const T* grad = grad_ + (first_row + where.row / window[0]) * (source_.cols / window[1]);
    spread_over_windows<Chain>(kept(v_, strip, where.row).data + c * plane_, grad,
                               kept(spread_, strip, where.row).data + c * plane_, where.rows, source_.cols,
                               source_.pitch, window, channels_[strip.slot * channel_count_ + c], pool_rows);
  }

  void set_norm_gradients(const Samples& some) const {
    for (int64_t n = 0; n < some.count; ++n) {
      const int64_t strip = some.strip + n * strips_;
      const int64_t at = (some.slot + n) * channel_count_;
      Sums* of_sample = sample_sums_.data() + at;
      for (int64_t c = 0; c < channel_count_; ++c) {
        of_sample[c] = {};
        for (int64_t s = strip; s < strip + strips_; ++s) add(sums_[s * channel_count_ + c], of_sample[c]);
      }
      for (int64_t first = 0; first < channel_count_; first += group_channels_) {
        set_norm_gradient(problem_.arguments, of_sample + first, first, group_channels_,
                          source_.rows * source_.cols, norms_.data() + at + first);
      }
    }
  }

  void finish(const Strip& strip, int worker) const {
    const Tile<T> to = gradients_.clear(grad_v(worker));
    double* weight_sums = weight_sums_.data() + strip.index * gradients_.weight_elements();
    if (wants_weight()) clear(weight_sums, gradients_.weight_elements());
    if (strip.begin > 0 && wants_input()) {
      const Place halo = place(strip, strip.begin * band_rows_ - reach_, reach_);
      differentiate(strip, halo, to.data, nullptr, worker);
    }
    for (int64_t b = strip.begin; b < strip.end; ++b) {
      const Place where = band(strip, b);
      T* first_row = to.data + reach_ * to.pitch;
      if (where.rows > 0) {
        differentiate(strip, where, first_row, sums_.data() + strip.index * channel_count_, worker);
        if (wants_weight()) {
          gradients_.add_to_weight(source_.taps(where, packed(worker)), to, where.rows, weight_sums);
        }
      }
      if (!wants_input()) continue;
      clear_rows(to, where.rows);
      gradients_.write_input(strip.sample, where.row, smaller(band_rows_, source_.rows + reach_ - where.row),
                             to, tile(worker));
      gradients_.advance(to, band_rows_);
    }
  }

  // The gradient of v at a place, from `to` on; packs the input. Without `sums` another strip has them.
  void differentiate(const Strip& strip, const Place& where, T* to, Sums* sums, int worker) const {
    source_.pack(where, packed(worker));
    for_each_part(where, [&](const Place& part, int64_t first) {
      const Tile<T> v = v_of(strip, part, worker);
      for (int64_t c = first; c < first + part.channels; ++c) {
        const int64_t at = strip.slot * channel_count_ + c;
        Sums unused{};
        write_gradient<Chain>(rows(strip, where, c, v.data + (c - first) * plane_), channels_[at], norms_[at],
                              to + c * gradients_.plane(), source_.pitch, sums ? sums[c] : unused);
      }
    });
  }

  Tile<T> v_of(const Strip& strip, const Place& part, int worker) const {
    if constexpr (kKeeps) {
      const Tile<T> all = kept(v_, strip, part.row);
      return {all.data + part.channel * plane_, plane_, all.pitch};
    }
    const Tile<T> v{tile(worker), plane_, source_.pitch};
    source_.load(part, v, packed(worker));
    return v;
  }

  // A channel's rows at a place, from where its v stands.
  Rows<T> rows(const Strip& strip, const Place& where, int64_t c, const T* v) const {
    if constexpr (Reduce::kStores) {
      const int64_t row = (where.sample * channel_count_ + c) * source_.rows + where.row;
      return {v, source_.pitch, grad_ + row * source_.cols, source_.cols, where.rows, source_.cols};
    }
    const T* spread = kept(spread_, strip, where.row).data + c * plane_;
    return {v, source_.pitch, spread, source_.pitch, where.rows, source_.cols};
  }

  // The rows of a band that v does not have.
  void clear_rows(const Tile<T>& grad_v, int64_t rows) const {
    if (rows == band_rows_) return;
    for (int64_t c = 0; c < channel_count_; ++c) {
      T* row = grad_v.data + c * grad_v.plane + (reach_ + rows) * grad_v.pitch;
      for (int64_t i = 0; i < (band_rows_ - rows) * grad_v.pitch; ++i) row[i] = T(0);
    }
  }

  // ---- sums

  void add_up(int64_t strips) const {
    for (int64_t s = 0; s < strips; ++s) {
      for (int64_t c = 0; c < channel_count_; ++c) add(sums_[s * channel_count_ + c], total_[c]);
    }
    if (!wants_weight()) return;
    const int64_t count = gradients_.weight_elements();
    parallel_for(channel_count_, threads_, [&](int64_t c, int) {
      const int64_t taps = gradients_.taps();
      for (int64_t s = 0; s < strips; ++s) {
        for (int64_t i = c * taps; i < (c + 1) * taps; ++i) weight_total_[i] += weight_sums_[s * count + i];
      }
    });
  }

  void write_weight() const {
    if (!wants_weight()) return;
    T* to = static_cast<T*>(problem_.conv->grad_weight);
    for (int64_t i = 0; i < channel_count_ * gradients_.taps(); ++i) to[i] = T(weight_total_[i]);
  }

  void write(int parameter) const {
    T* to = static_cast<T*>(problem_.grad_parameters[parameter]);
    if (to == nullptr) return;
    for (int64_t c = 0; c < channel_count_; ++c) to[c] = T(total_[c].of[parameter]);
  }

  const BackwardProblem& problem_;
  ConvSource<T> source_;
  const T* grad_;
  const int64_t samples_;
  const int64_t channel_count_;
  const int64_t group_channels_;
  const int64_t reach_;
  const int64_t band_rows_;
  const int64_t bands_;  // of a sample's padded input: v has fewer rows
  const int64_t strip_bands_;
  const int64_t strips_;
  const int threads_;
  const ConvGradients<T> gradients_;
  const int64_t plane_;
  const int64_t tile_elements_;
  const bool by_thread_;
  const int64_t step_samples_;
  const int64_t slots_;
  const int64_t row_elements_;
  const int64_t packed_elements_;
  const int64_t grad_v_elements_;
  const int64_t scratch_elements_;
  // For each thread.
  const Buffer<T> scratch_;
  const Buffer<T> pool_rows_;
  // For each slot: a sample's bands, or channels.
  const Buffer<T> v_;
  const Buffer<T> spread_;
  const Buffer<Channel<T>> channels_;
  const Buffer<NormGradient<T>> norms_;
  const Buffer<Sums> sample_sums_;
  // For each strip of a step.
  const Buffer<Sums> sums_;
  const Buffer<double> weight_sums_;
  // Of all samples.
  const Buffer<Sums> total_;
  const Buffer<double> weight_total_;
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

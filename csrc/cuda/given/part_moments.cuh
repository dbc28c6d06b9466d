// The moments of the values that the threads of a block have of its piece.
#pragma once

#include "moments.cuh"
#include "tile.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

template <class Chain, class ThreadLoad>
class PartMoments {
 public:
  using Tile = GivenTile<ThreadLoad>;
  using T = typename Tile::T;

  __device__ explicit PartMoments(const Tile& tile)
      : tile_(tile), plan_(tile.plan), parts_(part_moments<T>(tile.plan)) {}

  // Of parts of the piece: of all that a thread has of a group or, where a run has several of them, of each
  // of its channels.
  __device__ void take() const {
    const bool whole = plan_.run_channels == plan_.group_channels;
    for (int first = 0; first * plan_.run_channels < tile_.piece.channels; first += plan_.runs_at_once) {
      const int run = first + tile_.share.run;
      const ChannelSteps channels = tile_.channels_of(run);
      int c = channels.first;
      do {
        const int end = whole ? channels.end : min(channels.end, c + 1);
        const Taken taken = taken_by([&](Taken& to) {
          for (int i = c; i < end; i += channels.step) take_pixels(i, to);
        });
        if (whole) {
          write_part(joined(total_of(taken)), run);
        } else if (c < end) {
          write_parts(taken, c);
        }
        c += channels.step;
      } while (!whole && c < channels.end);
    }
    __syncthreads();
  }

 private:
  static constexpr int kChannels = Tile::kChannels;
  static constexpr int kCount = Tile::kCount;

  // Sums of a thread's values about a shift; those of a wide load apart until the end.
  struct Taken {
    bool has_shift;
    T shift[kChannels];
    T sum[kCount];
    T squares[kCount];
    int loads;
  };

  // About the first values and, should those lie far from the others, again about the mean: so neither a mean
  // much larger than the deviation nor a few values far from the rest cost digits.
  template <class Take>
  __device__ Taken taken_by(const Take& take) const {
    Taken taken{};
    for (bool again = false;; again = true) {
      take(taken);
      if (again || !cancels(taken)) return taken;
      taken = about_means(taken);
    }
  }

  // Whether three quarters of the squares, or more, come from the shift alone.
  __device__ static bool cancels(T count, T sum, T squares) { return 4 * sum * sum > 3 * count * squares; }
  __device__ bool cancels(const Taken& taken) const {
    if (are_together()) {
      const Deviations<T> total = total_of(taken);
      return cancels(total.count, total.sum, total.squares);
    }
    bool any = false;
#pragma unroll
    for (int k = 0; k < kChannels; ++k) any |= cancels(T(taken.loads), taken.sum[k], taken.squares[k]);
    return any;
  }

  __device__ Taken about_means(const Taken& taken) const {
    Taken again{true};
    const Deviations<T> total = total_of(taken);
#pragma unroll
    for (int k = 0; k < kChannels; ++k)
      again.shift[k] =
          taken.shift[k] + (are_together() ? total.sum / total.count : taken.sum[k] / T(taken.loads));
    return again;
  }

  // Whether the channels that a wide load meets are of one part.
  __device__ bool are_together() const { return !ThreadLoad::kOfChannels || plan_.part_channels > 1; }

  __device__ void take_pixels(int c, Taken& taken) const {
    const typename Tile::Element* from = tile_.values() + tile_.offset(c, tile_.first_pixel);
    if (!taken.has_shift && tile_.first_pixel < tile_.piece.pixels) set_shift(normed_values(from, c), taken);
    for (int p = tile_.first_pixel; p < tile_.piece.pixels; p += tile_.pixel_step(), from += tile_.step()) {
      const auto x = normed_values(from, c);
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        const T deviation = x.element[k] - taken.shift[Tile::channel_of(k)];
        taken.sum[k] += deviation;
        taken.squares[k] += deviation * deviation;
      }
      ++taken.loads;
    }
  }

  __device__ void set_shift(const Pack<T, kCount>& x, Taken& taken) const {
    const T mean = mean_of(x);
#pragma unroll
    for (int k = 0; k < kChannels; ++k) taken.shift[k] = are_together() ? mean : x.element[k];
    taken.has_shift = true;
  }

  // Of equal values, their value.
  __device__ static T mean_of(Pack<T, kCount> x) {
#pragma unroll
    for (int k = kCount / 2; k > 0; k /= 2) {
#pragma unroll
      for (int i = 0; i < k; ++i) x.element[i] = T(0.5) * x.element[i] + T(0.5) * x.element[i + k];
    }
    return x.element[0];
  }

  // What the norm gets.
  __device__ Pack<T, kCount> normed_values(const typename Tile::Element* from, int c) const {
    const auto v = load_pack<kCount>(from);
    Pack<T, kCount> x;
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      x.element[k] = widen<T>(v.element[k]);
      if constexpr (!std::is_same_v<typename Chain::Pre, Sequence<>>)
        x.element[k] =
            Chain::Pre::value(x.element[k], x.element[k], tile_.block.channel_at(c + Tile::channel_of(k)));
    }
    return x;
  }

  __device__ Deviations<T> total_of(const Taken& taken) const {
    T sum = taken.sum[0];
    T squares = taken.squares[0];
#pragma unroll
    for (int k = 1; k < kCount; ++k) {
      sum += taken.sum[k];
      squares += taken.squares[k];
    }
    return {T(taken.loads * kCount), taken.shift[0], sum, squares};
  }

  __device__ void write_part(const Deviations<T>& part, int run) const {
    if (run < plan_.groups && tile_.share.exists && tile_.share.lane == 0)
      parts_[run * plan_.parts_per_group + tile_.share.line * plan_.run_threads + tile_.share.run_thread] =
          part;
  }

  // Those of a group lie next to each other: its channels' parts in line after line of threads.
  __device__ void write_parts(const Taken& taken, int c) const {
    const int per_line = plan_.group_channels / plan_.part_channels;
    const auto part_of = [&](int c) -> Deviations<T>& {
      const int g = plan_.by_group_channels.divide(c);
      const int of_group =
          are_together() ? (c - g * plan_.group_channels) / kChannels : c - g * plan_.group_channels;
      return parts_[g * plan_.parts_per_group + tile_.share.line * per_line + of_group];
    };
    if (are_together()) {
      part_of(c) = total_of(taken);
      return;
    }
#pragma unroll
    for (int k = 0; k < kChannels; ++k)
      part_of(c + k) = {T(taken.loads), taken.shift[k], taken.sum[k], taken.squares[k]};
  }

  // With those of the lanes that have the same channels, about their mean.
  __device__ Deviations<T> joined(Deviations<T> d) const {
    if (plan_.lanes == 1) return d;
    const T shift = __shfl_sync(~0u, d.shift, lane_of_thread() & -plan_.lanes);
    Sums<double> sums{};
    sums.add(d, shift);
    T count = d.count;
    add_lanes(sums, plan_.lanes);
    for (int distance = 1; distance < plan_.lanes; distance *= 2)
      count += __shfl_xor_sync(~0u, count, distance);
    const T mean = count > 0 ? shift + T(sums.sum) / count : shift;
    Sums<double> about_mean{};
    about_mean.add(Deviations<double>{count, shift, sums.sum, sums.squares}, mean);
    return {count, mean, T(about_mean.sum), T(about_mean.squares)};
  }

  const Tile& tile_;
  const GivenPlan& plan_;
  Deviations<T>* const parts_;
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

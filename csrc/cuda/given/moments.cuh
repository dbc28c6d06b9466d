// The moments of a block's piece, and its channels' norms from the moments of all pieces of a group: those of
// a cluster of blocks.
#pragma once

#include <cooperative_groups.h>

#include "tile.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

template <class Chain, class In, int kCount, bool kOfChannels>
class GivenMoments {
 public:
  using Tile = GivenTile<Chain, In, kCount, kOfChannels>;
  using T = typename Tile::T;

  __device__ explicit GivenMoments(const Tile& tile) : tile_(tile) {}

  // Of parts of the piece: of all that a thread has of a group or, where a run has several of them, of each
  // of its channels.
  __device__ void take() const {
    const bool whole = tile_.plan.run_channels == tile_.plan.group_channels;
    for (int first = 0; first * tile_.plan.run_channels < tile_.piece.channels;
         first += tile_.plan.runs_at_once) {
      const int run = first + tile_.share.run;
      if (whole) {
        const Taken taken =
            taken_by([&](Taken& to) { tile_.for_each_channel(run, [&](int c) { take_pixels(c, to); }); });
        const Deviations<T> part = joined(total_of(taken));
        if (run < tile_.plan.groups && tile_.share.exists && tile_.share.lane == 0)
          parts()[run * tile_.plan.parts_per_group + tile_.share.line * tile_.plan.run_threads +
                  tile_.share.run_thread] = part;
      } else {
        tile_.for_each_channel(
            run, [&](int c) { write_parts(taken_by([&](Taken& to) { take_pixels(c, to); }), c); });
      }
    }
    __syncthreads();
  }

  // Calls give(group, lane, lanes, its moments) in so many lanes for each group of the piece. Nor are the
  // loops from here on unrolled.
  template <class Give>
  __device__ void sum_groups(const Give& give) const {
    const int lanes = tile_.plan.group_lanes;
    const int lane = threadIdx.x & (lanes - 1);
    const int groups_at_once = blockDim.x >> log2_of(lanes);
    for (int first = 0; first < tile_.plan.groups; first += groups_at_once) {
      const int g = first + (threadIdx.x >> log2_of(lanes));
      const bool exists = has_group(g);
      const Deviations<T>* const of_group = parts() + g * tile_.plan.parts_per_group;
      const double shift = exists ? of_group[0].shift : 0;  // the first part is never empty
      Sums<double> sums{};
#pragma unroll 1
      for (int i = lane; exists && i < tile_.plan.parts_per_group; i += lanes) sums.add(of_group[i], shift);
      add_lanes(sums, lanes);
      const double n = double(group_channels()) * tile_.piece.pixels;
      if (exists) give(g, lane, lanes, {n, shift, sums.sum, sums.squares});
    }
  }

  // To every block of the cluster.
  __device__ void share() const {
    const int blocks = int(tile_.plan.slices);
    sum_groups([&](int g, int lane, int lanes, const Deviations<double>& d) {
#pragma unroll 1
      for (int block = lane; block < blocks; block += lanes)
        *of_block(moments() + tile_.piece.slice * tile_.plan.groups + g, block) = d;
    });
  }

  __device__ void set_norms() const {
    for (int c = threadIdx.x; c < tile_.piece.channels; c += blockDim.x) {
      const Deviations<double>* const of_group = moments() + tile_.plan.by_group_channels.divide(c);
      const double shift = of_group->shift;
      Sums<double> sums{};
#pragma unroll 1
      for (int block = 0; block < int(tile_.plan.slices); ++block)
        sums.add(of_group[block * tile_.plan.groups], shift);
      const GroupStatistics found =
          statistics_of(sums, shift, tile_.work.share_of_value, tile_.work.arguments.eps);
      if (tile_.work.statistics != nullptr && tile_.piece.slice == 0) write_statistics(c, found);
      tile_.set_parameters(
          c, norm_of<T>(found, tile_.parameter(Tile::kNormScale, c), tile_.parameter(Tile::kNormShift, c)));
    }
  }

  // ---- the cluster; a block alone needs none ----

  __device__ void arrive_at_cluster() const {
#if __CUDA_ARCH__ >= 900
    if (is_cluster()) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
  }

  __device__ void wait_for_cluster() const {
#if __CUDA_ARCH__ >= 900
    if (is_cluster()) asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
  }

  __device__ void sync_cluster() const {
#if __CUDA_ARCH__ >= 900
    if (is_cluster()) return cooperative_groups::this_cluster().sync();
#endif
    __syncthreads();
  }

 private:
  static constexpr int kChannels = Tile::kChannels;

  // By the thread that has the group's first channel.
  __device__ void write_statistics(int c, const GroupStatistics& found) const {
    const int group = tile_.plan.by_group_channels.divide(c);
    if (c != group * tile_.plan.group_channels) return;
    const int64_t first = tile_.piece.channel / tile_.plan.group_channels;
    tile_.work.statistics[tile_.piece.sample * tile_.work.shape.groups + first + group] = found;
  }

  __device__ Deviations<T>* parts() const {
    return reinterpret_cast<Deviations<T>*>(shared_memory + tile_.plan.parts_at);
  }
  __device__ Deviations<double>* moments() const {
    return reinterpret_cast<Deviations<double>*>(shared_memory + tile_.plan.moments_at);
  }

  __device__ bool cuts_groups() const { return tile_.plan.units_per_group > 1; }
  __device__ int group_channels() const {
    return cuts_groups() ? tile_.piece.channels : tile_.plan.group_channels;
  }
  __device__ bool has_group(int g) const {
    return g < tile_.plan.groups && g * tile_.plan.group_channels < tile_.piece.channels;
  }

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
  __device__ bool are_together() const { return !kOfChannels || tile_.plan.part_channels > 1; }

  __device__ void take_pixels(int c, Taken& taken) const {
    const In* from = tile_.values() + tile_.offset(c, tile_.share.pixel);
    for (int p = tile_.share.pixel; p < tile_.piece.pixels; p += tile_.pixel_step(), from += tile_.step()) {
      const auto x = normed_values(from, c);
      if (!taken.has_shift) {
        const T mean = mean_of(x);
#pragma unroll
        for (int k = 0; k < kChannels; ++k) taken.shift[k] = are_together() ? mean : x.element[k];
        taken.has_shift = true;
      }
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        const T deviation = x.element[k] - taken.shift[Tile::channel_of(k)];
        taken.sum[k] += deviation;
        taken.squares[k] += deviation * deviation;
      }
      ++taken.loads;
    }
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
  __device__ Pack<T, kCount> normed_values(const In* from, int c) const {
    const auto v = load_pack<kCount>(from);
    Pack<T, kCount> x;
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      x.element[k] = widen<T>(v.element[k]);
      if constexpr (!std::is_same_v<typename Chain::Pre, Sequence<>>)
        x.element[k] =
            Chain::Pre::value(x.element[k], x.element[k], tile_.channel_at(c + Tile::channel_of(k)));
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

  // Those of a group lie next to each other: its channels' parts in line after line of threads.
  __device__ void write_parts(const Taken& taken, int c) const {
    const int per_line = tile_.plan.group_channels / tile_.plan.part_channels;
    const auto part_of = [&](int c) -> Deviations<T>& {
      const int g = tile_.plan.by_group_channels.divide(c);
      const int of_group = are_together() ? (c - g * tile_.plan.group_channels) / kChannels
                                          : c - g * tile_.plan.group_channels;
      return parts()[g * tile_.plan.parts_per_group + tile_.share.line * per_line + of_group];
    };
    if (are_together()) {
      part_of(c) = total_of(taken);
      return;
    }
#pragma unroll
    for (int k = 0; k < kChannels; ++k)
      part_of(c + k) = {T(taken.loads), taken.shift[k], taken.sum[k], taken.squares[k]};
  }

  // Of so many neighbouring lanes. The loop is not unrolled: a small piece waits longest for its
  // instructions.
  __device__ static void add_lanes(Sums<double>& sums, int lanes) {
#pragma unroll 1
    for (int distance = 1; distance < lanes; distance *= 2)
      sums.add({__shfl_xor_sync(~0u, sums.sum, distance), __shfl_xor_sync(~0u, sums.squares, distance)});
  }

  // With those of the lanes that have the same channels, about their mean.
  __device__ Deviations<T> joined(Deviations<T> d) const {
    if (tile_.plan.lanes == 1) return d;
    const T shift = __shfl_sync(~0u, d.shift, lane_of_thread() & -tile_.plan.lanes);
    Sums<double> sums{};
    sums.add(d, shift);
    T count = d.count;
    add_lanes(sums, tile_.plan.lanes);
    for (int distance = 1; distance < tile_.plan.lanes; distance *= 2)
      count += __shfl_xor_sync(~0u, count, distance);
    const T mean = count > 0 ? shift + T(sums.sum) / count : shift;
    Sums<double> about_mean{};
    about_mean.add(Deviations<double>{count, shift, sums.sum, sums.squares}, mean);
    return {count, mean, T(about_mean.sum), T(about_mean.squares)};
  }

#if __CUDA_ARCH__ >= 900
  __device__ bool is_cluster() const { return tile_.plan.slices > 1; }
#else
  __device__ static constexpr bool is_cluster() { return false; }
#endif

  // The same place in the shared memory of another block.
  template <class Value>
  __device__ Value* of_block(Value* value, [[maybe_unused]] int block) const {
#if __CUDA_ARCH__ >= 900
    if (is_cluster()) return cooperative_groups::this_cluster().map_shared_rank(value, block);
#endif
    return value;
  }

  const Tile& tile_;
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

// One piece of a tensor, one block: it keeps its values in shared memory, takes their moments, and ends the
// chain, or does one of both.
#pragma once

#include <cooperative_groups.h>

#include "launch.cuh"
#include "tensor_piece.cuh"
#include "tensor_reduce.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

extern __shared__ __align__(128) uint8_t shared_memory[];

template <class Chain, class In, int kCount, bool kOfChannels>
class PieceOfChain {
 public:
  using T = Compute<In>;

  __device__ explicit PieceOfChain(const TensorWork<T>& work)
      : work_(work), plan_(work.plan), piece_(piece_of_block(work.shape, work.plan)), share_(work.plan) {}

  __device__ void run() const {
    if constexpr (Chain::kNeedsStatistics) {
      if (work_.step == TensorStep::kWhole) return run_whole();
      if (work_.step == TensorStep::kMoments) return write_moments();
    }
    if constexpr (Chain::Reduce::kStores) finish();
  }

 private:
  static constexpr int kChannels = kOfChannels ? kCount : 1;  // that one wide load meets
  static constexpr int kPixels = kOfChannels ? 1 : kCount;
  __device__ static int channel_of(int k) { return kOfChannels ? k : 0; }

  // ---- the steps ----

  __device__ void run_whole() const {
    arrive_at_cluster();
    load();
    take_moments();
    wait_for_cluster();  // every block of it has started: its memory may be written
    share_moments();
    sync_cluster();
    set_norms();
    __syncthreads();
    if constexpr (Chain::Reduce::kStores) {
      store<false>();
    } else if constexpr (Chain::Reduce::kPools) {
      if (work_.arguments.pool[0] == 2 && work_.arguments.pool[1] == 2) return pool<2, 2>();
      pool<0, 0>();  // any size
    } else {
      reduce_channels();
    }
  }

  __device__ void write_moments() const {
    let_next_kernel_start();
    load();
    take_moments();
    const TensorShape& shape = work_.shape;
    const int64_t parts_per_group = plan_.units_per_group * plan_.slices;
    const int64_t first_group = piece_.channel / (shape.channels / shape.groups);
    const int64_t part = piece_.unit % plan_.units_per_group * plan_.slices + piece_.slice;
    sum_groups([&](int g, int lane, int, const Deviations<double>& d) {
      if (lane > 0) return;
      const double offset = d.sum / d.count;
      const double m2 = d.squares - d.sum * offset;
      work_.parts[(piece_.sample * shape.groups + first_group + g) * parts_per_group + part] = {
          d.count, d.shift + offset, m2 < 0 ? 0 : m2};  // keeps NaN
    });
  }

  // Straight from memory to memory.
  __device__ void finish() const {
    if constexpr (Chain::kReadsChannel || Chain::kNeedsStatistics) {
      load_parameters(false);
      if constexpr (Chain::kNeedsStatistics) load_norms();
      __syncthreads();
    }
    store<true>();
  }

  // ---- where things are ----

  // Known when compiled, unless each load takes one element.
  __device__ bool channels_last() const {
    if constexpr (kCount > 1) return kOfChannels;
    return work_.shape.channels_last;
  }

  __device__ In* tile() const { return reinterpret_cast<In*>(shared_memory + plan_.tile_at); }
  __device__ Deviations<T>* parts() const {
    return reinterpret_cast<Deviations<T>*>(shared_memory + plan_.parts_at);
  }
  __device__ Deviations<double>* moments() const {
    return reinterpret_cast<Deviations<double>*>(shared_memory + plan_.moments_at);
  }
  // Of the piece's channels, one kind after the other.
  enum Kind { kBias, kScale, kNormScale, kNormShift, kMean };
  static_assert(kMean + 1 == cuda::kParameterKinds);
  __device__ T& parameter(int kind, int c) const {
    return reinterpret_cast<T*>(shared_memory)[kind * plan_.unit_channels + c];
  }
  __device__ Channel<T> channel_at(int c) const {
    return {parameter(kBias, c),         parameter(kScale, c),     parameter(kMean, c),
            parameter(kNormScale, c),    parameter(kNormShift, c), T(work_.arguments.clamp_min),
            T(work_.arguments.clamp_max)};
  }

  __device__ int tile_offset(int c, int p) const {
    return channels_last() ? p * plan_.unit_channels + c : c * plan_.slice_pixels + p;
  }
  // In the tensor. The output has the same place where all values are stored.
  __device__ int64_t offset(int c, int p) const {
    const TensorShape& shape = work_.shape;
    const int64_t channel = piece_.channel + c;
    const int64_t pixel = piece_.pixel + p;
    return piece_.sample * shape.channels * shape.pixels +
           (channels_last() ? pixel * shape.channels + channel : channel * shape.pixels + pixel);
  }

  __device__ const In* values_in_memory(int c, int p) const {
    return static_cast<const In*>(work_.input) + offset(c, p);
  }
  // From one of a thread's channels and pixels to the next.
  __device__ int channel_step() const { return plan_.run_threads * kChannels; }
  __device__ int pixel_step() const { return plan_.pixel_threads * kPixels; }
  __device__ int tile_step() const {
    return channels_last() ? pixel_step() * plan_.unit_channels : pixel_step();
  }
  __device__ int64_t memory_step() const {
    return channels_last() ? pixel_step() * work_.shape.channels : pixel_step();
  }

  // Calls visit(c) for the thread's channels of a run.
  template <class Visit>
  __device__ void for_each_channel(int run, const Visit& visit) const {
    const int first = run * plan_.run_channels;
    const int end = min(first + plan_.run_channels, piece_.channels);
    for (int c = first + share_.channel; share_.exists && c < end; c += channel_step()) visit(c);
  }
  // Of all its runs.
  template <class Visit>
  __device__ void for_each_channel(const Visit& visit) const {
    for (int run = share_.run; run * plan_.run_channels < piece_.channels; run += plan_.runs_at_once)
      for_each_channel(run, visit);
  }

  __device__ bool cuts_groups() const { return plan_.units_per_group > 1; }
  __device__ int group_channels() const { return cuts_groups() ? piece_.channels : plan_.group_channels; }
  __device__ bool has_group(int g) const {
    return g < plan_.groups && g * plan_.group_channels < piece_.channels;
  }

  // ---- load ----

  __device__ void load() const {
    copy_values();
    load_parameters(true);
    wait_for_copies();
    __syncthreads();
  }

  // with_affine: the norm's weight and bias too, which stand in its place until it is known. Each thread asks
  // for another parameter: one after the other, they would take longer than a small piece.
  __device__ void load_parameters(bool with_affine) const {
    const Arguments& arguments = work_.arguments;
    const int kind = threadIdx.x % 4;
    if (kind == kBias || kind == kScale ? !Chain::kReadsChannel : !with_affine) return;
    const Parameter source = kind == kBias        ? arguments.bias
                             : kind == kScale     ? arguments.scale
                             : kind == kNormScale ? arguments.norm_weight
                                                  : arguments.norm_bias;
#pragma unroll 1
    for (int c = threadIdx.x / 4; c < piece_.channels; c += blockDim.x / 4)
      parameter(kind, c) = value_of<T>(source, piece_.channel + c, T(kind == kNormScale));
  }

  // Those that an earlier kernel found.
  __device__ void load_norms() const {
    wait_for_earlier_kernels();
    const Norm<T>* const norms = work_.norms + piece_.sample * work_.shape.channels + piece_.channel;
    for (int c = threadIdx.x; c < piece_.channels; c += blockDim.x) set_parameters(c, norms[c]);
  }

  __device__ void set_parameters(int c, const Norm<T>& norm) const {
    parameter(kMean, c) = norm.mean;
    parameter(kNormScale, c) = norm.scale;
    parameter(kNormShift, c) = norm.shift;
  }

  __device__ void copy_values() const {
    if (kCount == 1 && is_run()) return copy_run(values_in_memory(0, 0));
    for_each_channel([&](int c) {
      const In* from = values_in_memory(c, share_.pixel);
      In* to = tile() + tile_offset(c, share_.pixel);
      for (int p = share_.pixel; p < piece_.pixels; p += pixel_step()) {
        copy_pack<kCount>(to, from);
        from += memory_step();
        to += tile_step();
      }
    });
  }

  // Whether the piece is one run of memory that wide loads may start with.
  __device__ bool is_run() const {
    const bool whole_rows =
        channels_last() ? piece_.channels == work_.shape.channels : piece_.pixels == work_.shape.pixels;
    return whole_rows && reinterpret_cast<uintptr_t>(values_in_memory(0, 0)) % kVectorBytes == 0;
  }

  __device__ void copy_run(const In* from) const {
    constexpr int kWide = kVectorBytes / int(sizeof(In));
    const int count = piece_.channels * piece_.pixels;
    const int wide_count = count / kWide * kWide;
    for (int i = threadIdx.x * kWide; i < wide_count; i += blockDim.x * kWide)
      copy_pack<kWide>(tile() + i, from + i);
    for (int i = wide_count + threadIdx.x; i < count; i += blockDim.x) copy_pack<1>(tile() + i, from + i);
  }

  // ---- moments ----

  // Sums of a thread's values about a shift; those of a wide load apart until the end.
  struct Taken {
    bool has_shift;
    T shift[kChannels];
    T sum[kCount];
    T squares[kCount];
    int loads;
  };

  // Of parts of the piece: of all that a thread has of a group or, where a run has several of them, of each
  // of its channels.
  __device__ void take_moments() const {
    const bool whole = plan_.run_channels == plan_.group_channels;
    for (int first = 0; first * plan_.run_channels < piece_.channels; first += plan_.runs_at_once) {
      const int run = first + share_.run;
      if (whole) {
        const Taken taken =
            taken_by([&](Taken& to) { for_each_channel(run, [&](int c) { take_pixels(c, to); }); });
        const Deviations<T> part = joined(total_of(taken));
        if (run < plan_.groups && share_.exists && share_.lane == 0)
          parts()[run * plan_.parts_per_group + share_.line * plan_.run_threads + share_.run_thread] = part;
      } else {
        for_each_channel(run,
                         [&](int c) { write_parts(taken_by([&](Taken& to) { take_pixels(c, to); }), c); });
      }
    }
    __syncthreads();
  }

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
  __device__ bool are_together() const { return !kOfChannels || plan_.part_channels > 1; }

  __device__ void take_pixels(int c, Taken& taken) const {
    const In* from = tile() + tile_offset(c, share_.pixel);
    for (int p = share_.pixel; p < piece_.pixels; p += pixel_step(), from += tile_step()) {
      const auto x = normed_values(from, c);
      if (!taken.has_shift) {
        const T mean = mean_of(x);
#pragma unroll
        for (int k = 0; k < kChannels; ++k) taken.shift[k] = are_together() ? mean : x.element[k];
        taken.has_shift = true;
      }
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        const T deviation = x.element[k] - taken.shift[channel_of(k)];
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
        x.element[k] = Chain::Pre::value(x.element[k], x.element[k], channel_at(c + channel_of(k)));
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
    const int per_line = plan_.group_channels / plan_.part_channels;
    const auto part_of = [&](int c) -> Deviations<T>& {
      const int g = plan_.by_group_channels.divide(c);
      const int of_group =
          are_together() ? (c - g * plan_.group_channels) / kChannels : c - g * plan_.group_channels;
      return parts()[g * plan_.parts_per_group + share_.line * per_line + of_group];
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

  // Calls give(group, lane, lanes, its moments) in so many lanes for each group of the piece. Nor are the
  // loops from here on unrolled.
  template <class Give>
  __device__ void sum_groups(const Give& give) const {
    const int lanes = plan_.group_lanes;
    const int lane = threadIdx.x & (lanes - 1);
    const int groups_at_once = blockDim.x >> log2_of(lanes);
    for (int first = 0; first < plan_.groups; first += groups_at_once) {
      const int g = first + (threadIdx.x >> log2_of(lanes));
      const bool exists = has_group(g);
      const Deviations<T>* const of_group = parts() + g * plan_.parts_per_group;
      const double shift = exists ? of_group[0].shift : 0;  // the first part is never empty
      Sums<double> sums{};
#pragma unroll 1
      for (int i = lane; exists && i < plan_.parts_per_group; i += lanes) sums.add(of_group[i], shift);
      add_lanes(sums, lanes);
      const double n = double(group_channels()) * piece_.pixels;
      if (exists) give(g, lane, lanes, {n, shift, sums.sum, sums.squares});
    }
  }

  // ---- norms, from the moments of all pieces of a group: the cluster's ----

  // To every block of the cluster.
  __device__ void share_moments() const {
    const int blocks = int(plan_.slices);
    sum_groups([&](int g, int lane, int lanes, const Deviations<double>& d) {
#pragma unroll 1
      for (int block = lane; block < blocks; block += lanes)
        *of_block(moments() + piece_.slice * plan_.groups + g, block) = d;
    });
  }

  __device__ void set_norms() const {
    for (int c = threadIdx.x; c < piece_.channels; c += blockDim.x) {
      const Deviations<double>* const of_group = moments() + plan_.by_group_channels.divide(c);
      const double shift = of_group->shift;
      Sums<double> sums{};
#pragma unroll 1
      for (int block = 0; block < int(plan_.slices); ++block) sums.add(of_group[block * plan_.groups], shift);
      set_parameters(c, norm_of<T>(sums, shift, work_.share_of_value, work_.arguments.eps,
                                   parameter(kNormScale, c), parameter(kNormShift, c)));
    }
  }

  // ---- the cluster; a block alone needs none ----

#if __CUDA_ARCH__ >= 900
  __device__ bool is_cluster() const { return plan_.slices > 1; }
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

  // ---- the end of the chain ----

  // From the tile or, kFromMemory, from the tensor.
  template <bool kFromMemory>
  __device__ void store() const {
    // Loads on their way at a time: more from memory, as far as registers go.
    constexpr int kBatch = Chain::kNeedsStatistics || kCount > 4 ? 2 : 4;
    const In* const input = static_cast<const In*>(work_.input);
    const OutputMemory<In> output(work_.output);
    for_each_channel([&](int c) {
      Channel<T> channels[kChannels];
#pragma unroll
      for (int k = 0; k < kChannels; ++k) channels[k] = channel_at(c + k);
      const In* kept = tile() + tile_offset(c, share_.pixel);
      int64_t at = offset(c, share_.pixel);
      for (int first = share_.pixel; first < piece_.pixels; first += kBatch * pixel_step()) {
        Pack<In, kCount> v[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          if (first + i * pixel_step() >= piece_.pixels) continue;
          v[i] = load_pack<kCount>(kFromMemory ? input + at + i * memory_step() : kept + i * tile_step());
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          if (first + i * pixel_step() < piece_.pixels)
            output.store(at + i * memory_step(), finished(v[i], channels));
        }
        kept += kBatch * tile_step();
        at += kBatch * memory_step();
      }
    });
  }

  __device__ static Pack<T, kCount> finished(const Pack<In, kCount>& v,
                                             const Channel<T> (&channels)[kChannels]) {
    Pack<T, kCount> y;
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      const Channel<T>& channel = channels[channel_of(k)];
      const T value = Chain::value(widen<T>(v.element[k]), channel);
      y.element[k] = Chain::Final::value(value, value, channel);
    }
    return y;
  }

  // Windows of kRows x kCols or, 0, of any size. Neighbouring threads have windows that are neighbours in
  // memory: so many lanes the columns of a row of windows or, where channels are last, the channels of one.
  template <int kRows, int kCols>
  __device__ void pool() const {
    const int window_rows = kRows > 0 ? kRows : int(work_.arguments.pool[0]);
    const int window_cols = kCols > 0 ? kCols : int(work_.arguments.pool[1]);
    const int rows = plan_.by_pooled_rows.value;  // the last piece of a sample may have fewer
    const int cols = int(work_.shape.window_pixels) / window_rows;
    const int pooled_cols = int(work_.output.size[3]);
    const int row_step = tile_offset(0, cols);
    const int col_step = tile_offset(0, 1);
    const OutputMemory<In> output(work_.output);
    const int64_t* stride = work_.output.stride;
    const int64_t first_row = piece_.slice * rows;
    const int64_t first_output =
        piece_.sample * stride[0] + piece_.channel * stride[1] + first_row * stride[2];
    const auto pool_window = [&](int c, int row, int col, const Channel<T>& channel) {
      const In* const first = tile() + tile_offset(c, row * window_rows * cols + col * window_cols);
      const T most = window_maximum<T>(window_rows, window_cols, [&](int r, int q) {
        return Chain::value(widen<T>(first[r * row_step + q * col_step]), channel);
      });
      output.store(first_output + c * stride[1] + row * stride[2] + col * stride[3],
                   Pack<T, 1>{Chain::Final::value(most, most, channel)});
    };
    const int lanes = lanes_of(channels_last() ? piece_.channels : pooled_cols);
    const int lane = threadIdx.x & (lanes - 1);
    const int line_step = blockDim.x >> log2_of(lanes);
    const int lines = rows * (channels_last() ? pooled_cols : piece_.channels);
    const int rows_here = int(min(work_.output.size[2] - first_row, int64_t(rows)));
    for (int line = threadIdx.x >> log2_of(lanes); line < lines; line += line_step) {
      const int outer = plan_.by_pooled_rows.divide(line);  // a column of windows, or a channel
      const int row = line - outer * rows;
      if (row >= rows_here) continue;
      if (channels_last()) {
        for (int c = lane; c < piece_.channels; c += lanes) pool_window(c, row, outer, channel_at(c));
      } else {
        const Channel<T> channel = channel_at(outer);
        for (int col = lane; col < pooled_cols; col += lanes) pool_window(outer, row, col, channel);
      }
    }
  }

  __device__ void reduce_channels() const {
    const ReducingThread thread(channels_last(), plan_.reducing_lanes);
    const OutputPixels<In> output(work_.output, piece_.sample);
    const int loads = (piece_.pixels + kPixels - 1) / kPixels;
    for (int first = 0; first < loads; first += thread.pixels) {
      const int p = (first + thread.pixel) * kPixels;
      const bool exists = p < piece_.pixels;
      T y[kPixels];
      thread.logsumexp<Chain, kChannels>(y, exists ? piece_.channels : 0, [&](int c, T* x) {
        const auto v = load_pack<kCount>(tile() + tile_offset(c, p));
#pragma unroll
        for (int k = 0; k < kCount; ++k)
          x[k] = Chain::value(widen<T>(v.element[k]), channel_at(c + channel_of(k)));
      });
      if (exists) output.store(thread, piece_.pixel + p, y);
    }
  }

  const TensorWork<T>& work_;
  const TensorPlan& plan_;
  const Piece piece_;
  const ThreadShare<kCount, kOfChannels> share_;
};

// Of a multiprocessor, by registers: while one loads, another computes. Doubles take too many.
template <class T>
constexpr int kLeastBlocks = sizeof(T) == sizeof(double) ? 1 : 2;

template <class Chain, class In>
__global__ void __launch_bounds__(cuda::kMostThreads, kLeastBlocks<Compute<In>>)
    tensor_chain(const __grid_constant__ TensorWork<Compute<In>> work) {
  if (block_index() >= work.pieces) return;
  visit_width<In>(work, [&](auto count, auto of_channels) {
    PieceOfChain<Chain, In, decltype(count)::value, decltype(of_channels)::value>(work).run();
  });
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

// One piece of a tensor, one block: it keeps its values in shared memory, takes their moments, and ends the
// chain, or does one of both.
#pragma once

#include <cooperative_groups.h>

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
      : work_(work),
        plan_(work.plan),
        piece_(piece_of_block(work.shape, work.plan)),
        share_(work.plan, work.shape.channels_last) {}

  __device__ void run() const {
    if constexpr (Chain::kNeedsStatistics) {
      if (work_.step == TensorStep::kWhole) return run_whole();
      if (work_.step == TensorStep::kMoments) return write_moments();
    }
    if constexpr (Chain::Reduce::kStores) {
      const In* const input = static_cast<const In*>(work_.input);
      store([&](int c, int p) { return load_pack<kCount>(input + offset(c, p)); },
            [&](int c) { return channel_from_memory(c); });
    }
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
      store([&](int c, int p) { return load_pack<kCount>(tile() + tile_offset(c, p)); },
            [&](int c) { return channels()[c]; });
    } else if constexpr (Chain::Reduce::kPools) {
      pool();
    } else {
      reduce_channels();
    }
  }

  __device__ void write_moments() const {
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

  // ---- where things are ----

  // Known when compiled, unless each load takes one element.
  __device__ bool channels_last() const {
    if constexpr (kCount > 1) return kOfChannels;
    return work_.shape.channels_last;
  }

  __device__ In* tile() const { return reinterpret_cast<In*>(shared_memory); }
  __device__ Deviations<T>* parts() const {
    return reinterpret_cast<Deviations<T>*>(shared_memory + plan_.parts_at);
  }
  __device__ Deviations<double>* moments() const {
    return reinterpret_cast<Deviations<double>*>(shared_memory + plan_.moments_at);
  }
  __device__ Channel<T>* channels() const {
    return reinterpret_cast<Channel<T>*>(shared_memory + plan_.channels_at);
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

  __device__ bool cuts_groups() const { return plan_.units_per_group > 1; }
  __device__ int group_channels() const { return cuts_groups() ? piece_.channels : plan_.group_channels; }
  __device__ int groups() const { return cuts_groups() ? 1 : piece_.channels / plan_.group_channels; }

  __device__ Channel<T> channel_from_memory(int c) const {
    Channel<T> channel = make_channel<T>(work_.arguments, piece_.channel + c);
    if constexpr (Chain::kNeedsStatistics)
      set_norm(channel, work_.norms[piece_.sample * work_.shape.channels + piece_.channel + c]);
    return channel;
  }

  // ---- load ----

  // The values, and the channels' parameters: as long as there is no norm, its weight and bias.
  __device__ void load() const {
    copy_values();
    for (int c = threadIdx.x; c < piece_.channels; c += blockDim.x) {
      Channel<T> channel = make_channel<T>(work_.arguments, piece_.channel + c);
      channel.norm_scale = value_of<T>(work_.arguments.norm_weight, piece_.channel + c, T(1));
      channel.norm_shift = value_of<T>(work_.arguments.norm_bias, piece_.channel + c);
      channels()[c] = channel;
    }
    wait_for_copies();
    __syncthreads();
  }

  __device__ void copy_values() const {
    const In* const input = static_cast<const In*>(work_.input);
    if (kCount == 1 && is_run()) return copy_run(input + offset(0, 0));
    share_.for_each_channel(piece_, [&](int c) {
      share_.for_each_pixel(piece_,
                            [&](int p) { copy_pack<kCount>(tile() + tile_offset(c, p), input + offset(c, p)); });
    });
  }

  // Whether the piece is one run of memory that wide loads may start with.
  __device__ bool is_run() const {
    const bool whole_rows =
        channels_last() ? piece_.channels == work_.shape.channels : piece_.pixels == work_.shape.pixels;
    const In* const first = static_cast<const In*>(work_.input) + offset(0, 0);
    return whole_rows && reinterpret_cast<uintptr_t>(first) % kVectorBytes == 0;
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

  // Of parts of the piece: each thread takes its values about the first of them, so that neither a mean much
  // larger than the deviation nor a few values far from the others cost digits.
  __device__ void take_moments() const {
    for (int first = 0; first < piece_.channels; first += share_.channel_step) {
      const int c = first + share_.channel;
      const bool exists = share_.exists && c < piece_.channels;
      Deviations<T> of_thread[kChannels]{};
      if (exists) take_pixels(c, of_thread);
      const int index = share_.line * parts_per_line() + (are_together() ? c / kChannels : c);
#pragma unroll
      for (int k = 0; k < kChannels; ++k) {
        if (k > 0 && are_together()) break;
        const Deviations<T> part = joined(of_thread[k]);
        if (exists && share_.lane == 0) parts()[index + k] = part;
      }
    }
    __syncthreads();
  }

  // Whether the channels that a wide load meets are one part.
  __device__ bool are_together() const { return !kOfChannels || plan_.part_channels > 1; }
  __device__ int parts_per_line() const { return plan_.unit_channels / plan_.part_channels; }

  // Of each channel; or of all together, as the first's.
  __device__ void take_pixels(int c, Deviations<T> (&deviations)[kChannels]) const {
    if (share_.pixel >= piece_.pixels) return;
    const bool together = are_together();
    T shift[kChannels], sum[kCount]{}, squares[kCount]{};
    const auto first = values_at(c, share_.pixel);
#pragma unroll
    for (int k = 0; k < kChannels; ++k) shift[k] = together ? first.element[0] : first.element[k];
    int loads = 0;
    share_.for_each_pixel(piece_, [&](int p) {
      const auto x = values_at(c, p);
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        const T deviation = x.element[k] - shift[channel_of(k)];
        sum[k] += deviation;
        squares[k] += deviation * deviation;
      }
      ++loads;
    });
    if (together) {
#pragma unroll
      for (int k = 1; k < kCount; ++k) {
        sum[0] += sum[k];
        squares[0] += squares[k];
      }
    }
#pragma unroll
    for (int k = 0; k < kChannels; ++k)
      deviations[k] = {T(loads * (together ? kCount : 1)), shift[k], sum[k], squares[k]};
  }

  // What the norm gets.
  __device__ Pack<T, kCount> values_at(int c, int p) const {
    const auto v = load_pack<kCount>(tile() + tile_offset(c, p));
    Pack<T, kCount> x;
#pragma unroll
    for (int k = 0; k < kCount; ++k) {
      x.element[k] = widen<T>(v.element[k]);
      if constexpr (!std::is_same_v<typename Chain::Pre, Sequence<>>)
        x.element[k] = Chain::Pre::value(x.element[k], x.element[k], channels()[c + channel_of(k)]);
    }
    return x;
  }

  // With those of the lanes that have the same channel, about their mean.
  __device__ Deviations<T> joined(Deviations<T> d) const {
    if (plan_.lanes == 1) return d;
    const T shift = __shfl_sync(~0u, d.shift, lane_of_thread() / plan_.lanes * plan_.lanes);
    Sums<double> sums{};
    sums.add(d, shift);
    T count = d.count;
    for (int distance = 1; distance < plan_.lanes; distance *= 2) {
      sums.add({__shfl_xor_sync(~0u, sums.sum, distance), __shfl_xor_sync(~0u, sums.squares, distance)});
      count += __shfl_xor_sync(~0u, count, distance);
    }
    const T mean = count > 0 ? shift + T(sums.sum) / count : shift;
    Sums<double> about_mean{};
    about_mean.add(Deviations<double>{count, shift, sums.sum, sums.squares}, mean);
    return {count, mean, T(about_mean.sum), T(about_mean.squares)};
  }

  // Calls give(group, lane, lanes, its moments) in so many lanes for each group of the piece.
  template <class Give>
  __device__ void sum_groups(const Give& give) const {
    const int lanes = plan_.group_lanes;
    const int lane = threadIdx.x % lanes;
    const int per_line = parts_per_line();
    const int per_group = group_channels() / plan_.part_channels;
    const int count = plan_.pixel_threads / plan_.lanes * per_group;
    for (int first = 0; first < groups(); first += blockDim.x / lanes) {
      const int g = first + threadIdx.x / lanes;
      const bool exists = g < groups();
      const Deviations<T>* const of_group = parts() + g * per_group;
      const double shift = exists ? of_group[0].shift : 0;  // the first part is never empty
      Sums<double> sums{};
      for (int i = lane; exists && i < count; i += lanes)
        sums.add(of_group[i / per_group * per_line + i % per_group], shift);
      sums.add_lanes(lanes);
      const double n = double(group_channels()) * piece_.pixels;
      if (exists) give(g, lane, lanes, {n, shift, sums.sum, sums.squares});
    }
  }

  // ---- norms, from the moments of all pieces of a group: the cluster's ----

  // To every block of the cluster.
  __device__ void share_moments() const {
    const int blocks = int(plan_.slices);
    sum_groups([&](int g, int lane, int lanes, const Deviations<double>& d) {
      for (int block = lane; block < blocks; block += lanes)
        *of_block(moments() + piece_.slice * groups() + g, block) = d;
    });
  }

  __device__ void set_norms() const {
    const double share = 1.0 / (double(group_channels()) * double(work_.shape.pixels));
    for (int c = threadIdx.x; c < piece_.channels; c += blockDim.x) {
      const Deviations<double>* const of_group = moments() + c / group_channels();
      const double shift = of_group->shift;
      Sums<double> sums{};
      for (int block = 0; block < plan_.slices; ++block) sums.add(of_group[block * groups()], shift);
      Channel<T>& channel = channels()[c];
      set_norm(channel, norm_of<T>(sums, shift, share, work_.arguments.eps, channel.norm_scale,
                                   channel.norm_shift));
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

  // load(c, p) gives what the tensor holds there, channel_at(c) the parameters.
  template <class Load, class ChannelAt>
  __device__ void store(const Load& load, const ChannelAt& channel_at) const {
    constexpr int kBatch = kCount > 4 ? 2 : 4;  // loads on their way at a time, as far as registers go
    const OutputMemory<In> output(work_.output);
    share_.for_each_channel(piece_, [&](int c) {
      Channel<T> channels[kChannels];
#pragma unroll
      for (int k = 0; k < kChannels; ++k) channels[k] = channel_at(c + k);
      for (int first = share_.pixel; first < piece_.pixels; first += kBatch * share_.pixel_step) {
        Pack<In, kCount> v[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const int p = first + i * share_.pixel_step;
          if (p < piece_.pixels) v[i] = load(c, p);
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const int p = first + i * share_.pixel_step;
          if (p < piece_.pixels) output.store(offset(c, p), finished(v[i], channels));
        }
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

  // Neighbouring threads have windows that are neighbours in memory: so many lanes the columns of a row of
  // windows or, where channels are last, the channels of a window.
  __device__ void pool() const {
    const int window_rows = int(work_.arguments.pool[0]);
    const int cols = int(work_.shape.window_pixels / window_rows);
    const int pooled_rows = piece_.pixels / cols / window_rows;
    const int pooled_cols = cols / int(work_.arguments.pool[1]);
    const int lanes = lanes_of(channels_last() ? piece_.channels : pooled_cols);
    const int lane = threadIdx.x % lanes;
    const int lines = channels_last() ? pooled_rows * pooled_cols : piece_.channels * pooled_rows;
    for (int line = threadIdx.x / lanes; line < lines; line += blockDim.x / lanes) {
      if (channels_last()) {
        for (int c = lane; c < piece_.channels; c += lanes)
          pool_window(channels()[c], c, line / pooled_cols, line % pooled_cols, cols);
      } else {
        const int c = line / pooled_rows;
        const Channel<T> channel = channels()[c];
        for (int col = lane; col < pooled_cols; col += lanes)
          pool_window(channel, c, line % pooled_rows, col, cols);
      }
    }
  }

  __device__ void pool_window(const Channel<T>& channel, int c, int row, int col, int cols) const {
    const int window_rows = int(work_.arguments.pool[0]);
    const int window_cols = int(work_.arguments.pool[1]);
    const int first = row * window_rows * cols + col * window_cols;
    const T most = window_maximum<T>(window_rows, window_cols, [&](int r, int q) {
      return Chain::value(widen<T>(tile()[tile_offset(c, first + r * cols + q)]), channel);
    });
    const int64_t* stride = work_.output.stride;
    const int64_t first_row = piece_.pixel / work_.shape.window_pixels;
    OutputMemory<In>(work_.output)
        .store(piece_.sample * stride[0] + (piece_.channel + c) * stride[1] + (first_row + row) * stride[2] +
                   col * stride[3],
               Pack<T, 1>{Chain::Final::value(most, most, channel)});
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
          x[k] = Chain::value(widen<T>(v.element[k]), channels()[c + channel_of(k)]);
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

// One piece of a tensor, one block: it reads its values once and keeps them in shared memory, takes their
// moments, and ends the chain, or does one of both.
#pragma once

#include <cooperative_groups.h>

#include "tensor_piece.cuh"
#include "tensor_reduce.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// Sums over some values: of their deviations from a shift, and of these squared.
template <class T>
struct alignas(2 * sizeof(T)) Deviations {
  T sum;
  T square;
};

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

  __device__ void run() {
    load();
    if constexpr (Chain::kNeedsStatistics) {
      if (work_.step == TensorStep::kFinish) {
        norms_ = work_.norms + piece_.sample * work_.shape.channels + piece_.channel;
      } else {
        take_moments();
        if (work_.step == TensorStep::kMoments) return write_parts();
        set_norms();
      }
    }
    if constexpr (Chain::Reduce::kStores) {
      store();
    } else if constexpr (Chain::Reduce::kPools) {
      pool();
    } else {
      reduce_channels();
    }
  }

 private:
  using Kept = std::conditional_t<Chain::kKeepsConv, In, T>;
  static constexpr int kChannels = kOfChannels ? kCount : 1;  // that one wide load meets
  __device__ static int channel_of(int k) { return kOfChannels ? k : 0; }

  struct Parameters {
    Channel<T> channel[kChannels];
  };

  // ---- where things are ----

  // Known when compiled, unless each load takes one element.
  __device__ bool channels_last() const {
    if constexpr (kCount > 1) return kOfChannels;
    return work_.shape.channels_last;
  }

  __device__ Kept* tile() const { return reinterpret_cast<Kept*>(shared_memory); }
  __device__ Deviations<T>* sums() const {
    return reinterpret_cast<Deviations<T>*>(shared_memory + plan_.sums_at);
  }
  __device__ Moments* moments() const { return reinterpret_cast<Moments*>(shared_memory + plan_.moments_at); }
  __device__ T* shifts() const { return reinterpret_cast<T*>(shared_memory + plan_.shifts_at); }
  __device__ Norm<T>* own_norms() const { return reinterpret_cast<Norm<T>*>(shared_memory + plan_.norms_at); }

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

  __device__ Channel<T> channel_at(int c) const {
    Channel<T> channel = make_channel<T>(work_.arguments, piece_.channel + c);
    if (norms_ != nullptr) set_norm(channel, norms_[c]);
    return channel;
  }
  __device__ Parameters parameters_at(int c) const {
    Parameters parameters;
#pragma unroll
    for (int k = 0; k < kChannels; ++k) parameters.channel[k] = channel_at(c + k);
    return parameters;
  }

  // ---- load ----

  __device__ void load() const {
    const In* const input = static_cast<const In*>(work_.input);
    if constexpr (Chain::kKeepsConv && kCount == 1) {
      if (is_run()) return copy_run(input + offset(0, 0));
    }
    share_.for_each_channel(piece_, [&](int c) {
      if constexpr (Chain::kKeepsConv) {
        share_.for_each_pixel(
            piece_, [&](int p) { copy_pack<kCount>(tile() + tile_offset(c, p), input + offset(c, p)); });
      } else {
        load_and_apply_pre(input, c);
      }
    });
    if (Chain::kKeepsConv) wait_for_copies();
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
    wait_for_copies();
    __syncthreads();
  }

  __device__ void load_and_apply_pre(const In* input, int c) const {
    constexpr int kBatch =
        kCount == 1 ? 4 : 8 / kCount;  // loads on their way at a time, as far as registers go
    const Parameters parameters = parameters_at(c);
    for (int first = share_.pixel; first < piece_.pixels; first += kBatch * share_.pixel_step) {
      Pack<In, kCount> x[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int p = first + i * share_.pixel_step;
        if (p < piece_.pixels) x[i] = load_pack<kCount>(input + offset(c, p));
      }
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const int p = first + i * share_.pixel_step;
        if (p >= piece_.pixels) continue;
        Pack<Kept, kCount> kept;
#pragma unroll
        for (int k = 0; k < kCount; ++k) {
          const T v = widen<T>(x[i].element[k]);
          kept.element[k] = Chain::Pre::value(v, v, parameters.channel[channel_of(k)]);
        }
        store_pack(tile() + tile_offset(c, p), kept);
      }
    }
  }

  // ---- moments ----

  // Of each group in this piece. The second pass takes them about the mean that the first gave: so a mean
  // much larger than the deviation costs no digits.
  __device__ void take_moments() const {
    for (int g = threadIdx.x; g < groups(); g += blockDim.x) shifts()[g] = 0;
    __syncthreads();
    for (int pass = 0; pass < 2; ++pass) {
      sum_channels();
      __syncthreads();
      sum_groups();
      __syncthreads();
    }
  }

  __device__ void sum_channels() const {
    for (int first = 0; first < piece_.channels; first += share_.channel_step) {
      const int c = first + share_.channel;
      const bool exists = share_.exists && c < piece_.channels;
      Deviations<T> sums_of_thread[kChannels]{};
      if (exists) sum_pixels(c, sums_of_thread);
#pragma unroll
      for (int k = 0; k < kChannels; ++k) {
        Deviations<T> d = sums_of_thread[k];
        for (int distance = 1; distance < plan_.lanes; distance *= 2) {
          d.sum += __shfl_xor_sync(~0u, d.sum, distance);
          d.square += __shfl_xor_sync(~0u, d.square, distance);
        }
        if (exists && share_.lane == 0) sums()[share_.line * plan_.unit_channels + c + k] = d;
      }
    }
  }

  __device__ void sum_pixels(int c, Deviations<T> (&sums)[kChannels]) const {
    T shift[kChannels];
#pragma unroll
    for (int k = 0; k < kChannels; ++k) shift[k] = shifts()[(c + k) / group_channels()];
    share_.for_each_pixel(piece_, [&](int p) {
      const auto x = load_pack<kCount>(tile() + tile_offset(c, p));
#pragma unroll
      for (int k = 0; k < kCount; ++k) {
        const T deviation = kept_before_norm(x.element[k]) - shift[channel_of(k)];
        sums[channel_of(k)].sum += deviation;
        sums[channel_of(k)].square += deviation * deviation;
      }
    });
  }

  // What was kept is Pre(v), or v where there is no Pre.
  __device__ static T kept_before_norm(Kept x) {
    static_assert(
        !Chain::kNeedsStatistics || !Chain::kKeepsConv || std::is_same_v<typename Chain::Pre, Sequence<>>,
        "statistics of Pre(v), while v is kept, would need the parameters here");
    return widen<T>(x);
  }

  // A warp for each group.
  __device__ void sum_groups() const {
    const int lane = threadIdx.x % kWarpThreads;
    const int count = plan_.pixel_threads / plan_.lanes * group_channels();
    for (int g = threadIdx.x / kWarpThreads; g < groups(); g += blockDim.x / kWarpThreads) {
      Deviations<double> total{};
      for (int i = lane; i < count; i += kWarpThreads) {
        const int line = i / group_channels();
        const int c = i % group_channels() + g * group_channels();
        const Deviations<T> d = sums()[line * plan_.unit_channels + c];
        total.sum += double(d.sum);
        total.square += double(d.square);
      }
#pragma unroll
      for (int distance = 1; distance < kWarpThreads; distance *= 2) {
        total.sum += __shfl_xor_sync(~0u, total.sum, distance);
        total.square += __shfl_xor_sync(~0u, total.square, distance);
      }
      if (lane > 0) continue;
      const double n = double(group_channels()) * piece_.pixels;
      const double m2 = total.square - total.sum * total.sum / n;
      const double mean = double(shifts()[g]) + total.sum / n;
      moments()[g] = {n, mean, m2 < 0 ? 0 : m2};  // keeps NaN
      shifts()[g] = T(mean);
    }
  }

  __device__ void write_parts() const {
    const TensorShape& shape = work_.shape;
    const int64_t parts_per_group = plan_.units_per_group * plan_.slices;
    const int64_t first_group = piece_.channel / (shape.channels / shape.groups);
    const int64_t part = piece_.unit % plan_.units_per_group * plan_.slices + piece_.slice;
    for (int g = threadIdx.x; g < groups(); g += blockDim.x) {
      const Moments m = moments()[g];
      work_.parts[(piece_.sample * shape.groups + first_group + g) * parts_per_group + part] = {m.count,
                                                                                                m.mean, m.m2};
    }
  }

  // ---- norms, from the moments of all pieces of a group: the cluster's ----

  __device__ void set_norms() {
    sync_cluster();
    for (int c = threadIdx.x; c < piece_.channels; c += blockDim.x) {
      const Moments m = moments_of_group(c / group_channels());
      Channel<T> channel{};
      set_norm(channel, work_.arguments, piece_.channel + c, m.mean,
               1.0 / sqrt(m.m2 / m.count + work_.arguments.eps));
      own_norms()[c] = {channel.mean, channel.norm_scale, channel.norm_shift};
    }
    norms_ = own_norms();
    sync_cluster();  // before a block may end, the others have read its moments
  }

  __device__ Moments moments_of_group(int g) const {
#if __CUDA_ARCH__ >= 900
    if (plan_.slices > 1) {
      Moments all{};
      for (int block = 0; block < plan_.slices; ++block)
        all = combine(all, *cooperative_groups::this_cluster().map_shared_rank(moments() + g, block));
      return all;
    }
#endif
    return moments()[g];
  }

  __device__ void sync_cluster() const {
#if __CUDA_ARCH__ >= 900
    if (plan_.slices > 1) return cooperative_groups::this_cluster().sync();
#endif
    __syncthreads();
  }

  // ---- the end of the chain ----

  __device__ void store() const {
    const OutputMemory<In> output(work_.output);
    share_.for_each_channel(piece_, [&](int c) {
      const Parameters parameters = parameters_at(c);
      share_.for_each_pixel(piece_, [&](int p) {
        const auto x = load_pack<kCount>(tile() + tile_offset(c, p));
        Pack<T, kCount> y;
#pragma unroll
        for (int k = 0; k < kCount; ++k) {
          const Channel<T>& channel = parameters.channel[channel_of(k)];
          const T value = Chain::pointwise(widen<T>(x.element[k]), channel);
          y.element[k] = Chain::Final::value(value, value, channel);
        }
        output.store(offset(c, p), y);
      });
    });
  }

  // Neighbouring threads have windows that are neighbours in memory.
  __device__ void pool() const {
    const OutputMemory<In> output(work_.output);
    const int window_rows = int(work_.arguments.pool[0]);
    const int window_cols = int(work_.arguments.pool[1]);
    const int cols = int(work_.shape.window_pixels / window_rows);
    const int pooled_rows = piece_.pixels / cols / window_rows;
    const int pooled_cols = cols / window_cols;
    const int64_t first_row = piece_.pixel / work_.shape.window_pixels;
    for (int i = threadIdx.x; i < piece_.channels * pooled_rows * pooled_cols; i += blockDim.x) {
      const int pooled = pooled_rows * pooled_cols;
      const int c = channels_last() ? i % piece_.channels : i / pooled;
      const int window = channels_last() ? i / piece_.channels : i % pooled;
      const int row = window / pooled_cols;
      const int col = window % pooled_cols;
      const Channel<T> channel = channel_at(c);
      const T most = window_maximum<T>(window_rows, window_cols, [&](int r, int q) {
        const int p = (row * window_rows + r) * cols + col * window_cols + q;
        return Chain::pointwise(widen<T>(tile()[tile_offset(c, p)]), channel);
      });
      const int64_t* stride = work_.output.stride;
      output.store(piece_.sample * stride[0] + (piece_.channel + c) * stride[1] +
                       (first_row + row) * stride[2] + col * stride[3],
                   Pack<T, 1>{Chain::Final::value(most, most, channel)});
    }
  }

  __device__ void reduce_channels() const {
    const OutputMemory<In> output(work_.output);
    const int lanes = lanes_of_channels(channels_last(), piece_.channels);
    const int pixels_at_once = blockDim.x / lanes;
    for (int first = 0; first < piece_.pixels; first += pixels_at_once) {
      const int p = first + threadIdx.x / lanes;
      const bool exists = p < piece_.pixels;
      LogSumExp<T> sum = channel_logsumexp<T>(
          exists ? piece_.channels : 0, threadIdx.x % lanes, lanes,
          [&](int c) { return Chain::pointwise(widen<T>(tile()[tile_offset(c, p)]), channel_at(c)); });
      sum.add_lanes(lanes);
      const T y = sum.value();
      if (!exists || threadIdx.x % lanes > 0) continue;
      const int64_t pixel = piece_.pixel + p;
      const int64_t* stride = work_.output.stride;
      const int64_t cols = work_.output.size[3];
      output.store(piece_.sample * stride[0] + pixel / cols * stride[2] + pixel % cols * stride[3],
                   Pack<T, 1>{Chain::Final::value(y, y, make_channel<T>(work_.arguments, 0))});
    }
  }

  const TensorWork<T>& work_;
  const TensorPlan& plan_;
  const Piece piece_;
  const ThreadShare<kCount, kOfChannels> share_;
  const Norm<T>* norms_ = nullptr;  // of the piece's first channel, once they are known
};

// Of a multiprocessor, by registers: while one loads, another computes. Doubles take too many.
template <class T>
constexpr int kLeastBlocks = sizeof(T) == sizeof(double) ? 1 : 2;

template <class Chain, class In>
__global__ void __launch_bounds__(cuda::kMostThreads, kLeastBlocks<Compute<In>>)
    tensor_chain(const __grid_constant__ TensorWork<Compute<In>> work) {
  constexpr int kWide = kVectorBytes / int(sizeof(In));
  if (block_index() >= work.pieces) return;
  const int width = work.plan.width;
  if (width == 1) {
    PieceOfChain<Chain, In, 1, false>(work).run();
  } else if (work.shape.channels_last) {
    PieceOfChain<Chain, In, kWide, true>(work).run();
  } else if (width == kWide) {
    PieceOfChain<Chain, In, kWide, false>(work).run();
  } else {
    PieceOfChain<Chain, In, kWide / 2, false>(work).run();
  }
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

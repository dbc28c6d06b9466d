// The gradient of v as the gradients of a conv take it: in packed rows, without a tensor in between. A block
// has a row of a sample, of all channels: it has to know the largest value before it can pack any.
#pragma once

#include "gradient.cuh"
#include "row_spread.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// ---- the gradients of a row ----

// How lanes share rows of channels: whole warps have them, and kPassShift is known when compiled, or neither.
template <int kPassShift>
struct PackLanes {
  static constexpr bool kIsKnown = kPassShift >= 0;

  const PackShape& shape;

  __device__ int count() const { return kIsKnown ? kWarpThreads : shape.lanes; }
  __device__ int lane() const { return threadIdx.x & (count() - 1); }
  // Of a lane's kPackItems packs that are under way, those of one channel come one after the other.
  __device__ int pass_shift() const { return kIsKnown ? kPassShift : shape.pass_shift; }
  __device__ int channel_of(int item) const { return item >> pass_shift(); }
  __device__ int pass_of(int item) const { return item & ((1 << pass_shift()) - 1); }
  // At a time: of lanes that share some, and of a warp.
  __device__ int channels() const { return kPackItems >> pass_shift(); }
  __device__ int channels_of_warp() const { return kWarpThreads / count() * channels(); }
  __device__ int passes_lanes() const { return count() << pass_shift(); }
  __device__ int first_channel() const {
    return threadIdx.x / kWarpThreads * channels_of_warp() +
           (kIsKnown ? 0 : (lane_of_thread() >> log2_of(count())) * channels());
  }
};

// Writes the gradients of a block's row to shared memory.
template <class Chain, int kWidth, int kPassShift>
class RowGradients {
 public:
  __device__ RowGradients(const PackWork& pack, const PackRow& row, const PackMemory<Chain>& memory,
                          const RowSpread<Chain>& spread)
      : pack_(pack),
        memory_(memory),
        spread_(spread),
        lanes_{pack.shape},
        channels_(pack.to.channels),
        first_(row.sample * channels_ * pack.work.pixels + int64_t(row.row) * pack.to.cols) {}

  // Returns the largest magnitude of a thread's.
  __device__ float write() {
    const int step = kGradientWarps * lanes_.channels_of_warp();
    const int first = lanes_.first_channel();
    for (int of_passes = 0; of_passes < pack_.to.cols; of_passes += lanes_.passes_lanes() * kWidth) {
      const int col = of_passes + lanes_.lane() * kWidth;
      Place place{first, col, first_ + first * pack_.work.pixels + col,
                  memory_.values + first * pack_.shape.pitch + col, memory_.channels + first};
      const int rounds = (channels_ + step - 1) / step;  // the same for a whole warp
      for (int i = 0; i < rounds; ++i) {
        write_items(place, of_passes == 0);
        place.channel += step;
        place.offset += step * pack_.work.pixels;
        place.value += step * pack_.shape.pitch;
        place.of_channel += step;
      }
    }
    return largest_;
  }

 private:
  // Of a lane's first pack.
  struct Place {
    int channel;
    int col;
    int64_t offset;  // in the tensor
    float* value;    // in shared memory
    const SampleChannel* of_channel;
  };

  struct Loaded {
    Pack<float, kWidth> v;
    typename RowSpread<Chain>::template Loaded<kWidth> spread;
  };

  // From a lane's first pack to another one.
  __device__ int cols_to(int item) const { return lanes_.pass_of(item) * lanes_.count() * kWidth; }

  __device__ bool exists(const Place& place, int item) const {
    return place.channel + lanes_.channel_of(item) < channels_ && place.col + cols_to(item) < pack_.to.cols;
  }

  __device__ void write_items(const Place& place, bool is_first) {
    const float* const v = static_cast<const float*>(pack_.work.v.data);
    Loaded loaded[kPackItems];
#pragma unroll
    for (int k = 0; k < kPackItems; ++k) {
      if (!exists(place, k)) continue;
      const int64_t offset = place.offset + lanes_.channel_of(k) * pack_.work.pixels + cols_to(k);
      loaded[k] = {load_pack<kWidth>(v + offset), spread_.template load<kWidth>(offset)};
    }
    asm volatile("" ::: "memory");
    float sums[kPackItems][kGradientKinds]{};
#pragma unroll
    for (int k = 0; k < kPackItems; ++k) {
      if (exists(place, k)) write_item(place, k, loaded[k], sums[k]);
    }
    add_sums(sums, place.channel, is_first);
  }

  __device__ void write_item(const Place& place, int k, const Loaded& loaded, float (&sums)[kGradientKinds]) {
    SampleChannel of{};
    if constexpr (kHasChannels<Chain>) of = place.of_channel[lanes_.channel_of(k)];
    float* const value = place.value + lanes_.channel_of(k) * pack_.shape.pitch + cols_to(k);
    Pack<float, kWidth> grad =
        spread_.gradients(loaded.spread, value, place.col + cols_to(k), loaded.v, of.channel);
    const float* const balance = pack_.to.balance;
    const float factor = balance != nullptr ? balance[place.channel + lanes_.channel_of(k)] : 1.0f;
#pragma unroll
    for (int i = 0; i < kWidth; ++i) {
      grad.element[i] =
          factor * gradient_of_v<Chain>(grad.element[i], loaded.v.element[i], of.channel, of.norm, sums);
      largest_ = fmaxf(largest_, fabsf(grad.element[i]));  // NaN has no say
    }
    store_pack(value, grad);
  }

  __device__ void add_sums(const float (&sums)[kPackItems][kGradientKinds], int first_channel,
                           bool is_first) const {
    const int of_channel = lanes_.passes_lanes() / kPackItems;  // lanes with the same sum
    const int c = first_channel + (lanes_.lane() >> log2_of(of_channel));
    const bool writes = (lanes_.lane() & (of_channel - 1)) == 0 && c < channels_;
#pragma unroll
    for (int kind = 0; kind < kGradientKinds; ++kind) {
      if ((kOfAll<Chain> >> kind & 1) == 0 || pack_.work.of_all.of[kind] == nullptr) continue;
      float of_kind[kPackItems];
#pragma unroll
      for (int k = 0; k < kPackItems; ++k) of_kind[k] = sums[k][kind];
      double sum = sum_over_lanes(of_kind, lanes_.count());
      for (int distance = lanes_.count() / kPackItems; distance < of_channel; distance *= 2)
        sum += __shfl_xor_sync(~0u, sum, distance);
      double& total = memory_.sums_of(kind, channels_)[c];
      if (writes) total = is_first ? sum : total + sum;
    }
  }

  const PackWork& pack_;
  const PackMemory<Chain>& memory_;
  const RowSpread<Chain>& spread_;
  const PackLanes<kPassShift> lanes_;
  const int channels_;
  const int64_t first_;  // of the row, in the tensor
  float largest_ = 0;
};

// ---- the kernel ----

template <class Chain>
__device__ void load_row_channels(const PackWork& pack, const PackRow& row, const PackMemory<Chain>& memory) {
  if constexpr (kHasChannels<Chain>) {
    for (int c = threadIdx.x; c < pack.to.channels; c += kGradientThreads)
      memory.channels[c] = {channel_of_thread<Chain>(pack.work, row.sample, c),
                            norm_gradient_of<Chain, true>(pack.work, row.sample, c)};
  }
}

template <class Chain>
__device__ void write_row_sums(const PackWork& pack, const PackRow& row, const PackMemory<Chain>& memory) {
  const int channels = pack.to.channels;
#pragma unroll
  for (int kind = 0; kind < kGradientKinds; ++kind) {
    double* const to = pack.work.of_all.of[kind];
    if ((kOfAll<Chain> >> kind & 1) == 0 || to == nullptr) continue;
    for (int c = threadIdx.x; c < channels; c += kGradientThreads)
      to[(row.sample * channels + c) * pack.to.rows + row.row] = memory.sums_of(kind, channels)[c];
  }
}

// Of each thread's; the memory is of a value a warp.
__device__ inline unsigned largest_of_block(unsigned of_thread, unsigned* of_warps) {
  const unsigned of_warp = largest_of_warp(of_thread);
  if (lane_of_thread() == 0) of_warps[threadIdx.x / kWarpThreads] = of_warp;
  __syncthreads();
  unsigned largest = 0;
#pragma unroll
  for (int warp = 0; warp < kGradientWarps; ++warp) largest = max(largest, of_warps[warp]);
  return largest;
}

// For the rare row that has an infinity: of a thread's share.
__device__ inline unsigned largest_finite(const PackWork& pack, const float* values) {
  unsigned largest = 0;
  for (int c = threadIdx.x / kWarpThreads; c < pack.to.channels; c += kGradientWarps) {
    for (int col = lane_of_thread(); col < pack.to.cols; col += kWarpThreads)
      largest = max(largest, finite_magnitude(values[c * pack.shape.pitch + col]));
  }
  return largest;
}

template <class Chain>
__device__ float write_row_gradients(const PackWork& pack, const PackRow& row,
                                     const PackMemory<Chain>& memory, const RowSpread<Chain>& spread) {
  const auto write = [&](auto width, auto pass_shift) {
    return RowGradients<Chain, decltype(width)::value, decltype(pass_shift)::value>(pack, row, memory, spread)
        .write();
  };
  const std::integral_constant<int, kPackWidth> wide{};
  if (pack.shape.width == 1)
    return write(std::integral_constant<int, 1>{}, std::integral_constant<int, -1>{});
  if (pack.shape.pass_shift == 0) return write(wide, std::integral_constant<int, 0>{});
  if (pack.shape.pass_shift == 1) return write(wide, std::integral_constant<int, 1>{});
  return write(wide, std::integral_constant<int, 2>{});
}

template <class Chain>
__global__ void __launch_bounds__(kGradientThreads, kGradientBlocks)
    pack_gradient(const __grid_constant__ PackWork pack) {
  extern __shared__ uint4 pack_memory[];
  let_next_kernel_start();
  wait_for_earlier_kernels();
  const PackRow row(pack);
  if (row.sample >= pack.work.samples) return;
  const PackMemory<Chain> memory(pack_memory, pack.to.channels, pack.shape.pitch);
  const RowSpread<Chain> spread(pack, row, memory);
  load_row_channels(pack, row, memory);
  spread.prepare();
  __syncthreads();
  const float of_thread = write_row_gradients(pack, row, memory, spread);
  unsigned largest = largest_of_block(__float_as_uint(of_thread), memory.largest);
  write_row_sums(pack, row, memory);
  if (pack.to.units == nullptr) return;
  if (!is_finite(largest))
    largest = largest_of_block(largest_finite(pack, memory.values), memory.largest + kGradientWarps);
  pack_row<kGradientThreads>(pack.to, row.index, memory.values, pack.shape.pitch, largest);
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

// The gradient of v as the gradients of a conv take it: in packed rows, without a tensor in between. A block
// has a row of a sample, of all channels: it has to know the largest value before it can pack any.
#pragma once

#include "packed_rows.cuh"
#include "tensor_gradient.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

constexpr int kPackThreads = 256;
constexpr int kPackBlocks = 4;  // on a multiprocessor, for registers
constexpr int kPackItems = 4;   // loads of v that a lane has under way
constexpr int kPackWidth = 2;   // elements of such a load, or 1: many rows are no multiple of 4

// How a block shares out its row. All of it follows from the size of a sample.
struct PackShape {
  int pitch;         // floats between channels in shared memory
  int width;         // elements of a load: kPackWidth or 1
  int lanes;         // of a warp, that share a row of a channel: a power of two, kPackItems at least
  int pass_shift;    // log2 of the loads of a lane that are of one channel, of kPackItems
  int window_lanes;  // that share a row of windows: a power of two
  cuda::WideDivisor by_rows;
};

inline int pack_pitch(int64_t cols) { return int(cuda::round_up(cols, kMostWidth)); }

inline PackShape pack_shape(const PackedRows& to, int64_t samples, int width, int pooled_cols) {
  PackShape shape{};
  shape.pitch = pack_pitch(to.cols);
  shape.width = width;
  const int64_t loads = cuda::divide_up(to.cols, width);
  shape.lanes = std::max(cuda::power_of_two_from(loads, kWarpThreads), kPackItems);
  const int passes = cuda::power_of_two_from(cuda::divide_up(loads, shape.lanes), kPackItems);
  while (1 << shape.pass_shift < passes) ++shape.pass_shift;
  shape.window_lanes = cuda::power_of_two_from(std::max(pooled_cols, 1), kWarpThreads);
  shape.by_rows = cuda::wide_divisor(to.rows, (samples + 1) * to.rows);
  return shape;
}

// work's planes and grad_v are not used.
struct PackWork {
  BackwardWork<float> work;
  PackedRows to;  // without units where nobody wants it: then only sums are left
  DType dtype;    // of the packed units; float32's depend on the parts
  PackShape shape;
};

// What is known of a channel of a sample. Aligned so that few loads get it.
struct alignas(16) RowChannel {
  Channel<float> channel;
  NormGradient<float> norm;
};

constexpr int count_of(unsigned mask) {
  int count = 0;
  for (; mask != 0; mask >>= 1) count += mask & 1;
  return count;
}

// A block's shared memory.
template <class Chain>
struct PackMemory {
  float* values;         // [channels][pitch]
  float* of_pixels;      // [2][pitch], where channels are reduced
  RowChannel* channels;  // [channels], where there is anything to be known of them
  unsigned* largest;     // [warps]
  double* sums;          // [kinds][channels]

  static constexpr int kPixelRows = Chain::Reduce::kReducesChannels ? 2 : 0;
  static constexpr int kKinds = count_of(kOfAll<Chain>);

  __device__ PackMemory(void* memory, int of_channels, int pitch)
      : values(static_cast<float*>(memory)),
        of_pixels(values + of_channels * pitch),
        channels(reinterpret_cast<RowChannel*>(of_pixels + kPixelRows * pitch)),
        largest(reinterpret_cast<unsigned*>(channels + (kHasChannels<Chain> ? of_channels : 0))),
        sums(reinterpret_cast<double*>(largest + kPackThreads / kWarpThreads)) {}

  static int64_t bytes(int64_t of_channels, int64_t pitch) {
    return int64_t(sizeof(float)) * (of_channels + kPixelRows) * pitch +
           (kHasChannels<Chain> ? int64_t(sizeof(RowChannel)) * of_channels : 0) +
           int64_t(sizeof(unsigned)) * (kPackThreads / kWarpThreads) +
           int64_t(sizeof(double)) * kKinds * of_channels;
  }

  // Of a kind of kOfAll.
  __device__ double* sums_of(int kind, int of_channels) const {
    return sums + __popc(kOfAll<Chain> & ((1u << kind) - 1)) * of_channels;
  }
};

// A block's row.
struct PackRow {
  int64_t index;  // through all samples
  int64_t sample;
  int row;

  __device__ explicit PackRow(const PackWork& pack) : index(block_index()) {
    sample = pack.shape.by_rows.divide(index);
    row = int(index - sample * pack.to.rows);
  }
};

// ---- the gradient at each place of a row ----

// As Spread, for a row of all channels: all threads prepare() what the row takes, with a barrier after it.
// Then come load(), of an offset in the tensor, and gradients().
template <class Chain, class Reduce = typename Chain::Reduce>
class RowSpread;

template <class Chain>
class RowSpread<Chain, Store> {
 public:
  template <int kCount>
  using Loaded = RawPack<float, kCount>;

  __device__ RowSpread(const PackWork& pack, const PackRow&, const PackMemory<Chain>&)
      : grad_(pack.work.grad) {}

  __device__ void prepare() const {}

  template <int kCount>
  __device__ Loaded<kCount> load(int64_t offset) const {
    return load_raw<float, kCount>(grad_, offset);
  }

  template <int kCount>
  __device__ Pack<float, kCount> gradients(const Loaded<kCount>& loaded, int, int, const Pack<float, kCount>&,
                                           const Channel<float>&) const {
    return values_of(loaded, grad_.dtype);
  }

 private:
  const Elements& grad_;
};

struct NothingLoaded {};

// The row's values are zeros at first, but for the places of maxima.
template <class Chain>
class RowSpread<Chain, MaxPool> {
 public:
  template <int kCount>
  using Loaded = NothingLoaded;

  __device__ RowSpread(const PackWork& pack, const PackRow& row, const PackMemory<Chain>& memory)
      : pack_(pack), row_(row), values_(memory.values) {}

  __device__ void prepare() const {
    const int quads = pack_.to.channels * pack_.shape.pitch / kMostWidth;
    for (int i = threadIdx.x; i < quads; i += kPackThreads)
      store_pack(values_ + i * kMostWidth, Pack<float, kMostWidth>{});
    __syncthreads();
    const int window_row = pack_.work.pool.by_window_rows.divide(row_.row);
    if (window_row < pack_.work.pool.pooled_rows) place_maxima(window_row);
  }

  template <int kCount>
  __device__ NothingLoaded load(int64_t) const {
    return {};
  }

  template <int kCount>
  __device__ Pack<float, kCount> gradients(const NothingLoaded&, int c, int col, const Pack<float, kCount>&,
                                           const Channel<float>&) const {
    return load_pack<kCount>(values_ + c * pack_.shape.pitch + col);
  }

 private:
  __device__ void place_maxima(int window_row) const {
    constexpr int kAtOnce = 4;
    const PoolShape& pool = pack_.work.pool;
    const int channels = pack_.to.channels;
    const int shift = log2_of(pack_.shape.window_lanes);
    const int step = kPackThreads >> shift;
    const int lane = threadIdx.x & (pack_.shape.window_lanes - 1);
    const int64_t plane_windows = pack_.work.windows.of.values;
    const int64_t first_window =
        row_.sample * channels * plane_windows + int64_t(window_row) * pool.pooled_cols;
    for (int first = threadIdx.x >> shift; first < channels; first += kAtOnce * step) {
      for (int col = lane; col < pool.pooled_cols; col += pack_.shape.window_lanes) {
        int2 place[kAtOnce];
        float grad[kAtOnce];
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          const int c = first + k * step;
          if (c >= channels) continue;
          place[k] = pack_.work.window_place[first_window + c * plane_windows + col];
          grad[k] = pack_.work.window_grad[first_window + c * plane_windows + col];
        }
#pragma unroll
        for (int k = 0; k < kAtOnce; ++k) {
          const int c = first + k * step;
          if (c < channels && place[k].x == row_.row) values_[c * pack_.shape.pitch + place[k].y] = grad[k];
        }
      }
    }
  }

  const PackWork& pack_;
  const PackRow& row_;
  float* const values_;
};

template <class Chain>
class RowSpread<Chain, ChannelLogSumExp> {
 public:
  template <int kCount>
  using Loaded = NothingLoaded;

  __device__ RowSpread(const PackWork& pack, const PackRow& row, const PackMemory<Chain>& memory)
      : pack_(pack), row_(row), most_(memory.of_pixels), factor_(most_ + pack.shape.pitch) {}

  __device__ void prepare() const {
    const int64_t first = row_.index * pack_.to.cols;
    for (int col = threadIdx.x; col < pack_.to.cols; col += kPackThreads) {
      most_[col] = pack_.work.most[first + col];
      factor_[col] = pack_.work.factor[first + col];
    }
  }

  template <int kCount>
  __device__ NothingLoaded load(int64_t) const {
    return {};
  }

  template <int kCount>
  __device__ Pack<float, kCount> gradients(const NothingLoaded&, int, int col, const Pack<float, kCount>& v,
                                           const Channel<float>& channel) const {
    const Pack<float, kCount> most = load_pack<kCount>(most_ + col);
    const Pack<float, kCount> factor = load_pack<kCount>(factor_ + col);
    Pack<float, kCount> grad;
#pragma unroll
    for (int k = 0; k < kCount; ++k)
      grad.element[k] = exp(Chain::value(v.element[k], channel) - most.element[k]) * factor.element[k];
    return grad;
  }

 private:
  const PackWork& pack_;
  const PackRow& row_;
  float* const most_;
  float* const factor_;
};

// ---- sums of a row ----

// Of kPackItems values a lane, one after the other, over lanes next to each other: the first quarter of
// lanes gets that of the first items, and so on; but neighbouring quarters share one where items are of one
// channel. A thread's few values and those of four lanes are added in float.
__device__ inline double sum_of_items(const float (&x)[kPackItems], int lanes, int pass_shift) {
  static_assert(kPackItems == 4);
  const bool has_last = (threadIdx.x & (lanes / 2)) != 0;
  const float low = (has_last ? x[2] : x[0]) + __shfl_xor_sync(~0u, has_last ? x[0] : x[2], lanes / 2);
  const float high = (has_last ? x[3] : x[1]) + __shfl_xor_sync(~0u, has_last ? x[1] : x[3], lanes / 2);
  const int quarter = lanes / kPackItems;
  const bool has_high = (threadIdx.x & quarter) != 0;
  double sum = double((has_high ? high : low) + __shfl_xor_sync(~0u, has_high ? low : high, quarter));
  for (int distance = quarter / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(~0u, sum, distance);
  for (int distance = quarter; distance < quarter << pass_shift; distance *= 2)
    sum += __shfl_xor_sync(~0u, sum, distance);
  return sum;
}

// The gradients of a block's row in shared memory. Returns the largest finite magnitude of a thread's.
template <class Chain, int kWidth>
class RowGradients {
 public:
  __device__ RowGradients(const PackWork& pack, const PackRow& row, const PackMemory<Chain>& memory,
                          const RowSpread<Chain>& spread)
      : pack_(pack),
        memory_(memory),
        spread_(spread),
        channels_(pack.to.channels),
        row_first_(row.sample * channels_ * pack.work.pixels + int64_t(row.row) * pack.to.cols),
        lane_(threadIdx.x & (pack.shape.lanes - 1)),
        group_(lane_of_thread() >> log2_of(pack.shape.lanes)) {}

  __device__ unsigned write() const {
    const PackShape& shape = pack_.shape;
    const int of_group = kPackItems >> shape.pass_shift;
    const int of_warp = (kWarpThreads >> log2_of(shape.lanes)) * of_group;
    const int passes_cols = (shape.lanes << shape.pass_shift) * kWidth;
    unsigned largest = 0;
    for (int first = threadIdx.x / kWarpThreads * of_warp; first < channels_;  // the same for a whole warp
         first += kPackThreads / kWarpThreads * of_warp) {
      for (int col = 0; col < pack_.to.cols; col += passes_cols)
        largest = max(largest, write_items(first + group_ * of_group, col));
    }
    return largest;
  }

 private:
  struct Loaded {
    RawPack<float, kWidth> v;
    typename RowSpread<Chain>::template Loaded<kWidth> spread;
  };

  // From a channel and a column on.
  __device__ unsigned write_items(int first_channel, int first_col) const {
    const int shift = pack_.shape.pass_shift;
    const auto channel_of = [&](int k) { return first_channel + (k >> shift); };
    const auto col_of = [&](int k) {
      return first_col + ((k & ((1 << shift) - 1)) * pack_.shape.lanes + lane_) * kWidth;
    };
    const auto exists = [&](int k) { return channel_of(k) < channels_ && col_of(k) < pack_.to.cols; };
    Loaded loaded[kPackItems];
#pragma unroll
    for (int k = 0; k < kPackItems; ++k) {
      if (!exists(k)) continue;
      const int64_t offset = row_first_ + channel_of(k) * pack_.work.pixels + col_of(k);
      loaded[k] = {load_raw<float, kWidth>(pack_.work.v, offset), spread_.template load<kWidth>(offset)};
    }
    asm volatile("" ::: "memory");
    unsigned largest = 0;
    float sums[kPackItems][kGradientKinds]{};
#pragma unroll
    for (int k = 0; k < kPackItems; ++k) {
      if (exists(k)) largest = max(largest, write_item(channel_of(k), col_of(k), loaded[k], sums[k]));
    }
    add_sums(sums, first_channel, first_col == 0);
    return largest;
  }

  __device__ unsigned write_item(int c, int col, const Loaded& loaded, float (&sums)[kGradientKinds]) const {
    RowChannel of{};
    if constexpr (kHasChannels<Chain>) of = memory_.channels[c];
    const Pack<float, kWidth> v = values_of(loaded.v, DType::kFloat32);
    Pack<float, kWidth> grad = spread_.gradients(loaded.spread, c, col, v, of.channel);
    unsigned largest = 0;
#pragma unroll
    for (int k = 0; k < kWidth; ++k) {
      grad.element[k] = gradient_of_v<Chain>(grad.element[k], v.element[k], of.channel, of.norm, sums);
      largest = max(largest, finite_magnitude(grad.element[k]));
    }
    store_pack(memory_.values + c * pack_.shape.pitch + col, grad);
    return largest;
  }

  __device__ void add_sums(const float (&sums)[kPackItems][kGradientKinds], int first_channel,
                           bool is_first) const {
    const int lanes = pack_.shape.lanes;
    const int shift = pack_.shape.pass_shift;
    const int of_channel = lanes / kPackItems << shift;  // lanes with the same sum
    const int c = first_channel + (lane_ >> log2_of(of_channel));
    const bool writes = (lane_ & (of_channel - 1)) == 0 && c < channels_;
#pragma unroll
    for (int kind = 0; kind < kGradientKinds; ++kind) {
      if ((kOfAll<Chain> >> kind & 1) == 0 || pack_.work.of_all.of[kind] == nullptr) continue;
      const float of_kind[] = {sums[0][kind], sums[1][kind], sums[2][kind], sums[3][kind]};
      const double sum = sum_of_items(of_kind, lanes, shift);
      double& total = memory_.sums_of(kind, channels_)[c];
      if (writes) total = is_first ? sum : total + sum;
    }
  }

  const PackWork& pack_;
  const PackMemory<Chain>& memory_;
  const RowSpread<Chain>& spread_;
  const int channels_;
  const int64_t row_first_;  // of the first channel
  const int lane_;           // of those that share a row of a channel
  const int group_;          // of such lanes, in the warp
};

// ---- the kernel ----

template <class Chain>
__device__ void load_row_channels(const PackWork& pack, const PackRow& row, const PackMemory<Chain>& memory) {
  if constexpr (kHasChannels<Chain>) {
    for (int c = threadIdx.x; c < pack.to.channels; c += kPackThreads)
      memory.channels[c] = {channel_of_thread<Chain>(pack.work, row.sample, c),
                            whole_norm_gradient_of<Chain>(pack.work, row.sample, c)};
  }
}

template <class Chain>
__device__ void write_row_sums(const PackWork& pack, const PackRow& row, const PackMemory<Chain>& memory) {
  const int channels = pack.to.channels;
#pragma unroll
  for (int kind = 0; kind < kGradientKinds; ++kind) {
    double* const to = pack.work.of_all.of[kind];
    if ((kOfAll<Chain> >> kind & 1) == 0 || to == nullptr) continue;
    for (int c = threadIdx.x; c < channels; c += kPackThreads)
      to[(row.sample * channels + c) * pack.to.rows + row.row] = memory.sums_of(kind, channels)[c];
  }
}

template <class Chain>
__device__ unsigned write_row_gradients(const PackWork& pack, const PackRow& row,
                                        const PackMemory<Chain>& memory, const RowSpread<Chain>& spread) {
  if (pack.shape.width > 1) return RowGradients<Chain, kPackWidth>(pack, row, memory, spread).write();
  return RowGradients<Chain, 1>(pack, row, memory, spread).write();
}

__device__ inline void pack_row_as(DType dtype, const PackedRows& to, int64_t row, const float* values,
                                   int pitch, unsigned largest) {
  if (dtype == DType::kBFloat16) {
    pack_row<BFloat16, kPackThreads>(to, row, values, pitch, largest);
  } else if (dtype == DType::kFloat16) {
    pack_row<Float16, kPackThreads>(to, row, values, pitch, largest);
  } else if (to.parts == Float32Ieee::kParts) {
    pack_row<Float32Ieee, kPackThreads>(to, row, values, pitch, largest);
  } else {
    pack_row<Float32Tf32, kPackThreads>(to, row, values, pitch, largest);
  }
}

template <class Chain>
__global__ void __launch_bounds__(kPackThreads, kPackBlocks)
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
  const unsigned of_warp = __reduce_max_sync(~0u, write_row_gradients(pack, row, memory, spread));
  if (lane_of_thread() == 0) memory.largest[threadIdx.x / kWarpThreads] = of_warp;
  __syncthreads();
  write_row_sums(pack, row, memory);
  if (pack.to.units == nullptr) return;
  unsigned largest = 0;
#pragma unroll
  for (int warp = 0; warp < kPackThreads / kWarpThreads; ++warp) largest = max(largest, memory.largest[warp]);
  pack_row_as(pack.dtype, pack.to, row.index, memory.values, pack.shape.pitch, largest);
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

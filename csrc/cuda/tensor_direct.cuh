// The reductions of a chain straight from memory, for samples too large to be kept on chip: any window, any
// number of channels.
#pragma once

#include "tensor_piece.cuh"
#include "tensor_reduce.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

constexpr int kDirectThreads = 256;

// A value of the chain before its reduction.
template <class Chain, class In>
class DirectValues {
 public:
  using T = Compute<In>;

  __device__ DirectValues(const TensorWork<T>& work, int64_t sample) : work_(work), sample_(sample) {}

  __device__ Channel<T> channel_at(int64_t c) const {
    Channel<T> channel = make_channel<T>(work_.arguments, c);
    if (work_.norms != nullptr) set_norm(channel, work_.norms[sample_ * work_.shape.channels + c]);
    return channel;
  }

  __device__ T value(int64_t c, int64_t p, const Channel<T>& channel) const {
    const TensorShape& shape = work_.shape;
    const int64_t place = shape.channels_last ? p * shape.channels + c : c * shape.pixels + p;
    const T v =
        widen<T>(static_cast<const In*>(work_.input)[sample_ * shape.channels * shape.pixels + place]);
    return Chain::value(v, channel);
  }

 private:
  const TensorWork<T>& work_;
  const int64_t sample_;
};

// A thread for each output; neighbours have outputs that are neighbours in memory.
template <class Chain, class In>
__global__ void __launch_bounds__(kDirectThreads, 1)
    tensor_max_pool(const __grid_constant__ TensorWork<Compute<In>> work, int64_t blocks_per_sample) {
  using T = Compute<In>;
  const int64_t sample = block_index() / blocks_per_sample;
  if (sample >= work.shape.samples) return;
  const int64_t i = block_index() % blocks_per_sample * kDirectThreads + threadIdx.x;
  const Tensor& output = work.output;
  const int64_t channels = work.shape.channels;
  const int64_t pooled_cols = output.size[3];
  const int64_t pooled = output.size[2] * pooled_cols;
  if (i >= channels * pooled) return;
  const int64_t c = work.shape.channels_last ? i % channels : i / pooled;
  const int64_t window = work.shape.channels_last ? i / channels : i % pooled;
  const int64_t row = window / pooled_cols;
  const int64_t col = window % pooled_cols;
  const int64_t* size = work.arguments.pool;
  const int64_t cols = work.shape.window_pixels / size[0];
  const int64_t first = row * size[0] * cols + col * size[1];
  const DirectValues<Chain, In> values(work, sample);
  const Channel<T> channel = values.channel_at(c);
  const T most = window_maximum<T>(
      size[0], size[1], [&](int64_t r, int64_t q) { return values.value(c, first + r * cols + q, channel); });
  const int64_t* stride = output.stride;
  OutputMemory<In>(output).store(sample * stride[0] + c * stride[1] + row * stride[2] + col * stride[3],
                                 Pack<T, 1>{Chain::Final::value(most, most, channel)});
}

// How a block's threads share pixels and their channels: neighbours have neighbours in memory.
struct PixelThreads {
  bool channels_last;
  int lanes;  // of a pixel, where channels are last; else each warp has some channels of a warp's pixels

  __host__ __device__ explicit PixelThreads(const TensorShape& shape)
      : channels_last(shape.channels_last), lanes(lanes_of_channels(shape.channels_last, shape.channels)) {}

  __host__ __device__ int pixels() const { return channels_last ? kDirectThreads / lanes : kWarpThreads; }
  __device__ int pixel() const { return channels_last ? threadIdx.x / lanes : threadIdx.x % kWarpThreads; }
  __device__ int channel() const { return channels_last ? threadIdx.x % lanes : threadIdx.x / kWarpThreads; }
  __host__ __device__ int channel_step() const {
    return channels_last ? lanes : kDirectThreads / kWarpThreads;
  }
};

// The first warp gets the sums of all warps.
template <class T>
__device__ void add_warps(LogSumExp<T>& sum) {
  constexpr int kWarps = kDirectThreads / kWarpThreads;
  __shared__ T most[kDirectThreads];
  __shared__ T sums[kDirectThreads];
  most[threadIdx.x] = sum.most;
  sums[threadIdx.x] = sum.sum;
  __syncthreads();
  if (threadIdx.x >= kWarpThreads) return;
#pragma unroll
  for (int w = 1; w < kWarps; ++w) {
    const int i = w * kWarpThreads + threadIdx.x;
    sum.add(LogSumExp<T>{most[i], sums[i]});
  }
}

template <class Chain, class In>
__global__ void __launch_bounds__(kDirectThreads, 1)
    tensor_logsumexp(const __grid_constant__ TensorWork<Compute<In>> work, int64_t blocks_per_sample) {
  using T = Compute<In>;
  const int64_t sample = block_index() / blocks_per_sample;
  if (sample >= work.shape.samples) return;
  const PixelThreads threads(work.shape);
  const int64_t p = block_index() % blocks_per_sample * threads.pixels() + threads.pixel();
  const bool exists = p < work.shape.pixels;
  const DirectValues<Chain, In> values(work, sample);
  LogSumExp<T> sum =
      channel_logsumexp<T>(exists ? work.shape.channels : 0, threads.channel(), threads.channel_step(),
                           [&](int64_t c) { return values.value(c, p, values.channel_at(c)); });
  if (threads.channels_last) {
    sum.add_lanes(threads.lanes);
  } else {
    add_warps(sum);
  }
  if (!exists || threads.channel() > 0) return;
  const T y = sum.value();
  const int64_t* stride = work.output.stride;
  const int64_t cols = work.output.size[3];
  OutputMemory<In>(work.output)
      .store(sample * stride[0] + p / cols * stride[2] + p % cols * stride[3],
             Pack<T, 1>{Chain::Final::value(y, y, make_channel<T>(work.arguments, 0))});
}

template <class Chain, class In>
cudaError_t launch_direct(const TensorWork<Compute<In>>& work, cudaStream_t stream) {
  const TensorShape& shape = work.shape;
  if constexpr (Chain::Reduce::kPools) {
    const int64_t outputs = shape.channels * work.output.size[2] * work.output.size[3];
    const int64_t blocks = cuda::divide_up(outputs, kDirectThreads);
    tensor_max_pool<Chain, In>
        <<<grid_of(shape.samples * blocks, 1), kDirectThreads, 0, stream>>>(work, blocks);
  } else {
    const int64_t blocks = cuda::divide_up(shape.pixels, PixelThreads(shape).pixels());
    tensor_logsumexp<Chain, In>
        <<<grid_of(shape.samples * blocks, 1), kDirectThreads, 0, stream>>>(work, blocks);
  }
  return cudaGetLastError();
}

template <class Chain, class In>
const void* direct_kernel() {
  if constexpr (Chain::Reduce::kPools) {
    return reinterpret_cast<const void*>(tensor_max_pool<Chain, In>);
  } else {
    return reinterpret_cast<const void*>(tensor_logsumexp<Chain, In>);
  }
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

#include "conv_gradients.cuh"

#include "cuda/device/elements.cuh"
#include "cuda/device/launch.cuh"
#include "input_gradient.cuh"
#include "plan/workspace.h"
#include "weight_gradient.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {
namespace {

using cuda::kBlockChannels;
using cuda::kRowPadding;

// ---- channels, balanced ----

constexpr int kBalanceThreads = 128;
constexpr int kMostBalance = 50;  // as an exponent

// A row of the output's gradient has one scale. Behind a GroupNorm a channel with small weights has large
// gradients: each is multiplied by the root of its largest weight, in powers of two, and its weights divided
// by it. The root, as weights that are small by themselves must not make gradients small. A block for each
// channel.
__global__ void __launch_bounds__(kBalanceThreads) balance_channels(Tensor weight, float* balance) {
  __shared__ unsigned of_warp[kBalanceThreads / kWarpThreads];
  const int cols = int(weight.size[3]);
  const int taps = int(weight.size[2]) * cols;
  const float* const of_channel = static_cast<const float*>(weight.data) + blockIdx.x * weight.stride[0];
  unsigned largest = 0;
  for (int i = threadIdx.x; i < weight.size[1] * taps; i += kBalanceThreads) {
    const int64_t at =
        i / taps * weight.stride[1] + i % taps / cols * weight.stride[2] + i % cols * weight.stride[3];
    largest = max(largest, finite_magnitude(of_channel[at]));
  }
  largest = largest_of_warp(largest);
  if (lane_of_thread() == 0) of_warp[threadIdx.x / kWarpThreads] = largest;
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (const unsigned of : of_warp) largest = max(largest, of);
  const int exponent = largest > 0 ? exponent_of(largest) / 2 : 0;
  balance[blockIdx.x] = power_of_two(min(max(exponent, -kMostBalance), kMostBalance));
}

// ---- the input, packed ----

constexpr int kRowPackThreads = 256;
constexpr int kRowPackBlocks = 8;  // on a multiprocessor, for registers

// A block's row, widened into shared memory. Returns the largest magnitude of a thread's values.
template <class Word, class Value>
__device__ unsigned load_row(const Tensor& from, const PackedRows& to, float* values, int pitch,
                             const Value& value_of) {
  const Word* const row = static_cast<const Word*>(from.data) + blockIdx.x / to.rows * from.stride[0] +
                          blockIdx.x % to.rows * from.stride[2];
  unsigned of_thread = 0;
  for (int c = threadIdx.x / kWarpThreads; c < to.channels; c += kRowPackThreads / kWarpThreads) {
#pragma unroll 4
    for (int col = lane_of_thread(); col < to.cols; col += kWarpThreads) {
      const float x = value_of(row[c * from.stride[1] + col * from.stride[3]]);
      values[c * pitch + col] = x;
      of_thread = max(of_thread, finite_magnitude(x));
    }
  }
  return of_thread;
}

// A block for each row of each sample.
__global__ void __launch_bounds__(kRowPackThreads, kRowPackBlocks) pack_rows(Tensor from, PackedRows to) {
  extern __shared__ float values[];
  __shared__ unsigned largest;
  if (threadIdx.x == 0) largest = 0;
  __syncthreads();
  const int pitch = to.cols + kRowPadding;
  if (is_scaled(to.dtype)) {
    const unsigned of_warp =
        largest_of_warp(load_row<float>(from, to, values, pitch, [](float value) { return value; }));
    if (lane_of_thread() == 0) atomicMax(&largest, of_warp);
  } else {
    const bool is_bfloat16 = to.dtype == DType::kBFloat16;
    load_row<uint16_t>(from, to, values, pitch,
                       [=](uint16_t bits) { return from_half_bits(bits, is_bfloat16); });
  }
  __syncthreads();
  pack_row<kRowPackThreads>(to, blockIdx.x, values, pitch, largest);
}

// ---- the weight's gradient, added up ----

constexpr int kSlotThreads = 256;

// Adds up the slots in double: so many neighbouring weights a block, each by a few threads.
__global__ void __launch_bounds__(kSlotThreads)
    sum_weight_gradient(const float* slots, WeightGradientPlan plan, ConvShape shape, const float* balance,
                        float* grad) {
  constexpr int kLines = kSlotThreads / kWarpThreads;
  __shared__ double of_line[kLines][kWarpThreads];
  const int line = threadIdx.x / kWarpThreads;
  const int lane = threadIdx.x % kWarpThreads;
  const int64_t values = plan.values_of_slot(shape);
  const int64_t value = int64_t(blockIdx.x) * kWarpThreads + lane;  // the blocks divide them
  double sum = 0;
#pragma unroll 4
  for (int slot = line; slot < plan.slots; slot += kLines) sum += slots[slot * values + value];
  of_line[line][lane] = sum;
  __syncthreads();
  if (line > 0) return;
  for (int i = 1; i < kLines; ++i) sum += of_line[i][lane];
  const int tap = int(value % (kTaps * kTaps));
  int64_t rest = value / (kTaps * kTaps);
  const int in_lane = int(rest % kUnitChannels);
  rest /= kUnitChannels;
  const int out_lane = int(rest % (kTileChannels * plan.channel_warps));
  rest /= kTileChannels * plan.channel_warps;
  const WindowPlace window(shape, int(rest % shape.count_windows()));
  rest /= shape.count_windows();
  const int in_channel = int(rest % plan.in_blocks) * kUnitChannels + in_lane;
  const int out_channel = int(rest / plan.in_blocks) * kBlockChannels + out_lane;
  const int down = window.down + tap / kTaps;
  const int across = window.across + tap % kTaps;
  if (in_channel >= shape.in_channels || out_channel >= shape.out_channels || down >= shape.kernel[0] ||
      across >= shape.kernel[1])
    return;
  grad[((int64_t(out_channel) * shape.in_channels + in_channel) * shape.kernel[0] + down) * shape.kernel[1] +
       across] = float(balance != nullptr ? sum / balance[out_channel] : sum);
}

void take_memory(PackedRows& packed, int64_t samples, Workspace& workspace) {
  const Checked rows = Checked(samples) * packed.rows;
  packed.units = workspace.take<uint4>(rows * packed.row_units() + 2 * kGuardUnits) + kGuardUnits;
  packed.exponents = workspace.take<int>(rows);
}

}  // namespace

WeightSums::WeightSums(const BackwardProblem& problem, const ConvShape& shape, const WeightGradientPlan& plan,
                       Workspace& workspace)
    : conv_(*problem.conv), shape_(shape), plan_(plan) {
  if (is_scaled(conv_.input.dtype) && (problem.wants.weight || problem.wants.input))
    balance_ = workspace.take<float>(shape.out_channels);
  if (problem.wants.weight) slots_ = workspace.take<float>(Checked(plan.slots) * plan.values_of_slot(shape));
}

cudaError_t WeightSums::launch_before(cudaStream_t stream) const {
  if (balance_ == nullptr) return cudaSuccess;
  const LaunchShape launch{dim3(shape_.out_channels), kBalanceThreads, 0, false};
  return launch_kernel(balance_channels, launch, stream, conv_.conv.weight, balance_);
}

cudaError_t WeightSums::launch_after(cudaStream_t stream) const {
  if (slots_ == nullptr) return cudaSuccess;
  const LaunchShape launch{dim3(unsigned(plan_.values_of_slot(shape_) / kWarpThreads)), kSlotThreads, 0,
                           false};
  return launch_kernel(sum_weight_gradient, launch, stream, slots_, plan_, shape_, balance_,
                       static_cast<float*>(conv_.grad_weight));
}

ConvGradients::ConvGradients(const BackwardProblem& problem, const cuda::ConvGradientsPlan& plan,
                             Workspace& workspace)
    : conv_(*problem.conv),
      wants_(problem.wants),
      plan_(plan),
      grads_(plan.grads),
      input_(plan.input_rows),
      sums_(problem, plan.shape, plan.weight, workspace) {
  grads_.balance = sums_.balance();
  if (wants_.weight || wants_.input) take_memory(grads_, plan.step_samples, workspace);
  if (wants_.weight) take_memory(input_, plan.step_samples, workspace);
}

cudaError_t ConvGradients::launch_step(int64_t first, int64_t samples, cudaStream_t stream) const {
  return visit_mode(grads_.dtype, grads_.operand_parts, [&](auto mode) {
    using Mode = decltype(mode);
    if (wants_.weight) {
      if (const cudaError_t status = add_to_weight<Mode>(input_from(first, samples), first == 0, stream))
        return status;
    }
    return wants_.input ? write_input<Mode>(first, samples, stream) : cudaSuccess;
  });
}

Tensor ConvGradients::input_from(int64_t first, int64_t samples) const {
  Tensor input = conv_.input;
  input.data = static_cast<char*>(input.data) + first * input.stride[0] * bytes_of(input.dtype);
  input.size[0] = samples;
  return input;
}

template <class Mode>
cudaError_t ConvGradients::add_to_weight(const Tensor& input, bool is_first, cudaStream_t stream) const {
  const WeightGradientPlan& plan = plan_.weight;
  const int64_t samples = input.size[0];
  const LaunchShape pack{dim3(unsigned(samples * input_.rows)), kRowPackThreads,
                         int(cuda::row_shared_bytes(input_)), false};
  if (const cudaError_t status = launch_kernel(pack_rows, pack, stream, input, input_)) return status;
  const WeightGradientWork work{
      plan_.shape, plan, grads_, input_, sums_.slots(), !is_first, int(plan.slabs.of_samples(samples))};
  const LaunchShape shape{dim3(plan.blocks, plan.out_blocks * plan.in_blocks * plan_.shape.count_windows()),
                          kWeightThreads, cuda::weight_shared_bytes(Mode::kParts), false};
  return launch_kernel(conv_weight_gradient<Mode>, shape, stream, work);
}

template <class Mode>
cudaError_t ConvGradients::write_input(int64_t first, int64_t samples, cudaStream_t stream) const {
  const InputGradientPlan& plan = plan_.input;
  const ConvShape& conv = plan_.shape;
  const int64_t sample = int64_t(conv.in_channels) * conv.in_size[0] * conv.in_size[1];
  const Elements to = elements_from(conv_.grad_input.data, conv_.grad_input.dtype, first * sample);
  const InputGradientWork work{
      conv, plan, grads_, conv_.conv.weight, to, int(plan.slabs.of_samples(samples))};
  const LaunchShape shape{dim3(plan.blocks, plan.in_blocks), kInputThreads, plan.shared_bytes, false};
  return launch_kernel(conv_input_gradient<Mode>, shape, stream, work);
}

cudaError_t ConvGradients::load(const cuda::Card& card) {
  const int rest = card.shared_bytes - cuda::kStaticBytes;
  if (const cudaError_t status = load_kernel(balance_channels)) return status;
  if (const cudaError_t status = load_kernel(sum_weight_gradient)) return status;
  if (const cudaError_t status = load_kernel(pack_rows, rest)) return status;
  return visit_modes([&](auto mode) {
    const cudaError_t status = load_kernel(conv_weight_gradient<decltype(mode)>, rest);
    return status != cudaSuccess ? status : load_kernel(conv_input_gradient<decltype(mode)>, rest);
  });
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

#include "conv_gradients.cuh"

#include <algorithm>

#include "cuda/device/elements.cuh"
#include "cuda/device/launch.cuh"
#include "cuda/device/workspace.cuh"
#include "input_gradient.cuh"
#include "weight_gradient.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {
namespace {

using cuda::Card;
using cuda::kBlockChannels;
using cuda::parts_of;
using cuda::Slabs;

constexpr int kStaticBytes = 256;  // of shared memory that a kernel has besides, at the most

template <class Visit>
auto visit_mode(const ConvBackward& conv, const Visit& visit) {
  if (conv.input.dtype == DType::kBFloat16) return visit(BFloat16s{});
  return parts_of(conv) == SplitHalves::kParts ? visit(SplitHalves{}) : visit(Halves{});
}

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
constexpr int kRowPadding = 1;     // of a row in shared memory

int64_t pack_bytes(const PackedRows& to) {
  return to.channels * (to.cols + int64_t(kRowPadding)) * int64_t(sizeof(float));
}

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

FUSEDCONV_INLINE int64_t values_of_slot(const WeightGradientPlan& plan, const ConvShape& shape) {
  return int64_t(plan.out_blocks) * plan.in_blocks * shape.count_windows() * plan.channel_warps * kSlotValues;
}

// Adds up the slots in double: so many neighbouring weights a block, each by a few threads.
__global__ void __launch_bounds__(kSlotThreads)
    sum_weight_gradient(const float* slots, WeightGradientPlan plan, ConvShape shape, const float* balance,
                        float* grad) {
  constexpr int kLines = kSlotThreads / kWarpThreads;
  __shared__ double of_line[kLines][kWarpThreads];
  const int line = threadIdx.x / kWarpThreads;
  const int lane = threadIdx.x % kWarpThreads;
  const int64_t values = values_of_slot(plan, shape);
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

// ---- loading, memory ----

template <class Kernel>
cudaError_t allow_shared_memory(Kernel* kernel, const Card& card) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, card.shared_bytes);
}

template <class Mode>
cudaError_t load_mode(const Card& rest) {
  if (const cudaError_t status = allow_shared_memory(conv_weight_gradient<Mode>, rest)) return status;
  return allow_shared_memory(conv_input_gradient<Mode>, rest);
}

// margin: of zeros that are read beside a row.
PackedRows packed_map(const ConvBackward& conv, int channels, const int (&size)[2], int least_pitch,
                      int margin) {
  const int pitch = std::max(least_pitch, size[1] + margin);
  return {nullptr, nullptr, nullptr, conv.input.dtype, channels, cuda::chunks_of(channels), parts_of(conv),
          size[0], size[1], pitch};
}

// Of the output's gradient, all of a slab is read, and as much beside a row as windows have taps.
PackedRows packed_grads(const ConvBackward& conv, const ConvShape& shape, const Slabs& slabs) {
  return packed_map(conv, shape.out_channels, shape.out_size, slabs.across * slabs.cols,
                    shape.windows[1] * kTaps - 1);
}

// So is the input, which may have padding: what is multiplied by zeros must be finite.
PackedRows packed_input(const ConvBackward& conv, const ConvShape& shape, const Slabs& slabs) {
  const int cols = slabs.across * slabs.cols + shape.windows[1] * kTaps - 1;
  return packed_map(conv, shape.in_channels, shape.in_size, cols, shape.padding[1]);
}

void take_memory(PackedRows& packed, int64_t samples, Workspace& workspace) {
  const Checked rows = Checked(samples) * packed.rows;
  packed.units = workspace.take<uint4>(rows * packed.row_units() + 2 * kGuardUnits) + kGuardUnits;
  packed.exponents = workspace.take<int>(rows);
}

}  // namespace

bool ConvGradients::may_run(const BackwardProblem& problem, const Card& card) {
  const ConvShape shape = cuda::conv_shape(problem);
  const int64_t of_input = cuda::plan_input_gradient(shape, parts_of(*problem.conv), 1, card).shared_bytes;
  const int64_t bytes = std::max(of_input, pack_bytes(packed_input(*problem.conv, shape, {})));
  return bytes + kStaticBytes <= card.shared_bytes;
}

ConvGradients::ConvGradients(const BackwardProblem& problem, int64_t step_samples, void* memory,
                             const Card& card)
    : conv_(*problem.conv), wants_(problem.wants), shape_(cuda::conv_shape(problem)) {
  Workspace workspace(memory);
  const int parts = parts_of(conv_);
  weight_plan_ = cuda::plan_weight_gradient(shape_, parts, step_samples, card);
  grads_ = packed_grads(conv_, shape_, weight_plan_.slabs);
  input_ = packed_input(conv_, shape_, weight_plan_.slabs);
  if (wants_weight() || wants_input()) {
    take_memory(grads_, step_samples, workspace);
    if (is_scaled(grads_.dtype)) grads_.balance = balance_ = workspace.take<float>(shape_.out_channels);
  }
  if (wants_weight()) take_memory(input_, step_samples, workspace);
  if (wants_input()) input_plan_ = cuda::plan_input_gradient(shape_, parts, step_samples, card);
  if (wants_weight())
    slots_ = workspace.take<float>(Checked(weight_plan_.slots) * values_of_slot(weight_plan_, shape_));
  workspace_bytes_ = workspace.bytes();
}

int64_t ConvGradients::sample_bytes(const BackwardProblem& problem, const Card& card) {
  const ConvShape shape = cuda::conv_shape(problem);
  const Slabs slabs = cuda::plan_weight_gradient(shape, parts_of(*problem.conv), 1, card).slabs;
  const PackedRows grads = packed_grads(*problem.conv, shape, slabs);
  const PackedRows input = packed_input(*problem.conv, shape, slabs);
  const Checked units =
      std::max(Checked(grads.rows) * grads.row_units(), Checked(input.rows) * input.row_units());
  return (units * int64_t(sizeof(uint4))).value();
}

cudaError_t launch_balance(const Tensor& weight, float* balance, cudaStream_t stream) {
  const LaunchShape shape{dim3(unsigned(weight.size[0])), kBalanceThreads, 0, false};
  return launch_kernel(balance_channels, shape, stream, weight, balance);
}

cudaError_t launch_sum_of_slots(const float* slots, const WeightGradientPlan& plan, const ConvShape& shape,
                                const float* balance, float* grad_weight, cudaStream_t stream) {
  const LaunchShape launch{dim3(unsigned(values_of_slot(plan, shape) / kWarpThreads)), kSlotThreads, 0,
                           false};
  return launch_kernel(sum_weight_gradient, launch, stream, slots, plan, shape, balance, grad_weight);
}

cudaError_t ConvGradients::launch_before_steps(cudaStream_t stream) const {
  return balance_ == nullptr ? cudaSuccess : launch_balance(conv_.conv.weight, balance_, stream);
}

cudaError_t ConvGradients::launch_step(int64_t first, int64_t samples, cudaStream_t stream) const {
  return visit_mode(conv_, [&](auto mode) {
    using Mode = decltype(mode);
    if (wants_weight()) {
      if (const cudaError_t status = add_to_weight<Mode>(input_from(first, samples), first == 0, stream))
        return status;
    }
    return wants_input() ? write_input<Mode>(first, samples, stream) : cudaSuccess;
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
  const WeightGradientPlan& plan = weight_plan_;
  const int64_t samples = input.size[0];
  const LaunchShape pack{dim3(unsigned(samples * input_.rows)), kRowPackThreads, int(pack_bytes(input_)),
                         false};
  if (const cudaError_t status = launch_kernel(pack_rows, pack, stream, input, input_)) return status;
  const WeightGradientWork work{
      shape_, plan, grads_, input_, slots_, !is_first, int(plan.slabs.of_samples(samples))};
  const LaunchShape shape{dim3(plan.blocks, plan.out_blocks * plan.in_blocks * shape_.count_windows()),
                          kWeightThreads, cuda::weight_shared_bytes(Mode::kParts), false};
  return launch_kernel(conv_weight_gradient<Mode>, shape, stream, work);
}

template <class Mode>
cudaError_t ConvGradients::write_input(int64_t first, int64_t samples, cudaStream_t stream) const {
  const InputGradientPlan& plan = input_plan_;
  const int64_t sample = int64_t(shape_.in_channels) * shape_.in_size[0] * shape_.in_size[1];
  const Elements to = elements_from(conv_.grad_input.data, conv_.grad_input.dtype, first * sample);
  const InputGradientWork work{
      shape_, plan, grads_, conv_.conv.weight, to, int(plan.slabs.of_samples(samples))};
  const LaunchShape shape{dim3(plan.blocks, plan.in_blocks), kInputThreads, plan.shared_bytes, false};
  return launch_kernel(conv_input_gradient<Mode>, shape, stream, work);
}

cudaError_t ConvGradients::launch_weight(cudaStream_t stream) const {
  if (!wants_weight()) return cudaSuccess;
  return launch_sum_of_slots(slots_, weight_plan_, shape_, balance_, static_cast<float*>(conv_.grad_weight),
                             stream);
}

cudaError_t ConvGradients::load(const Card& card) {
  if (const cudaError_t status = load_kernel(balance_channels)) return status;
  if (const cudaError_t status = load_kernel(sum_weight_gradient)) return status;
  Card rest = card;
  rest.shared_bytes -= kStaticBytes;
  if (const cudaError_t status = allow_shared_memory(pack_rows, rest)) return status;
  if (const cudaError_t status = load_mode<SplitHalves>(rest)) return status;
  if (const cudaError_t status = load_mode<Halves>(rest)) return status;
  return load_mode<BFloat16s>(rest);
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

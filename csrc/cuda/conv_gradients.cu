#include "conv_gradients.h"

#include <algorithm>

#include "conv_input_gradient.cuh"
#include "conv_weight_gradient.cuh"
#include "launch.cuh"
#include "workspace.cuh"

namespace fusedconv {
namespace cuda {
namespace {

constexpr int kBlocksOfWeight = 3;  // of each kind on a multiprocessor, if its memory suffices
constexpr int kBlocksOfInput = 2;
constexpr int kMostStripRows = 32;
constexpr int kLeastStripRows = 8;

int divide_up(int a, int b) { return (a + b - 1) / b; }

ConvShape shape_of(const BackwardProblem& problem) {
  const Tensor& input = problem.conv->input;
  const Conv& conv = problem.conv->conv;
  const int64_t* out = problem.v.size;
  return {int(input.size[1]),
          int(out[1]),
          {int(input.size[2]), int(input.size[3])},
          {int(out[2]), int(out[3])},
          {int(conv.padding[0]), int(conv.padding[1])}};
}

int value_bytes(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// Four at the most, as many as rows of the output's gradient are made of.
int copy_values(const ConvShape& shape, DType dtype) {
  constexpr int kLeastBytes = 4;
  for (int values = 4; values * value_bytes(dtype) >= kLeastBytes; values /= 2)
    if (shape.out_size[1] % values == 0) return values;
  return 1;
}

// Long strips read few rows twice; short ones give every block something to do.
int strip_rows_for(int rows, int64_t strips, int64_t blocks) {
  int strip_rows = kMostStripRows;
  while (strip_rows > kLeastStripRows && strips * divide_up(rows, strip_rows) < blocks) strip_rows /= 2;
  return strip_rows;
}

size_t weight_shared_bytes(DType dtype) {
  return dtype == DType::kFloat32 ? sizeof(WeightShared<float>) : sizeof(WeightShared<__half>);
}

WeightGradientPlan plan_weight(const ConvShape& shape, DType dtype, int64_t samples, const Card& card) {
  WeightGradientPlan plan{};
  plan.out_blocks = divide_up(shape.out_channels, kBlockChannels);
  plan.in_blocks = divide_up(shape.in_channels, kInChannels);
  plan.channel_warps = 1;
  while (plan.channel_warps < kWeightWarps && plan.channel_warps * kWarpChannels16 < shape.out_channels)
    plan.channel_warps *= 2;
  plan.strips = divide_up(shape.out_size[1], kMostStripCols);
  plan.strip_cols = divide_up(divide_up(shape.out_size[1], plan.strips), kGroupPixels) * kGroupPixels;
  const int of_multiprocessor =
      std::min(kBlocksOfWeight, int(card.shared_bytes / weight_shared_bytes(dtype)));
  const int pairs = plan.out_blocks * plan.in_blocks;
  const int64_t blocks = std::max(card.multiprocessors * of_multiprocessor / pairs, 1);
  plan.strip_rows = strip_rows_for(shape.out_size[0], samples * plan.strips, blocks);
  plan.segments = divide_up(shape.out_size[0], plan.strip_rows);
  plan.blocks = int(std::min(samples * plan.strips * plan.segments, blocks));
  plan.slots = plan.blocks * (kWeightWarps / plan.channel_warps);
  plan.copy_values = copy_values(shape, dtype);
  plan.copy_lanes = 1;
  while (plan.copy_lanes < kWarpThreads && plan.copy_lanes * plan.copy_values < plan.strip_cols)
    plan.copy_lanes *= 2;
  return plan;
}

// The most pixels at a time that are not much more than a row has.
int strip_warps_for(int cols) {
  constexpr int kCostOfStrip = 4;  // in pixels
  const auto cost = [&](int warps) {
    return divide_up(cols, warps * kWarpPixels) * (warps * kWarpPixels + kCostOfStrip);
  };
  int best = kInputWarps;
  for (int warps = kInputWarps / 2; warps >= 1; warps /= 2)
    if (cost(warps) < cost(best)) best = warps;
  return best;
}

// The lanes for what is left of a row that all lanes have had copies of.
int rest_lanes_for(int cols, int values) {
  int lanes = 1;
  while (lanes * values < cols % (kWarpThreads * values)) lanes *= 2;
  return lanes;
}

// parts: of a word of the weight.
InputGradientPlan plan_input(const ConvShape& shape, DType dtype, int parts, int64_t samples,
                             const Card& card) {
  InputGradientPlan plan{};
  plan.strip_warps = strip_warps_for(shape.in_size[1]);
  plan.strips = divide_up(shape.in_size[1], plan.strip_warps * kWarpPixels);
  plan.in_blocks = divide_up(shape.in_channels, kGradChannels);
  plan.chunks = divide_up(shape.out_channels, kStageRows * channels_of_word(value_bytes(dtype)));
  plan.shared_bytes = input_gradient_bytes(plan.strip_warps, plan.chunks, parts);
  const int strips_at_once = kInputWarps / plan.strip_warps;
  const int64_t blocks = std::max(card.multiprocessors * kBlocksOfInput / plan.in_blocks, 1);
  plan.strip_rows = strip_rows_for(shape.in_size[0], samples * plan.strips, blocks * strips_at_once);
  plan.segments = divide_up(shape.in_size[0], plan.strip_rows);
  const int64_t units = samples * plan.strips * plan.segments;
  plan.blocks = int(std::min((units + strips_at_once - 1) / strips_at_once, blocks));
  plan.copy_values = copy_values(shape, dtype);
  plan.shift = (shape.padding[1] + plan.copy_values * kTaps - (kTaps - 1)) % plan.copy_values;
  plan.rest_lanes = rest_lanes_for(plan.strip_warps * kWarpPixels + kTaps - 1 + plan.shift, plan.copy_values);
  return plan;
}

template <class Visit>
cudaError_t visit_mode(const ConvBackward& conv, const Visit& visit) {
  switch (conv.input.dtype) {
    case DType::kFloat32:
      return conv.conv.tf32 ? visit(Float32Tf32{}) : visit(Float32Ieee{});
    case DType::kBFloat16:
      return visit(BFloat16{});
    case DType::kFloat16:
      return visit(Float16{});
    default:
      return cudaErrorInvalidValue;
  }
}

int parts_of(const ConvBackward& conv) {
  return conv.input.dtype == DType::kFloat32 && !conv.conv.tf32 ? Float32Ieee::kParts : 1;
}

cudaError_t allow_shared_memory(const void* kernel, const Card& card) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, card.shared_bytes);
}

template <class Mode>
cudaError_t load_mode(const Card& card) {
  if (const cudaError_t status =
          allow_shared_memory(reinterpret_cast<const void*>(conv_weight_gradient<Mode>), card))
    return status;
  return allow_shared_memory(reinterpret_cast<const void*>(conv_input_gradient<Mode>), card);
}

}  // namespace

std::string reason_against_gradients(const BackwardProblem& problem, const Card& card) {
  const ConvBackward& backward = *problem.conv;
  const Conv& conv = backward.conv;
  if (backward.input.dtype == DType::kFloat64) return "float64";
  if (card.capability < 80) return "no kernels of a conv for this card";
  for (int d = 0; d < 2; ++d) {
    if (conv.weight.size[2 + d] != kTaps) return "a kernel that is not 3x3";
    if (conv.stride[d] != 1) return "stride";
    if (conv.dilation[d] != 1) return "dilation";
  }
  if (plan_input(shape_of(problem), backward.input.dtype, parts_of(backward), 1, card).shared_bytes >
      card.shared_bytes)
    return "shared memory";
  return "";
}

ConvGradients::ConvGradients(const BackwardProblem& problem, int64_t step_samples, void* memory,
                             const Card& card)
    : conv_(*problem.conv), shape_(shape_of(problem)) {
  const DType dtype = conv_.input.dtype;
  Workspace workspace(memory);
  if (conv_.grad_weight != nullptr) {
    weight_plan_ = plan_weight(shape_, dtype, step_samples, card);
    const int64_t of_slot =
        int64_t(weight_plan_.out_blocks) * weight_plan_.in_blocks * weight_plan_.channel_warps * kSlotValues;
    slots_ = workspace.take<float>(weight_plan_.slots * of_slot);
  }
  if (conv_.grad_input.data != nullptr)
    input_plan_ = plan_input(shape_, dtype, parts_of(conv_), step_samples, card);
  workspace_bytes_ = workspace.bytes();
}

cudaError_t ConvGradients::launch_step(int64_t first, int64_t samples, const void* grad_v,
                                       cudaStream_t stream) const {
  const int64_t sample_bytes = int64_t(value_bytes(conv_.input.dtype));
  return visit_mode(conv_, [&](auto mode) {
    using Mode = decltype(mode);
    if (conv_.grad_weight != nullptr) {
      const WeightGradientPlan& plan = weight_plan_;
      Tensor input = conv_.input;
      input.data = static_cast<char*>(input.data) + first * input.stride[0] * sample_bytes;
      const WeightGradientWork work{
          shape_, plan, input, grad_v, slots_, first > 0, int(samples * plan.strips * plan.segments)};
      const LaunchShape shape{dim3(plan.blocks, plan.out_blocks * plan.in_blocks), kWeightThreads,
                              int(weight_shared_bytes(conv_.input.dtype)), false};
      if (const cudaError_t status = launch_kernel(conv_weight_gradient<Mode>, shape, stream, work))
        return status;
    }
    if (conv_.grad_input.data == nullptr) return cudaSuccess;
    const InputGradientPlan& plan = input_plan_;
    const int64_t sample = int64_t(shape_.in_channels) * shape_.in_size[0] * shape_.in_size[1];
    const InputGradientWork work{shape_,
                                 plan,
                                 conv_.conv.weight,
                                 grad_v,
                                 static_cast<char*>(conv_.grad_input.data) + first * sample * sample_bytes,
                                 int(samples * plan.strips * plan.segments)};
    const LaunchShape shape{dim3(plan.blocks, plan.in_blocks), kInputThreads, plan.shared_bytes, false};
    return launch_kernel(conv_input_gradient<Mode>, shape, stream, work);
  });
}

cudaError_t ConvGradients::launch_weight(cudaStream_t stream) const {
  if (conv_.grad_weight == nullptr) return cudaSuccess;
  const int64_t values =
      int64_t(weight_plan_.out_blocks) * weight_plan_.in_blocks * weight_plan_.channel_warps * kSlotValues;
  const LaunchShape shape{dim3(unsigned(values / kWarpThreads)), kSlotThreads, 0, false};
  return launch_kernel(sum_weight_gradient, shape, stream, slots_, weight_plan_, shape_,
                       static_cast<float*>(conv_.grad_weight));
}

cudaError_t ConvGradients::load(const Card& card) {
  if (const cudaError_t status = load_kernel(sum_weight_gradient)) return status;
  if (const cudaError_t status = load_mode<Float32Ieee>(card)) return status;
  if (const cudaError_t status = load_mode<Float32Tf32>(card)) return status;
  if (const cudaError_t status = load_mode<BFloat16>(card)) return status;
  return load_mode<Float16>(card);
}

}  // namespace cuda
}  // namespace fusedconv

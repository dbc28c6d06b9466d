// Backward of a chain with its conv: computes v again, then the chain's gradients and the conv's. In strips
// where that serves, else a few samples at a time: so the memory that it takes hardly grows with the batch,
// by sums of each row. Reads from top to bottom.
#pragma once

#include "conv_chain.cuh"
#include "conv_gradients.cuh"
#include "kernels.h"
#include "strip_gradients.cuh"
#include "tensor_backward.cuh"
#include "workspace.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// Of what a step keeps of each kind: enough for each kernel to fill the card for a while. Steps that stay in
// the L2 cache are slower, see bench/NOTES.md.
constexpr int64_t kStepBytes = int64_t(128) << 20;

// The conv of some samples, as a problem of its own.
inline Problem conv_problem(const BackwardProblem& problem, int64_t first, int64_t samples, float* v) {
  Problem conv{problem.conv->input, &problem.conv->conv, problem.arguments, problem.v};
  conv.arguments.norm_weight = {};
  conv.arguments.norm_bias = {};
  conv.input.data =
      static_cast<char*>(conv.input.data) + first * conv.input.stride[0] * bytes_of(conv.input.dtype);
  conv.output.data = v;
  conv.input.size[0] = conv.output.size[0] = samples;
  return conv;
}

// A launch, or, from a null workspace, what memory it would take.
template <class Chain>
class PackedBackwardRun {
 public:
  PackedBackwardRun(const BackwardProblem& problem, const cuda::BackwardPlan& plan, void* memory,
                    const cuda::Card& card)
      : problem_(problem),
        plan_(plan),
        card_(card),
        workspace_(memory),
        v_(workspace_.take<float>(element_count(problem.v) / problem.v.size[0] * plan.step_samples)),
        conv_workspace_(workspace_.take<char>(
            cuda::identity.workspace(conv_problem(problem, 0, plan.step_samples, nullptr), plan.conv, card))),
        chain_(problem, {StepKind::kPackedRows, plan.step_samples, 0}, workspace_, card),
        gradients_(problem, plan.step_samples, workspace_.take<char>(0), card) {}

  size_t workspace_bytes() const { return workspace_.bytes() + gradients_.workspace_bytes(); }

  cudaError_t launch(cudaStream_t stream) const {
    if (const cudaError_t status = gradients_.launch_before_steps(stream)) return status;
    const int64_t samples = problem_.v.size[0];
    for (int64_t first = 0; first < samples; first += plan_.step_samples) {
      if (const cudaError_t status =
              launch_step(first, std::min(plan_.step_samples, samples - first), stream))
        return status;
    }
    if (const cudaError_t status = chain_.launch_parameters(stream)) return status;
    return gradients_.launch_weight(stream);
  }

 private:
  cudaError_t launch_step(int64_t first, int64_t samples, cudaStream_t stream) const {
    if (const cudaError_t status = cuda::identity.launch(conv_problem(problem_, first, samples, v_),
                                                         plan_.conv, conv_workspace_, card_, stream))
      return status;
    if (const cudaError_t status =
            chain_.with_conv().launch_packed_step(first, samples, v_, gradients_.grads(), stream))
      return status;
    return gradients_.launch_step(first, samples, stream);
  }

  const BackwardProblem& problem_;
  const cuda::BackwardPlan& plan_;
  const cuda::Card card_;
  Workspace workspace_;
  float* const v_;
  void* const conv_workspace_;
  const TensorBackward<Chain> chain_;
  const ConvGradients gradients_;
};

// The same in strips: all samples at once, or some where the chain wants v in memory.
template <class Chain>
class StripBackwardRun {
  static constexpr bool kNeedsV = BackwardRun<Chain, float>::kStripsNeedV;
  static constexpr bool kUsesConv = kNeedsV || Chain::kNeedsStatistics;

 public:
  StripBackwardRun(const BackwardProblem& problem, const cuda::BackwardPlan& plan, void* memory,
                   const cuda::Card& card)
      : problem_(problem),
        plan_(plan),
        card_(card),
        strips_(problem, plan.step_samples, memory, card),
        workspace_(static_cast<char*>(memory) + strips_.workspace_bytes()),
        v_(kNeedsV ? workspace_.take<float>(element_count(problem.v) / problem.v.size[0] * plan.step_samples)
                   : nullptr),
        conv_workspace_(kUsesConv ? workspace_.take<char>(conv_bytes()) : nullptr),
        chain_(problem, {StepKind::kStrips, plan.step_samples, strips_.slices()}, workspace_, card) {}

  size_t workspace_bytes() const { return workspace_.bytes() + strips_.workspace_bytes(); }

  cudaError_t launch(cudaStream_t stream) const {
    if (const cudaError_t status = strips_.launch_before_steps(stream)) return status;
    const int64_t samples = problem_.v.size[0];
    for (int64_t first = 0; first < samples; first += plan_.step_samples) {
      const int64_t of_step = std::min(plan_.step_samples, samples - first);
      if (const cudaError_t status = launch_conv(first, of_step, stream)) return status;
      if (const cudaError_t status =
              chain_.with_conv().launch_strips(first, of_step, v_, strips_.work(first, of_step), stream))
        return status;
    }
    if (const cudaError_t status = chain_.launch_parameters(stream)) return status;
    return strips_.launch_weight(stream);
  }

 private:
  size_t conv_bytes() const {
    const Problem conv = conv_problem(problem_, 0, plan_.step_samples, nullptr);
    if constexpr (kNeedsV) return cuda::identity.workspace(conv, plan_.conv, card_);
    return ConvChain<Chain>::workspace(conv, plan_.conv);
  }

  // v, or its statistics.
  cudaError_t launch_conv(int64_t first, int64_t samples, cudaStream_t stream) const {
    const Problem conv = conv_problem(problem_, first, samples, v_);
    if constexpr (kNeedsV) return cuda::identity.launch(conv, plan_.conv, conv_workspace_, card_, stream);
    if constexpr (kUsesConv) {
      if (Norm<float>* const norms = chain_.with_conv().norms())
        return ConvChain<Chain>::launch_statistics_of(conv, plan_.conv, conv_workspace_, norms, card_,
                                                      stream);
    }
    return cudaSuccess;
  }

  const BackwardProblem& problem_;
  const cuda::BackwardPlan& plan_;
  const cuda::Card card_;
  const StripGradients strips_;
  Workspace workspace_;
  float* const v_;
  void* const conv_workspace_;
  const TensorBackward<Chain> chain_;
};

// The same where v is given, whose gradient the caller has memory for.
template <class Chain>
class GivenBackwardRun {
 public:
  GivenBackwardRun(const BackwardProblem& problem, void* memory, const cuda::Card& card)
      : problem_(problem),
        workspace_(memory),
        chain_(problem, {StepKind::kTensor, problem.v.size[0], 0}, workspace_, card) {}

  size_t workspace_bytes() const { return workspace_.bytes(); }

  cudaError_t launch(cudaStream_t stream) const {
    if (const cudaError_t status =
            chain_.launch_step(0, problem_.v.size[0], problem_.v.data, problem_.grad_v, stream))
      return status;
    return chain_.launch_parameters(stream);
  }

 private:
  const BackwardProblem& problem_;
  Workspace workspace_;
  const TensorBackward<Chain> chain_;
};

template <class Chain, bool kHasConv>
struct ChainBackward {
  static cuda::BackwardPlan plan(const BackwardProblem& problem, const cuda::Card& card) {
    if (element_count(problem.v) == 0) return {true, "nothing to do"};
    if (problem.conv == nullptr)
      return {true, "", {}, 0, false, GivenBackwardRun<Chain>(problem, nullptr, card).workspace_bytes()};
    if constexpr (kHasConv) return plan_with_conv(problem, card);
    return {false, "two-step, the chain has no conv"};
  }

  static cudaError_t launch(const BackwardProblem& problem, const cuda::BackwardPlan& plan, void* workspace,
                            const cuda::Card& card, cudaStream_t stream) {
    if (element_count(problem.v) == 0) return cudaSuccess;
    if (problem.conv == nullptr) return GivenBackwardRun<Chain>(problem, workspace, card).launch(stream);
    if constexpr (kHasConv) {
      if (plan.in_strips) return StripBackwardRun<Chain>(problem, plan, workspace, card).launch(stream);
      return PackedBackwardRun<Chain>(problem, plan, workspace, card).launch(stream);
    }
    return cudaErrorInvalidValue;
  }

  static cudaError_t load(const cuda::Card& card) {
    if (const cudaError_t status = TensorBackward<Chain>::load()) return status;
    if constexpr (!kHasConv) return cudaSuccess;
    using Run = BackwardRun<Chain, float>;
    if (const cudaError_t status = Run::load_packing(card)) return status;
    if (const cudaError_t status = Run::load_strips(card)) return status;
    return ConvGradients::load(card);
  }

 private:
  static cuda::BackwardPlan plan_with_conv(const BackwardProblem& problem, const cuda::Card& card) {
    std::string reason = reason_against_gradients(problem, card);
    const bool in_strips = reason.empty() && reason_against_strips(problem, card).empty();
    if (reason.empty() && !in_strips && !BackwardRun<Chain, float>::may_pack(problem, card))
      reason = "shared memory";
    if (!reason.empty()) return {false, "two-step, " + reason};
    const Problem conv = conv_problem(problem, 0, problem.v.size[0], nullptr);
    cuda::BackwardPlan plan{true, "", cuda::identity.plan(conv, card)};
    plan.reason = plan.conv.reason;
    plan.runs = plan.conv.source != cuda::ConvSource::kNone;
    if (!plan.runs) return plan;
    plan.in_strips = in_strips;
    plan.step_samples = step_samples(problem, in_strips, card);
    if (in_strips) plan.reason += ", strips";
    plan.reason += ", steps of " + std::to_string(plan.step_samples) + " samples";
    plan.workspace = in_strips ? StripBackwardRun<Chain>(problem, plan, nullptr, card).workspace_bytes()
                               : PackedBackwardRun<Chain>(problem, plan, nullptr, card).workspace_bytes();
    return plan;
  }

  // As many as fill kStepBytes with what is kept of one kind: of v, of the input, which is packed for v, or
  // of what is packed for the gradients.
  static int64_t step_samples(const BackwardProblem& problem, bool in_strips, const cuda::Card& card) {
    const int64_t samples = problem.v.size[0];
    if (in_strips && !BackwardRun<Chain, float>::kStripsNeedV) return samples;
    const int64_t values = std::max(element_count(problem.v), element_count(problem.conv->input));
    int64_t bytes = values / samples * int64_t(sizeof(float));
    if (!in_strips) bytes = std::max(bytes, ConvGradients::sample_bytes(problem, card));
    return std::clamp<int64_t>(kStepBytes / bytes, 1, samples);
  }
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

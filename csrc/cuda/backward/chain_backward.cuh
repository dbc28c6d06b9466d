// Backward of a chain with its conv: computes v again, then the chain's gradients and the conv's. In strips
// where that serves, else a few samples at a time. Reads from top to bottom.
#pragma once

#include <variant>

#include "cuda/device/workspace.cuh"
#include "cuda/gradients/conv_gradients.cuh"
#include "cuda/passes/conv_output.cuh"
#include "plan/backward_plan.h"
#include "steps.cuh"
#include "strip_gradients.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// The conv of some samples, as a problem of its own. The output's memory is for the caller to set.
inline Problem conv_problem(const BackwardProblem& problem, int64_t first, int64_t samples) {
  Problem conv{problem.conv->input, &problem.conv->conv, problem.arguments, problem.v};
  conv.input.data =
      static_cast<char*>(conv.input.data) + first * conv.input.stride[0] * bytes_of(conv.input.dtype);
  conv.input.size[0] = conv.output.size[0] = samples;
  return conv;
}

// The same, with an output as the chain's.
template <class Chain>
Problem chain_problem(const BackwardProblem& problem, int64_t first, int64_t samples) {
  Problem conv = conv_problem(problem, first, samples);
  if (Chain::Reduce::kPools) {
    for (int d = 0; d < 2; ++d) conv.output.size[2 + d] /= problem.arguments.pool[d];
  }
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
        v_(workspace_.take<float>(Checked(element_count(problem.v) / problem.v.size[0]) * plan.step_samples)),
        conv_workspace_(workspace_.take<char>(
            conv_output_workspace(conv_problem(problem, 0, plan.step_samples), plan.conv, card))),
        chain_(problem, {StepKind::kPackedRows, plan.step_samples, 0, 0}, workspace_, card),
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
    Problem conv = conv_problem(problem_, first, samples);
    conv.output.data = v_;
    if (const cudaError_t status = launch_conv_output(conv, plan_.conv, conv_workspace_, card_, stream))
      return status;
    if (const cudaError_t status = chain_.launch_packed_step(first, samples, v_, gradients_.grads(), stream))
      return status;
    return gradients_.launch_step(first, samples, stream);
  }

  const BackwardProblem& problem_;
  const cuda::BackwardPlan& plan_;
  const cuda::Card card_;
  Workspace workspace_;
  float* const v_;
  void* const conv_workspace_;
  const BackwardRun<Chain, float> chain_;
  const ConvGradients gradients_;
};

// A launch in strips. What has to be known of the conv before is found a few samples at a time.
template <class Chain>
class StripBackwardRun {
 public:
  StripBackwardRun(const BackwardProblem& problem, const cuda::BackwardPlan& plan, void* memory,
                   const cuda::Card& card)
      : problem_(problem),
        plan_(plan),
        card_(card),
        strips_(problem, memory, card),
        workspace_(static_cast<char*>(memory) + strips_.workspace_bytes()),
        conv_workspace_(Chain::kNeedsStatistics ? workspace_.take<char>(conv_bytes()) : nullptr),
        chain_(
            problem,
            {StepKind::kStrips, problem.v.size[0], FindingPasses<Chain>::slices(plan.conv), strips_.slices()},
            workspace_, card) {}

  size_t workspace_bytes() const { return workspace_.bytes() + strips_.workspace_bytes(); }

  cudaError_t launch(cudaStream_t stream) const {
    if (const cudaError_t status = strips_.launch_before(stream)) return status;
    if (const cudaError_t status = launch_findings(stream)) return status;
    if (const cudaError_t status = chain_.launch_strips(strips_.work(), stream)) return status;
    if (const cudaError_t status = chain_.launch_parameters(stream)) return status;
    return strips_.launch_weight(stream);
  }

 private:
  size_t conv_bytes() const {
    return FindingPasses<Chain>::workspace(chain_problem<Chain>(problem_, 0, plan_.step_samples), plan_.conv);
  }

  cudaError_t launch_findings(cudaStream_t stream) const {
    const int64_t samples = problem_.v.size[0];
    if constexpr (Chain::kNeedsStatistics) {
      if (!chain_.runs()) return cudaSuccess;
      if (const cudaError_t status = chain_.launch_norms(0, samples, stream)) return status;
      for (int64_t first = 0; first < samples; first += plan_.step_samples) {
        const Problem conv =
            chain_problem<Chain>(problem_, first, std::min(plan_.step_samples, samples - first));
        if (const cudaError_t status = FindingPasses<Chain>::launch(conv, plan_.conv, conv_workspace_,
                                                                    chain_.findings(first), card_, stream))
          return status;
      }
    }
    return cudaSuccess;
  }

  const BackwardProblem& problem_;
  const cuda::BackwardPlan& plan_;
  const cuda::Card card_;
  const StripGradients strips_;
  Workspace workspace_;
  void* const conv_workspace_;
  const BackwardRun<Chain, float> chain_;
};

// The same where v is given, whose gradient the caller has memory for.
template <class Chain>
class GivenBackwardRun {
 public:
  GivenBackwardRun(const BackwardProblem& problem, void* memory, const cuda::Card& card)
      : problem_(problem), workspace_(memory), chain_(make_chain(card)) {}

  size_t workspace_bytes() const { return workspace_.bytes(); }
  bool fits() const {
    return std::visit([](const auto& chain) { return chain.fits(); }, chain_);
  }

  cudaError_t launch(cudaStream_t stream) const {
    const auto launch_chain = [&](const auto& chain) {
      if (const cudaError_t status =
              chain.launch_step(0, problem_.v.size[0], problem_.v.data, problem_.grad_v, stream))
        return status;
      return chain.launch_parameters(stream);
    };
    return std::visit(launch_chain, chain_);
  }

 private:
  using AnyRun = std::variant<BackwardRun<Chain, float>, BackwardRun<Chain, double>>;

  AnyRun make_chain(const cuda::Card& card) {
    const StepShape step{StepKind::kTensor, problem_.v.size[0], 0, 0};
    if (problem_.v.dtype == DType::kFloat64)
      return BackwardRun<Chain, double>(problem_, step, workspace_, card);
    return BackwardRun<Chain, float>(problem_, step, workspace_, card);
  }

  const BackwardProblem& problem_;
  Workspace workspace_;
  const AnyRun chain_;
};

template <class Chain, bool kHasConv>
struct ChainBackward {
  static cuda::BackwardPlan plan(const BackwardProblem& problem, const cuda::Card& card) {
    if (element_count(problem.v) == 0) return {Path::kChain};
    if (problem.conv == nullptr) return plan_given(problem, card);
    if constexpr (kHasConv) return plan_with_conv(problem, card);
    return cuda::leave_to_pytorch(Reason::kNoKernels);
  }

  static cudaError_t launch(const BackwardProblem& problem, const cuda::BackwardPlan& plan, void* workspace,
                            const cuda::Card& card, cudaStream_t stream) {
    if (element_count(problem.v) == 0) return cudaSuccess;
    if (problem.conv == nullptr) return GivenBackwardRun<Chain>(problem, workspace, card).launch(stream);
    if constexpr (kHasConv) {
      if (plan.strip_pixels > 0)
        return StripBackwardRun<Chain>(problem, plan, workspace, card).launch(stream);
      return PackedBackwardRun<Chain>(problem, plan, workspace, card).launch(stream);
    }
    return cudaErrorInvalidValue;
  }

  static cudaError_t load(const cuda::Card& card) {
    if (const cudaError_t status = BackwardRun<Chain, float>::load()) return status;
    if (const cudaError_t status = BackwardRun<Chain, double>::load()) return status;
    if constexpr (kHasConv) {
      using Run = BackwardRun<Chain, float>;
      if (const cudaError_t status = Run::load_packing(card)) return status;
      if (const cudaError_t status = Run::load_strips(card)) return status;
      if constexpr (Chain::kNeedsStatistics) {
        if (const cudaError_t status = FindingPasses<Chain>::load(card)) return status;
      }
      return ConvGradients::load(card);
    } else {
      return cudaSuccess;
    }
  }

 private:
  static cuda::BackwardPlan plan_given(const BackwardProblem& problem, const cuda::Card& card) {
    const GivenBackwardRun<Chain> run(problem, nullptr, card);
    if (!run.fits()) return {Path::kPlain, Reason::kLargeWindow};
    cuda::BackwardPlan plan{Path::kChain};
    plan.workspace = run.workspace_bytes();
    return plan;
  }

  static cuda::BackwardPlan plan_with_conv(const BackwardProblem& problem, const cuda::Card& card) {
    if (const auto reason = cuda::reason_against_gradients(problem, card))
      return cuda::leave_to_pytorch(*reason);
    if (may_run_in_strips(problem, card) &&
        (!Chain::Reduce::kPools || cuda::has_large_windows(problem.arguments))) {
      const cuda::BackwardPlan plan = plan_strips(problem, card);
      if (plan.path == Path::kDirect) return plan;
    }
    if (!BackwardRun<Chain, float>::may_pack(problem, card) || !ConvGradients::may_run(problem, card))
      return cuda::leave_to_pytorch(Reason::kSharedMemory);
    return plan_packed(problem, card);
  }

  static cuda::BackwardPlan plan_strips(const BackwardProblem& problem, const cuda::Card& card) {
    const int64_t samples = problem.v.size[0];
    // Without a norm there is nothing to find: this only tells whether forward's conv is ours.
    cuda::BackwardPlan plan =
        cuda::recompute(FindingPasses<Chain>::plan(chain_problem<Chain>(problem, 0, samples), card));
    if (plan.path != Path::kDirect) return plan;
    if constexpr (Chain::kNeedsStatistics) {
      const size_t of_sample =
          FindingPasses<Chain>::workspace(chain_problem<Chain>(problem, 0, 1), plan.conv);
      plan.step_samples = cuda::samples_of_step(int64_t(of_sample), samples);
    }
    plan.strip_pixels = kStripPixels;
    plan.workspace = StripBackwardRun<Chain>(problem, plan, nullptr, card).workspace_bytes();
    return plan;
  }

  static cuda::BackwardPlan plan_packed(const BackwardProblem& problem, const cuda::Card& card) {
    const int64_t samples = problem.v.size[0];
    cuda::BackwardPlan plan = cuda::recompute(plan_conv_output(conv_problem(problem, 0, samples), card));
    if (plan.path != Path::kDirect) return plan;
    plan.step_samples = cuda::samples_of_step(sample_bytes(problem, card), samples);
    plan.workspace = PackedBackwardRun<Chain>(problem, plan, nullptr, card).workspace_bytes();
    return plan;
  }

  // The most that is kept of a sample: of v, of the input, which is packed for v, or of what is packed for
  // the gradients.
  static int64_t sample_bytes(const BackwardProblem& problem, const cuda::Card& card) {
    const int64_t values = std::max(element_count(problem.v), element_count(problem.conv->input));
    const Checked of_values = Checked(values / problem.v.size[0]) * int64_t(sizeof(float));
    return std::max(of_values.value(), ConvGradients::sample_bytes(problem, card));
  }
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

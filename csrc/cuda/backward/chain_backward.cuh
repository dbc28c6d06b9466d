// Backward of a chain with its conv: computes v again, then the chain's gradients and the conv's. In strips
// where that serves, else a few samples at a time. Reads from top to bottom.
#pragma once

#include "cuda/gradients/conv_gradients.cuh"
#include "cuda/passes/conv_chain.cuh"
#include "plan/backward_plan.h"
#include "plan/workspace.h"
#include "steps.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

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
        v_(workspace_.take<float>(Checked(element_count(problem.v) / problem.v.size[0]) *
                                  plan.steps.step_samples)),
        conv_workspace_(workspace_.take<char>(
            ConvOutput::workspace(cuda::conv_problem(problem, 0, plan.steps.step_samples), plan.conv, card))),
        chain_(problem, plan.steps, workspace_, card),
        gradients_(problem, plan.gradients, workspace_) {}

  size_t workspace_bytes() const { return workspace_.bytes(); }

  cudaError_t launch(cudaStream_t stream) const {
    if (const cudaError_t status = gradients_.launch_before(stream)) return status;
    const int64_t samples = problem_.v.size[0];
    for (int64_t first = 0; first < samples; first += plan_.steps.step_samples) {
      if (const cudaError_t status =
              launch_step(first, std::min(plan_.steps.step_samples, samples - first), stream))
        return status;
    }
    if (const cudaError_t status = chain_.launch_parameters(stream)) return status;
    return gradients_.launch_after(stream);
  }

 private:
  cudaError_t launch_step(int64_t first, int64_t samples, cudaStream_t stream) const {
    Problem conv = cuda::conv_problem(problem_, first, samples);
    conv.output.data = v_;
    if (const cudaError_t status = ConvOutput::launch(conv, plan_.conv, conv_workspace_, card_, stream))
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
        workspace_(memory),
        weight_(problem, cuda::conv_shape(problem), plan.strips.weight(), workspace_),
        conv_workspace_(Chain::kNeedsStatistics ? workspace_.take<char>(findings_workspace(
                                                      problem, plan.conv, plan.findings_samples))
                                                : nullptr),
        chain_(problem, plan.steps, workspace_, card) {}

  size_t workspace_bytes() const { return workspace_.bytes(); }

  cudaError_t launch(cudaStream_t stream) const {
    if (const cudaError_t status = weight_.launch_before(stream)) return status;
    if (const cudaError_t status = launch_findings(stream)) return status;
    if (const cudaError_t status = chain_.launch_strips(strip_work(), stream)) return status;
    if (const cudaError_t status = chain_.launch_parameters(stream)) return status;
    return weight_.launch_after(stream);
  }

  // Of what is found of so many samples at a time.
  static size_t findings_workspace(const BackwardProblem& problem, const cuda::ConvPlan& plan,
                                   int64_t samples) {
    return FindingPasses<Chain>::workspace(cuda::chain_problem(problem, kTraits, 0, samples), plan);
  }

 private:
  static constexpr cuda::BackwardTraits kTraits = backward_traits<Chain, true>();

  StripWork strip_work() const {
    const ConvBackward& conv = *problem_.conv;
    StripWork work{};
    work.shape = cuda::conv_shape(problem_);
    work.plan = plan_.strips;
    work.input = conv.input;
    work.weight = conv.conv.weight;
    work.bias = conv.conv.bias;
    work.balance = weight_.balance();
    work.grad_input = {conv.grad_input.data, conv.grad_input.dtype};
    work.slots = weight_.slots();
    work.operand_parts = cuda::operand_parts(conv);
    work.segments = int(problem_.v.size[0] * plan_.strips.strips * plan_.strips.segments);
    return work;
  }

  cudaError_t launch_findings(cudaStream_t stream) const {
    const int64_t samples = problem_.v.size[0];
    if constexpr (Chain::kNeedsStatistics) {
      if (!chain_.runs()) return cudaSuccess;
      if (const cudaError_t status = chain_.launch_norms(0, samples, stream)) return status;
      for (int64_t first = 0; first < samples; first += plan_.findings_samples) {
        const Problem conv =
            cuda::chain_problem(problem_, kTraits, first, std::min(plan_.findings_samples, samples - first));
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
  Workspace workspace_;
  const WeightSums weight_;
  void* const conv_workspace_;
  const BackwardRun<Chain, float> chain_;
};

// The same where v is given, whose gradient the caller has memory for.
template <class Chain, class T>
class GivenBackwardRun {
 public:
  GivenBackwardRun(const BackwardProblem& problem, const cuda::BackwardPlan& plan, void* memory,
                   const cuda::Card& card)
      : workspace_(memory), chain_(problem, plan.steps, workspace_, card) {}

  size_t workspace_bytes() const { return workspace_.bytes(); }

  cudaError_t launch(cudaStream_t stream) const {
    if (const cudaError_t status = chain_.launch_tensor(stream)) return status;
    return chain_.launch_parameters(stream);
  }

 private:
  Workspace workspace_;
  const BackwardRun<Chain, T> chain_;
};

template <class Chain, bool kHasConv>
struct ChainBackward {
  static cuda::BackwardPlan plan(const BackwardProblem& problem, const cuda::Card& card) {
    cuda::BackwardPlan plan = cuda::plan_backward(problem, backward_traits<Chain, kHasConv>(), card);
    if (!runs(problem, plan)) return plan;
    if constexpr (kHasConv && Chain::kNeedsStatistics) {
      if (plan.runs_in_strips()) {
        const size_t of_sample = StripBackwardRun<Chain>::findings_workspace(problem, plan.conv, 1);
        plan.findings_samples = cuda::samples_of_step(int64_t(of_sample), problem.v.size[0]);
      }
    }
    plan.workspace =
        visit_run(problem, plan, nullptr, card, [](const auto& run) { return run.workspace_bytes(); });
    return plan;
  }

  static cudaError_t launch(const BackwardProblem& problem, const cuda::BackwardPlan& plan, void* workspace,
                            const cuda::Card& card, cudaStream_t stream) {
    if (element_count(problem.v) == 0) return cudaSuccess;
    if (!runs(problem, plan)) return cudaErrorInvalidValue;
    return visit_run(problem, plan, workspace, card,
                     [stream](const auto& run) { return run.launch(stream); });
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
  static bool runs(const BackwardProblem& problem, const cuda::BackwardPlan& plan) {
    return element_count(problem.v) > 0 && (plan.path == Path::kChain || plan.path == Path::kDirect);
  }

  // Calls visit with what a plan runs; from null memory it only counts.
  template <class Visit>
  static auto visit_run(const BackwardProblem& problem, const cuda::BackwardPlan& plan, void* memory,
                        const cuda::Card& card, const Visit& visit) {
    if constexpr (kHasConv) {
      if (plan.path == Path::kDirect) {
        if (plan.runs_in_strips()) return visit(StripBackwardRun<Chain>(problem, plan, memory, card));
        return visit(PackedBackwardRun<Chain>(problem, plan, memory, card));
      }
    }
    if (problem.v.dtype == DType::kFloat64)
      return visit(GivenBackwardRun<Chain, double>(problem, plan, memory, card));
    return visit(GivenBackwardRun<Chain, float>(problem, plan, memory, card));
  }
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

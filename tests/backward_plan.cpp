// What must hold of csrc/plan/backward_plan.h and step_plan.h, over random problems, chains and cards: a
// program that says what does not. test_plans.py compiles it, with checks of undefined behaviour, and runs
// it.
#include "plan/backward_plan.h"

#include <cstdio>
#include <cstdlib>
#include <map>
#include <random>

#include "cards.h"

using namespace fusedconv;
using namespace fusedconv::cuda;

namespace {

// Those of the chains in csrc/cuda/host/chains, and of a logsumexp without a norm.
constexpr BackwardTraits kChains[] = {
    {true, false, false, false, false, 1}, {false, false, false, false, true, 3},
    {true, true, false, false, true, 1},   {true, true, true, false, true, 1},
    {true, true, false, true, true, 1},    {true, false, false, true, true, 3},
    {true, true, false, false, true, 3}};

std::mt19937_64 random_bits(1);

int64_t one_of(std::initializer_list<int64_t> values) {
  return values.begin()[random_bits() % values.size()];
}
int64_t side() { return one_of({1, 2, 7, 16, 31, 32, 33, 48, 63, 64, 65, 127, 128, 130, 500, 1000, 3000}); }
int64_t huge() { return 1 + int64_t(random_bits() >> (2 + random_bits() % 62)); }

struct Call {
  BackwardTraits traits = kChains[random_bits() % std::size(kChains)];
  Card card = kCards[random_bits() % std::size(kCards)];
  ConvBackward conv{};
  BackwardProblem problem{};

  Call() {
    const bool is_huge = random_bits() % 8 == 0;
    const auto size = [is_huge](int64_t likely) { return is_huge && random_bits() % 2 ? huge() : likely; };
    const int64_t samples = size(one_of({1, 2, 7, 128, 100000}));
    const int64_t in_channels = size(one_of({1, 3, 8, 9, 32, 64}));
    const int64_t channels = size(one_of({1, 3, 16, 17, 32, 33, 64, 65, 192, 193, 200}));
    const DType dtype = DType(one_of({0, 0, 0, 1, 2, 3}));
    problem.v = {nullptr, DType::kFloat32, {samples, channels, size(side()), size(side())}, {}};
    problem.arguments.num_groups = 1;
    for (int d = 0; d < 2; ++d)
      problem.arguments.pool[d] = std::min(size(one_of({1, 2, 3, 4, 5, 8})), problem.v.size[2 + d]);
    problem.wants.parameters[kConvBias] = random_bits() % 2 == 0;
    if (random_bits() % 3 == 0) {
      problem.v.dtype = dtype;
      return;
    }
    conv.input = {nullptr, dtype, {samples, in_channels, 1, 1}, {}};
    conv.conv.groups = one_of({1, 1, 1, 1, 1, 1, 1, 2});
    conv.conv.weight = {nullptr, dtype, {channels, in_channels, 1, 1}, {}};
    for (int d = 0; d < 2; ++d) {
      const int64_t kernel = one_of({1, 3, 3, 3, 3, 4, 7, 8});
      conv.conv.weight.size[2 + d] = kernel;
      conv.conv.stride[d] = one_of({1, 1, 1, 1, 1, 1, 1, 2});
      conv.conv.dilation[d] = one_of({1, 1, 1, 1, 1, 1, 1, 2});
      const int64_t out = problem.v.size[2 + d];
      conv.conv.padding[d] = std::min(one_of({0, 0, kernel / 2, 3, 24, 25}), (out + kernel - 2) / 2);
      conv.input.size[2 + d] = out + kernel - 1 - 2 * conv.conv.padding[d];
    }
    problem.conv = &conv;
  }
  Call(const Call&) = delete;
};

const char* fault_of(const PlaneSlices& plane, int64_t values) {
  if (plane.values != values) return "slices of another plane";
  if (plane.team % 32 != 0 || plane.team > kPlaneThreads || (plane.team & (plane.team - 1)) != 0)
    return "a team is no power of two of warps";
  if (plane.slice_values % kMostWidth != 0) return "slices end within a wide load";
  if (plane.slices * plane.slice_values < values ||
      (values > 0 && (plane.slices - 1) * plane.slice_values >= values))
    return "slices do not cover a plane";
  return nullptr;
}

const char* fault_of_steps(const Call& call, const StepPlan& steps) {
  if (const char* fault = fault_of(steps.plane, steps.pixels)) return fault;
  if (const char* fault = fault_of(steps.window_plane, steps.windows)) return fault;
  if (steps.samples * steps.channels * steps.pixels != element_count(call.problem.v))
    return "values are left out";
  if (steps.after_norm_slices < 1 || steps.slices < 1) return "sums without a slice";
  if (call.traits.reduces_channels) {
    for (const int width : {1, 2, 4}) {
      const PixelBlocks blocks = pixel_blocks(steps, steps.step_samples, width, 4);
      if (blocks.lanes < 1 || blocks.lanes > 32) return "lanes of a pixel";
      const int64_t pixels = steps.sums_channels ? kSpanPixels : kPlaneThreads / blocks.lanes * width;
      if (steps.kind != StepKind::kStrips && blocks.per_sample * pixels < steps.pixels)
        return "blocks do not cover the pixels";
    }
  }
  if (call.traits.pools) {
    const PoolShape pool = pool_shape(call.problem, steps);
    if (pool.has_pairs && (pool.window_cols % 2 != 0 || pool.cols % 2 != 0)) return "pairs that are none";
    if (pool.lanes < 1 || pool.lanes > 32) return "lanes of a window";
  }
  return nullptr;
}

const char* fault_of_rows(const Call& call, const BackwardPlan& plan) {
  const int64_t step_samples = plan.steps.step_samples;
  if (step_samples < 1 || step_samples > call.problem.v.size[0]) return "samples of a step";
  if (plan.gradients.step_samples != step_samples) return "steps of different sizes";
  if (plan.steps.pack_bytes <= 0 || plan.steps.pack_bytes > call.card.shared_bytes ||
      !plan.gradients.fits(call.card))
    return "rows do not fit";
  if (plan.steps.slices != call.problem.v.size[2]) return "a row without sums of its own";
  for (const int width : {1, kPackWidth}) {
    const PackShape shape = pack_shape(plan.gradients.grads, plan.steps, step_samples, width);
    if (shape.pitch < call.problem.v.size[3]) return "a row is longer than its memory";
    if (shape.lanes < kPackItems || shape.lanes > 32 || 1 << shape.pass_shift > kPackItems)
      return "lanes of a row";
  }
  return nullptr;
}

const char* fault_of_strips(const Call& call, const BackwardPlan& plan) {
  if (strip_shared_bytes(plan.strips.out_tiles) > call.card.shared_bytes) return "strips do not fit";
  if (plan.steps.slices != int64_t(plan.strips.strips) * plan.strips.segments * kTileWarps)
    return "sums of a strip";
  if (plan.strips.weight().slots * plan.strips.out_tiles != plan.strips.blocks * kSumWarps)
    return "slots of strips";
  const int64_t* const pool = call.problem.arguments.pool;
  if (call.traits.pools && pool[0] * pool[1] < 8) return "strips with small windows";
  return call.problem.v.size[3] < kStripPixels / 2 ? "strips of a narrow map" : nullptr;
}

// How often there was what.
std::map<std::string, int> found;

// Sums of a sample must not depend on its batch, but for strips, which are of so many in all.
const char* fault_of_batch(const Call& call, const StepPlan& steps) {
  BackwardProblem alone = call.problem;
  ConvBackward conv = call.conv;
  alone.v.size[0] = conv.input.size[0] = 1;
  if (alone.conv != nullptr) alone.conv = &conv;
  const StepPlan of_one = plan_backward(alone, call.traits, call.card).steps;
  if (of_one.kind == StepKind::kStrips || steps.samples != call.problem.v.size[0]) return nullptr;
  const bool is_the_same = of_one.kind == steps.kind && of_one.slices == steps.slices &&
                           of_one.after_norm_slices == steps.after_norm_slices &&
                           of_one.plane.slice_values == steps.plane.slice_values;
  return is_the_same ? nullptr : "sums depend on the batch";
}

const char* fault_of(const Call& call) {
  const BackwardPlan plan = plan_backward(call.problem, call.traits, call.card);
  const Plan told = cuda::told(plan);
  found[std::string(name_of(plan.path)) + (plan.runs_in_strips() ? " strips" : "")] += 1;
  if (!told.is_ours()) {
    const bool is_left = plan.path == (call.problem.conv != nullptr ? Path::kTwoStep : Path::kPlain);
    return is_left && !told.remarks.empty() ? nullptr : "no reason";
  }
  if (plan.path != (call.problem.conv != nullptr ? Path::kDirect : Path::kChain)) return "path";
  if (const char* fault = fault_of_steps(call, plan.steps)) return fault;
  if (plan.runs_in_strips()) return fault_of_strips(call, plan);
  if (const char* fault = fault_of_batch(call, plan.steps)) return fault;
  return plan.path == Path::kDirect ? fault_of_rows(call, plan) : nullptr;
}

}  // namespace

int main(int, char** arguments) {
  int faults = 0;
  for (int i = 0; i < std::atoi(arguments[1]) && faults < 10; ++i) {
    const Call call;
    const char* fault = nullptr;
    try {
      // What Python asks before: see element_count.
      const int64_t* const size = call.problem.v.size;
      Checked(size[0]) * size[1] * size[2] * size[3];
      if (call.problem.conv != nullptr) {
        const int64_t* const in = call.conv.input.size;
        Checked(in[0]) * in[1] * in[2] * in[3];
      }
      fault = fault_of(call);
    } catch (const std::overflow_error&) {
      found["overflow"] += 1;
    }
    if (fault == nullptr) continue;
    const int64_t* const size = call.problem.v.size;
    std::printf("%s: (%ld, %ld, %ld, %ld), %s conv, chain %d, sm_%d\n", fault, long(size[0]), long(size[1]),
                long(size[2]), long(size[3]), call.problem.conv != nullptr ? "with a" : "without",
                int(call.traits.pools + 2 * call.traits.reduces_channels + 4 * call.traits.needs_statistics),
                call.card.capability);
    ++faults;
  }
  for (const auto& [path, times] : found) std::printf("%s: %d\n", path.c_str(), times);
  return faults == 0 ? 0 : 1;
}

#include "conv_plan.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <limits>
#include <optional>
#include <stdexcept>

#include "conv_cut.h"
#include "core/checked.h"

namespace fusedconv {
namespace cuda {
namespace {

constexpr int kMostKernel = 7;
constexpr int kMostChannels = 256;                // of the output
constexpr int kMostInputChannels = 8192;          // whose magnitudes stand in shared memory
constexpr int64_t kMostReach = int64_t(1) << 15;  // of a kernel: a plane of a tile's units has 32 bits
constexpr int64_t kMostSide = int64_t(1) << 28;   // of the padded input: so have pixels and windows
// Offsets within a sample's output have 32 bits, and rows and columns of the padded input.
constexpr int64_t kMostSampleElements = int64_t(1) << 30;

// Elements between the first and the last of a sample, with the padding before it. In double, for a size of 1
// may have any stride.
double sample_span(const Tensor& tensor, const int64_t (&padding)[2]) {
  double span = double(tensor.size[1] - 1) * double(tensor.stride[1]);
  for (int d = 0; d < 2; ++d)
    span += double(padding[d] + tensor.size[2 + d] - 1) * double(tensor.stride[2 + d]);
  return span;
}

// Why the direct path does not serve; empty if it may.
std::optional<Reason> reason_against(const Problem& problem) {
  const Conv& conv = *problem.conv;
  const Tensor& weight = conv.weight;
  if (conv.groups != 1) return Reason::kGroups;
  if (problem.input.dtype == DType::kFloat64) return Reason::kFloat64;
  if (conv.stride[0] != 1 || conv.stride[1] != 1) return Reason::kStride;
  if (weight.size[2] > kMostKernel || weight.size[3] > kMostKernel) return Reason::kLargeKernel;
  if (weight.size[0] > kMostChannels) return Reason::kManyOutputChannels;
  if (weight.size[1] > kMostInputChannels) return Reason::kManyInputChannels;
  for (int d = 0; d < 2; ++d) {
    if (Checked(conv.dilation[d]) * (weight.size[2 + d] - 1) > kMostReach) return Reason::kDilation;
    if (problem.input.size[2 + d] + 2 * Checked(conv.padding[d]) > kMostSide) return Reason::kPadding;
  }
  if (sample_span(problem.input, conv.padding) >= kMostSampleElements ||
      sample_span(problem.output, {0, 0}) >= kMostSampleElements ||
      Checked(problem.output.size[2]) * problem.output.size[3] >= kMostSampleElements / weight.size[0])
    return Reason::kLargeSamples;
  return std::nullopt;
}

int parts_of(const Problem& problem) { return operand_parts(problem.input.dtype, *problem.conv); }

// Whether PyTorch's conv is the faster one: see Architecture.
bool is_slower(const Problem& problem, const ChainShape& chain, const Architecture& architecture) {
  const Tensor& weight = problem.conv->weight;
  const bool is_exact = parts_of(problem) == 2;
  const int passes = chain.waits_for_norms ? 2 : 1;
  const int64_t products = weight.size[1] * weight.size[2] * weight.size[3] * passes;
  return weight.size[1] * (is_exact ? passes : 1) > architecture.most_channels ||
         products > (is_exact ? architecture.most_exact_products : architecture.most_products);
}

bool has_tap_chunks(const ConvTiling& t) { return t.by_chunks_down.value * t.by_chunks_across.value > 1; }

// Whether what is packed of a sample would take much more memory than the conv's input and output: of one
// narrow column a panel has eight, and it has the padding. Where our conv was asked for, a little may.
bool takes_much_memory(const ConvTiling& t, bool was_asked) {
  constexpr double kMuch = 2;
  constexpr double kLittle = 1 << 24;  // elements
  const double packed =
      double(t.chunks) * t.blocks_per_chunk * t.panel_units * kUnitElements * t.panels_down * t.tiles_across;
  const double input = double(t.in_channels) * t.in_size[0] * t.in_size[1];
  const double output = double(t.out_channels) * t.out_size[0] * t.out_size[1];
  return packed > kMuch * (input + output) && !(was_asked && packed <= kLittle);
}

// What is counted in ints: of a sample the moments that make up a channel's; of the whole batch blocks that
// pack, and items, whose count groups of threads exceed by a few steps of all multiprocessors.
bool counts_items(const ConvTiling& t, const Problem& problem, const Card& card) {
  const Checked moments = Checked(t.bands) * t.tiles_across * t.sub_tiles * kPartsOfTile * t.stack;
  const Checked of_sample = Checked(t.bands) * t.tiles_across * t.row_blocks;
  const int64_t most = std::numeric_limits<int>::max() - 2 * kGroups * card.multiprocessors - kMostChannels;
  return moments <= most && problem.input.size[0] <= most / of_sample.value();
}

// Whether all groups of threads together have room for a sample's tiles, each one: see
// cuda/passes/resident.cuh. Not where sums are folded: that takes the memory in which a tile stays.
bool may_reside(const ConvPlan& plan, const Card& card) {
  const ConvTiling& t = plan.tiling;
  const bool folds = plan.operand_parts == 2 && t.half_steps / 2 > kMostSumSteps;
  return architecture_of(plan.instructions).keeps_samples && t.row_blocks == 1 && t.chunks == 1 && !folds &&
         tiles_per_sample(t) <= kGroups * card.multiprocessors;
}

ConvPlan two_steps(Reason reason) { return {Instructions::kNone, reason}; }

}  // namespace

std::string asked_source() {
  const char* const set = std::getenv("FUSEDCONV_CUDA_SOURCE");
  const std::string asked = set != nullptr ? set : "";
  std::string name = asked;
  std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return std::tolower(c); });
  for (const char* known : {"", "best", "sm_90a", "sm_80", "none"})
    if (name == known) return name;
  throw std::invalid_argument("FUSEDCONV_CUDA_SOURCE is '" + asked +
                              "', not one of best, sm_90a, sm_80, none");
}

ConvPlan plan_conv(const Problem& problem, const ChainShape& chain, const Card& card) {
  if (const auto reason = reason_against(problem)) return two_steps(*reason);
  const std::string asked = asked_source();
  const Instructions instructions = asked == "none" ? Instructions::kNone : card.instructions;
  const Architecture& architecture = architecture_of(instructions);
  if (asked.empty() && is_slower(problem, chain, architecture)) return two_steps(Reason::kManyProducts);
  if (instructions == Instructions::kNone) return two_steps(Reason::kNoKernels);
  ConvPlan plan{instructions, Reason::kTiles, {}, parts_of(problem)};
  const ConvCutter cutter(problem, architecture.columns, plan.operand_parts, chain, card);
  ConvTiling& t = plan.tiling;
  if (!cutter.cut_into_tiles(t)) return two_steps(Reason::kSharedMemory);
  if (asked.empty() && architecture.is_slower_in_chunks && chain.waits_for_norms && has_tap_chunks(t))
    return two_steps(Reason::kTapsInChunks);
  if (!counts_items(t, problem, card)) return two_steps(Reason::kManyTiles);
  if (asked.empty() && chain.pools && tiles_per_sample(t) <= architecture.few_tiles)
    return two_steps(Reason::kSmallMap);
  plan.is_resident = chain.waits_for_norms && may_reside(plan, card) && cutter.keep_tiles(t);
  if (!cut_into_panels(t)) return two_steps(Reason::kLargeBand);
  if (takes_much_memory(t, !asked.empty())) return two_steps(Reason::kPackedMemory);
  return plan;
}

Plan told(const ConvPlan& plan) {
  if (plan.instructions == Instructions::kNone) return two_step({plan.reason});
  const ConvTiling& t = plan.tiling;
  Plan told{Path::kDirect,
            plan.instructions,
            {{plan.reason,
              {t.tile_rows, t.tile_cols, t.stack, t.chunks, t.blocks_per_chunk * t.unit_channels,
               t.kernel_rows, kGroups * t.stages, t.shared_bytes}}}};
  told.terms = terms_of(plan.operand_parts);
  if (plan.is_resident) told.remarks.push_back({Reason::kResident});
  return told;
}

}  // namespace cuda
}  // namespace fusedconv

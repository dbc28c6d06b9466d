#include "conv_plan.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <limits>
#include <stdexcept>

#include "conv_cut.h"
#include "core/checked.h"

namespace fusedconv {
namespace cuda {
namespace {

constexpr int kMostKernel = 7;
constexpr int kMostChannels = 256;       // of the output
constexpr int kMostFastChannels = 64;    // of the input
constexpr int kMostFastProducts = 1200;  // for a value, of two passes where the chain waits for norms
constexpr int kMostFastExactProducts = 600;
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
std::string reason_against(const Problem& problem) {
  const Conv& conv = *problem.conv;
  const Tensor& weight = conv.weight;
  const DType dtype = problem.input.dtype;
  if (dtype == DType::kFloat64) return "float64";
  if (conv.stride[0] != 1 || conv.stride[1] != 1) return "stride";
  if (weight.size[2] > kMostKernel || weight.size[3] > kMostKernel) return "kernel larger than 7";
  if (weight.size[0] > kMostChannels) return "more than 256 output channels";
  if (weight.size[1] > kMostInputChannels) return "more than 8192 input channels";
  for (int d = 0; d < 2; ++d) {
    if (Checked(conv.dilation[d]) * (weight.size[2 + d] - 1) > kMostReach) return "dilation";
    if (problem.input.size[2 + d] + 2 * Checked(conv.padding[d]) > kMostSide) return "padding";
  }
  if (sample_span(problem.input, conv.padding) >= kMostSampleElements ||
      sample_span(problem.output, {0, 0}) >= kMostSampleElements ||
      Checked(problem.output.size[2]) * problem.output.size[3] >= kMostSampleElements / weight.size[0])
    return "samples of more than 2^30 elements";
  return "";
}

int parts_of(const Problem& problem) {
  return problem.input.dtype == DType::kFloat32 && !problem.conv->tf32 ? 2 : 1;
}

// Whether PyTorch's conv is the faster one: it makes more of many products for a value, and of many channels.
// Measured, see bench/NOTES.md; as it may not depend on the batch, with one that fills the card.
bool is_slower(const Problem& problem, const ChainShape& chain) {
  const Tensor& weight = problem.conv->weight;
  const bool is_exact = parts_of(problem) == 2;
  const int passes = chain.waits_for_norms ? 2 : 1;
  const int64_t products = weight.size[1] * weight.size[2] * weight.size[3] * passes;
  return weight.size[1] * (is_exact ? passes : 1) > kMostFastChannels ||
         products > (is_exact ? kMostFastExactProducts : kMostFastProducts);
}

// The same, of a kernel whose taps do not fit into shared memory at once.
bool is_slower_in_parts(const ConvTiling& t, const ChainShape& chain) {
  return chain.waits_for_norms && t.by_chunks_down.value * t.by_chunks_across.value > 1;
}

// The same, of maps so small that a pooled chain's four launches take longer than PyTorch's conv and one
// kernel.
bool is_slower_as_small(const ConvTiling& t, const ChainShape& chain) {
  constexpr int kFewTiles = 4;
  return chain.pools && tiles_per_sample(t) <= kFewTiles;
}

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

std::string describe(const ConvPlan& plan) {
  const ConvTiling& t = plan.tiling;
  const auto number = [](int n) { return std::to_string(n); };
  return std::string("direct, ") + (plan.source == ConvSource::kSm90a ? "sm_90a" : "sm_80") + ", tiles of " +
         number(t.tile_rows) + " x " + number(t.tile_cols) + " pixels, " + number(t.stack) +
         " rows stacked, " + number(t.chunks) + " chunks of " + number(t.blocks_per_chunk * t.unit_channels) +
         " channels and " + number(t.kernel_rows) + " rows of taps, " + number(kGroups * t.stages) +
         " stages, " + number(t.shared_bytes) + " bytes of shared memory" +
         (plan.is_resident ? ", samples stay there" : "");
}

// What is counted in ints: of a sample the parts of a channel's statistics; of the whole batch blocks that
// pack, and items, whose count groups of threads exceed by a few steps of all multiprocessors.
bool counts_items(const ConvTiling& t, const Problem& problem, const Card& card) {
  const Checked parts = Checked(t.bands) * t.tiles_across * t.sub_tiles * kPartsOfTile * t.stack;
  const Checked of_sample = Checked(t.bands) * t.tiles_across * t.row_blocks;
  const int64_t most = std::numeric_limits<int>::max() - 2 * kGroups * card.multiprocessors - kMostChannels;
  return parts <= most && problem.input.size[0] <= most / of_sample.value();
}

// Whether all groups of threads together have room for a sample's tiles, each one: see
// cuda/passes/resident.cuh. Not where sums are folded: that takes the memory in which a tile stays.
bool may_reside(const ConvPlan& plan, const Card& card) {
  const ConvTiling& t = plan.tiling;
  const bool folds = plan.parts == 2 && t.half_steps / 2 > kMostSumSteps;
  return plan.source == ConvSource::kSm90a && t.row_blocks == 1 && t.chunks == 1 && !folds &&
         tiles_per_sample(t) <= kGroups * card.multiprocessors;
}

ConvPlan two_steps(const std::string& reason) { return {ConvSource::kNone, "two-step, " + reason, {}, 0}; }

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
  const std::string reason = reason_against(problem);
  if (!reason.empty()) return two_steps(reason);
  const std::string asked = asked_source();
  if (asked.empty() && is_slower(problem, chain)) return two_steps("many channels or products for a value");
  ConvPlan plan{asked == "none" ? ConvSource::kNone : card.source, "", {}, parts_of(problem)};
  if (plan.source == ConvSource::kNone) return two_steps("no kernels of a conv for this card");
  const int columns = plan.source == ConvSource::kSm90a ? 256 : 128;  // as the kernels' products have
  const ConvCutter cutter(problem, columns, plan.parts, chain, card);
  ConvTiling& t = plan.tiling;
  if (!cutter.cut_into_tiles(t)) return two_steps("shared memory");
  if (asked.empty() && plan.source == ConvSource::kSm90a && is_slower_in_parts(t, chain))
    return two_steps("a large kernel");
  if (!counts_items(t, problem, card)) return two_steps("more than 2^31 tiles");
  if (asked.empty() && is_slower_as_small(t, chain)) return two_steps("a small map");
  plan.is_resident = chain.waits_for_norms && may_reside(plan, card) && cutter.keep_tiles(t);
  if (!cut_into_panels(t)) return two_steps("a band of too many rows");
  if (takes_much_memory(t, !asked.empty())) return two_steps("memory for the packed input");
  plan.reason = describe(plan);
  return plan;
}

}  // namespace cuda
}  // namespace fusedconv

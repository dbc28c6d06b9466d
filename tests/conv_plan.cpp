// What must hold of csrc/plan/conv_plan.cpp and conv_cut.cpp, over convs of any size that Python lets
// through: a program that says what does not. test_plans.py compiles it, with checks of undefined
// behaviour, and runs it.
#include "plan/conv_plan.h"

#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <initializer_list>
#include <random>
#include <stdexcept>
#include <string>

#include "cards.h"
#include "core/checked.h"

using namespace fusedconv;
using namespace fusedconv::cuda;

namespace {

constexpr const char* kSources[] = {"", "best", "SM_90a", "sm_80", "none"};
constexpr int64_t kMost = 2147483647;  // of a stride, a padding or a dilation, as chains.py has it

std::mt19937 random_bits(1);

int64_t one_of(std::initializer_list<int64_t> values) {
  return values.begin()[random_bits() % values.size()];
}

bool chance(unsigned of) { return random_bits() % of == 0; }

// The usual, and now and then what is not.
int64_t usually(std::initializer_list<int64_t> usual, std::initializer_list<int64_t> extreme) {
  return chance(4) ? one_of(extreme) : one_of(usual);
}

int64_t side() {
  return usually({1, 1, 2, 3, 5, 8, 16, 17, 33, 64, 129, 256, 1000},
                 {4095, 32768, 65537, 1 << 20, 1 << 24, (1 << 28) - 1, 1 << 28, (1 << 28) + 1, kMost});
}
int64_t padding() {
  return usually({0, 0, 1, 1, 2, 3}, {24, 100, 6000, 10000, 1 << 20, (1 << 27) - 1, 1 << 27, kMost});
}
int64_t dilation() { return usually({1, 1, 1, 2, 3}, {60, 6000, 20000, 32768, 1 << 27, 1 << 30, kMost}); }
int64_t kernel() { return usually({1, 1, 2, 3, 3, 3, 5, 7}, {8, 31, 32768, kMost}); }
int64_t stride() { return chance(8) ? one_of({2, 20000, kMost}) : 1; }
int64_t channels() { return usually({1, 2, 3, 8, 16, 17, 64}, {65, 255, 256, 257, 8192, 1 << 20, kMost}); }
int64_t batch() { return usually({0, 1, 2, 128}, {65536, 1 << 28, kMost, int64_t(1) << 40}); }

// Of an expanded tensor, where memory for all of it is beyond what can be computed.
void set_strides(Tensor& tensor, bool is_expanded) {
  for (int64_t& stride : tensor.stride) stride = 0;
  if (is_expanded) return;
  try {
    Checked stride = 1;
    int64_t strides[4];
    for (int d = 3; d >= 0; --d) {
      strides[d] = stride.value();
      stride = stride * tensor.size[d];
    }
    std::copy(strides, strides + 4, tensor.stride);
  } catch (const std::overflow_error&) {
  }
}

struct Call {
  Conv conv{};
  Problem problem{};
  ChainShape chain;
  Card card;
  const char* source;
  bool exists = true;

  Call()
      : card(kCards[random_bits() % std::size(kCards)]),
        source(kSources[random_bits() % std::size(kSources)]) {
    const DType dtype = DType(one_of({0, 0, 1, 2, 3}));
    problem.input = {nullptr, dtype, {batch(), channels(), side(), side()}, {}};
    conv.weight = {nullptr, dtype, {channels(), problem.input.size[1], kernel(), kernel()}, {}};
    conv.tf32 = chance(3);
    chain = {chance(3), chance(2)};
    if (chain.pools) chain = {true, false, chance(2)};
    problem.output = {nullptr, dtype, {problem.input.size[0], conv.weight.size[0], 0, 0}, {}};
    for (int d = 0; d < 2; ++d) {
      conv.stride[d] = stride();
      conv.padding[d] = padding();
      conv.dilation[d] = dilation();
      const int64_t reach = conv.dilation[d] * (conv.weight.size[2 + d] - 1);  // under 2^62
      const int64_t spare = problem.input.size[2 + d] + 2 * conv.padding[d] - reach - 1;
      exists &= spare >= 0;
      int64_t& size = problem.output.size[2 + d];
      size = exists ? spare / conv.stride[d] + 1 : 1;
      problem.arguments.pool[d] = chain.pools ? std::min(one_of({1, 2, 3, 8, 1000, size}), size) : 1;
      if (chain.pools) size /= problem.arguments.pool[d];
    }
    set_strides(problem.input, chance(4));
    set_strides(conv.weight, chance(4));
    set_strides(problem.output, false);
  }

  std::string text() const {
    const auto sizes = [](const int64_t* size, int count) {
      std::string text;
      for (int d = 0; d < count; ++d) text += (d == 0 ? "[" : ", ") + std::to_string(size[d]);
      return text + "]";
    };
    return "input " + sizes(problem.input.size, 4) + ", weight " + sizes(conv.weight.size, 4) + ", stride " +
           sizes(conv.stride, 2) + ", padding " + sizes(conv.padding, 2) + ", dilation " +
           sizes(conv.dilation, 2) + ", pool " + sizes(problem.arguments.pool, 2) + ", sm_" +
           std::to_string(card.capability) + ", source '" + source + "'";
  }

  ConvPlan plan() {
    problem.conv = &conv;
    setenv("FUSEDCONV_CUDA_SOURCE", source, 1);
    return plan_conv(problem, chain, card);
  }
};

// What is wrong with a plan of ours; null if nothing.
const char* fault_of(const Call& call, const ConvPlan& plan) {
  const ConvTiling& t = plan.tiling;
  const int64_t most = 2147483647;
  if (t.shared_bytes > call.card.shared_bytes) return "more shared memory than the card has";
  double input = t.in_channels;
  double output = t.out_channels;
  for (int d = 0; d < 2; ++d) {
    const int64_t reach = call.conv.dilation[d] * (call.conv.weight.size[2 + d] - 1);
    if (t.in_size[d] != call.problem.input.size[2 + d] ||
        t.out_size[d] != call.problem.input.size[2 + d] + 2 * call.conv.padding[d] - reach)
      return "a size is another one";
    input *= t.in_size[d];
    output *= t.out_size[d];
  }
  if (int64_t(t.bands) * t.band_rows < t.out_size[0] || int64_t(t.sub_tiles) * t.tile_rows < t.band_rows ||
      int64_t(t.tiles_across) * t.tile_cols < t.out_size[1])
    return "pixels are left out";
  const Checked tiles = Checked(t.bands) * t.tiles_across * t.sub_tiles;
  if (tiles * t.stack * kPartsOfTile > most ||
      Checked(call.problem.input.size[0]) * t.bands * t.tiles_across * t.row_blocks > most)
    return "more than an int counts";
  const double packed =
      double(t.chunks) * t.blocks_per_chunk * t.panel_units * kUnitElements * t.panels_down * t.tiles_across;
  if (packed > std::max(2 * (input + output), double(1 << 24))) return "memory";
  return nullptr;
}

}  // namespace

// Says how many plans are ours, how many PyTorch's, and how many are too large to compute.
int main(int, char** arguments) {
  constexpr double kMostSeconds = 2;  // of a plan
  int ours = 0, two_step = 0, too_large = 0, faults = 0;
  for (int i = std::atoi(arguments[1]); i > 0 && faults < 10;) {
    Call call;
    if (!call.exists) continue;
    --i;
    const std::clock_t start = std::clock();
    const char* fault = nullptr;
    try {
      const ConvPlan plan = call.plan();
      const bool is_ours = plan.instructions != Instructions::kNone;
      ++(is_ours ? ours : two_step);
      if (is_ours) fault = fault_of(call, plan);
    } catch (const std::overflow_error&) {
      ++too_large;
    }
    if (double(std::clock() - start) / CLOCKS_PER_SEC > kMostSeconds) fault = "it takes long to plan";
    if (fault == nullptr) continue;
    std::printf("%s: %s\n", fault, call.text().c_str());
    ++faults;
  }
  std::printf("%d %d %d\n", ours, two_step, too_large);
  return faults == 0 ? 0 : 1;
}

#include "cpu_policy.h"

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <initializer_list>
#include <limits>
#include <optional>
#include <stdexcept>

#include "chain_backward.h"
#include "core/checked.h"

namespace fusedconv {
namespace {

// Products for one value of a conv's output. Up to so many our own conv is the faster one with its chain;
// beyond, the conv takes nearly all of the time, and oneDNN's, which blocks over many channels, takes less of
// it.
constexpr int64_t kMostProducts = 512;
// Of input channels; each is a plane of its own to our conv.
constexpr int64_t kMostInputChannels = 64;
// So few output channels leave most of oneDNN's blocks empty: there, in NCHW and of filters larger than a
// pixel, ours is the faster one for more products, of any number of input channels.
constexpr int64_t kFewOutputs = 16;
constexpr int64_t kMostProductsOfFew = 4096;
constexpr int64_t kMostChannelPairs = 8192;  // input times output channels
// In channels_last ours moves each value to a plane and back, which oneDNN's does not. That pays where a
// call's own cost is most of it: for so many values of a sample's input and output. AVX-512 has the registers
// to do it quickly; elsewhere it pays for large maps too where filters are larger than a pixel and few
// channels leave oneDNN's blocks empty.
constexpr int64_t kFewValues = int64_t(1) << 14;
constexpr int64_t kFewValuesOfAvx512 = int64_t(1) << 17;
constexpr int64_t kMostOfFewerChannels = 12;
constexpr int64_t kMostOfMoreChannels = 64;
// Our conv computes a tile's output as one run of pixels, rows with all that the filter reaches beyond them,
// in whole vectors, and packs the input of each tile with its padding (csrc/cpu/conv_source.h, tiling.h). So
// many times the output it may compute, and so many times input and output it may pack: beyond, work and
// memory would follow from padding and dilation.
constexpr int64_t kMostComputed = 2;
constexpr int64_t kMostPacked = 4;
constexpr int64_t kVector = 16;  // lanes of the widest, on all machines
// Of maps of few pixels it leaves lanes idle. There oneDNN's conv is the faster one, unless all is so little
// that a call's own cost is most of it: so many products, less of many channels, whose weights it packs; and
// values to pack.
constexpr int64_t kFewPixels = 32;
constexpr double kFewIdle = 1.5;
constexpr int64_t kFewProducts = int64_t(1) << 22;
constexpr int64_t kFewProductsOfWide = int64_t(1) << 20;
constexpr int64_t kFewWeightsOfPixel = int64_t(1)
                                       << 14;  // of 1x1 filters: oneDNN's others cost more than to pack
constexpr int64_t kFewPacked = int64_t(1) << 16;

// Of input and output channels the fewer. Up to so many our own gradients of the conv are the faster ones;
// oneDNN's work on whole blocks of 16. Rows of few pixels leave lanes of our vectors idle.
constexpr int64_t kMostChannels = 12;
constexpr int64_t kMostChannelsOfNarrow = 4;
constexpr int64_t kNarrow = 28;

// Of a chain's gradients: what a plane costs by itself is as much as some pixels.
constexpr int64_t kLeastPixels = 32;
constexpr int64_t kMostSide = int64_t(1) << 24;  // a pool counts a window's rows and columns in float32

// Strides, paddings and expanded tensors make sizes that 63 bits do not count: those are the most that they
// do.
template <class Count>
int64_t count(const Count& counted) {
  try {
    return Checked(counted()).value();
  } catch (const std::overflow_error&) {
    return std::numeric_limits<int64_t>::max();
  }
}

int64_t product(std::initializer_list<int64_t> factors) {
  return count([&] {
    Checked all = 1;
    for (const int64_t factor : factors) all = all * factor;
    return all;
  });
}

std::optional<Remark> reason_of_dtype(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return std::nullopt;
    case DType::kFloat64:
      return Remark{Reason::kFloat64};
    case DType::kBFloat16:
      return Remark{Reason::kBFloat16};
    default:
      return Remark{Reason::kFloat16};
  }
}

// What a conv would take of ours, and why that is too much.
class ConvOnCpu {
 public:
  ConvOnCpu(const Tensor& input, const Conv& conv, Instructions instructions)
      : input_(input), conv_(conv), instructions_(instructions) {
    for (int d = 0; d < 2; ++d) {
      const int64_t kernel = conv.weight.size[2 + d], stride = conv.stride[d], padding = conv.padding[d];
      const int64_t span = count([&] { return Checked(conv.dilation[d]) * (kernel - 1); });
      side_[d] = count([&] {
        return (input.size[2 + d] + 2 * Checked(padding) - span - 1).value() / stride + Checked(1);
      });
      reach_[d] = span / stride;
      phases_[d] = std::min(stride, count([&] { return Checked(span) + 1; }));
    }
  }

  int64_t in_channels() const { return conv_.weight.size[1]; }
  int64_t out_channels() const { return conv_.weight.size[0]; }
  int64_t columns() const { return side_[1]; }
  // For one value of the output.
  int64_t products() const {
    const int64_t* size = conv_.weight.size;
    return product({size[1], size[2], size[3]});
  }

  // Why PyTorch's conv runs; empty where ours does.
  std::optional<Remark> reason_against() const {
    if (conv_.groups != 1) return Remark{Reason::kGroups};
    const bool is_float32 = input_.dtype == DType::kFloat32;
    if (!is_float32 && input_.dtype != DType::kFloat64) return reason_of_dtype(input_.dtype);
    const std::string path = asked_cpu_path();
    if (!path.empty()) return path == "direct" ? std::nullopt : std::optional<Remark>{{Reason::kAsked}};
    if (!is_float32) return reason_of_cost();  // oneDNN has no float64
    const std::optional<Remark> of_width = reason_of_width();
    if (pixels() < kFewPixels) {
      if (is_little(of_width.has_value())) return std::nullopt;
      if (double(computed()) > kFewIdle * double(pixels()))
        return Remark{Reason::kIdleLanes, {input_.size[0], computed(), pixels()}};
    }
    return of_width ? of_width : reason_of_cost();
  }

 private:
  int64_t pixels() const { return product({side_[0], side_[1]}); }
  int64_t taps() const { return product({conv_.weight.size[2], conv_.weight.size[3]}); }
  int64_t weights() const { return product({out_channels(), products()}); }
  // Of a sample's input and output.
  int64_t values() const {
    const int64_t* size = input_.size;
    return count(
        [&] { return Checked(product({size[1], size[2], size[3]})) + product({out_channels(), pixels()}); });
  }
  bool lies_in_pixels() const { return input_.stride[1] == 1 && input_.size[1] > 1; }

  Checked pitch() const { return Checked(side_[1]) + reach_[1]; }
  // Pixels that our conv computes for those of a sample.
  int64_t computed() const {
    return count([&] { return round_up(side_[0] * pitch(), kVector); });
  }
  // Values that it packs of a sample, once. A tile has as many rows as the filter reaches beyond it, if not
  // more.
  int64_t packed() const {
    return count([&] {
      const Checked tile_rows = std::max<int64_t>(1, std::min(side_[0], reach_[0]));
      const Checked rows = divide_up(side_[0], tile_rows) * (tile_rows + reach_[0]) * phases_[0];
      return rows * pitch() * phases_[1] * in_channels();
    });
  }

  // Whether a call's own cost is most of it.
  bool is_little(bool is_wide) const {
    const int64_t samples = input_.size[0];
    const int64_t all_products = product({samples, weights(), computed()});
    return products() <= kMostProductsOfFew &&  // one after the other, more of them would lose digits
           all_products <= (is_wide ? kFewProductsOfWide : kFewProducts) &&
           (taps() > 1 || weights() <= kFewWeightsOfPixel) && product({samples, packed()}) <= kFewPacked;
  }

  // Why oneDNN's conv is the faster one for so many channels.
  std::optional<Remark> reason_of_width() const {
    const bool has_few = out_channels() <= kFewOutputs && taps() > 1 && !lies_in_pixels();
    if (products() > (has_few ? kMostProductsOfFew : kMostProducts))
      return Remark{Reason::kProducts, {products()}};
    if (in_channels() > kMostInputChannels && !has_few)
      return Remark{Reason::kInputChannels, {in_channels()}};
    if (product({in_channels(), out_channels()}) >= kMostChannelPairs)
      return Remark{Reason::kChannels, {in_channels(), out_channels()}};
    if (lies_in_pixels() && is_wide_for_pixels())
      return Remark{Reason::kChannelsLast, {in_channels(), out_channels()}};
    return std::nullopt;
  }

  bool is_wide_for_pixels() const {
    if (instructions_ == Instructions::kAvx512) return values() > kFewValuesOfAvx512;
    const auto [fewer, more] = std::minmax({in_channels(), out_channels()});
    if (fewer <= kMostOfFewerChannels && more <= kMostOfMoreChannels && taps() > 1) return false;
    return values() > kFewValues;
  }

  // Why work and memory would be beyond what the output and the input have.
  std::optional<Remark> reason_of_cost() const {
    if (divide_up(Checked(computed()), kMostComputed) > pixels())
      return Remark{Reason::kComputed, {computed(), pixels()}};
    if (divide_up(Checked(packed()), kMostPacked) > values())
      return Remark{Reason::kPacked, {packed(), values()}};
    return std::nullopt;
  }

  const Tensor& input_;
  const Conv& conv_;
  const Instructions instructions_;
  int64_t side_[2];    // of the output
  int64_t reach_[2];   // of the filter, beyond a pixel of the output
  int64_t phases_[2];  // of the stride, that have pixels
};

Plan direct(const ConvOnCpu& own, Instructions instructions) {
  return {Path::kDirect, instructions, {{Reason::kProducts, {own.products()}}}};
}

// Why PyTorch computes the gradients of a conv: it computes its output, or ours do not serve or are slower.
// They are in float32 and of stride 1: there the input's gradient is a conv of v's gradient, in the layout
// that it has.
std::optional<Remark> reason_against_gradients(const ConvOnCpu& own, DType dtype, const Conv& conv,
                                               Instructions instructions) {
  if (const auto reason = own.reason_against()) return reason;
  if (dtype != DType::kFloat32) return reason_of_dtype(dtype);
  if (conv.stride[0] != 1 || conv.stride[1] != 1) return Remark{Reason::kStride};
  if (asked_cpu_path() == "direct") return std::nullopt;
  if (own.products() > kMostProducts || own.in_channels() > kMostInputChannels)
    return Remark{Reason::kWidth, {own.in_channels(), own.products()}};
  // With SSE2 oneDNN's are faster on small maps; on Arm nobody has measured.
  if (instructions == Instructions::kBaseline) return Remark{Reason::kInstructions};
  const int64_t channels = std::min(own.in_channels(), own.out_channels());
  if (channels > (own.columns() < kNarrow ? kMostChannelsOfNarrow : kMostChannels))
    return Remark{Reason::kBlocks, {channels, own.columns()}};
  return std::nullopt;
}

// Why the CPU's kernel of a chain's backward does not serve, or is the slower way.
std::optional<Remark> reason_against_chain(const Tensor& v, std::optional<DType> grad) {
  if (v.dtype != DType::kFloat32 && v.dtype != DType::kFloat64) return reason_of_dtype(v.dtype);
  const int64_t pixels = product({v.size[2], v.size[3]});
  if (pixels < kLeastPixels && asked_cpu_path() != "direct") return Remark{Reason::kFewPixels, {pixels}};
  if (std::max(v.size[2], v.size[3]) >= kMostSide) return Remark{Reason::kLargeSide};
  if (grad != v.dtype) return Remark{Reason::kGradDtype};
  return std::nullopt;
}

}  // namespace

std::string asked_cpu_path() {
  const char* const set = std::getenv("FUSEDCONV_CPU_PATH");
  std::string name = set != nullptr ? set : "";
  std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return std::tolower(c); });
  for (const char* known : {"", "direct", "two-step"})
    if (name == known) return name;
  throw std::invalid_argument("FUSEDCONV_CPU_PATH is '" + std::string(set) +
                              "', not one of direct, two-step");
}

Plan plan_conv_on_cpu(const Tensor& input, const Conv& conv, Instructions instructions) {
  const ConvOnCpu own(input, conv, instructions);
  const auto reason = own.reason_against();
  return reason ? two_step(*reason) : direct(own, instructions);
}

Plan plan_backward_on_cpu(const Tensor& v, std::optional<DType> grad, bool has_infinite_bounds,
                          const std::optional<InputAndConv>& conv, Instructions instructions) {
  if (const auto reason = reason_against_chain(v, grad)) return plain(*reason);
  const Plan chain = plan_chain_backward(v.dtype, grad, has_infinite_bounds);
  if (!chain.is_ours() || !conv) return chain;
  const ConvOnCpu own(conv->input, conv->conv, instructions);
  if (const auto reason = reason_against_gradients(own, conv->input.dtype, conv->conv, instructions))
    return two_step(*reason);
  Plan plan = direct(own, instructions);
  plan.remarks.push_back({Reason::kConvGradients});
  return plan;
}

Plan plan_v_on_cpu(const InputAndConv& conv, bool stores, Instructions instructions) {
  // Then the whole step took longer with ours, by a tenth.
  if (!stores) return two_step({Reason::kReduction});
  return plan_conv_on_cpu(conv.input, conv.conv, instructions);
}

}  // namespace fusedconv

// The parameters that have a value for each channel. All that has to do with each of them follows from this
// list: what arguments and gradients there are, how they are called in Python, loads and sums.
#pragma once

namespace fusedconv {

// First those that stages read, then the norm's; then the conv's, whose gradient is that of v, summed.
enum ChannelParameter : int { kBias, kScale, kNormWeight, kNormBias, kConvBias };

constexpr const char* kParameterNames[] = {"bias", "scale", "norm_weight", "norm_bias", "conv_bias"};

constexpr int kStageParameters = kNormWeight;
constexpr int kChainParameters = kConvBias;
constexpr int kGradientKinds = kConvBias + 1;
static_assert(sizeof(kParameterNames) / sizeof(*kParameterNames) == kGradientKinds);

}  // namespace fusedconv

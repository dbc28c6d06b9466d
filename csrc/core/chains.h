// The chains: each is a `using` that composes stages. chain_list.h has their names.
#pragma once

#include "chain.h"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// No operator's: backward computes a conv's output again by it, but in strips, with the bits that forward saw
// where forward's conv was ours.
using Identity = Chain<Sequence<>, NoNorm, Sequence<>, Store, Sequence<>>;

using ReluHardswish = Chain<Sequence<Relu, Hardswish>, NoNorm, Sequence<>, Store, Sequence<>>;

using BiasScaleSigmoid =
    Chain<Sequence<AddBias, MultiplyScale, Sigmoid>, NoNorm, Sequence<>, Store, Sequence<>>;

using BiasScaleSigmoidGroupNorm =
    Chain<Sequence<AddBias, MultiplyScale, Sigmoid>, GroupNorm, Sequence<>, Store, Sequence<>>;

using GroupNormScaleMaxPoolClamp =
    Chain<Sequence<>, GroupNorm, Sequence<MultiplyScale>, MaxPool, Sequence<Clamp>>;

using GroupNormSilu = Chain<Sequence<>, GroupNorm, Sequence<Silu>, Store, Sequence<>>;

using GroupNormTanhHardswishLogSumExp =
    Chain<Sequence<>, GroupNorm, Sequence<Tanh, HardswishInside, AddConv>, ChannelLogSumExp, Sequence<>>;

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

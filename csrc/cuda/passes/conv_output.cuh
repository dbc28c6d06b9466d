// A conv's output by itself, with the bits that a chain's forward saw: for backward, which computes it again.
#pragma once

#include "conv_chain.cuh"
#include "core/chains.h"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

using ConvOutput = ConvChain<Identity>;

template <class Mode>
using StoreV = StorePass<Identity, Mode>;
FUSEDCONV_SHARED_PASS(extern, StoreV)

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

// Decides how a conv's chain runs on a card: by our own conv, and how it is cut, or by PyTorch's conv and
// then the chain. Nothing here looks at the batch, but for one of more than 2^31 tiles, so that a sample's
// result does not depend on the others; and nothing at a pointer.
#pragma once

#include <string>

#include "card.h"
#include "conv_tiling.h"
#include "core/problem.h"
#include "plan.h"

namespace fusedconv {
namespace cuda {

struct ConvPlan {
  Instructions instructions = Instructions::kNone;
  Reason reason = Reason::kNoKernels;  // for which there are none
  ConvTiling tiling{};
  int operand_parts = 0;     // see cuda/device/split.cuh
  bool is_resident = false;  // samples stay in shared memory until their statistics are known
};

struct ChainShape {
  bool pools;                 // it has a pool, whose windows tiles follow
  bool waits_for_norms;       // it needs all of the conv's output before it finishes any: two passes, or see
                              // is_resident
  bool keeps_places = false;  // of the pool's values
};

// Whose instructions FUSEDCONV_CUDA_SOURCE asks for, by which tests choose it; empty: the best for the card,
// where it is the faster path. Each plan reads it anew; what is prepared keeps its plan. Throws
// std::invalid_argument for a name that is none.
std::string asked_source();

// Throws std::overflow_error where sizes are beyond what can be computed: the conv is PyTorch's then.
ConvPlan plan_conv(const Problem& problem, const ChainShape& chain, const Card& card);

// What there is to tell of it, but for the workspace.
Plan told(const ConvPlan& plan);

}  // namespace cuda
}  // namespace fusedconv

// Who runs a conv on the CPU, ours or PyTorch's, and who its gradients and the chain's: what was measured, as
// thresholds. A sample's size decides, so that its bits are the same in any batch; but for maps of few
// pixels.
#pragma once

#include <optional>
#include <string>

#include "core/problem.h"
#include "plan.h"

namespace fusedconv {

// Which path FUSEDCONV_CPU_PATH asks for, by which tests choose it: "direct", wherever our kernels serve, or
// "two-step"; empty: the faster one. Each plan reads it anew; what is prepared keeps its plan. Throws
// std::invalid_argument for a name that is none.
std::string asked_cpu_path();

Plan plan_conv_on_cpu(const Tensor& input, const Conv& conv, Instructions instructions);

// A conv and its input.
struct InputAndConv {
  Tensor input;
  Conv conv;
};

// Of a chain's backward. Two-step: the conv's gradients are PyTorch's, the chain's part is ours; plain: that
// is PyTorch's too. conv: none where v is given. grad, has_infinite_bounds: see chain_backward.h.
Plan plan_backward_on_cpu(const Tensor& v, std::optional<DType> grad, bool has_infinite_bounds,
                          const std::optional<InputAndConv>& conv, Instructions instructions);

// Of v, which backward computes again where it is not direct. stores: whether the output has a value for each
// of v's.
Plan plan_v_on_cpu(const InputAndConv& conv, bool stores, Instructions instructions);

}  // namespace fusedconv

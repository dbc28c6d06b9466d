// Who runs a conv on the CPU, ours or PyTorch's, and who its gradients and the chain's: what was measured, as
// thresholds. A sample's size decides, so that its bits are the same in any batch; but for maps of few
// pixels.
#pragma once

#include <string>

#include "core/problem.h"
#include "plan.h"

namespace fusedconv {

// Which path FUSEDCONV_CPU_PATH asks for, by which tests choose it: "direct", wherever our kernels serve, or
// "two-step"; empty: the faster one. Throws std::invalid_argument for a name that is none.
std::string asked_cpu_path();

Plan plan_conv_on_cpu(const Tensor& input, const Conv& conv, Instructions instructions);

// Of a chain's backward with its conv's gradients. Where PyTorch has these, the chain's part may still be
// ours.
Plan plan_conv_gradients_on_cpu(const Tensor& input, const Conv& conv, Instructions instructions);

// The chain's part, on a given v.
Plan plan_chain_gradients_on_cpu(const Tensor& v);

}  // namespace fusedconv

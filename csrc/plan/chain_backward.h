// Whether kernels serve for a chain's part of backward, on any device.
#pragma once

#include <optional>

#include "core/problem.h"
#include "plan.h"

namespace fusedconv {

// grad: of the output's gradient; empty for a dtype that no kernel knows. has_infinite_bounds: of a clamp.
// Kernels take them for none, and NaN passes the one and not the other.
Plan plan_chain_backward(DType v, std::optional<DType> grad, bool has_infinite_bounds);

}  // namespace fusedconv

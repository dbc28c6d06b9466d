#include "chain_backward.h"

namespace fusedconv {

Plan plan_chain_backward(DType v, std::optional<DType> grad, bool has_infinite_bounds) {
  const bool is_widened = grad == DType::kFloat32 && v != DType::kFloat64;
  if (grad != v && !is_widened) return plain({Reason::kGradDtype});
  if (has_infinite_bounds) return plain({Reason::kInfiniteBounds});
  return {Path::kChain};
}

}  // namespace fusedconv

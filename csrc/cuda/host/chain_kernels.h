// The chains of an image. Each has a file chains/<name>.cu.
#pragma once

#include "core/chain_list.h"
#include "core/target.h"
#include "kernels.h"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {
namespace chain_kernels {

#define FUSEDCONV_DECLARE(name) extern const cuda::Kernel name;
FUSEDCONV_FOR_EACH_CHAIN(FUSEDCONV_DECLARE)
#undef FUSEDCONV_DECLARE

}  // namespace chain_kernels
}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

// The tensor cores' products of one chunk, added to accumulators in registers: by what the image's
// architectures have. Either leaves the accumulators in the same places: of four in a row, two belong to row
// 16 * warp + lane / 4 and two to the row 8 further down, in columns 8 * (i / 4) + 2 * (lane % 4) and the
// next.
#pragma once

#include "plan/card.h"
#ifdef FUSEDCONV_SM90A
#include "wgmma_products.cuh"
#else
#include "mma_sync_products.cuh"
#endif

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

#ifdef FUSEDCONV_SM90A
using Products = WgmmaProducts;
constexpr cuda::Architecture kArchitecture = cuda::kWgmma;
#else
using Products = MmaSyncProducts;
constexpr cuda::Architecture kArchitecture = cuda::kMmaSync;
#endif

constexpr int kColumns = Products::kColumns;  // of a tile, that a half of a group has
constexpr int kTileColumns = 2 * kColumns;
static_assert(kTileColumns == kArchitecture.columns, "for which plans cut tiles");

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

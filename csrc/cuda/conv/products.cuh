// The tensor cores' products of one chunk, added to accumulators in registers: by what the image's
// architectures have. Either leaves the accumulators in the same places: of four in a row, two belong to row
// 16 * warp + lane / 4 and two to the row 8 further down, in columns 8 * (i / 4) + 2 * (lane % 4) and the
// next.
#pragma once

#ifdef FUSEDCONV_SM90A
#include "wgmma_products.cuh"
#else
#include "mma_sync_products.cuh"
#endif

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

#ifdef FUSEDCONV_SM90A
using Products = WgmmaProducts;
#else
using Products = MmaSyncProducts;
#endif

constexpr int kColumns = Products::kColumns;  // of a tile, that a half of a group has
constexpr int kTileColumns = 2 * kColumns;

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

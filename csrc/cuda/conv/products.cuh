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

template <class Mode>
__device__ void add_products(float (&d)[kColumns / 2], const Operands& from, bool is_first) {
  is_first ? Products::add<Mode, true>(d, from) : Products::add<Mode, false>(d, from);
}

// Adds a chunk's products, or some of them, to what is there; is_first: to zeros. What split values give
// never goes on from an earlier sum, see add_chunk(). The mode is known when a kernel runs: what a pass makes
// of the sums is much more code.
__device__ inline void add_products(float (&d)[kColumns / 2], const Operands& from, bool is_first) {
  if (from.parts == 2) {
    Products::add<SplitHalves, true>(d, from);
  } else if (from.are_bfloat16) {
    add_products<BFloat16s>(d, from, is_first);
  } else {
    add_products<Halves>(d, from, is_first);
  }
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

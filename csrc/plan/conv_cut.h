// Cuts a conv into tiles, chunks of its sum, and panels of the packed input: see conv_tiling.h.
#pragma once

#include "card.h"
#include "conv_plan.h"
#include "core/problem.h"

namespace fusedconv {
namespace cuda {

struct CutChoice;

class ConvCutter {
 public:
  // columns: of a tile's products. parts: of the operands, see cuda/device/split.cuh.
  ConvCutter(const Problem& problem, int columns, int parts, const ChainShape& chain, const Card& card)
      : problem_(problem), columns_(columns), parts_(parts), chain_(chain), card_(card) {}

  // False if no tile fits into shared memory.
  bool cut_into_tiles(ConvTiling& tiling) const;
  // Makes room for tiles that wait for their sample's statistics; leaves the tiling as it is if there is
  // none.
  bool keep_tiles(ConvTiling& tiling) const;

 private:
  bool fits(ConvTiling& tiling, const CutChoice& choice) const;
  const int64_t* pool() const;

  const Problem& problem_;
  const int columns_;
  const int parts_;
  const ChainShape& chain_;
  const Card& card_;
};

// As many bands as make a panel of the size that is wanted, or more until a third at most is packed twice,
// all panels of nearly the same size. Then all is known of a tiling that its steps need. False if one band is
// too large for a panel.
bool cut_into_panels(ConvTiling& tiling);

}  // namespace cuda
}  // namespace fusedconv

// What plans need to know about a card, and about an architecture: one row each.
#pragma once

#include "plan.h"

namespace fusedconv {
namespace cuda {

constexpr int kLineBytes = 128;  // of memory

struct Card {
  int capability;  // 90 for compute capability 9.0; an older one's, if it runs the code of that
  int multiprocessors;
  int shared_bytes;           // of shared memory, at most, for one block
  bool overlaps_kernels;      // a kernel may start while the one before it ends, also in a captured graph
  Instructions instructions;  // of convs, in the code that it runs
};

// Whether kernels may overlap: they must have been compiled to wait for one another, and a captured graph
// must know of it, which it does since CUDA 12.3.
constexpr bool may_overlap(int architecture, int driver) { return architecture >= 90 && driver >= 12030; }

// What kernels of an architecture have, and where they are the faster ones: measured, see bench/NOTES.md. As
// it may not depend on the batch, with one that fills the card.
struct Architecture {
  int columns;         // of a tile's products
  bool keeps_samples;  // has kernels that keep a sample in shared memory until its statistics are known
  // PyTorch's conv is the faster one beyond so many input channels, and products for a value, of two passes
  // where the chain waits for norms: it makes more of them.
  int most_channels;
  int most_products;
  int most_exact_products;
  // And of kernels whose taps do not fit into shared memory at once, where the chain waits for norms.
  bool is_slower_in_chunks;
  // And of maps so small that a pooled chain's four launches take longer than PyTorch's conv and one kernel.
  int few_tiles;
};

constexpr Architecture kMmaSync{128, false, 64, 1200, 600, false, 4};
constexpr Architecture kWgmma{256, true, 64, 1200, 600, true, 4};

inline const Architecture& architecture_of(Instructions instructions) {
  switch (instructions) {
    case Instructions::kSm90a:
      return kWgmma;
    default:
      return kMmaSync;  // its thresholds are those of cards without kernels of a conv, too
  }
}

}  // namespace cuda
}  // namespace fusedconv

// What plans need to know about a card.
#pragma once

namespace fusedconv {
namespace cuda {

constexpr int kLineBytes = 128;  // of memory

// By which instructions our conv multiplies: mma.sync, or wgmma; or there is none.
enum class ConvSource { kNone, kSm80, kSm90a };

struct Card {
  int capability;  // 90 for compute capability 9.0; an older one's, if it runs the code of that
  int multiprocessors;
  int shared_bytes;       // of shared memory, at most, for one block
  bool overlaps_kernels;  // a kernel may start while the one before it ends, also in a captured graph
  ConvSource source;      // of the code that it runs
};

}  // namespace cuda
}  // namespace fusedconv

#include "memory.h"

#include <cstdint>
#include <new>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace fusedconv {

constexpr std::align_val_t kAlignment{64};

void* allocate_aligned(size_t bytes) {
  void* memory = ::operator new(bytes, kAlignment);
  advise_huge_pages(memory, bytes);
  return memory;
}

void free_aligned(void* memory) { ::operator delete(memory, kAlignment); }

void advise_huge_pages([[maybe_unused]] void* memory, [[maybe_unused]] size_t bytes) {
#if defined(__linux__)
  constexpr uintptr_t kHugePage = 2 * 1024 * 1024;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(memory) + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(memory) + bytes) / kHugePage * kHugePage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // advice: may fail
#endif
}

}  // namespace fusedconv

#include "memory.h"

#include <cstdint>
#include <new>
#include <stdexcept>
#include <string>

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace fusedconv {

constexpr size_t kAlignment = 64;

// Not by an aligned new: cutting a block to size takes it longer than a small problem takes. In front of what
// is handed out stands where the block begins.
void* allocate_aligned(size_t bytes) {
  char* block = static_cast<char*>(::operator new(bytes + kAlignment, std::nothrow));
  if (block == nullptr)
    throw std::runtime_error("fusedconv: cannot allocate " + std::to_string(bytes) +
                             " bytes of working memory");
  char* memory = block + kAlignment - reinterpret_cast<uintptr_t>(block) % kAlignment;
  reinterpret_cast<char**>(memory)[-1] = block;
  advise_huge_pages(memory, bytes);
  return memory;
}

void free_aligned(void* memory) { ::operator delete(static_cast<char**>(memory)[-1]); }

void advise_huge_pages([[maybe_unused]] void* memory, [[maybe_unused]] size_t bytes) {
#if defined(__linux__)
  constexpr uintptr_t kHugePage = 2 * 1024 * 1024;
  const uintptr_t begin = (reinterpret_cast<uintptr_t>(memory) + kHugePage - 1) / kHugePage * kHugePage;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(memory) + bytes) / kHugePage * kHugePage;
  if (begin < end) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);  // advice: may fail
#endif
}

bool is_resident([[maybe_unused]] const void* memory) {
#if defined(__linux__)
  const uintptr_t page_size = uintptr_t(sysconf(_SC_PAGESIZE));
  void* page = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(memory) / page_size * page_size);
  unsigned char resident = 1;
  if (mincore(page, page_size, &resident) == 0) return resident & 1;
#endif
  return true;
}

}  // namespace fusedconv

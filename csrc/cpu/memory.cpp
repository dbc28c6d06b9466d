#include "memory.h"

#include <new>

namespace fusedconv {

constexpr std::align_val_t kAlignment{64};

void* allocate_aligned(size_t bytes) { return ::operator new(bytes, kAlignment); }
void free_aligned(void* memory) { ::operator delete(memory, kAlignment); }

}  // namespace fusedconv

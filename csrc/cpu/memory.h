#pragma once

#include <cstddef>

namespace fusedconv {

void* allocate_aligned(size_t bytes);  // to a cache line; throws std::bad_alloc
void free_aligned(void* memory);

}  // namespace fusedconv

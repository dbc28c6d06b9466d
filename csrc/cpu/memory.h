#pragma once

#include <cstddef>

namespace fusedconv {

void* allocate_aligned(
    size_t bytes);  // to a cache line; throws std::runtime_error, which says what was asked
void free_aligned(void* memory);

// Asks for huge pages under a large block that is about to be written for the first time: the system clears
// and maps it in a quarter of the time that small pages take.
void advise_huge_pages(void* memory, size_t bytes);

// Whether the page has been touched: where it has not, its first touch will clear it. True where nobody
// knows.
bool is_resident(const void* memory);

}  // namespace fusedconv

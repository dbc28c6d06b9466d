// Parallel loops on the OpenMP runtime that PyTorch has loaded, or on std::thread where there is none.
#pragma once

#include <cstdint>

namespace fusedconv {

// Called as body(context, index, worker); workers are numbered from 0 to threads - 1.
using LoopBody = void (*)(void* context, int64_t index, int worker);

// Runs body once for each index in [0, count) on at most `threads` threads.
void parallel_for(int64_t count, int threads, LoopBody body, void* context);

}  // namespace fusedconv

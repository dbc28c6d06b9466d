// Parallel loops on the OpenMP runtime that PyTorch has loaded, or on std::thread where there is none, or
// where a fork may have broken it.
#pragma once

#include <cstdint>

namespace fusedconv {

// Called as body(context, index, worker); workers are numbered from 0 to threads - 1.
using LoopBody = void (*)(void* context, int64_t index, int worker);

// Runs body once for each index in [0, count) on at most `threads` threads. All of them round, and flush
// denormals or not, as the caller does.
void parallel_for(int64_t count, int threads, LoopBody body, void* context);

}  // namespace fusedconv

// Functions of every target are always inline: so no instruction set's copy of one is there for the others to
// take.
#pragma once

#ifdef __CUDACC__
#define FUSEDCONV_INLINE __host__ __device__ __forceinline__
#else
#define FUSEDCONV_INLINE inline __attribute__((always_inline))
#endif

// The elementary functions that stages are written in (select, maximum, relu, hardsigmoid, exp, log, tanh,
// sigmoid; exp2 and reciprocal on the GPU), for the target's own value type: a vector on the CPU, a scalar on
// the GPU.
#pragma once

#ifdef __CUDACC__
#include "../cuda/scalar_math.cuh"
#else
#include "../cpu/vector_math.h"
#endif

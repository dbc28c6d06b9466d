// The elementary functions that stages are written in (select, maximum, relu, hardsigmoid, exp, log, tanh,
// sigmoid; exp2 and reciprocal on the GPU), for the target's own value type: a vector on the CPU, a scalar on
// the GPU.
#pragma once

#ifdef __CUDACC__
#include "scalar_math.h"
#else
#include "vector_math.h"
#endif

// The elementary functions that stages are written in (select, maximum, relu, hardsigmoid, exp, log, tanh,
// sigmoid, reciprocal), for the target's own value type: a vector on the CPU, a scalar on the GPU.
// vector_math.h tells which values log and reciprocal take. A constant alone is X{} + T(1).
#pragma once

#ifdef __CUDACC__
#include "scalar_math.h"
#else
#include "vector_math.h"
#endif

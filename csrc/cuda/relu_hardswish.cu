#include "one_pass.cuh"

FUSEDCONV_CUDA_ONE_PASS_CHAIN(relu_hardswish, ReluHardswish)

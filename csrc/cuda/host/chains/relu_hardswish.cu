#include "cuda/host/run_chain.cuh"

FUSEDCONV_CUDA_CHAIN(relu_hardswish, ReluHardswish)

#include "run_chain.cuh"

FUSEDCONV_CUDA_CONV(identity, Identity)

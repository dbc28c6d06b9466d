#include "run_chain.cuh"

FUSEDCONV_CUDA_CHAIN(identity, Identity)

#include "cuda/host/run_chain.cuh"

FUSEDCONV_CUDA_GIVEN_CHAIN(bias_scale_sigmoid, BiasScaleSigmoid)

#include "cuda/host/run_chain.cuh"

FUSEDCONV_CUDA_CHAIN(bias_scale_sigmoid_group_norm, BiasScaleSigmoidGroupNorm)

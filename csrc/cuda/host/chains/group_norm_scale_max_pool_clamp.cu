#include "cuda/host/run_chain.cuh"

FUSEDCONV_CUDA_CHAIN(group_norm_scale_max_pool_clamp, GroupNormScaleMaxPoolClamp)

#include "cuda/host/run_chain.cuh"

FUSEDCONV_CUDA_CHAIN(group_norm_tanh_hardswish_logsumexp, GroupNormTanhHardswishLogSumExp)

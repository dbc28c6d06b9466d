#include "run_chain.h"

FUSEDCONV_CPU_CHAIN(group_norm_scale_max_pool_clamp, GroupNormScaleMaxPoolClamp)

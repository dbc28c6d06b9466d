#include "run_chain.h"

FUSEDCONV_CPU_CHAIN(group_norm_silu, GroupNormSilu)

#include "run_chain.h"

FUSEDCONV_CPU_CHAIN(bias_scale_sigmoid_group_norm, BiasScaleSigmoidGroupNorm)

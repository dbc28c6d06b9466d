#include "run_chain.h"

FUSEDCONV_CPU_CHAIN(relu_hardswish, ReluHardswish)

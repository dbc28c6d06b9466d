#include "run_chain.h"

FUSEDCONV_CPU_CHAIN(identity, Identity)

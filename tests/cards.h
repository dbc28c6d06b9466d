// The cards that programs which test plans draw from. Without kernels of convs is the first one alone.
#pragma once

#include "plan/card.h"

constexpr fusedconv::cuda::Card kCards[] = {{75, 40, 65536, false, fusedconv::Instructions::kNone},
                                            {80, 108, 166912, false, fusedconv::Instructions::kSm80},
                                            {86, 84, 101376, false, fusedconv::Instructions::kSm80},
                                            {90, 132, 232448, true, fusedconv::Instructions::kSm90a},
                                            {120, 84, 101376, true, fusedconv::Instructions::kSm80}};

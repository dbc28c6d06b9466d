// Every chain's name, as Python and the backends call it. Each name has a file in cpu/
// and one in cuda/host/chains/.
#pragma once

#define FUSEDCONV_FOR_EACH_CHAIN(X)  \
  X(identity)                        \
  X(relu_hardswish)                  \
  X(bias_scale_sigmoid)              \
  X(bias_scale_sigmoid_group_norm)   \
  X(group_norm_scale_max_pool_clamp) \
  X(group_norm_silu)                 \
  X(group_norm_tanh_hardswish_logsumexp)

// What a chain's file has to say: one line that names it and its composition.
#pragma once

#include "kernels.h"
#include "tensor_chain.cuh"

#define FUSEDCONV_CUDA_CHAIN(name, Composition)                                            \
  namespace fusedconv {                                                                    \
  namespace cuda {                                                                         \
  const Kernel name{TensorChain<Composition>::workspace, TensorChain<Composition>::launch, \
                    TensorChain<Composition>::load};                                       \
  }                                                                                        \
  }

// Loading of kernels, and launches that may overlap with the end of the kernel before them in a stream.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "core/target.h"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// Onto the current device, for a later launch to load nothing: a capture would forbid it.
template <class Kernel>
cudaError_t load_kernel(Kernel* kernel) {
  cudaFuncAttributes attributes;
  return cudaFuncGetAttributes(&attributes, kernel);
}

// The same, and lets it use so many bytes of shared memory.
template <class Kernel>
cudaError_t load_kernel(Kernel* kernel, int shared_bytes) {
  return cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes);
}

// By all threads of a kernel that is launched to overlap, before they read what an earlier kernel wrote, or
// write what it reads.
__device__ inline void wait_for_earlier_kernels() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The next kernel may be started where this one leaves room.
__device__ inline void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

struct LaunchShape {
  dim3 grid;
  int threads;
  int shared_bytes;
  bool overlaps;                // with the kernel before it: see Card
  bool is_cooperative = false;  // all blocks run at the same time, or the launch fails
  int cluster = 1;              // blocks next to each other that can reach each other's shared memory
};

// Blocks beyond what one dimension of a grid takes go into the second; the last may be too many.
inline dim3 grid_of(int64_t blocks, int64_t multiple) {
  const int64_t most = (int64_t(1) << 30) / multiple * multiple;
  const int64_t x = blocks < most ? blocks : most;
  return dim3(unsigned(x), unsigned((blocks + x - 1) / x));
}

__device__ inline int64_t block_index() { return int64_t(blockIdx.y) * gridDim.x + blockIdx.x; }

// So many blocks, or fewer, which go on to what is left.
inline unsigned some_blocks(int64_t wanted) { return unsigned(std::min<int64_t>(wanted, 1 << 16)); }

template <class... Parameters>
cudaError_t launch_kernel(void (*kernel)(Parameters...), const LaunchShape& shape, cudaStream_t stream,
                          const std::decay_t<Parameters>&... arguments) {
  cudaLaunchAttribute attributes[3]{};
  int count = 0;
  if (shape.overlaps) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (shape.is_cooperative) {
    attributes[count].id = cudaLaunchAttributeCooperative;
    attributes[count++].val.cooperative = 1;
  }
  if (shape.cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {unsigned(shape.cluster), 1, 1};
  }
  cudaLaunchConfig_t config{};
  config.gridDim = shape.grid;
  config.blockDim = dim3(shape.threads);
  config.dynamicSmemBytes = shape.shared_bytes;
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

// One kernel for all chains: in a file of its own, so that it is compiled once.
#include "pack.cuh"

#include "cuda/device/launch.cuh"
#include "pack_pixels.cuh"
#include "pack_weights.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {
namespace {

// For cuda/passes/sample_statistics.cuh: what runs next and waits for them to be filled in: a panel's share
// of its sample's.
__device__ void clear_tile_parts(const ConvProblem& p, int panel) {
  const int panels = panels_per_sample(p.tiling);
  const int sample = panel / panels;
  const int parts = p.norm_shape.groups * p.norm_shape.tiles;
  TilePart* const of_sample = p.tile_parts + int64_t(sample) * parts;
  for (int i = (panel - sample * panels) * kPackThreads + threadIdx.x; i < parts; i += panels * kPackThreads)
    of_sample[i] = {};
}

// The first blocks pack weights, a warp a row; each of the others packs a panel.
template <class Mode>
__global__ void __launch_bounds__(kPackThreads, kPackBlocks)
    pack_conv_operands(const __grid_constant__ ConvProblem p, int weight_blocks) {
  if constexpr (kConvCompiles) {
    extern __shared__ unsigned magnitudes[];
    const int block = blockIdx.x;
    if (block < weight_blocks) {
      pack_weights<Mode>(p, block * kPackWarps + pack_warp());
    } else {
      const int panel = block - weight_blocks;
      if (p.tile_parts != nullptr) clear_tile_parts(p, panel);
      PanelPacker<Mode>(p, panel, magnitudes).pack();
    }
    let_next_kernel_start();
  }
}

}  // namespace

template <class Mode>
cudaError_t launch_pack(const ConvProblem& p, cudaStream_t stream) {
  const ConvTiling& t = p.tiling;
  const int weight_blocks = t.row_blocks * kRows / kPackWarps;
  const int blocks = weight_blocks + int(p.input.size[0]) * panels_per_sample(t);
  const size_t shared_bytes = t.in_channels * sizeof(unsigned);
  pack_conv_operands<Mode><<<blocks, kPackThreads, shared_bytes, stream>>>(p, weight_blocks);
  return cudaGetLastError();
}

template <class Mode>
cudaError_t load_pack() {
  return load_kernel(pack_conv_operands<Mode>);
}

#define FUSEDCONV_PACK(Mode)                                                \
  template cudaError_t launch_pack<Mode>(const ConvProblem&, cudaStream_t); \
  template cudaError_t load_pack<Mode>();

FUSEDCONV_PACK(Float32Ieee)
FUSEDCONV_PACK(Float32Tf32)
FUSEDCONV_PACK(BFloat16)
FUSEDCONV_PACK(Float16)

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

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

// The first blocks pack weights, a warp a row; each of the others packs a panel. Held: see Unit.
template <class Held>
__global__ void __launch_bounds__(kPackThreads, kPackBlocks)
    pack_conv_operands(const __grid_constant__ ConvProblem p, int weight_blocks) {
  extern __shared__ unsigned magnitudes[];
  const int block = blockIdx.x;
  if (block < weight_blocks) {
    pack_weights<Held>(p, block * kPackWarps + pack_warp());
  } else {
    const int panel = block - weight_blocks;
    if (p.tile_parts != nullptr) clear_tile_parts(p, panel);
    PanelPacker<Held>(p, panel, magnitudes).pack();
  }
  let_next_kernel_start();
}

}  // namespace

cudaError_t launch_pack(const ConvProblem& p, cudaStream_t stream) {
  const ConvTiling& t = p.tiling;
  const int weight_blocks = t.row_blocks * kRows / kPackWarps;
  const int blocks = weight_blocks + int(p.input.size[0]) * panels_per_sample(t);
  const LaunchShape shape{dim3(blocks), kPackThreads, t.in_channels * int(sizeof(unsigned)), false};
  const auto kernel =
      p.input.dtype == DType::kFloat32 ? pack_conv_operands<float> : pack_conv_operands<uint16_t>;
  return launch_kernel(kernel, shape, stream, p, weight_blocks);
}

cudaError_t load_pack() {
  if (const cudaError_t status = load_kernel(pack_conv_operands<float>)) return status;
  return load_kernel(pack_conv_operands<uint16_t>);
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

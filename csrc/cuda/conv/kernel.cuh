// The skeleton of every kernel with a conv: two groups of warps take turns at the tiles. Each has stages of
// shared memory of its own; it multiplies one, has it filled again at once, and finishes the tile, so that
// loads, products and what a pass does with a tile overlap. What becomes of a tile is the pass's: it stores,
// reduces or measures (cuda/passes/pass.cuh).
#pragma once

#include "cuda/device/launch.cuh"
#include "fragment.cuh"
#include "products.cuh"
#include "unit_copies.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// Of a group: the one before, the one at hand, and those that are on their way to its stages.
constexpr int kKnownTiles = 4;
static_assert(kKnownTiles >= cuda::kMostStages + 2);

// Shared memory: what the block shares, then what one group of threads has.
struct SharedHead {
  uint64_t weights;  // has arrived, where they stay
  uint64_t full[kGroups][cuda::kMostStages];
  uint64_t empty[kGroups][cuda::kMostStages];
  Tile tile[kGroups][kKnownTiles];
};

static_assert(sizeof(SharedHead) <= cuda::kSharedHeadBytes);

struct SharedLayout {
  SharedHead* head;
  uint64_t* full;  // barriers of the group's stages
  uint64_t* empty;
  Tile* tile;  // that the group works at, or has a stage for, by their number modulo kKnownTiles
  uint8_t* weights;
  uint8_t* pixels;
  uint8_t* staging;
  uint8_t* carry;
};

template <class Mode>
__device__ SharedLayout shared_layout(const ConvTiling& t, uint8_t* shared, int group) {
  const int weights_bytes = Mode::kParts * t.weights_bytes * (t.weights_stay ? 1 : t.stages);
  const int pixels_bytes = Mode::kParts * t.pixels_bytes * t.stages;
  SharedLayout s;
  s.head = reinterpret_cast<SharedHead*>(shared);
  s.full = s.head->full[group];
  s.empty = s.head->empty[group];
  s.tile = s.head->tile[group];
  uint8_t* end = shared + cuda::kSharedHeadBytes;
  const auto take = [&](int bytes, bool shares = false) {
    uint8_t* const start = end;
    end += bytes * (shares ? 1 : kGroups);
    return start + (shares ? 0 : group * bytes);
  };
  s.weights = take(weights_bytes, t.weights_stay);
  s.pixels = take(pixels_bytes);
  s.staging = take(t.staging_bytes);
  s.carry = take(t.carry_bytes);
  return s;
}

__device__ inline void init_barriers(const ConvTiling& t, SharedHead* head) {
  init_barrier(&head->weights, UnitCopies::kArrivals);
  for (int group = 0; group < kGroups; ++group) {
    for (int i = 0; i < t.stages; ++i) {
      init_barrier(&head->full[group][i], UnitCopies::kArrivals);
      init_barrier(&head->empty[group][i], kGroupThreads / kWarpThreads);
    }
  }
}

// Starts to copy a tile's rows of a panel: a run for each part, block of channels and remainder modulo stack.
// No loop is unrolled: copies stand between the products, whose instructions are to stay in the cache.
template <class Mode>
__device__ void copy_pixels(const ConvProblem& p, const Tile& tile, int chunk, const UnitCopies& copies,
                            uint8_t* stage) {
  const ConvTiling& t = p.tiling;
  const int run = t.phase_rows * t.pitch;
  const uint4* from = p.pixels + (int64_t(tile.panel) * t.chunks + chunk) * Mode::kParts * chunk_units(t) +
                      tile.panel_row * t.pitch;
#pragma unroll 1
  for (int part = 0; part < Mode::kParts; ++part) {
#pragma unroll 1
    for (int block = 0; block < t.blocks_per_chunk; ++block) {
      uint8_t* to = stage + part * t.pixels_bytes + block * t.plane * kUnitBytes;
#pragma unroll 1
      for (int phase = 0; phase < t.stack; ++phase) {
        copies.copy(to, from, run);
        to += run * kUnitBytes;
        from += t.panel_phase_rows * t.pitch;
      }
    }
  }
}

template <class Mode>
__device__ void copy_weights(const ConvProblem& p, int row_block, int chunk, const UnitCopies& copies,
                             uint8_t* to) {
  const ConvTiling& t = p.tiling;
  const int units = Mode::kParts * t.weights_bytes / kUnitBytes;
  copies.copy(to, p.weights + (row_block * t.chunks + chunk) * int64_t(units), units);
}

// Fills the stages of a group, in the order in which they are used: by the group's first warp.
template <class Mode, class Pass>
class StageFiller {
 public:
  __device__ StageFiller(const ConvProblem& problem, const SharedLayout& shared, int group, int items)
      : p_(problem), s_(shared), items_(items), cursor_(group) {}

  // Starts to copy the next stage's operands, once the last ones in its place have been used.
  __device__ void next() {
    if (cursor_.item >= items_) return;
    const ConvTiling& t = p_.tiling;
    const Tile tile = cursor_.tile(t);
    const int stage = ring_.stage;
    wait(&s_.empty[stage], ring_.parity ^ 1);
    const int weights_bytes = t.weights_stay ? 0 : Mode::kParts * t.weights_bytes;
    const int pixels_bytes =
        Mode::kParts * t.blocks_per_chunk * t.stack * t.phase_rows * t.pitch * kUnitBytes;
    if (chunk_ == 0 && lane_of_thread() == 0) s_.tile[number_ % kKnownTiles] = tile;
    const UnitCopies copies(&s_.full[stage], weights_bytes + pixels_bytes);
    if (!t.weights_stay)
      copy_weights<Mode>(p_, tile.row_block, chunk_, copies, s_.weights + stage * weights_bytes);
    copy_pixels<Mode>(p_, tile, chunk_, copies, s_.pixels + stage * Mode::kParts * t.pixels_bytes);
    copies.end();
    ring_.next(t.stages);
    if (++chunk_ < t.chunks) return;
    chunk_ = 0;
    ++number_;
    cursor_.next(t);
  }

 private:
  const ConvProblem& p_;
  const SharedLayout& s_;
  const int items_;
  TileCursor<Pass::kAllRowBlocks> cursor_;
  int chunk_ = 0;
  int number_ = 0;  // of the tile
  Ring ring_;
};

// The operands in a stage, from a column of the tile.
template <class Mode>
__device__ Operands operands_of(const ConvTiling& t, const SharedLayout& s, int stage, int column) {
  return {shared_address(s.weights) + (t.weights_stay ? 0 : stage) * Mode::kParts * t.weights_bytes,
          shared_address(s.pixels) + stage * Mode::kParts * t.pixels_bytes + column * kUnitBytes,
          uint32_t(t.weights_bytes),
          uint32_t(t.pixels_bytes),
          t.step,
          0};
}

// Adds the products of a chunk to accumulators; sums: memory to add them up in, or null.
template <class Mode>
__device__ void add_chunk(float (&d)[kColumns / 2], Operands operands, int steps, bool is_first,
                          uint8_t* sums) {
  for (int left = steps; left > 0; left -= kMostSumSteps) {
    operands.steps = min(left, kMostSumSteps);
    if (Mode::kParts == 2 || is_first) {
      Products::add<Mode, true>(d, operands);
    } else {
      Products::add<Mode, false>(d, operands);
    }
    if (Mode::kParts == 2 && sums != nullptr) fold(d, sums, is_first);
    is_first = false;
    operands.weights += kMostSumSteps * 2 * kHalfStepBytes;
    operands.offsets += kMostSumSteps;
  }
}

// Whether the tensor cores' products of a tile are right, for all threads of its group. exponent: of its
// panel.
__device__ inline bool products_are_right(const ConvProblem& p, const Tile& tile, const ThreadRows& rows,
                                          int exponent, int barrier) {
  if (exponent == kNonFinite) return false;
  return rows.are_usual() || !any_of_threads(barrier, kGroupThreads, rows_are_wrong(p, tile, rows, exponent));
}

template <class Mode, class Pass>
__device__ void run_tiles(const ConvProblem& p, const SharedLayout& s, int group, int items) {
  const ConvTiling& t = p.tiling;
  const int barrier = group + 1;
  const int half = uniform(half_of_thread());
  StageFiller<Mode, Pass> filler(p, s, group, items);
  const bool fills = uniform(threadIdx.x % kGroupThreads / kWarpThreads) == 0;
  if (fills) {
    for (int i = 0; i < t.stages; ++i) filler.next();
  }
  Pass pass(p, s.staging, s.carry, barrier);
  Ring ring;
  ThreadRows rows;
  const PixelMask whole = pixel_mask(t, rows.stacked(t), t.tile_rows, t.tile_cols);
  if (t.weights_stay) wait(&s.head->weights, 0);
  const int tiles = count_tiles<Pass::kAllRowBlocks>(t, group, items);
  for (int number = 0; number < tiles; ++number) {
    wait(&s.full[ring.stage], ring.parity);
    const Tile& tile = s.tile[number % kKnownTiles];  // in registers it would be in the way
    if (tile.row_block != rows.row_block) {
      rows.load(p, tile.row_block);
      pass.set_rows(rows);
    }
    const bool is_whole = tile.rows == t.tile_rows && tile.cols == t.tile_cols;
    rows.pixels = is_whole ? whole : pixel_mask(t, rows.stacked(t), tile.rows, tile.cols);
    pass.prepare(tile, rows);
    const int exponent = p.pixel_exponents[tile.panel];
    float d[kColumns / 2];
    const int steps = t.half_steps / 2;
    const bool folds = Pass::kMayFold && Mode::kParts == 2 && (t.chunks > 1 || steps > kMostSumSteps);
    if (folds) pass.before_staging();
    for (int chunk = 0; chunk < t.chunks; ++chunk) {
      if (chunk > 0) wait(&s.full[ring.stage], ring.parity);
      add_chunk<Mode>(d, operands_of<Mode>(t, s, ring.stage, half * kColumns), steps, chunk == 0,
                      folds ? s.staging : nullptr);
      __syncwarp();
      if (lane_of_thread() == 0) arrive(&s.empty[ring.stage]);
      if (fills) filler.next();
      ring.next(t.stages);
    }
    const bool is_right = products_are_right(p, tile, rows, exponent, barrier);
    pass.before_staging();
    Scaling scaling;
    if (is_right) {
      scaling = scaling_of<Mode>(p, d, rows, exponent);
    } else {
      recompute(p, tile, rows, d, reinterpret_cast<float*>(s.staging), barrier);
    }
    pass.finish(Fragment(t, tile, rows, d, scaling));
  }
  pass.end();
}

template <class Mode, class Pass>
__global__ void __launch_bounds__(kConvThreads, 1)
    conv_kernel(const __grid_constant__ ConvProblem p, int items) {
  extern __shared__ __align__(128) uint8_t shared[];
  const ConvTiling& t = p.tiling;
  const int group = group_of_thread();
  const SharedLayout s = shared_layout<Mode>(t, shared, group);
  if (threadIdx.x == 0) init_barriers(t, s.head);
  fence_async_proxy();
  __syncthreads();
  wait_for_earlier_kernels();
  if (t.weights_stay && uniform(threadIdx.x / kWarpThreads) == 0) {
    const UnitCopies copies(&s.head->weights, Mode::kParts * t.weights_bytes);
    copy_weights<Mode>(p, 0, 0, copies, s.weights);
    copies.end();
  }
  run_tiles<Mode, Pass>(p, s, group, items);
  let_next_kernel_start();
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

// The skeleton of every kernel with a conv: one group of warps fills stages of shared memory, two groups take
// turns to multiply them and to finish the tiles, so that loads, products and what a pass does with a tile
// overlap. What becomes of a tile is the pass's: it stores, reduces or measures (conv_pass.cuh).
#pragma once

#include "conv_fill.cuh"
#include "conv_products.cuh"
#include "conv_rows.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// Shared memory, from the start: barriers and what goes with a stage, weights, pixels, staging and carry of
// each group of consumers.
struct SharedHead {
  uint64_t full[kConsumers][cuda::kMostStages];  // a group sees each round of its own barriers, and must
  uint64_t empty[cuda::kMostStages];
  int exponent[cuda::kMostStages];
  unsigned magnitude[kFillThreads / kWarpThreads];
  unsigned channel_magnitude[cuda::kMostChunkChannels];
};

static_assert(sizeof(SharedHead) <= cuda::kSharedHeadBytes);

struct SharedLayout {
  SharedHead* head;
  uint8_t* weights;
  uint8_t* pixels;
  uint8_t* staging;
  uint8_t* carry;
};

template <class Mode>
__device__ SharedLayout shared_layout(const ConvTiling& t, uint8_t* shared) {
  SharedLayout s;
  s.head = reinterpret_cast<SharedHead*>(shared);
  s.weights = shared + cuda::kSharedHeadBytes;
  s.pixels = s.weights + Mode::kParts * t.weights_bytes * (t.weights_stay ? 1 : t.stages);
  s.staging = s.pixels + kStageParts<Mode> * t.pixels_bytes * t.stages;
  s.carry = s.staging + kConsumers * t.staging_bytes;
  return s;
}

// By a warp: whether a row of the block has weights of very different size.
__device__ inline bool has_wide_rows(const ConvProblem& p, int row_block) {
  const int* is_wide = p.is_wide + row_block * kRows + threadIdx.x % kWarpThreads;
  return __any_sync(~0u, (is_wide[0] | is_wide[kWarpThreads]) != 0);
}

template <class Mode, class Pass>
__device__ void fill_stages(const ConvProblem& p, const SharedLayout& s, int items) {
  using In = typename Mode::In;
  const ConvTiling& t = p.tiling;
  constexpr int kBarrier = kConsumers + 1;
  QuadPlace place[kThreadQuads];
  set_places<In>(p, place);
  StageCursor<Pass::kAllRowBlocks> cursor(t);
  const auto stage_pixels = [&](int stage) { return s.pixels + stage * kStageParts<Mode> * t.pixels_bytes; };

  const auto start = [&](const Tile& tile, bool is_first) {
    const int stage = cursor.ring.stage;
    wait(&s.head->empty[stage], (cursor.ring.round & 1) ^ 1);
    if (!t.weights_stay || is_first)
      copy_weights<Mode>(p, tile.row_block, cursor.chunk,
                         s.weights + (t.weights_stay ? 0 : stage) * Mode::kParts * t.weights_bytes);
    const ChunkPlace part(t, cursor.chunk);
    const Source from{static_cast<const In*>(p.input.data) + tile.sample * p.input.stride[0],
                      tile.row - t.padding[0] + part.kernel_row * t.dilation[0],
                      tile.col - t.padding[1] - t.lead + part.kernel_col * t.dilation[1], part.block};
    copy_pixels<In>(p, from, place, stage_pixels(stage));
  };

  int exponent;
  int known_rows = -1;
  bool are_wide = false;
  const auto finish = [&](int stage, int chunk, int turn, int row_block) {
    if (chunk == 0) exponent = kMostExponent;
    if (Mode::kScales && row_block != known_rows) {
      known_rows = row_block;
      are_wide = has_wide_rows(p, row_block);
    }
    bool loses = false;
    if (__builtin_expect(are_wide, false))
      loses = loses_digits<In>(
          p, stage_pixels(stage), exponent, p.shares + int64_t(row_block) * kRows * t.in_channels,
          ChunkPlace(t, chunk).block * t.unit_channels, kBarrier, s.head->channel_magnitude);
    const int found =
        lay_out_pixels<Mode>(p, place, stage_pixels(stage), exponent, kBarrier, s.head->magnitude);
    if (found != kNonFinite) exponent = found;
    if (filler() == 0) s.head->exponent[stage] = loses ? kNonFinite : found;
    fence_async_proxy();
    sync_threads(kBarrier, kFillThreads);  // also: all have read head->magnitude
    if (filler() == 0) arrive(&s.head->full[turn][stage]);
  };

  int stage, chunk, turn, row_block;  // of the one that was started last
  for (bool is_first = true;; is_first = false) {
    const bool goes_on = cursor.item < items;
    const Tile tile = cursor.tile(t);
    if (goes_on) start(tile, is_first);
    __pipeline_commit();
    if (!is_first) {
      __pipeline_wait_prior(1);  // all copies but the newest have arrived
      finish(stage, chunk, turn, row_block);
    }
    if (!goes_on) return;
    stage = cursor.ring.stage;
    chunk = cursor.chunk;
    turn = cursor.turn;
    row_block = tile.row_block;
    cursor.next(t);
  }
}

// The operands in a stage, from a column of the tile.
template <class Mode>
__device__ Operands operands_of(const ConvTiling& t, const SharedLayout& s, int stage, int column) {
  return {shared_address(s.weights) + (t.weights_stay ? 0 : stage) * Mode::kParts * t.weights_bytes,
          shared_address(s.pixels) + stage * kStageParts<Mode> * t.pixels_bytes + column * kUnitBytes,
          uint32_t(t.weights_bytes),
          uint32_t(t.pixels_bytes),
          t.step,
          t.half_steps / 2};
}

// The tensor cores cut sums off, which adds up: after so many steps their sums are added up outside, rounded.
constexpr int kMostSumSteps = 8;

template <class SourceOfTiles, class Mode, class Pass>
__device__ void consume_tiles(const ConvProblem& p, const SharedLayout& s, int items) {
  constexpr int kColumns = SourceOfTiles::kColumns;
  const ConvTiling& t = p.tiling;
  const int group = group_of_thread();
  const int half = uniform(half_of_thread());
  uint8_t* staging = s.staging + group * t.staging_bytes;
  Pass pass(p, staging, s.carry + group * t.carry_bytes, group + 1);
  Ring ring(t.stages);
  ThreadRows rows;
  const PixelMask whole = pixel_mask<kColumns>(t, rows.stacked(t), t.tile_rows, t.tile_cols);
  const int steps = t.half_steps / 2;
  const int stages_of_item = (Pass::kAllRowBlocks ? t.row_blocks : 1) * t.sub_tiles * t.chunks;
  uint32_t parities = 0;  // of this group's next round, a bit for each stage
  int turn = 0;
  for (int index = blockIdx.x; index < items; index += gridDim.x, turn ^= 1) {
    if (turn != group) {
      for (int i = 0; i < stages_of_item; ++i) ring.next();
      continue;
    }
    for_each_tile<Pass::kAllRowBlocks>(t, item_at<Pass::kAllRowBlocks>(t, index), [&](const Tile& tile) {
      const bool is_whole = tile.rows == t.tile_rows && tile.cols == t.tile_cols;
      if (tile.row_block != rows.row_block) {
        rows.load(p, tile.row_block);
        pass.set_rows(rows);
      }
      rows.pixels = is_whole ? whole : pixel_mask<kColumns>(t, rows.stacked(t), tile.rows, tile.cols);
      pass.prepare(tile, rows);
      float d[kColumns / 2];
      // wgmma is told that these are zeros all the same: else ptxas serialises it (C7515), and without them
      // it keeps the last tile's values alive.
#pragma unroll
      for (int i = 0; i < kColumns / 2; ++i) d[i] = 0;
      int exponent = kMostExponent;
      bool finite = rows.are_finite;
      const bool folds = Mode::kParts == 2 && t.chunks * steps > kMostSumSteps;
      if (folds) pass.before_staging();
      bool is_first = true;
      for (int chunk = 0; chunk < t.chunks; ++chunk, ring.next()) {
        wait(&s.head->full[group][ring.stage], parities >> ring.stage & 1);
        parities ^= 1u << ring.stage;
        const int found = uniform(s.head->exponent[ring.stage]);
        finite &= found != kNonFinite;
        float rescale =
            chunk > 0 && found < exponent ? power_of_two(max(found - exponent, -kMostExponent)) : 1;
        if (found != kNonFinite) exponent = found;
        if (rescale != 1 && !folds) multiply_all(d, rescale);
        Operands operands = operands_of<Mode>(t, s, ring.stage, half * kColumns);
        if (folds) operands.steps = kMostSumSteps;
        int left = steps;
        do {
          operands.steps = min(operands.steps, left);
          SourceOfTiles::template add<Mode>(d, operands, folds || is_first);
          left -= operands.steps;
          if (folds) fold<kColumns>(d, staging, rescale, is_first);
          rescale = 1;
          is_first = false;
          operands.weights += operands.steps * 2 * kHalfStepBytes;
          operands.offsets += operands.steps;
        } while (left > 0);
        __syncwarp();
        if (threadIdx.x % kWarpThreads == 0) arrive(&s.head->empty[ring.stage]);
      }
      pass.before_staging();
      if (finite) {
        unscale<Mode>(d, rows, exponent);
      } else {
        recompute<Mode, kColumns>(p, tile, rows, d, reinterpret_cast<float*>(staging));
        sync_threads(group + 1, kGroupThreads);  // the pass writes where other threads' values were
      }
      pass.template finish<kColumns>(tile, rows, d);
    });
  }
  pass.end();
}

template <class SourceOfTiles, class Mode, class Pass>
__global__ void __launch_bounds__(kConvThreads, 1)
    conv_kernel(const __grid_constant__ ConvProblem p, int items) {
  if constexpr (SourceOfTiles::kCompiles) {
    extern __shared__ __align__(128) uint8_t shared[];
    const SharedLayout s = shared_layout<Mode>(p.tiling, shared);
    if (threadIdx.x == 0) {
      for (int i = 0; i < p.tiling.stages; ++i) {
        for (int group = 0; group < kConsumers; ++group) init_barrier(&s.head->full[group][i], 1);
        init_barrier(&s.head->empty[i], kGroupThreads / kWarpThreads);
      }
    }
    __syncthreads();
    if (group_of_thread() == kConsumers) {
      fill_stages<Mode, Pass>(p, s, items);
    } else {
      consume_tiles<SourceOfTiles, Mode, Pass>(p, s, items);
    }
  }
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

// The skeleton of every kernel with a conv: one group of warps fills stages of shared memory, two groups take
// turns to multiply them and to finish the tiles, so that loads, products and what a pass does with a tile
// overlap. What becomes of a tile is the pass's: it stores, reduces or measures (conv_passes.cuh).
#pragma once

#include "conv_fill.cuh"
#include "conv_products.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// One sub-tile of an item of work and the channels of one block of rows. All sizes are those inside of the
// map.
struct Tile {
  int64_t sample;
  int part;  // counted in the sample, for each row of the stack `stack` parts
  int row_block;
  int row, col;  // of the output
  int rows, cols;
  int sub_tile;
};

// An item: a band of rows and columns of one sample, with one block of rows, or with all of them.
struct Item {
  int64_t sample;
  int row_block;
  int band, across;
};

template <bool kAllRowBlocks>
__device__ Item item_at(const ConvTiling& t, int index) {
  Item item;
  const auto split = [&](const cuda::Divisor& by) {
    const int quotient = by.divide(index);
    const int rest = index - quotient * by.value;
    index = quotient;
    return rest;
  };
  item.row_block = kAllRowBlocks ? 0 : split(t.by_row_blocks);
  item.across = split(t.by_tiles_across);
  item.band = split(t.by_bands);
  item.sample = index;
  return item;
}

// The same in all threads of a warp, and known to be: wgmma must not stand where threads could part.
__device__ inline int uniform(int x) { return __shfl_sync(~0u, x, 0); }
__device__ inline int group_of_thread() { return uniform(threadIdx.x / kGroupThreads); }

__device__ inline Tile tile_at(const ConvTiling& t, const Item& item, int row_block, int sub_tile) {
  Tile tile;
  tile.sample = item.sample;
  tile.row_block = row_block;
  tile.sub_tile = sub_tile;
  tile.part = (item.band * t.tiles_across + item.across) * t.sub_tiles + sub_tile;
  tile.row = item.band * t.band_rows + sub_tile * t.tile_rows;
  tile.col = item.across * t.tile_cols;
  const int band_end = min(t.out_size[0], (item.band + 1) * t.band_rows);
  // ptxas of CUDA 13.0 joins max(0, min(a, b)) and a later comparison with b, and takes b for the result
  // where it is the larger one. It does not see through a shuffle.
  tile.rows = uniform(max(0, min(t.tile_rows, band_end - tile.row)));
  tile.cols = min(t.tile_cols, t.out_size[1] - tile.col);
  return tile;
}

// Calls visit(tile) for the tiles of an item in the order in which stages are filled and used.
template <bool kAllRowBlocks, class Visit>
__device__ void for_each_tile(const ConvTiling& t, const Item& item, const Visit& visit) {
  const int row_blocks = kAllRowBlocks ? t.row_blocks : 1;
  for (int b = 0; b < row_blocks; ++b) {
    for (int s = 0; s < t.sub_tiles; ++s) visit(tile_at(t, item, kAllRowBlocks ? b : item.row_block, s));
  }
}

// The first of a thread's two rows of a product; the other is 8 further down.
__device__ inline int row_of_thread() {
  return threadIdx.x % kHalfThreads / kWarpThreads * 16 + threadIdx.x % kWarpThreads / 4;
}

// Which half of a tile's columns a thread has.
__device__ inline int half_of_thread() { return threadIdx.x / kHalfThreads % 2; }

// Which of a thread's columns are pixels of the map: of the two columns 8 j + 2 (lane % 4) and the next, bit
// j tells of the first and bit 16 + j of the second. As bits, for what was found out once to fit in a
// register.
template <int kRotation>
struct RotatedMask {
  uint32_t bits = 0;

  __device__ bool first(int j) const { return bits >> (j + kRotation) % 32 & 1; }
  __device__ bool second(int j) const { return bits >> (16 + j + kRotation) % 32 & 1; }
};

struct PixelMask : RotatedMask<0> {
  __device__ int count() const { return __popc(bits); }
  // The same to ask again: the compiler would keep each bit of one mask in between, at twice the
  // instructions. In assembly, for it not to see that they are the same.
  __device__ RotatedMask<1> rotated() const {
    RotatedMask<1> mask;
    asm("shf.l.wrap.b32 %0, %1, %1, 1;" : "=r"(mask.bits) : "r"(bits));
    return mask;
  }
};

template <int kColumns>
__device__ PixelMask pixel_mask(const ConvTiling& t, int stacked, int rows, int cols) {
  static_assert(kColumns <= 128, "two bits for 8 columns");
  PixelMask mask;
  const int slot = t.by_pitch.divide(half_of_thread() * kColumns);
  int row = slot * t.stack + stacked;
  int col = half_of_thread() * kColumns - slot * t.pitch + threadIdx.x % 4 * 2;
#pragma unroll 1
  for (int j = 0; j < kColumns / 8; ++j) {
    mask.bits |= (uint32_t(row < rows && col < cols) | uint32_t(row < rows && col + 1 < cols) << 16) << j;
    col += 8;
    if (col >= t.pitch) {
      col -= t.pitch;
      row += t.stack;
    }
  }
  return mask;
}

// What a thread knows of the two rows of accumulators that it holds, and of their channels.
struct ThreadRows {
  int row_block = -1;
  int first_channel;  // of the output; beyond the last where the row is not used
  int exponent[2];    // of the weights' scale
  float bias[2];      // of the conv
  bool are_finite;    // the weights of the whole block of rows
  PixelMask pixels;   // of the tile

  __device__ int channel(int k) const { return first_channel + 8 * k; }
  // Which of the stacked rows of the output, the same for both.
  __device__ static int stacked(const ConvTiling& t) { return row_of_thread() >> t.stack_shift; }

  __device__ void load(const ConvProblem& p, int block) {
    const ConvTiling& t = p.tiling;
    row_block = block;
    first_channel = row_block * kRows + (row_of_thread() & (t.stack_channels - 1));
    const int* exponents = p.exponents + row_block * kRows;
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      const int m = row_of_thread() + 8 * k;
      exponent[k] = exponents[m];
      bias[k] = p.row_bias[row_block * kRows + m];
    }
    const int lane = threadIdx.x % kWarpThreads;
    are_finite =
        __all_sync(~0u, exponents[lane] != kNonFinite && exponents[lane + kWarpThreads] != kNonFinite);
  }
};

// Calls visit(j, row, col) for each 8 columns of a product, which lie in one row of shared memory: col is the
// first's.
template <int kColumns, class Visit>
__device__ void for_each_block(const ConvTiling& t, const Visit& visit) {
  int row = t.by_pitch.divide(half_of_thread() * kColumns);
  int col = half_of_thread() * kColumns - row * t.pitch;
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j) {
    visit(j, row, col);
    col += 8;
    if (col == t.pitch) {
      col = 0;
      ++row;
    }
  }
}

// The conv at one pixel in plain arithmetic, where infinities and NaN mean what they mean in PyTorch.
template <class In>
__device__ float conv_at(const ConvProblem& p, int64_t sample, int channel, int row, int col) {
  const ConvTiling& t = p.tiling;
  float sum = 0;
  const In* input = static_cast<const In*>(p.input.data) + sample * p.input.stride[0];
  const In* weight = static_cast<const In*>(p.weight.data) + channel * p.weight.stride[0];
  for (int kh = 0; kh < t.kernel[0]; ++kh) {
    for (int kw = 0; kw < t.kernel[1]; ++kw) {
      const int h = row - t.padding[0] + kh * t.dilation[0];
      const int w = col - t.padding[1] + kw * t.dilation[1];
      const bool exists = unsigned(h) < unsigned(t.in_size[0]) && unsigned(w) < unsigned(t.in_size[1]);
      const In* x = input + h * p.input.stride[2] + w * p.input.stride[3];
      const In* k = weight + kh * p.weight.stride[2] + kw * p.weight.stride[3];
      for (int c = 0; c < t.in_channels; ++c) {  // the padding's zeros count: times infinity they are NaN
        const float pixel = exists ? static_cast<float>(x[c * p.input.stride[1]]) : 0.0f;
        sum = fmaf(pixel, static_cast<float>(k[c * p.weight.stride[1]]), sum);
      }
    }
  }
  return sum;
}

// Puts the conv's output in place of a thread's accumulators, by way of memory, as registers have no index.
template <class Mode, int kColumns>
__device__ void recompute(const ConvProblem& p, const Tile& tile, const ThreadRows& rows,
                          float (&d)[kColumns / 2], float* staging) {
  const ConvTiling& t = p.tiling;
  float* own = staging + threadIdx.x % kGroupThreads;
  for (int i = 0; i < kColumns / 2; ++i) {
    const int column = half_of_thread() * kColumns + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2;
    const bool is_first = i / 2 % 2 == 0;
    const int channel = rows.channel(is_first ? 0 : 1);
    const int row = column / t.pitch * t.stack + rows.stacked(t);
    const int col = column % t.pitch;
    if (row < tile.rows && col < tile.cols && channel < t.out_channels) {
      own[i * kGroupThreads] =
          conv_at<typename Mode::In>(p, tile.sample, channel, tile.row + row, tile.col + col) +
          (is_first ? rows.bias[0] : rows.bias[1]);
    }
  }
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) d[i] = own[i * kGroupThreads];
}

template <int kCount>
__device__ void multiply_all(float (&d)[kCount], float factor) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) d[i] *= factor;
}

// From accumulators to the conv's output: undoes the scales, adds the bias.
template <class Mode, int kCount>
__device__ void unscale(float (&d)[kCount], const ThreadRows& rows, int exponent) {
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const int power = Mode::kScales ? -(exponent + rows.exponent[k]) : 0;
    const int within = min(max(power, -kMostExponent), kMostExponent);
    const float factor = power_of_two(within);
    if (power != within) {  // 2^power itself is no float
      const float rest = power_of_two(power - within);
#pragma unroll
      for (int i = 2 * k; i < kCount; i += 4) {
        d[i] *= rest;
        d[i + 1] *= rest;
      }
    }
#pragma unroll
    for (int i = 2 * k; i < kCount; i += 4) {
      d[i] = fmaf(d[i], factor, rows.bias[k]);
      d[i + 1] = fmaf(d[i + 1], factor, rows.bias[k]);
    }
  }
}

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

// Where a role is in the ring of stages. Both roles go through all stages in the same order.
struct Ring {
  int stages;
  int stage = 0;
  uint32_t round = 0;

  __device__ explicit Ring(int count) : stages(count) {}
  __device__ void next() {
    if (++stage == stages) {
      stage = 0;
      ++round;
    }
  }
};

// By a warp: whether a row of the block has weights of very different size.
__device__ inline bool has_wide_rows(const ConvProblem& p, int row_block) {
  const int* is_wide = p.is_wide + row_block * kRows + threadIdx.x % kWarpThreads;
  return __any_sync(~0u, (is_wide[0] | is_wide[kWarpThreads]) != 0);
}

// The stages of a block in the order in which they are filled and used: see for_each_tile.
template <bool kAllRowBlocks>
struct StageCursor {
  int item;
  int row_block = 0, sub_tile = 0, chunk = 0;
  int turn = 0;  // the group that uses it
  Ring ring;

  __device__ explicit StageCursor(const ConvTiling& t) : item(blockIdx.x), ring(t.stages) {}

  __device__ Tile tile(const ConvTiling& t) const {
    const Item of_tile = item_at<kAllRowBlocks>(t, item);
    return tile_at(t, of_tile, kAllRowBlocks ? row_block : of_tile.row_block, sub_tile);
  }

  __device__ void next(const ConvTiling& t) {
    ring.next();
    if (++chunk < t.chunks) return;
    chunk = 0;
    if (++sub_tile < t.sub_tiles) return;
    sub_tile = 0;
    if (kAllRowBlocks && ++row_block < t.row_blocks) return;
    row_block = 0;
    item += gridDim.x;
    turn ^= 1;
  }
};

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
  bool are_wide;
  const auto finish = [&](int stage, int chunk, int turn, int row_block) {
    if (chunk == 0) exponent = kMostExponent;
    if (Mode::kScales && row_block != known_rows) {
      known_rows = row_block;
      are_wide = has_wide_rows(p, row_block);
    }
    bool loses = false;
    if (Mode::kScales && __builtin_expect(are_wide, false))
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

// The tensor cores cut sums off, which adds up: after so many steps their sums are added up outside, rounded.
constexpr int kMostSumSteps = 8;

// Adds what is in memory, brought to the accumulators' scale, to them, and leaves the sums there as well.
template <int kColumns>
__device__ void fold(float (&d)[kColumns / 2], uint8_t* staging, float rescale, bool is_first) {
  float4* sums = reinterpret_cast<float4*>(staging) + threadIdx.x % kGroupThreads;
#pragma unroll
  for (int i = 0; i < kColumns / 8; ++i) {
    float4& sum = sums[i * kGroupThreads];
    float* part = d + 4 * i;
    if (!is_first) {
      part[0] = fmaf(sum.x, rescale, part[0]);
      part[1] = fmaf(sum.y, rescale, part[1]);
      part[2] = fmaf(sum.z, rescale, part[2]);
      part[3] = fmaf(sum.w, rescale, part[3]);
    }
    sum = {part[0], part[1], part[2], part[3]};
  }
}

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
        Operands operands{
            shared_address(s.weights) + (t.weights_stay ? 0 : ring.stage) * Mode::kParts * t.weights_bytes,
            shared_address(s.pixels) + ring.stage * kStageParts<Mode> * t.pixels_bytes +
                half * kColumns * kUnitBytes,
            uint32_t(t.weights_bytes),
            uint32_t(t.pixels_bytes),
            t.step,
            folds ? kMostSumSteps : steps};
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

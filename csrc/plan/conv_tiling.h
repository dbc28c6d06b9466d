// How a conv is cut into products of the tensor cores: what stands in shared memory, and what is one tile.
//
// A product has 64 rows, which are output channels, and columns, which are pixels of the output. The input
// stands in shared memory in units of 16 bytes: 8 channels of one pixel, pixels one after the other along the
// rows of the image, `pitch` units a row. The columns of a product are consecutive units, over the ends of
// rows: so the operand of a filter tap is the same memory, some units further on, and nothing is ever copied
// for a tap. The columns between the end of one row of the tile and the start of the next are waste.
//
// The input is packed that way before, padding and all, in panels: the rows that some tiles one below the
// other read. A tile's rows of a panel are runs of memory.
//
// - Where there are few input channels, a unit holds some taps of each: unit x has pixels x, x + dilation,
// ... .
// - Where the taps of a kernel do not all fit, or the pixels that they read, a chunk has some of them, as
//   if the kernel were a smaller one. All chunks have the same steps, each with the pixels and the weights
//   of its own taps. Taps beyond the kernel's end have zeros for weights.
// - Where there are few output channels, rows of the product are `stack` rows of the output: row m is channel
//   m % stack_channels of output row m / stack_channels. They share the rows of the input that both of them
//   read. The rows in shared memory are sorted by their remainder modulo `stack`, so that a step of `stack`
//   rows is one row there.
#pragma once

#include <cstdint>

#include "core/problem.h"
#include "divisor.h"
#include "sizes.h"

namespace fusedconv {
namespace cuda {

// How many parts a value has as an operand of the tensor cores: see cuda/device/split.cuh.
inline int operand_parts(DType dtype, const Conv& conv) {
  return dtype == DType::kFloat32 && !conv.tf32 ? 2 : 1;
}

// Products of the tensor cores that add up to one of the conv's.
constexpr int terms_of(int parts) { return parts == 2 ? 3 : 1; }

constexpr int kUnitElements = 8;
constexpr int kUnitBytes = 16;
constexpr int kRows = 64;  // of one product
constexpr int kMostTapRows = 16;
constexpr int kGroups = 2;  // of threads, that take turns at tiles
constexpr int kGroupWarps = 8;
constexpr int kPartsOfTile = 2;        // of the statistics, for each row of the stack: halves of the columns
constexpr int kMostStages = 2;         // of a group
constexpr int kPackWarps = 8;          // of a block of threads that packs a panel
constexpr int kPackBatch = 8;          // units of one of its threads on their way at once
constexpr int kPanelUnits = 2048;      // about so many, of pixels, or more where most of them would be halo
constexpr int kSharedHeadBytes = 512;  // barriers, and which tiles are in the stages
constexpr int kKeptTileBytes = 3072;   // of a tile that waits for its sample's statistics, besides its values
constexpr int kMostSteps = 448;        // of a chunk; they are a kernel's parameters, of 4 KB in all
// The tensor cores cut sums off, which adds up: after so many steps their sums are added up outside, rounded,
// where float32 is to be exact.
constexpr int kMostSumSteps = 8;
// Of a row of the staging memory of a tile, beyond its columns: so neighbouring rows do not meet in the same
// banks.
constexpr int kStagingPadding = 8;

#ifdef __CUDACC__
#define FUSEDCONV_DEVICE __host__ __device__
#else
#define FUSEDCONV_DEVICE
#endif

struct ConvTiling {
  // The conv.
  int in_channels, out_channels;
  int in_size[2], out_size[2];
  int kernel[2], padding[2], dilation[2];

  // Products: for each block of 8 channels, each row of taps and each group of taps along it, a unit wide
  // each.
  int unit_channels;  // 8, or 4, 2, 1: then a unit holds unit_taps = 8 / unit_channels taps
  int unit_taps;
  bool reads_vectors;  // a unit's values are whole vectors of the input
  int kernel_rows;     // whose taps a chunk has
  int tap_groups;      // along a row of the kernel, in a chunk
  int tap_rows;
  int tap_row[kMostTapRows];                 // the input row of each row of taps, from the tile's first
  int stack, stack_channels;                 // powers of two
  int stack_shift;                           // of stack_channels
  int phase_rows;                            // rows in shared memory for each remainder modulo stack
  int blocks;                                // of 8 input channels
  int blocks_per_chunk, chunks;              // a chunk is what one stage of the pipeline holds
  Divisor by_chunks_down, by_chunks_across;  // of the kernel, for the same channels
  int half_steps;                            // of one chunk: units along the sum; even
  // Where the pixels of a step of two half steps are: the units before the first one in the low 16 bits, from
  // there to the second one in the high ones. The last half step may have zeros for weights: it may read any.
  uint32_t step[kMostSteps];
  int row_blocks;  // of 64 output channels

  // Tiles. A band is what one item of work covers, in sub-tiles one after the other.
  int pitch;
  int tile_rows;  // rows of the output in one sub-tile
  int tile_cols;
  int band_rows, sub_tiles;
  int bands, tiles_across;  // in a sample
  Divisor by_pool[2];       // the window's sizes
  Divisor by_bands, by_tiles_across, by_row_blocks;

  // Panels, in units of one block of channels. Each has its own scale.
  int panel_bands;
  int panel_phase_rows;  // rows for each remainder modulo stack
  int panel_units;
  int panels_down;  // in a sample
  Divisor by_pitch, by_panel_bands, by_panel_phase_rows;
  Divisor by_blocks_per_chunk, by_panels_down;
  int pack_team_warps;  // that pack a block of channels; a power of two

  // Shared memory, in bytes but for plane.
  int plane;          // units of one block of channels, and what products read beyond
  int pixels_bytes;   // of one part of the pixels of a stage
  int weights_bytes;  // of one part of the weights of a chunk
  bool weights_stay;  // one copy serves all stages
  int stages;         // of one group of threads
  int staging_bytes;  // of one group
  int carry_bytes;
  int shared_bytes;
};

// Of one block of rows.
FUSEDCONV_DEVICE inline int tiles_per_sample(const ConvTiling& t) {
  return t.bands * t.tiles_across * t.sub_tiles;
}

// A tile's parts: one for each row of the stack and half of the columns.
FUSEDCONV_DEVICE inline int parts_per_channel(const ConvTiling& t) {
  return tiles_per_sample(t) * t.stack * kPartsOfTile;
}

// Panels: [N][panels_down][tiles_across].
FUSEDCONV_DEVICE inline int panels_per_sample(const ConvTiling& t) { return t.panels_down * t.tiles_across; }

// Units of a chunk of a panel in one part.
FUSEDCONV_DEVICE inline int64_t chunk_units(const ConvTiling& t) {
  return int64_t(t.blocks_per_chunk) * t.panel_units;
}

// Where the row of the input that is `offset` below a tile's first row stands in shared memory.
FUSEDCONV_DEVICE inline int row_slot(const ConvTiling& t, int offset) {
  return offset % t.stack * t.phase_rows + offset / t.stack;
}

// How statistics of samples that stay in shared memory are shared out: each warp has some of the norm's
// groups, on some lanes each.
struct NormShape {
  double share;  // 1 / the values of a group
  int tiles;     // of a sample
  int groups;    // of the norm
  int channels;  // of a group
  int lanes;     // a power of two
};

inline NormShape norm_shape(const ConvTiling& t, int groups) {
  NormShape shape{0, tiles_per_sample(t), groups, t.out_channels / groups, kWarpLanes};
  shape.share = 1.0 / (double(shape.channels) * t.out_size[0] * t.out_size[1]);
  const int groups_per_warp = (groups + kGroupWarps - 1) / kGroupWarps;
  while (shape.lanes * groups_per_warp > kWarpLanes) shape.lanes /= 2;
  return shape;
}

}  // namespace cuda
}  // namespace fusedconv

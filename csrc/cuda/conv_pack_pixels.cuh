// Packs a conv's input as the right operand of its products: for each panel, chunk and part the units of its
// blocks of channels, row by row. Rows of a panel are sorted by their remainder modulo `stack`; pixels and
// channels that do not exist are zeros. One scale serves a panel: it is found first, from all its values.
#pragma once

#include "conv_modes.cuh"
#include "conv_problem.cuh"
#include "vector_access.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

constexpr int kPackThreads = 512;
constexpr int kPackBlocks = 2;  // of a multiprocessor: one loads while another stores
constexpr int kPackWarps = kPackThreads / kWarpThreads;
constexpr int kPackBatch = 4;  // units of a thread on their way at once

__device__ inline int pack_warp() { return threadIdx.x / kWarpThreads; }

// 8 values: those of one unit of 16 bytes once they are halves.
template <class In>
struct alignas(16) Unit {
  In value[kUnitElements];
};

struct Panel {
  int64_t sample;
  int row, col;  // of its first pixel, in the input; padding comes before 0

  __device__ Panel(const ConvTiling& t, int64_t panel) {
    const int of_rows = t.by_tiles_across.divide(int(panel));
    const int across = int(panel) - of_rows * t.tiles_across;
    const int of_sample = t.by_panels_down.divide(of_rows);
    sample = of_sample;
    row = (of_rows - of_sample * t.panels_down) * t.panel_bands * t.band_rows - t.padding[0];
    col = across * t.tile_cols - t.padding[1];
  }
};

// Where a unit is in its panel. A warp has 32 neighbours of one block of channels.
struct UnitPlace {
  int chunk, block;  // of channels, in the chunk
  int unit;          // in the block's plane

  __device__ UnitPlace(const ConvTiling& t, int warp) {
    const int blocks = t.by_panel_warps.divide(warp);
    unit = (warp - blocks * t.by_panel_warps.value) * kWarpThreads + lane_of_thread();
    chunk = t.by_blocks_per_chunk.divide(blocks);
    block = blocks - chunk * t.blocks_per_chunk;
  }
};

template <class In>
__device__ Unit<In> load_unit(const ConvProblem& p, const Panel& panel, const UnitPlace& place) {
  const ConvTiling& t = p.tiling;
  const ChunkPlace part(t, place.chunk);
  const int slot = t.by_pitch.divide(place.unit);
  const int phase = t.by_panel_phase_rows.divide(slot);
  const int row =
      panel.row + part.kernel_row * t.dilation[0] + (slot - phase * t.panel_phase_rows) * t.stack + phase;
  const int col = panel.col + part.kernel_col * t.dilation[1] + place.unit - slot * t.pitch;
  const int channel = (part.block + place.block) * t.unit_channels;
  const int64_t* stride = p.input.stride;
  const In* at = static_cast<const In*>(p.input.data) + panel.sample * stride[0] + channel * stride[1] +
                 row * stride[2] + col * stride[3];
  const bool is_row = place.unit < t.panel_units && unsigned(row) < unsigned(t.in_size[0]);
  const auto exists = [&](int shift) { return is_row && unsigned(col + shift) < unsigned(t.in_size[1]); };
  Unit<In> unit{};
  if (t.reads_vectors) {
    if (exists(0)) unit = *reinterpret_cast<const Unit<In>*>(at);
  } else if (t.unit_taps == 1) {
    const int channels = exists(0) ? t.in_channels - channel : 0;
#pragma unroll
    for (int i = 0; i < kUnitElements; ++i)
      if (i < channels) unit.value[i] = at[i * stride[1]];
  } else {
#pragma unroll
    for (int i = 0; i < kUnitElements; ++i) {
      const int c = i & (t.unit_channels - 1);
      const int shift = i / t.unit_channels * t.dilation[1];
      if (channel + c < t.in_channels && exists(shift)) unit.value[i] = at[c * stride[1] + shift * stride[3]];
    }
  }
  return unit;
}

// By all threads of a block: calls visit(place, unit) for its units, whole warps at once. Units beyond a
// plane's end are zeros.
template <class In, class Visit>
__device__ void for_each_unit(const ConvProblem& p, const Panel& panel, const Visit& visit) {
  const ConvTiling& t = p.tiling;
  const int warps = t.chunks * t.blocks_per_chunk * t.by_panel_warps.value;
#pragma unroll 1
  for (int warp = pack_warp(); warp < warps; warp += kPackWarps * kPackBatch) {
    Unit<In> unit[kPackBatch];
#pragma unroll
    for (int k = 0; k < kPackBatch; ++k)
      if (warp + k * kPackWarps < warps)
        unit[k] = load_unit<In>(p, panel, UnitPlace(t, warp + k * kPackWarps));
#pragma unroll
    for (int k = 0; k < kPackBatch; ++k)
      if (warp + k * kPackWarps < warps) visit(UnitPlace(t, warp + k * kPackWarps), unit[k]);
  }
}

// Writes a unit's parts, so many units from each other.
template <class Mode>
__device__ void store_unit(const Unit<float>& unit, float scale, uint4* to, int64_t part) {
  uint4 high, low;
  __half2* highs = reinterpret_cast<__half2*>(&high);
  __half2* lows = reinterpret_cast<__half2*>(&low);
#pragma unroll
  for (int i = 0; i < kUnitElements / 2; ++i) {
    const float2 x{unit.value[2 * i], unit.value[2 * i + 1]};
    highs[i] = __float22half2_rn({x.x * scale, x.y * scale});
    const float2 rounded = __half22float2(highs[i]);
    lows[i] = __float22half2_rn({fmaf(x.x, scale, -rounded.x), fmaf(x.y, scale, -rounded.y)});
  }
  *to = high;
  if constexpr (Mode::kParts == 2) to[part] = low;
}

template <class Mode, class In>
__device__ void store_unit(const Unit<In>& unit, float, uint4* to, int64_t) {
  *to = *reinterpret_cast<const uint4*>(&unit);
}

// By a warp: takes a unit's magnitudes into those of its channels, as the bits of floats; NaN wins.
template <class In>
__device__ void add_magnitudes(const ConvProblem& p, const UnitPlace& place, const Unit<In>& unit,
                               unsigned* magnitudes) {
  const ConvTiling& t = p.tiling;
  const int channel = (ChunkPlace(t, place.chunk).block + place.block) * t.unit_channels;
#pragma unroll
  for (int i = 0; i < kUnitElements; ++i) {
    const float x = fabsf(static_cast<float>(unit.value[i]));
    const unsigned most = __reduce_max_sync(~0u, __float_as_uint(x));
    const int c = channel + (i & (t.unit_channels - 1));
    if (lane_of_thread() == i && c < t.in_channels) atomicMax(&magnitudes[c], most);
  }
}

// By a warp: the largest of some magnitudes.
__device__ inline unsigned largest(const unsigned* magnitudes, int count) {
  unsigned most = 0;
  for (int c = lane_of_thread(); c < count; c += kWarpThreads) most = max(most, magnitudes[c]);
  return __reduce_max_sync(~0u, most);
}

// By all threads of a block. magnitudes: shared memory, one for each input channel.
template <class Mode>
__device__ void pack_panel(const ConvProblem& p, int64_t index, unsigned* magnitudes) {
  using In = typename Mode::In;
  const ConvTiling& t = p.tiling;
  const Panel panel(t, index);
  const auto store = [&](const UnitPlace& place, const Unit<In>& unit, float scale) {
    if (place.unit >= t.panel_units) return;
    const int64_t chunk = index * t.chunks + place.chunk;
    uint4* to = p.pixels + chunk * Mode::kParts * chunk_units(t) + place.block * t.panel_units + place.unit;
    store_unit<Mode>(unit, scale, to, chunk_units(t));
  };
  for (int c = threadIdx.x; c < t.in_channels; c += kPackThreads) magnitudes[c] = 0;
  __syncthreads();
  for_each_unit<In>(p, panel, [&](const UnitPlace& place, const Unit<In>& unit) {
    add_magnitudes(p, place, unit, magnitudes);
    if (!Mode::kScales) store(place, unit, 1.0f);
  });
  __syncthreads();
  const unsigned most = largest(magnitudes, t.in_channels);
  const int exponent = Mode::kScales ? scale_exponent(most) : 0;
  if (Mode::kScales) {
    const float scale = power_of_two(exponent);
    for_each_unit<In>(p, panel,
                      [&](const UnitPlace& place, const Unit<In>& unit) { store(place, unit, scale); });
  }
  if (threadIdx.x == 0) p.pixel_exponents[index] = most < kInfinityBits ? exponent : kNonFinite;
  for (int c = threadIdx.x; c < t.in_channels; c += kPackThreads)
    p.magnitudes[index * t.in_channels + c] = magnitudes[c];
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

// Fills a stage: loads the pixels of a chunk, scales and splits them, and lays them out as the right operand.
#pragma once

#include "barriers.cuh"
#include "conv_modes.cuh"
#include "conv_problem.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// The number of a thread among those that fill, which come after the consumers.
__device__ inline int filler() { return int(threadIdx.x) - kConsumers * kGroupThreads; }

// Which pixels: those that a tile's products with one chunk read.
struct Source {
  const void* sample;  // of the input
  int row, col;        // of the tile's first pixel, padding counted
  int block;           // first block of channels
};

// 8 values: those of one unit of 16 bytes once they are halves.
template <class In>
struct Unit {
  In value[kUnitElements];
};

// Where a unit is in the input: bytes from the sample's start, which fit in 32 bits, and what of it exists.
struct UnitPlace {
  uint32_t offset;
  int col;      // of the first pixel
  int channel;  // the first
  bool is_row;  // its row is one of the image's
};

template <class In>
__device__ UnitPlace unit_place(const ConvProblem& p, const Source& from, int index) {
  const ConvTiling& t = p.tiling;
  const int block = t.by_plane_units.divide(index);
  index -= block * int(t.by_plane_units.value);
  const int slot = t.by_pitch.divide(index);
  const int phase = t.by_phase_rows.divide(slot);
  const int row = from.row + (slot - phase * t.phase_rows) * t.stack + phase;
  UnitPlace place;
  place.col = from.col + index - slot * t.pitch;
  place.channel = (from.block + block) * t.unit_channels;
  place.is_row = unsigned(row) < unsigned(t.in_size[0]);
  place.offset =
      (uint32_t(row) * uint32_t(p.input.stride[2]) + uint32_t(place.col) * uint32_t(p.input.stride[3]) +
       uint32_t(place.channel) * uint32_t(p.input.stride[1])) *
      sizeof(In);
  return place;
}

// Loads units; zeros where there is no pixel or no channel. No branch stands between the loads of a batch:
// all of them are under way at the same time.
template <class In>
__device__ void load_units(const ConvProblem& p, const Source& from, int units,
                           Unit<In> (&unit)[kThreadUnits]) {
  const ConvTiling& t = p.tiling;
  const uint8_t* sample = static_cast<const uint8_t*>(from.sample);
  const uint32_t channel_bytes = uint32_t(p.input.stride[1]) * sizeof(In);
  const auto is_col = [&](int col) { return unsigned(col) < unsigned(t.in_size[1]); };
  const auto for_each = [&](const auto& load) {
#pragma unroll
    for (int k = 0; k < kThreadUnits; ++k) {
      const int index = filler() + k * kGroupThreads;
      UnitPlace place = unit_place<In>(p, from, index);
      place.is_row &= index < units;
      load(unit[k], place);
    }
  };
  if (t.reads_vectors) {
    for_each([&](Unit<In>& u, const UnitPlace& place) {
      uint4* to = reinterpret_cast<uint4*>(&u);
      const uint4* at = reinterpret_cast<const uint4*>(sample + place.offset);
      const bool exists = place.is_row && is_col(place.col);
#pragma unroll
      for (int i = 0; i < int(sizeof(u) / sizeof(uint4)); ++i) to[i] = exists ? __ldg(at + i) : uint4{};
    });
  } else if (t.unit_taps == 1) {
    for_each([&](Unit<In>& u, const UnitPlace& place) {
      const bool is_pixel = place.is_row && is_col(place.col);
#pragma unroll
      for (int i = 0; i < kUnitElements; ++i) {
        const bool exists = is_pixel && place.channel + i < t.in_channels;
        u.value[i] =
            exists ? __ldg(reinterpret_cast<const In*>(sample + i * channel_bytes + place.offset)) : In(0.0f);
      }
    });
  } else {
    const uint32_t tap_bytes = uint32_t(t.dilation[1]) * uint32_t(p.input.stride[3]) * sizeof(In);
    for_each([&](Unit<In>& u, const UnitPlace& place) {
#pragma unroll
      for (int i = 0; i < kUnitElements; ++i) {
        const int c = i & (t.unit_channels - 1);
        const int tap = i / t.unit_channels;
        const bool exists = place.is_row && is_col(place.col + tap * t.dilation[1]) && c < t.in_channels;
        const uint8_t* at = sample + c * channel_bytes + tap * tap_bytes;
        u.value[i] = exists ? __ldg(reinterpret_cast<const In*>(at + place.offset)) : In(0.0f);
      }
    });
  }
}

// The larger magnitude; NaN wins.
__device__ inline float larger_magnitude(float most, float x) {
  float y;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(y) : "f"(most), "f"(fabsf(x)));
  return y;
}

template <class In>
__device__ float largest_magnitude(const Unit<In> (&unit)[kThreadUnits]) {
  float most = 0;
#pragma unroll
  for (int k = 0; k < kThreadUnits; ++k) {
#pragma unroll
    for (int i = 0; i < kUnitElements; ++i)
      most = larger_magnitude(most, static_cast<float>(unit[k].value[i]));
  }
  return most;
}

// The same of all threads that fill, as the bits of a float.
__device__ inline unsigned largest_of_all(float most, int barrier, unsigned* of_warp) {
  unsigned bits = __reduce_max_sync(~0u, __float_as_uint(most) & 0x7fffffff);
  if (threadIdx.x % kWarpThreads == 0) of_warp[filler() / kWarpThreads] = bits;
  sync_threads(barrier, kGroupThreads);
#pragma unroll
  for (int i = 0; i < kGroupThreads / kWarpThreads; ++i) bits = max(bits, of_warp[i]);
  return bits;
}

// Writes a unit's parts, `part` bytes from each other.
template <class Mode>
__device__ void store_unit(const Unit<float>& unit, float scale, uint8_t* to, int part) {
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
  *reinterpret_cast<uint4*>(to) = high;
  if constexpr (Mode::kParts == 2) *reinterpret_cast<uint4*>(to + part) = low;
}

template <class Mode, class In>
__device__ void store_unit(const Unit<In>& unit, float, uint8_t* to, int) {
  *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(&unit);
}

// By all threads that fill. Gives the exponent of the pixels' scale, or kNonFinite. Of the
// chunks of a tile the scale only ever falls: so sums of earlier chunks, brought to it, do not overflow.
// before_store() is called when the stage is about to be written; the first loads do not wait for it.
template <class Mode, class BeforeStore>
__device__ int fill_pixels(const ConvProblem& p, const Source& from, uint8_t* to, int exponent, int barrier,
                           unsigned* of_warp, const BeforeStore& before_store) {
  const ConvTiling& t = p.tiling;
  const int plane_units = int(t.by_plane_units.value);
  const int units = t.blocks_per_chunk * plane_units;
  Unit<typename Mode::In> unit[kThreadUnits];
  load_units(p, from, units, unit);
  const unsigned most = largest_of_all(largest_magnitude(unit), barrier, of_warp);
  if (Mode::kScales) exponent = min(exponent, scale_exponent(most));
  const float scale = power_of_two(exponent);
  before_store();
#pragma unroll
  for (int k = 0; k < kThreadUnits; ++k) {
    const int index = filler() + k * kGroupThreads;
    if (index < units) {
      const int place = index + t.by_plane_units.divide(index) * (t.plane - plane_units);
      store_unit<Mode>(unit[k], scale, to + place * kUnitBytes, t.pixels_bytes);
    }
  }
  return most < kInfinityBits ? exponent : kNonFinite;
}

// By all threads that fill: the weights of a chunk, as they were packed.
template <class Mode>
__device__ void fill_weights(const ConvProblem& p, int row_block, int chunk, uint8_t* to) {
  const ConvTiling& t = p.tiling;
  const int units = Mode::kParts * t.weights_bytes / kUnitBytes;
  const uint4* from = p.packed + (row_block * t.chunks + chunk) * int64_t(units);
#pragma unroll 4
  for (int i = filler(); i < units; i += kGroupThreads) reinterpret_cast<uint4*>(to)[i] = __ldg(from + i);
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

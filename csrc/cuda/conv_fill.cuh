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

// A thread has every kFillThreads-th unit of a stage, in batches that are loaded together.
constexpr int kBatchUnits = 4;

// Where a unit is, from a tile's first pixel and channel.
struct UnitPlace {
  int block, row, col;

  __device__ UnitPlace(const ConvTiling& t, int index) {
    block = t.by_plane_units.divide(index);
    index -= block * t.plane_units;
    const int slot = t.by_pitch.divide(index);
    const int phase = t.by_phase_rows.divide(slot);
    row = (slot - phase * t.phase_rows) * t.stack + phase;
    col = index - slot * t.pitch;
  }
};

template <class In>
__device__ uint32_t byte_offset(const ConvProblem& p, int channel, int row, int col) {
  return (uint32_t(channel) * uint32_t(p.input.stride[1]) + uint32_t(row) * uint32_t(p.input.stride[2]) +
          uint32_t(col) * uint32_t(p.input.stride[3])) *
         sizeof(In);
}

// Calls visit(index, i) for each of a thread's units in a batch that starts with unit `first`: the i-th of
// the batch.
template <class Visit>
__device__ void for_each_unit(int first, int units, const Visit& visit) {
#pragma unroll
  for (int i = 0; i < kBatchUnits; ++i) {
    const int index = first + i * kFillThreads;
    if (index < units) visit(index, i);
  }
}

// Calls visit(first) for each batch.
template <class Visit>
__device__ void for_each_batch(int units, const Visit& visit) {
#pragma unroll 1
  for (int first = filler(); first < units; first += kBatchUnits * kFillThreads) visit(first);
}

// Loads a batch; zeros where there is no pixel. Where there is no channel the weights are zeros, and
// any channel's value will do.
template <class In>
__device__ void load_batch(const ConvProblem& p, const Source& from, int first, int units,
                           Unit<In> (&unit)[kBatchUnits]) {
  const ConvTiling& t = p.tiling;
  const int first_channel = from.block * t.unit_channels;
  const uint8_t* sample = static_cast<const uint8_t*>(from.sample);
  const auto for_each = [&](const auto& load) {
    for_each_unit(first, units, [&](int index, int i) {
      const UnitPlace place(t, index);
      const int row = from.row + place.row;
      const int col = from.col + place.col;
      const bool is_row = unsigned(row) < unsigned(t.in_size[0]);
      load(unit[i], byte_offset<In>(p, first_channel + place.block * kUnitElements, row, col), is_row, col);
    });
  };
  const auto is_col = [&](int col) { return unsigned(col) < unsigned(t.in_size[1]); };
  const uint32_t channel_bytes = uint32_t(p.input.stride[1]) * sizeof(In);
  if (t.reads_vectors) {
    for_each([&](Unit<In>& u, uint32_t offset, bool is_row, int col) {
      uint4* to = reinterpret_cast<uint4*>(&u);
      const bool exists = is_row && is_col(col);
#pragma unroll
      for (int i = 0; i < int(sizeof(u) / sizeof(uint4)); ++i)
        to[i] = exists ? __ldg(reinterpret_cast<const uint4*>(sample + offset) + i) : uint4{};
    });
  } else if (t.unit_taps == 1) {
    const int last = t.blocks_per_chunk > 1 ? kUnitElements - 1 : t.in_channels - 1 - first_channel;
    for_each([&](Unit<In>& u, uint32_t offset, bool is_row, int col) {
      const bool exists = is_row && is_col(col);
#pragma unroll
      for (int i = 0; i < kUnitElements; ++i) {
        const uint8_t* channel = sample + min(i, last) * channel_bytes;
        u.value[i] = exists ? __ldg(reinterpret_cast<const In*>(channel + offset)) : In(0.0f);
      }
    });
  } else {
    const uint32_t tap_bytes = uint32_t(t.dilation[1]) * uint32_t(p.input.stride[3]) * sizeof(In);
    for_each([&](Unit<In>& u, uint32_t offset, bool is_row, int col) {
#pragma unroll
      for (int i = 0; i < kUnitElements; ++i) {
        const int tap = i / t.unit_channels;
        const uint8_t* channel = sample + min(i & (t.unit_channels - 1), t.in_channels - 1) * channel_bytes;
        const bool exists = is_row && is_col(col + tap * t.dilation[1]);
        u.value[i] =
            exists ? __ldg(reinterpret_cast<const In*>(channel + (offset + tap * tap_bytes))) : In(0.0f);
      }
    });
  }
}

// The larger magnitude; NaN wins.
template <class In>
__device__ float larger_magnitude(float most, const Unit<In>& unit) {
#pragma unroll
  for (int i = 0; i < kUnitElements; ++i) most = maximum(most, fabsf(static_cast<float>(unit.value[i])));
  return most;
}

// The same of all threads that fill, as the bits of a float.
__device__ inline unsigned largest_of_all(float most, int barrier, unsigned* of_warp) {
  unsigned bits = __reduce_max_sync(~0u, __float_as_uint(most) & 0x7fffffff);
  if (threadIdx.x % kWarpThreads == 0) of_warp[filler() / kWarpThreads] = bits;
  sync_threads(barrier, kFillThreads);
#pragma unroll
  for (int i = 0; i < kFillThreads / kWarpThreads; ++i) bits = max(bits, of_warp[i]);
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
  using In = typename Mode::In;
  const ConvTiling& t = p.tiling;
  const int units = t.blocks_per_chunk * t.plane_units;
  Unit<In> unit[kBatchUnits];
  float magnitude = 0;
  for_each_batch(units, [&](int first) {
    load_batch(p, from, first, units, unit);
    for_each_unit(first, units, [&](int, int i) { magnitude = larger_magnitude(magnitude, unit[i]); });
  });
  const unsigned most = largest_of_all(magnitude, barrier, of_warp);
  if (Mode::kScales) exponent = min(exponent, scale_exponent(most));
  const float scale = power_of_two(exponent);
  before_store();
  const bool kept = units <= kBatchUnits * kFillThreads;
  for_each_batch(units, [&](int first) {
    if (!kept) load_batch(p, from, first, units, unit);  // a cache has them
    for_each_unit(first, units, [&](int index, int i) {
      const int place = index + t.by_plane_units.divide(index) * (t.plane - t.plane_units);
      store_unit<Mode>(unit[i], scale, to + place * kUnitBytes, t.pixels_bytes);
    });
  });
  return most < kInfinityBits ? exponent : kNonFinite;
}

// By all threads that fill: the weights of a chunk, as they were packed.
template <class Mode>
__device__ void fill_weights(const ConvProblem& p, int row_block, int chunk, uint8_t* to) {
  const ConvTiling& t = p.tiling;
  const int units = Mode::kParts * t.weights_bytes / kUnitBytes;
  const uint4* from = p.packed + (row_block * t.chunks + chunk) * int64_t(units);
#pragma unroll 4
  for (int i = filler(); i < units; i += kFillThreads) reinterpret_cast<uint4*>(to)[i] = __ldg(from + i);
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

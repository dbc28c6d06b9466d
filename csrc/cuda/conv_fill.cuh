// Fills a stage: loads the pixels of a chunk, scales and splits them, and lays them out as the right operand.
#pragma once

#include "barriers.cuh"
#include "conv_modes.cuh"
#include "conv_problem.cuh"
#include "vector_access.cuh"

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

// Four units of neighbouring pixels, which are loaded together.
constexpr int kQuadUnits = 4;
template <class In>
struct Quad {
  Unit<In> unit[kQuadUnits];
};

// A thread has every kFillThreads-th quad of a stage, in registers: a stage is read once, though its scale
// must be known before anything is written.
constexpr int kThreadQuads = cuda::kMostChunkUnits / (kQuadUnits * kFillThreads);

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

// Calls visit(unit, k) for each quad of a thread, its k-th: unit is the first one's number in the stage.
template <class Visit>
__device__ void for_each_quad(int units, const Visit& visit) {
#pragma unroll
  for (int k = 0; k < kThreadQuads; ++k) {
    const int unit = (filler() + k * kFillThreads) * kQuadUnits;
    if (unit < units) visit(unit, k);
  }
}

// Values from global memory, or zeros.
template <int kCount, class In>
__device__ Pack<In, kCount> load_if(bool exist, const uint8_t* from) {
  return exist ? load_pack<kCount>(reinterpret_cast<const In*>(from)) : Pack<In, kCount>{};
}

// Loads a quad, whose first unit is at a place; zeros where there is no pixel. Where there is no channel the
// weights are zeros, and any channel's value will do.
template <class In>
__device__ void load_quad(const ConvProblem& p, const Source& from, const UnitPlace& place, Quad<In>& quad) {
  const ConvTiling& t = p.tiling;
  const int row = from.row + place.row;
  const int col = from.col + place.col;
  const bool is_row = unsigned(row) < unsigned(t.in_size[0]);
  const auto exists = [&](int col) { return is_row && unsigned(col) < unsigned(t.in_size[1]); };
  const int first_channel = from.block * t.unit_channels;
  const int64_t channel_bytes = p.input.stride[1] * int(sizeof(In));
  const int col_bytes = int(p.input.stride[3]) * int(sizeof(In));
  // The quad's first pixel may not exist, and others may.
  const uint8_t* at = static_cast<const uint8_t*>(from.sample) +
                      (first_channel + place.block * kUnitElements) * channel_bytes +
                      row * p.input.stride[2] * int(sizeof(In)) + int64_t(col) * col_bytes;
  const int last = t.blocks_per_chunk > 1 ? kUnitElements - 1 : t.in_channels - 1 - first_channel;
  if (t.reads_rows) {
    const bool exist = exists(col);  // all or none
#pragma unroll
    for (int i = 0; i < kUnitElements; ++i) {
      const auto pixels = load_if<kQuadUnits, In>(exist, at + min(i, last) * channel_bytes);
#pragma unroll
      for (int k = 0; k < kQuadUnits; ++k) quad.unit[k].value[i] = pixels.element[k];
    }
  } else if (t.reads_vectors) {
    constexpr int kWidth = kVectorBytes / int(sizeof(In));
#pragma unroll
    for (int i = 0; i < kQuadUnits * kUnitElements; i += kWidth) {
      const int k = i / kUnitElements;
      const auto values =
          load_if<kWidth, In>(exists(col + k), at + k * col_bytes + i % kUnitElements * sizeof(In));
#pragma unroll
      for (int j = 0; j < kWidth; ++j) quad.unit[k].value[i % kUnitElements + j] = values.element[j];
    }
  } else {
#pragma unroll
    for (int i = 0; i < kUnitElements; ++i) {
      const int shift = i / t.unit_channels * t.dilation[1];  // of the value's tap
      const int channel = min(i & (t.unit_channels - 1), last);
      const uint8_t* first = at + channel * channel_bytes + shift * col_bytes;
#pragma unroll
      for (int k = 0; k < kQuadUnits; ++k) {
        quad.unit[k].value[i] = load_if<1, In>(exists(col + k + shift), first + k * col_bytes).element[0];
      }
    }
  }
}

// The largest magnitude of many values; NaN wins. Of types of two bytes it keeps two at once, as bits: these
// are in the order of the magnitudes.
template <class In>
class Magnitude {
 public:
  __device__ void add(const Unit<In>& unit) {
    const uint32_t* words = reinterpret_cast<const uint32_t*>(&unit);
#pragma unroll
    for (int i = 0; i < int(sizeof(unit) / sizeof(*words)); ++i)
      most_ = __vmaxu2(most_, words[i] & 0x7fff7fff);
  }
  __device__ float value() const {
    const uint32_t most = max(most_ & 0xffff, most_ >> 16);
    return static_cast<float>(reinterpret_cast<const In&>(most));
  }

 private:
  uint32_t most_ = 0;
};

template <>
class Magnitude<float> {
 public:
  __device__ void add(const Unit<float>& unit) {
#pragma unroll
    for (const float& x : unit.value) most_ = maximum(most_, fabsf(x));
  }
  __device__ float value() const { return most_; }

 private:
  float most_ = 0;
};

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
  Quad<In> quad[kThreadQuads];
  for_each_quad(units, [&](int unit, int k) { load_quad(p, from, UnitPlace(t, unit), quad[k]); });
  Magnitude<In> magnitude;
  for_each_quad(units, [&](int, int k) {
#pragma unroll
    for (const Unit<In>& of_pixel : quad[k].unit) magnitude.add(of_pixel);
  });
  const unsigned most = largest_of_all(magnitude.value(), barrier, of_warp);
  if (Mode::kScales) exponent = min(exponent, scale_exponent(most));
  const float scale = power_of_two(exponent);
  before_store();
  for_each_quad(units, [&](int unit, int k) {
    uint8_t* at = to + (unit + t.by_plane_units.divide(unit) * (t.plane - t.plane_units)) * kUnitBytes;
#pragma unroll
    for (int i = 0; i < kQuadUnits; ++i)
      store_unit<Mode>(quad[k].unit[i], scale, at + i * kUnitBytes, t.pixels_bytes);
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

// Fills a stage: copies the pixels of a chunk into it as they are, then scales and splits them, and lays them
// out as the right operand in the same place. The copies of the next stage are on their way meanwhile.
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

// Four units of neighbouring pixels. They are copied as 8 pieces: of one channel's four pixels each, or,
// where channels are neighbours, of four of one pixel's channels.
constexpr int kQuadUnits = 4;
constexpr int kQuadPieces = 8;

template <class In>
struct Quad {
  Unit<In> unit[kQuadUnits];
};

template <class In>
using PixelPiece = Pack<In, 4>;

// A thread has every kFillThreads-th quad of a stage, all in registers when their scale is found.
constexpr int kThreadQuads = cuda::kMostChunkUnits / (kQuadUnits * kFillThreads);

// Where a quad is: the same in every stage, so found once, and kept in few registers.
struct QuadPlace {
  int number;       // in the stage
  uint32_t pixel;   // its first one's row and column, from the tile's, 16 bits each; or kNone
  uint32_t input;   // bytes from the tile's first pixel and channel
  uint32_t pixels;  // bytes from the start of the stage's pixels

  static constexpr uint32_t kNone = ~0u;

  __device__ bool exists() const { return pixel != kNone; }
  __device__ int row() const { return pixel >> 16; }
  __device__ int col() const { return pixel & 0xffff; }

  template <class In>
  __device__ void set(const ConvProblem& p, int quad) {
    const ConvTiling& t = p.tiling;
    number = quad;
    const int unit = quad * kQuadUnits;
    const int block = t.by_plane_units.divide(unit);
    const int of_plane = unit - block * t.plane_units;
    const int slot = t.by_pitch.divide(of_plane);
    const int phase = t.by_phase_rows.divide(slot);
    const int row = (slot - phase * t.phase_rows) * t.stack + phase;
    const int col = of_plane - slot * t.pitch;
    pixel = unit < t.blocks_per_chunk * t.plane_units ? uint32_t(row << 16 | col) : kNone;
    const int64_t* stride = p.input.stride;
    input = uint32_t(block * kUnitElements * stride[1] + row * stride[2] + col * stride[3]) * sizeof(In);
    pixels = (block * t.plane + of_plane) * kUnitBytes;
  }
};

template <class In>
__device__ void set_places(const ConvProblem& p, QuadPlace (&place)[kThreadQuads]) {
#pragma unroll
  for (int k = 0; k < kThreadQuads; ++k) place[k].template set<In>(p, filler() + k * kFillThreads);
}

// Piece i of a quad in a stage that is not laid out yet: neighbouring threads' are neighbours.
template <class In>
__device__ PixelPiece<In>* piece_of(const ConvTiling& t, uint8_t* stage, int quad, int i) {
  const int quads = t.blocks_per_chunk * t.plane_units / kQuadUnits;
  return reinterpret_cast<PixelPiece<In>*>(stage) + quad + i * quads;
}

// Starts to copy a quad to a stage; zeros where there is no pixel. Where there is no channel the weights are
// zeros, and any channel's value will do.
template <class In>
__device__ void copy_quad(const ConvProblem& p, const Source& from, const QuadPlace& place, uint8_t* stage) {
  const ConvTiling& t = p.tiling;
  const int64_t* stride = p.input.stride;
  const bool is_row = unsigned(from.row + place.row()) < unsigned(t.in_size[0]);
  const int col = from.col + place.col();
  const auto exists = [&](int col) { return is_row && unsigned(col) < unsigned(t.in_size[1]); };
  const int first_channel = from.block * t.unit_channels;
  const int64_t channel_bytes = stride[1] * int(sizeof(In));
  const int col_bytes = int(stride[3]) * int(sizeof(In));
  // The tile's first pixel need not exist.
  const uint8_t* tile = static_cast<const uint8_t*>(from.sample) + first_channel * channel_bytes +
                        (from.row * stride[2] + from.col * stride[3]) * int(sizeof(In));
  const uint8_t* at = tile + place.input;
  const int last = t.blocks_per_chunk > 1 ? kUnitElements - 1 : t.in_channels - 1 - first_channel;
  const auto piece = [&](int i) { return piece_of<In>(t, stage, place.number, i)->element; };
  if (t.reads_rows) {
    const bool exist = exists(col);  // all or none
#pragma unroll
    for (int i = 0; i < kQuadPieces; ++i) {
      copy_pack_if<4>(exist, piece(i), reinterpret_cast<const In*>(at));
      if (i < last) at += channel_bytes;
    }
  } else if (t.reads_vectors) {
#pragma unroll
    for (int i = 0; i < kQuadPieces; ++i) {
      const int k = i / 2;
      copy_pack_if<4>(exists(col + k), piece(i), reinterpret_cast<const In*>(at + k * col_bytes) + i % 2 * 4);
    }
  } else {
    int shift = 0;  // of the value's tap
    int channel = 0;
    const uint8_t* first = at;
#pragma unroll
    for (int i = 0; i < kQuadPieces; ++i) {
#pragma unroll
      for (int k = 0; k < kQuadUnits; ++k)
        copy_pack_if<1>(exists(col + k + shift), piece(i) + k,
                        reinterpret_cast<const In*>(first + k * col_bytes));
      if (++channel == t.unit_channels) {
        channel = 0;
        shift += t.dilation[1];
        first = at + shift * col_bytes;
      } else if (channel <= last) {
        first += channel_bytes;
      }
    }
  }
}

// A quad that was copied.
template <class In>
__device__ void read_quad(const ConvTiling& t, uint8_t* stage, const QuadPlace& place, Quad<In>& quad) {
  const auto for_each_value = [&](const auto& visit) {
#pragma unroll
    for (int i = 0; i < kQuadPieces; ++i) {
      const PixelPiece<In> piece = *piece_of<In>(t, stage, place.number, i);
#pragma unroll
      for (int k = 0; k < 4; ++k) visit(i, k, piece.element[k]);
    }
  };
  if (t.reads_vectors) {
    for_each_value([&](int i, int k, In x) { quad.unit[i / 2].value[i % 2 * 4 + k] = x; });
  } else {
    for_each_value([&](int i, int k, In x) { quad.unit[k].value[i] = x; });
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
    for (int i = 0; i < kUnitElements; ++i) {
      float& most = most_[i % kChains];
      most = maximum(most, fabsf(unit.value[i]));
    }
  }
  __device__ float value() const { return maximum(maximum(most_[0], most_[1]), maximum(most_[2], most_[3])); }

 private:
  static constexpr int kChains = 4;  // side by side
  float most_[kChains]{};
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

// By all threads that fill: starts the copies of a chunk's pixels.
template <class In>
__device__ void copy_pixels(const ConvProblem& p, const Source& from, const QuadPlace (&place)[kThreadQuads],
                            uint8_t* stage) {
#pragma unroll
  for (const QuadPlace& at : place)
    if (at.exists()) copy_quad<In>(p, from, at, stage);
}

// By all threads that fill, once a thread's copies have arrived: whether the largest products of some row are
// much smaller than the largest pixel times the largest weight, so that the tile's one scale would cost their
// pixels digits. That takes weights of very different size between channels, which is rare, and pixels to
// match. exponent: of the scale of the chunks before; shares: of a block of rows.
template <class In>
__device__ bool loses_digits(const ConvProblem& p, uint8_t* stage, int exponent, const int* shares,
                             int first_channel, int barrier, unsigned* of_channel) {
  const ConvTiling& t = p.tiling;
  const int channels = min(t.blocks_per_chunk * t.unit_channels, t.in_channels - first_channel);
  // No loop is unrolled: what is rare must not take registers and instruction cache from what is not.
#pragma unroll 1
  for (int c = filler(); c < channels; c += kFillThreads) of_channel[c] = 0;
  sync_threads(barrier, kFillThreads);
#pragma unroll 1
  for (int quad = filler(); quad < t.blocks_per_chunk * t.plane_units / kQuadUnits; quad += kFillThreads) {
    const int of_block = t.by_plane_units.divide(quad * kQuadUnits) * t.unit_channels;
#pragma unroll 1
    for (int i = 0; i < kQuadPieces * 4; ++i) {
      const In x = piece_of<In>(t, stage, quad, i / 4)->element[i % 4];
      const int c = of_block + ((t.reads_vectors ? i % kUnitElements : i / 4) & (t.unit_channels - 1));
      if (c < channels) atomicMax(&of_channel[c], __float_as_uint(fabsf(float(x))));
    }
  }
  sync_threads(barrier, kFillThreads);
  const int row = filler() % kRows;
  const int* share = shares + row * t.in_channels + first_channel;
  int largest = kNoShare;
#pragma unroll 1
  for (int c = 0; c < channels; ++c) {
    exponent = min(exponent, scale_exponent(of_channel[c]));
    if (of_channel[c] != 0 && share[c] != kNoShare)
      largest = max(largest, exponent_of(of_channel[c]) + share[c]);
  }
  const bool loses = largest != kNoShare && largest + exponent < kScaledExponent - kExactBits;
  return any_of_threads(barrier, kFillThreads, loses);
}

// By all threads that fill, once a thread's copies have arrived. Gives the exponent of the pixels' scale, or
// kNonFinite. Of the chunks of a tile the scale only ever falls: so sums of earlier chunks, brought to it, do
// not overflow.
template <class Mode>
__device__ int lay_out_pixels(const ConvProblem& p, const QuadPlace (&place)[kThreadQuads], uint8_t* stage,
                              int exponent, int barrier, unsigned* of_warp) {
  using In = typename Mode::In;
  Quad<In> quad[kThreadQuads];
  const auto for_each_quad = [&](const auto& visit) {
#pragma unroll
    for (int k = 0; k < kThreadQuads; ++k)
      if (place[k].exists()) visit(quad[k], place[k]);
  };
  for_each_quad([&](Quad<In>& q, const QuadPlace& at) { read_quad(p.tiling, stage, at, q); });
  Magnitude<In> magnitude;
  for_each_quad([&](const Quad<In>& q, const QuadPlace&) {
#pragma unroll
    for (const Unit<In>& unit : q.unit) magnitude.add(unit);
  });
  const unsigned most = largest_of_all(magnitude.value(), barrier, of_warp);
  if (Mode::kScales) exponent = min(exponent, scale_exponent(most));
  const float scale = power_of_two(exponent);
  // All threads have read what they had copied: it may be overwritten.
  for_each_quad([&](const Quad<In>& q, const QuadPlace& at) {
#pragma unroll
    for (int i = 0; i < kQuadUnits; ++i)
      store_unit<Mode>(q.unit[i], scale, stage + at.pixels + i * kUnitBytes, p.tiling.pixels_bytes);
  });
  return most < kInfinityBits ? exponent : kNonFinite;
}

// By all threads that fill: starts to copy the weights of a chunk, as they were packed.
template <class Mode>
__device__ void copy_weights(const ConvProblem& p, int row_block, int chunk, uint8_t* to) {
  const ConvTiling& t = p.tiling;
  const int units = Mode::kParts * t.weights_bytes / kUnitBytes;
  const uint4* from = p.packed + (row_block * t.chunks + chunk) * int64_t(units);
  for (int i = filler(); i < units; i += kFillThreads)
    __pipeline_memcpy_async(to + i * kUnitBytes, from + i, kUnitBytes);
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

// Packs a conv's input as the right operand of its products: for each panel, chunk and part the units of its
// blocks of channels, row by row. Rows of a panel are sorted by their remainder modulo `stack`; pixels and
// channels that do not exist are zeros. One scale serves a panel: it is found first, from all its values.
#pragma once

#include "cuda/device/elements.cuh"
#include "pack_unit.cuh"
#include "problem.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

using cuda::kPackBatch;
using cuda::kPackWarps;
constexpr int kPackThreads = kPackWarps * kWarpThreads;
constexpr int kPackBlocks = 2;  // of a multiprocessor: one loads while another stores

__device__ inline int pack_warp() { return threadIdx.x / kWarpThreads; }

// One block of channels of a panel.
template <class Held>
struct ChannelPlane {
  const Held* first;  // its first pixel's first channel, which need not exist
  int row, col;       // of that pixel, in the input; padding comes before 0
  int channel;        // the first one
  int64_t units;      // of it, from the start of all that is packed, in the first part

  __device__ ChannelPlane(const ConvProblem& p, int panel, int plane) {
    const ConvTiling& t = p.tiling;
    const int of_rows = t.by_tiles_across.divide(panel);
    const int sample = t.by_panels_down.divide(of_rows);
    const int chunk = t.by_blocks_per_chunk.divide(plane);
    const int block = plane - chunk * t.blocks_per_chunk;
    const ChunkPlace part(t, chunk);
    row = (of_rows - sample * t.panels_down) * t.panel_bands * t.band_rows - t.padding[0] +
          part.kernel_row * t.dilation[0];
    col = (panel - of_rows * t.tiles_across) * t.tile_cols - t.padding[1] + part.kernel_col * t.dilation[1];
    channel = (part.block + block) * t.unit_channels;
    const int64_t* stride = p.input.stride;
    first = static_cast<const Held*>(p.input.data) + sample * stride[0] + channel * stride[1] +
            row * stride[2] + col * stride[3];
    units = (int64_t(panel) * t.chunks + chunk) * chunk_units(t) * p.operand_parts + block * t.panel_units;
  }
};

template <class Held>
__device__ void load_unit(const ConvProblem& p, const ChannelPlane<Held>& plane, int index,
                          Unit<Held>& unit) {
  const ConvTiling& t = p.tiling;
  const int slot = t.by_pitch.divide(index);
  const int phase = t.by_panel_phase_rows.divide(slot);
  const int row = (slot - phase * t.panel_phase_rows) * t.stack + phase;
  const int col = index - slot * t.pitch;
  const int64_t col_stride = p.input.stride[3];
  const int64_t channel_stride = p.input.stride[1];
  const Held* at = plane.first + row * p.input.stride[2] + col * col_stride;
  const bool is_row = index < t.panel_units && unsigned(plane.row + row) < unsigned(t.in_size[0]);
  const auto exists = [&](int shift) {
    return is_row && unsigned(plane.col + col + shift) < unsigned(t.in_size[1]);
  };
  const bool exists_here = exists(0);
  unit = {};
  if (t.reads_vectors) {
    if (exists_here) unit.set(at);
  } else if (t.unit_taps == 1 && plane.channel + kUnitElements <= t.in_channels) {
    if (exists_here) {
#pragma unroll
      for (int i = 0; i < kUnitElements; ++i) unit.set(i, at + i * channel_stride);
    }
  } else {
#pragma unroll 1
    for (int tap = 0; tap < t.unit_taps; ++tap) {
      const int shift = tap * t.dilation[1];
#pragma unroll
      for (int i = 0; i < kUnitElements; ++i) {
        const int c = i & (t.unit_channels - 1);
        if (i / t.unit_channels == tap && plane.channel + c < t.in_channels && exists(shift))
          unit.set(i, at + c * channel_stride + shift * col_stride);
      }
    }
  }
}

// How a block's warps share the planes of a panel: teams have one each, warps of a team every so many units.
struct PackTeam {
  int warps, warp;  // of the team
  int teams, team;

  __device__ explicit PackTeam(const ConvTiling& t) {
    warps = t.pack_team_warps;
    teams = kPackWarps / warps;
    warp = pack_warp() & (warps - 1);
    team = pack_warp() / warps;
  }
};

// The largest magnitudes of a thread's units, for each of their values; NaN wins.
template <class Held>
struct UnitMagnitudes {
  float most[kUnitElements]{};

  __device__ void add(const Unit<Held>& unit) {
#pragma unroll
    for (int i = 0; i < kUnitElements; ++i) most[i] = maximum(most[i], fabsf(unit.value[i]));
  }
  __device__ float value(int i, DType) const { return most[i]; }
};

// Of values of two bytes: their bits are in the order of the magnitudes.
template <>
struct UnitMagnitudes<uint16_t> {
  uint32_t most[kUnitElements / 2]{};

  __device__ void add(const Unit<uint16_t>& unit) {
#pragma unroll
    for (int i = 0; i < kUnitElements / 2; ++i) most[i] = __vmaxu2(most[i], unit.word[i] & 0x7fff7fff);
  }
  __device__ float value(int i, DType dtype) const {
    return from_half_bits(uint16_t(most[i / 2] >> (i % 2 * 16)), dtype == DType::kBFloat16);
  }
};

// By a warp: into those of the channels.
template <class Held>
__device__ void write_magnitudes(const UnitMagnitudes<Held>& of_units, const ConvProblem& p, int channel,
                                 unsigned* magnitudes) {
  const ConvTiling& t = p.tiling;
#pragma unroll
  for (int i = 0; i < kUnitElements; ++i) {
    const unsigned of_warp = largest_of_warp(magnitude_of(of_units.value(i, p.input.dtype)));
    const int c = channel + (i & (t.unit_channels - 1));
    if (lane_of_thread() == i && c < t.in_channels) atomicMax(&magnitudes[c], of_warp);
  }
}

// By a warp: the largest of some magnitudes.
__device__ inline unsigned largest(const unsigned* magnitudes, int count) {
  unsigned most = 0;
  for (int c = lane_of_thread(); c < count; c += kWarpThreads) most = max(most, magnitudes[c]);
  return largest_of_warp(most);
}

// By all threads of a block: its panel. magnitudes: shared memory, one for each input channel.
template <class Held>
class PanelPacker {
  static constexpr bool kScales = std::is_same_v<Held, float>;

 public:
  __device__ PanelPacker(const ConvProblem& problem, int panel, unsigned* magnitudes)
      : p_(problem), panel_(panel), magnitudes_(magnitudes), team_(problem.tiling) {}

  __device__ void pack() {
    const ConvTiling& t = p_.tiling;
    for (int c = threadIdx.x; c < t.in_channels; c += kPackThreads) magnitudes_[c] = 0;
    __syncthreads();
    // What fits is in registers still when it is stored. One loop for both, for the loads to be compiled
    // once.
    const bool fits = t.chunks * t.blocks_per_chunk <= team_.teams &&
                      t.panel_units <= team_.warps * kWarpThreads * kPackBatch;
    Unit<Held> unit[kPackBatch];
    unsigned most = 0;
#pragma unroll 1
    for (int pass = 0; pass < (kScales ? 2 : 1); ++pass) {
      const bool measures = pass == 0;
      const float scale = power_of_two(kScales && !measures ? scale_exponent(most) : 0);
      for_each_plane([&](const ChannelPlane<Held>& plane) {
        UnitMagnitudes<Held> magnitudes;
        for_each_batch([&](int index) {
          if (measures || !fits) load(plane, index, unit);
          if (measures) {
#pragma unroll
            for (const Unit<Held>& u : unit) magnitudes.add(u);
          }
          if (!measures || !kScales) store(plane, index, unit, scale);
        });
        if (measures) write_magnitudes(magnitudes, p_, plane.channel, magnitudes_);
      });
      __syncthreads();
      most = largest(magnitudes_, t.in_channels);
    }
    const int exponent = kScales ? scale_exponent(most) : 0;
    if (threadIdx.x == 0) p_.pixel_exponents[panel_] = is_finite(most) ? exponent : kNonFinite;
    for (int c = threadIdx.x; c < t.in_channels; c += kPackThreads)
      p_.magnitudes[int64_t(panel_) * t.in_channels + c] = magnitudes_[c];
  }

 private:
  template <class Visit>
  __device__ void for_each_plane(const Visit& visit) const {
    const int planes = p_.tiling.chunks * p_.tiling.blocks_per_chunk;
#pragma unroll 1
    for (int plane = team_.team; plane < planes; plane += team_.teams)
      visit(ChannelPlane<Held>(p_, panel_, plane));
  }

  // Calls visit(index of the thread's first unit); the next ones are batch_step() further on.
  template <class Visit>
  __device__ void for_each_batch(const Visit& visit) const {
#pragma unroll 1
    for (int index = team_.warp * kWarpThreads + lane_of_thread();
         index - lane_of_thread() < p_.tiling.panel_units; index += kPackBatch * batch_step())
      visit(index);
  }

  __device__ int batch_step() const { return team_.warps * kWarpThreads; }

  __device__ void load(const ChannelPlane<Held>& plane, int index, Unit<Held> (&unit)[kPackBatch]) const {
#pragma unroll
    for (int k = 0; k < kPackBatch; ++k) load_unit(p_, plane, index + k * batch_step(), unit[k]);
#pragma unroll
    for (Unit<Held>& u : unit) u.settle(p_.tiling.reads_vectors);
  }

  __device__ void store(const ChannelPlane<Held>& plane, int index, const Unit<Held> (&unit)[kPackBatch],
                        float scale) const {
#pragma unroll
    for (int k = 0; k < kPackBatch; ++k, index += batch_step())
      if (index < p_.tiling.panel_units)
        store_unit(unit[k], scale, p_.operand_parts, p_.pixels + plane.units + index, chunk_units(p_.tiling));
  }

  const ConvProblem& p_;
  const int panel_;
  unsigned* const magnitudes_;
  const PackTeam team_;
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

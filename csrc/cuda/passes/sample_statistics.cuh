// Statistics of samples that stay in shared memory, whose tiles are spread over all blocks. Tiles tell each
// other their moments by parts in memory, which the packing kernel has cleared: a part that has pixels is
// there.
#pragma once

#include "core/scalar_math.h"
#include "cuda/conv/tiles.cuh"
#include "cuda/device/statistics.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// One access of 16 bytes, at the L2, where all blocks meet: whoever reads a part sees all of it, or nothing.
__device__ inline void write_part(TilePart* to, const TilePart& part) {
  uint64_t words[2];
  memcpy(words, &part, sizeof(part));
  asm volatile("{ .reg .b128 x; mov.b128 x, {%1, %2}; st.relaxed.gpu.global.b128 [%0], x; }" ::"l"(to),
               "l"(words[0]), "l"(words[1])
               : "memory");
}

__device__ inline TilePart read_part(const TilePart* from) {
  uint64_t words[2];
  asm volatile("{ .reg .b128 x; ld.relaxed.gpu.global.b128 x, [%2]; mov.b128 {%0, %1}, x; }"
               : "=l"(words[0]), "=l"(words[1])
               : "l"(from)
               : "memory");
  TilePart part;
  memcpy(&part, words, sizeof(part));
  return part;
}

// What a group of threads has in its memory besides a tile's values.
struct KeptTile {
  float2 affine[kRows];  // the norm's weight and bias
  Norm<float> norms[kRows];
  Part<float> parts[2 * kRows];  // [channel][stacked row][half of the columns]
};

static_assert(sizeof(KeptTile) <= cuda::kKeptTileBytes);

// A thread's part in the statistics of samples whose tiles are spread over all blocks: its warp writes a
// tile's moments in a group of the norm, and adds up those of all tiles of a sample, always in the same
// order.
class SampleStatistics {
 public:
  __device__ SampleStatistics(const ConvProblem& p, KeptTile& kept, int64_t sample)
      : p_(p), kept_(kept), shape_(p.norm_shape) {
    const int warp = threadIdx.x % kGroupThreads / kWarpThreads;
    const int group = lane_of_thread() / shape_.lanes * kGroupWarps + warp;
    exists_ = group < shape_.groups;
    first_channel_ = exists_ ? group * shape_.channels : 0;
    parts_ = p.tile_parts + (sample * shape_.groups + (exists_ ? group : 0)) * shape_.tiles;
  }

  // Of a tile, from the kept parts, which all threads of the group wrote.
  __device__ void write(const Tile& tile) const {
    const int parts_per_channel = 2 * p_.tiling.stack;
    const Part<float>* const parts = kept_.parts + first_channel_ * parts_per_channel;
    const float shift = parts[0].mean;  // every tile has pixels of its first row in the first half
    // In double, for that part may be far from the others, in deviations.
    Sums<double> sums{};
    for (int i = lane(); i < shape_.channels * parts_per_channel; i += shape_.lanes)
      sums.add(parts[i], shift);
    __syncwarp();
    sums.add_lanes(shape_.lanes);
    const float count = float(shape_.channels * tile.rows * tile.cols);
    const double offset = sums.sum / count;
    const float m2 = maximum(0.0f, float(sums.squares - sums.sum * offset));
    if (exists_ && lane() == 0) write_part(parts_ + tile.part, TilePart{{count, float(shift + offset), m2}});
  }

  // Once all tiles of the sample have been measured. No lane goes a way of its own.
  __device__ void find_norms(const Tile& tile) const {
    constexpr int kBatch = 4;  // loads on their way at a time
    const int last = shape_.tiles - 1;
    // It is likely to come last: until then one line is asked for, not all.
    while (!__all_sync(~0u, is_there(read_part(parts_ + last)))) {
    }
    Sums<double> sums{};
    float shift;
    for (int first = 0; first <= last; first += kBatch * shape_.lanes) {
      TilePart part[kBatch];
      bool are_there;
      do {
        are_there = true;
#pragma unroll
        for (int k = 0; k < kBatch; ++k) {
          part[k] = read_part(parts_ + min(first + k * shape_.lanes + lane(), last));
          are_there &= is_there(part[k]);
        }
      } while (!__all_sync(~0u, are_there));
      if (first == 0) shift = __shfl_sync(~0u, part[0].mean, lane_of_thread() & -shape_.lanes);
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        if (first + k * shape_.lanes + lane() > last) part[k].count = part[k].m2 = 0;
        sums.add(part[k], shift);
      }
    }
    sums.add_lanes(shape_.lanes);
    const GroupStatistics found = statistics_of(sums, shift, shape_.share, p_.arguments.eps);
    if (p_.statistics != nullptr && exists_ && tile.part == 0 && lane() == 0)
      p_.statistics[tile.sample * shape_.groups + first_channel_ / shape_.channels] = found;
    for (int i = lane(); exists_ && i < shape_.channels; i += shape_.lanes) {
      const int c = first_channel_ + i;
      const float2 affine = kept_.affine[c];
      kept_.norms[c] = norm_of<float>(found, affine.x, affine.y);
    }
  }

 private:
  // No tile has a part without pixels.
  __device__ static bool is_there(const TilePart& part) { return part.count != 0; }
  __device__ int lane() const { return lane_of_thread() & (shape_.lanes - 1); }

  const ConvProblem& p_;
  KeptTile& kept_;
  const NormShape& shape_;
  // Of this thread's group of the norm; where there is none it does the first one's work, and writes nothing.
  bool exists_;
  int first_channel_;
  TilePart* parts_;
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

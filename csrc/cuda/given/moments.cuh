// The channels' norms of a block's piece, from the moments of its threads' shares and of all pieces of a
// group: those of a cluster of blocks.
#pragma once

#include "piece.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// In shared memory: of each group of a piece, the parts that its threads took (part_moments.cuh).
template <class T>
__device__ Deviations<T>* part_moments(const GivenPlan& plan) {
  return reinterpret_cast<Deviations<T>*>(shared_memory + plan.parts_at);
}

// Of so many neighbouring lanes. The loop is not unrolled: a small piece waits longest for its instructions.
__device__ inline void add_lanes(Sums<double>& sums, int lanes) {
#pragma unroll 1
  for (int distance = 1; distance < lanes; distance *= 2)
    sums.add({__shfl_xor_sync(~0u, sums.sum, distance), __shfl_xor_sync(~0u, sums.squares, distance)});
}

template <class T>
class GroupMoments {
 public:
  __device__ explicit GroupMoments(const GivenPiece<T>& block)
      : block_(block), work_(block.work), plan_(block.plan), piece_(block.piece) {}

  // Calls give(group, lane, lanes, its moments) in so many lanes for each group of the piece. Nor are the
  // loops from here on unrolled.
  template <class Give>
  __device__ void sum_groups(const Give& give) const {
    const int lanes = plan_.group_lanes;
    const int lane = threadIdx.x & (lanes - 1);
    const int groups_at_once = blockDim.x >> log2_of(lanes);
    for (int first = 0; first < plan_.groups; first += groups_at_once) {
      const int g = first + (threadIdx.x >> log2_of(lanes));
      const bool exists = has_group(g);
      const Deviations<T>* const of_group = part_moments<T>(plan_) + g * plan_.parts_per_group;
      const double shift = exists ? of_group[0].shift : 0;  // the first part is never empty
      Sums<double> sums{};
#pragma unroll 1
      for (int i = lane; exists && i < plan_.parts_per_group; i += lanes) sums.add(of_group[i], shift);
      add_lanes(sums, lanes);
      const double n = double(group_channels()) * piece_.pixels;
      if (exists) give(g, lane, lanes, {n, shift, sums.sum, sums.squares});
    }
  }

  // To every block of the cluster.
  __device__ void share() const {
    sum_groups([&](int g, int lane, int lanes, const Deviations<double>& d) {
#pragma unroll 1
      for (int block = lane; block < int(plan_.slices); block += lanes)
        *of_block(moments() + piece_.slice * plan_.groups + g, block) = d;
    });
  }

  // To memory.
  __device__ void write() const {
    const int64_t parts_per_group = plan_.units_per_group * plan_.slices;
    const int64_t first_group = piece_.channel / (work_.shape.channels / work_.shape.groups);
    const int64_t part = piece_.unit_of_group * plan_.slices + piece_.slice;
    sum_groups([&](int g, int lane, int, const Deviations<double>& d) {
      if (lane > 0) return;
      const double offset = d.sum / d.count;
      const double m2 = d.squares - d.sum * offset;
      work_.parts[(piece_.sample * work_.shape.groups + first_group + g) * parts_per_group + part] = {
          d.count, d.shift + offset, m2 < 0 ? 0 : m2};  // keeps NaN
    });
  }

  __device__ void set_norms() const {
    for (int c = threadIdx.x; c < piece_.channels; c += blockDim.x) {
      const Deviations<double>* const of_group = moments() + plan_.by_group_channels.divide(c);
      const double shift = of_group->shift;
      Sums<double> sums{};
#pragma unroll 1
      for (int block = 0; block < int(plan_.slices); ++block) sums.add(of_group[block * plan_.groups], shift);
      const GroupStatistics found = statistics_of(sums, shift, work_.share_of_value, work_.arguments.eps);
      if (work_.statistics != nullptr && piece_.slice == 0) write_statistics(c, found);
      block_.set_parameters(
          c, norm_of<T>(found, block_.parameter(kNormWeight, c), block_.parameter(kNormBias, c)));
    }
  }

  // ---- the cluster; a block alone needs none. By intrinsics: the header that wraps them takes three seconds
  // to compile ----

  __device__ void arrive_at_cluster() const {
#if __CUDA_ARCH__ >= 900
    if (is_cluster()) __cluster_barrier_arrive_relaxed();
#endif
  }

  __device__ void wait_for_cluster() const {
#if __CUDA_ARCH__ >= 900
    if (is_cluster()) __cluster_barrier_wait();
#endif
  }

  __device__ void sync_cluster() const {
#if __CUDA_ARCH__ >= 900
    if (is_cluster()) {
      __cluster_barrier_arrive();
      return __cluster_barrier_wait();
    }
#endif
    __syncthreads();
  }

 private:
  // By the thread that has the group's first channel.
  __device__ void write_statistics(int c, const GroupStatistics& found) const {
    const int group = plan_.by_group_channels.divide(c);
    if (c != group * plan_.group_channels) return;
    const int64_t first = piece_.channel / plan_.group_channels;
    work_.statistics[piece_.sample * work_.shape.groups + first + group] = found;
  }

  __device__ Deviations<double>* moments() const {
    return reinterpret_cast<Deviations<double>*>(shared_memory + plan_.moments_at);
  }

  __device__ int group_channels() const {
    return plan_.units_per_group > 1 ? piece_.channels : plan_.group_channels;  // or groups are cut
  }
  __device__ bool has_group(int g) const {
    return g < plan_.groups && g * plan_.group_channels < piece_.channels;
  }

#if __CUDA_ARCH__ >= 900
  __device__ bool is_cluster() const { return plan_.slices > 1; }
#else
  __device__ static constexpr bool is_cluster() { return false; }
#endif

  // The same place in the shared memory of another block.
  template <class Value>
  __device__ Value* of_block(Value* value, [[maybe_unused]] int block) const {
#if __CUDA_ARCH__ >= 900
    if (is_cluster()) return static_cast<Value*>(__cluster_map_shared_rank(value, block));
#endif
    return value;
  }

  const GivenPiece<T>& block_;
  const GivenWork<T>& work_;
  const GivenPlan& plan_;
  const Piece& piece_;
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

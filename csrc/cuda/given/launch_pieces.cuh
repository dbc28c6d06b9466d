// Launches of a given v's pieces, and what becomes of their moments.
#pragma once

#include "core/checked.h"
#include "cuda/device/launch.cuh"
#include "kernel.cuh"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

template <class Chain, class T>
cuda::GivenTraits given_traits(DType dtype) {
  const int bytes = int(bytes_of(dtype));
  return {Chain::kNeedsStatistics, Chain::Reduce::kReducesChannels, bytes, int(sizeof(T)),
          kVectorBytes / bytes};
}

// All but the output and the memory for statistics.
template <class T>
GivenWork<T> given_work(const GivenShape& shape, const GivenPlan& plan, const Tensor& input,
                        const Arguments& arguments) {
  GivenWork<T> work{};
  work.shape = shape;
  work.plan = plan;
  work.input = {input.data, input.dtype};
  work.arguments = arguments;
  work.pieces = (Checked(shape.samples) * plan.units * plan.slices).value();
  work.share_of_value = 1 / (double(shape.channels / shape.groups) * double(shape.pixels));
  return work;
}

template <class T>
Checked parts_per_group(const GivenWork<T>& work) {
  return Checked(work.plan.units_per_group) * work.plan.slices;
}

template <class T>
Checked count_of_parts(const GivenWork<T>& work) {
  return Checked(work.shape.samples) * work.shape.groups * parts_per_group(work);
}

// Each block has a piece; those of a group are a cluster, where the step is the whole of the chain.
template <class Chain, class T>
cudaError_t launch_pieces(GivenWork<T>& work, GivenStep step, bool overlaps, cudaStream_t stream) {
  work.step = step;
  const int cluster = step == GivenStep::kWhole ? int(work.plan.slices) : 1;
  LaunchShape shape{grid_of(work.pieces, cluster), work.plan.threads, int(work.plan.shared_bytes), overlaps};
  if (step == GivenStep::kFinish) shape.shared_bytes = work.plan.tile_at;  // the parameters only
  shape.cluster = cluster;
  return launch_kernel(given_chain<Chain, T>, shape, stream, work);
}

// Each channel's norm, by way of work.parts. overlaps: within; the first kernel never does.
template <class Chain, class T>
cudaError_t launch_norms(GivenWork<T>& work, Norm<T>* norms, bool overlaps, cudaStream_t stream) {
  if (const cudaError_t status = launch_pieces<Chain, T>(work, GivenStep::kMoments, false, stream))
    return status;
  return launch_group_statistics(work.parts, parts_per_group(work).value(), work.shape.samples,
                                 work.shape.channels, work.shape.pixels, work.arguments,
                                 {norms, work.statistics}, overlaps, stream);
}

// Onto the current device, with all of its shared memory.
template <class Chain, class T>
cudaError_t load_pieces() {
  int device = 0;
  int shared_bytes = 0;
  if (const cudaError_t status = cudaGetDevice(&device)) return status;
  if (const cudaError_t status =
          cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device))
    return status;
  if constexpr (Chain::kNeedsStatistics) {
    if (const cudaError_t status = load_statistics()) return status;
  }
  return cudaFuncSetAttribute(given_chain<Chain, T>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                              shared_bytes);
}

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

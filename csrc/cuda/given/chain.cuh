// A chain on a given tensor, v = input: checks, plans and queues it. Reads from top to bottom.
#pragma once

#include "copy.h"
#include "core/chains.h"
#include "cuda/device/launch.cuh"
#include "direct.cuh"
#include "kernel.cuh"
#include "plan/workspace.h"

namespace fusedconv {
inline namespace FUSEDCONV_TARGET {

// Without gaps, in one of both layouts. The stride of a dimension of size 1 says nothing.
inline bool is_dense(const Tensor& tensor, bool channels_last) {
  constexpr int kOrders[2][4] = {{3, 2, 1, 0}, {1, 3, 2, 0}};
  int64_t stride = 1;
  for (const int d : kOrders[channels_last]) {
    if (tensor.size[d] != 1 && tensor.stride[d] != stride) return false;
    stride *= tensor.size[d];
  }
  return true;
}

inline Tensor dense_tensor(const Tensor& like, void* data, bool channels_last) {
  const auto [n, c, h, w] = like.size;
  if (channels_last) return {data, like.dtype, {n, c, h, w}, {c * h * w, 1, w * c, c}};
  return {data, like.dtype, {n, c, h, w}, {c * h * w, h * w, w, 1}};
}

// One call on elements of a kind. From a null workspace it only tells how much it needs, of tensors whose
// memory is aligned for wide loads or is not: only a launch knows their pointers.
template <class Chain, class Kind>
class GivenRun {
 public:
  using T = Compute<Kind>;

  GivenRun(const Problem& problem, void* memory, const cuda::Card& card, bool may_be_wide = true)
      : problem_(problem),
        workspace_(memory),
        input_(problem.input),
        output_(problem.output),
        overlaps_kernels_(card.overlaps_kernels),
        may_be_wide_(may_be_wide) {
    const bool channels_last = !fits(false) && is_dense(input_, true);
    if (!is_dense(input_, channels_last)) input_ = dense_tensor(input_, take_memory(input_), channels_last);
    if (kStores && !is_dense(output_, channels_last))
      output_ = dense_tensor(output_, take_memory(output_), channels_last);
    plan(channels_last, card);
  }

  size_t workspace_bytes() const { return workspace_.bytes(); }

  cudaError_t launch(cudaStream_t stream) const {
    if (input_.data != problem_.input.data) {
      if (const cudaError_t status = launch_copy(problem_.input, input_, stream)) return status;
    }
    if (const cudaError_t status = launch_chain(stream)) return status;
    if (output_.data == problem_.output.data) return cudaSuccess;
    return launch_copy(output_, problem_.output, stream);
  }

  static cudaError_t load(const cuda::Card& card) {
    if constexpr (!kStores) {
      if (const cudaError_t status = load_kernel(direct_kernel<Chain, Kind>())) return status;
    }
    if constexpr (kNeedsStatistics) {
      if (const cudaError_t status = load_statistics()) return status;
    }
    if constexpr (kStores || kNeedsStatistics)
      return load_kernel(given_chain<Chain, Kind>, card.shared_bytes);
    return cudaSuccess;
  }

 private:
  static constexpr bool kStores = Chain::Reduce::kStores;
  static constexpr bool kNeedsStatistics = Chain::kNeedsStatistics;

  // Whether both tensors have the layout, or the output need not: where it is smaller, any strides will do.
  bool fits(bool channels_last) const {
    return is_dense(input_, channels_last) && (!kStores || is_dense(output_, channels_last));
  }

  void* take_memory(const Tensor& tensor) {
    return workspace_.take<char>(Checked(element_count(tensor)) * bytes_of(tensor.dtype));
  }

  void plan(bool channels_last, const cuda::Card& card) {
    const int bytes = int(bytes_of(input_.dtype));
    const cuda::GivenTraits traits{kNeedsStatistics, Chain::Reduce::kReducesChannels, bytes, int(sizeof(T)),
                                   kVectorBytes / bytes};
    const GivenShape shape = shape_of_work(channels_last);
    const int widest = widest_load(traits, shape);
    work_.shape = shape;
    work_.plan = plan_given(traits, shape, may_be_wide_ && may_start(widest) ? widest : 1, card);
    work_.input = {input_.data, input_.dtype};
    work_.output = output_;
    work_.arguments = problem_.arguments;
    work_.statistics = problem_.statistics;
    work_.share_of_value = 1 / (double(shape.channels / shape.groups) * double(shape.pixels));
    work_.pieces = (Checked(shape.samples) * work_.plan.units * work_.plan.slices).value();
    if (kNeedsStatistics && !work_.plan.resident) {
      work_.parts = workspace_.take<Part<double>>(Checked(shape.samples) * shape.groups * parts_per_group());
      norms_ = workspace_.take<Norm<T>>(Checked(shape.samples) * shape.channels);
    }
  }

  Checked parts_per_group() const { return Checked(work_.plan.units_per_group) * work_.plan.slices; }

  // Whether loads and stores of so many elements may start where the tensors do. The elements divide a row:
  // so it is the same for every sample.
  bool may_start(int elements) const {
    return is_aligned(input_.data, elements * bytes_of(input_.dtype)) &&
           (!kStores ||
            is_aligned(output_.data, std::min<size_t>(elements * bytes_of(output_.dtype), kVectorBytes)));
  }

  GivenShape shape_of_work(bool channels_last) const {
    const int64_t* size = input_.size;
    const int64_t pixels = size[2] * size[3];
    if (kIsFlat<Chain>) return {1, 1, element_count(input_), false, 1, 1};
    if (!kNeedsStatistics && kStores && channels_last)  // samples are nothing of their own
      return {1, size[1], size[0] * pixels, true, 1, 1};
    const int64_t groups = kNeedsStatistics ? problem_.arguments.num_groups : 1;
    const int64_t window_pixels = Chain::Reduce::kPools ? problem_.arguments.pool[0] * size[3] : 1;
    return {size[0], size[1], pixels, channels_last, groups, window_pixels};
  }

  cudaError_t launch_chain(cudaStream_t stream) const {
    GivenWork<T> work = work_;
    const bool overlaps = kNeedsStatistics && overlaps_kernels_;
    if constexpr (kNeedsStatistics) {
      if (work.plan.resident) return launch_pieces(work, GivenStep::kWhole, false, stream);
      if (const cudaError_t status = launch_norms(overlaps, stream)) return status;
      work.norms = norms_;
    }
    if constexpr (kStores) {
      return launch_pieces(work, GivenStep::kFinish, overlaps, stream);
    } else {
      return launch_direct<Chain, Kind>(work, overlaps, stream);
    }
  }

  // Each block has a piece; those of a group are a cluster, where the step is the whole of the chain.
  static cudaError_t launch_pieces(GivenWork<T> work, GivenStep step, bool overlaps, cudaStream_t stream) {
    work.step = step;
    const int cluster = step == GivenStep::kWhole ? int(work.plan.slices) : 1;
    LaunchShape shape{grid_of(work.pieces, cluster), work.plan.threads, int(work.plan.shared_bytes),
                      overlaps};
    if (step == GivenStep::kFinish) shape.shared_bytes = work.plan.tile_at;  // the parameters only
    shape.cluster = cluster;
    return launch_kernel(given_chain<Chain, Kind>, shape, stream, work);
  }

  // Each channel's norm, by way of parts. overlaps: within; the first kernel never does.
  cudaError_t launch_norms(bool overlaps, cudaStream_t stream) const {
    const GivenShape& shape = work_.shape;
    if (const cudaError_t status = launch_pieces(work_, GivenStep::kMoments, false, stream)) return status;
    return launch_group_statistics(work_.parts, parts_per_group().value(), shape.samples, shape.channels,
                                   shape.pixels, work_.arguments, {norms_, work_.statistics}, overlaps,
                                   stream);
  }

  const Problem& problem_;
  Workspace workspace_;
  Tensor input_;   // dense
  Tensor output_;  // dense where all values are stored
  GivenWork<T> work_{};
  Norm<T>* norms_ = nullptr;
  const bool overlaps_kernels_;
  const bool may_be_wide_;
};

// Calls visit with a value of the kind of the input's elements; the output has the input's dtype or, if that
// is of half precision, float32.
template <class Visit>
cudaError_t visit_kind(const Problem& problem, const Visit& visit) {
  const DType in = problem.input.dtype;
  const DType out = problem.output.dtype;
  if (in != out && (out != DType::kFloat32 || bytes_of(in) != 2)) return cudaErrorInvalidValue;
  if (in == DType::kFloat64) return visit(double{});
  return in == DType::kFloat32 ? visit(float{}) : visit(HalfPrecision{});
}

template <class Chain>
struct GivenChain {
  // Bytes of memory that launch wants.
  static size_t workspace(const Problem& problem, const cuda::Card& card) {
    if (problem.conv != nullptr || element_count(problem.input) == 0) return 0;
    size_t bytes = 0;
    visit_kind(problem, [&](auto kind) {
      for (const bool may_be_wide : {true, false}) {
        const GivenRun<Chain, decltype(kind)> run(problem, nullptr, card, may_be_wide);
        bytes = std::max(bytes, run.workspace_bytes());
      }
      return cudaSuccess;
    });
    return bytes;
  }

  static cudaError_t launch(const Problem& problem, void* workspace, const cuda::Card& card,
                            cudaStream_t stream) {
    if (problem.conv != nullptr) return cudaErrorInvalidValue;
    if (element_count(problem.input) == 0) return cudaSuccess;
    return visit_kind(problem, [&](auto kind) {
      return GivenRun<Chain, decltype(kind)>(problem, workspace, card).launch(stream);
    });
  }

  // Loads every kernel onto the current device and lets it use all of its shared memory.
  static cudaError_t load(const cuda::Card& card) {
    if (const cudaError_t status = load_copy()) return status;
    if (const cudaError_t status = GivenRun<Chain, float>::load(card)) return status;
    if (const cudaError_t status = GivenRun<Chain, HalfPrecision>::load(card)) return status;
    return GivenRun<Chain, double>::load(card);
  }
};

}  // namespace FUSEDCONV_TARGET
}  // namespace fusedconv

// The module fusedconv._C: what Python passes becomes the structs of core/problem.h. See
// python/fusedconv/_C.pyi.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "core/problem.h"
#include "cpu/dispatch.h"
#include "cuda/entry.h"

namespace py = pybind11;

namespace fusedconv {
namespace {

using Pair = std::array<int64_t, 2>;
using Quad = std::array<int64_t, 4>;
using PyTensor = std::pair<std::string, int>;               // name, dtype
using PyForm = std::tuple<int, Quad, Quad>;                 // dtype, sizes, strides
using PyConv = std::tuple<PyForm, Pair, Pair, Pair, bool>;  // weight, stride, padding, dilation, tf32
// num_groups, eps, pool_size, clamp_min, clamp_max
using PyNumbers = std::tuple<int64_t, double, Pair, double, double>;

void* pointer(uintptr_t address) { return reinterpret_cast<void*>(address); }

Tensor to_tensor(const PyForm& from) {
  const auto& [dtype, size, stride] = from;
  return {nullptr,
          static_cast<DType>(dtype),
          {size[0], size[1], size[2], size[3]},
          {stride[0], stride[1], stride[2], stride[3]}};
}

Conv to_conv(const PyConv& from) {
  const auto& [weight, stride, padding, dilation, tf32] = from;
  return {to_tensor(weight),          {},  {stride[0], stride[1]}, {padding[0], padding[1]},
          {dilation[0], dilation[1]}, tf32};
}

Arguments to_arguments(const PyNumbers& from) {
  const auto& [num_groups, eps, pool, clamp_min, clamp_max] = from;
  return {{}, {}, {}, {}, num_groups, eps, {pool[0], pool[1]}, clamp_min, clamp_max};
}

// The tensors that a launch reads.
constexpr std::array kNames{"input", "weight", "conv_bias", "bias", "scale", "norm_weight", "norm_bias"};
enum Slot : size_t { kInput, kWeight, kConvBias, kBias, kScale, kNormWeight, kNormBias };

size_t find_slot(const std::string& name) {
  const size_t slot = size_t(std::find(kNames.begin(), kNames.end(), name) - kNames.begin());
  if (slot == kNames.size()) throw std::invalid_argument("fusedconv: no tensor is called '" + name + "'");
  return slot;
}

// A problem that is made once and run often, by several threads at a time: each run brings its own pointers.
class Launch {
 public:
  // tensors: names and dtypes of those whose pointers a run brings, in their order.
  Launch(const std::string& chain, const std::vector<PyTensor>& tensors, const PyForm& input,
         const std::optional<PyConv>& conv, const PyNumbers& numbers, const PyForm& output)
      : chain_(chain),
        cpu_kernel_(find_on_cpu(chain)),
        problem_{to_tensor(input), nullptr, to_arguments(numbers), to_tensor(output)} {
    for (const auto& [name, dtype] : tensors) {
      slots_.push_back(find_slot(name));
      dtypes_[slots_.back()] = static_cast<DType>(dtype);
    }
    if (conv) conv_ = to_conv(*conv);
  }

  void on_cpu(const std::vector<uintptr_t>& pointers, uintptr_t output, int threads) const {
    run(pointers, output, [&](const Problem& problem) { run_on_cpu(cpu_kernel_, problem, threads); });
  }

  // Bytes of memory that a run on this device wants and the plan in words; -1 where the conv is left to
  // PyTorch.
  std::pair<int64_t, std::string> prepare_cuda(int device) {
    Problem problem = problem_;
    if (conv_) problem.conv = &*conv_;
    cuda_ = prepare_on_cuda(chain_, problem, device);
    return {cuda_->runs ? int64_t(cuda_->workspace) : -1, cuda_->plan};
  }

  void on_cuda(const std::vector<uintptr_t>& pointers, uintptr_t output, uintptr_t workspace,
               uintptr_t stream) const {
    if (!cuda_ || !cuda_->runs)
      throw std::invalid_argument("fusedconv: this launch is not prepared for CUDA");
    run(pointers, output,
        [&](const Problem& problem) { cuda_->run(problem, pointer(workspace), pointer(stream)); });
  }

 private:
  template <class RunOnDevice>
  void run(const std::vector<uintptr_t>& pointers, uintptr_t output, const RunOnDevice& run_on_device) const {
    if (pointers.size() != slots_.size())
      throw std::invalid_argument("fusedconv: the pointers are not those that were named");
    std::array<void*, kNames.size()> at{};  // null: absent
    for (size_t i = 0; i < slots_.size(); ++i) at[slots_[i]] = pointer(pointers[i]);
    const auto parameter = [&](Slot slot) { return Parameter{at[slot], dtypes_[slot]}; };

    Problem problem = problem_;
    Conv conv;
    if (conv_) {
      conv = *conv_;
      conv.weight.data = at[kWeight];
      conv.bias = parameter(kConvBias);
      problem.conv = &conv;
    }
    problem.input.data = at[kInput];
    problem.arguments.bias = parameter(kBias);
    problem.arguments.scale = parameter(kScale);
    problem.arguments.norm_weight = parameter(kNormWeight);
    problem.arguments.norm_bias = parameter(kNormBias);
    problem.output.data = pointer(output);

    const py::gil_scoped_release release;
    run_on_device(problem);
  }

  std::string chain_;
  Kernel cpu_kernel_;  // every chain has one
  std::vector<size_t> slots_;
  std::array<DType, kNames.size()> dtypes_{};
  std::optional<Conv> conv_;
  std::optional<CudaLaunch> cuda_;
  Problem problem_;
};

// A parameter's name, its dtype and pointer, and the pointer of its gradient: 0 where nobody wants it.
using PyParameter = std::tuple<std::string, int, uintptr_t, uintptr_t>;

void set_parameter(BackwardProblem& problem, const PyParameter& from) {
  const auto& [name, dtype, data, gradient] = from;
  Arguments& arguments = problem.arguments;
  const std::map<std::string, std::pair<Parameter*, void**>> places{
      {"bias", {&arguments.bias, &problem.bias}},
      {"scale", {&arguments.scale, &problem.scale}},
      {"norm_weight", {&arguments.norm_weight, &problem.norm_weight}},
      {"norm_bias", {&arguments.norm_bias, &problem.norm_bias}}};
  const auto place = places.find(name);
  if (place == places.end()) throw std::invalid_argument("fusedconv: no parameter is called '" + name + "'");
  *place->second.first = {pointer(data), static_cast<DType>(dtype)};
  *place->second.second = pointer(gradient);
}

void backward_on_cpu(const std::string& chain, const PyForm& v_form, uintptr_t v, uintptr_t grad,
                     const PyNumbers& numbers, const std::vector<PyParameter>& parameters, uintptr_t grad_v,
                     bool wants_v, int threads) {
  BackwardProblem problem{};
  problem.v = to_tensor(v_form);
  problem.v.data = pointer(v);
  problem.grad = pointer(grad);
  problem.arguments = to_arguments(numbers);
  problem.grad_v = pointer(grad_v);
  problem.wants_v = wants_v;
  for (const PyParameter& parameter : parameters) set_parameter(problem, parameter);
  const Kernel kernel = find_on_cpu(chain);
  const py::gil_scoped_release release;
  run_backward_on_cpu(kernel, problem, threads);
}

std::map<std::string, std::string> build_info() {
  return {{"version", FUSEDCONV_VERSION},
          {"compiler", FUSEDCONV_COMPILER},
          {"cuda", cuda_version()},
          {"cuda_architectures", cuda_architectures()}};
}

}  // namespace

// All that is shared is read-only or has a lock: a free-threaded Python need not turn its GIL on for us.
PYBIND11_MODULE(_C, module, py::mod_gil_not_used()) {
  module.attr("FLOAT32") = static_cast<int>(DType::kFloat32);
  module.attr("FLOAT64") = static_cast<int>(DType::kFloat64);
  module.attr("BFLOAT16") = static_cast<int>(DType::kBFloat16);
  module.attr("FLOAT16") = static_cast<int>(DType::kFloat16);
  py::class_<Launch>(module, "Launch")
      .def(py::init<const std::string&, const std::vector<PyTensor>&, const PyForm&,
                    const std::optional<PyConv>&, const PyNumbers&, const PyForm&>())
      .def("on_cpu", &Launch::on_cpu)
      .def("on_cuda", &Launch::on_cuda)
      .def("prepare_cuda", &Launch::prepare_cuda);
  module.def("backward_on_cpu", &backward_on_cpu);
  module.def("cuda_chains", [] { return py::tuple(py::cast(cuda_chains())); });
  module.def("cuda_status", &cuda_status);
  module.def("build_info", &build_info);
  module.def("cpu_isa", &cpu_isa);
  module.def("cpu_isas", [] { return py::tuple(py::cast(cpu_isas())); });
}

}  // namespace fusedconv

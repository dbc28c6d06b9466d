// The module fusedconv._C: what Python passes becomes the structs of core/problem.h. See
// python/fusedconv/_C.pyi.
#include <pybind11/operators.h>
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

#include "core/checked.h"
#include "core/problem.h"
#include "cpu/dispatch.h"
#include "cuda/host/entry.h"
#include "plan/chain_backward.h"
#include "plan/conv_plan.h"
#include "plan/cpu_policy.h"

namespace py = pybind11;

namespace fusedconv {
namespace {

using Pair = std::array<int64_t, 2>;
using Quad = std::array<int64_t, 4>;
using PyTensor = std::pair<std::string, int>;  // name, dtype
using PyForm = std::tuple<int, Quad, Quad>;    // dtype, sizes, strides
// weight, stride, padding, dilation, groups, tf32
using PyConv = std::tuple<PyForm, Pair, Pair, Pair, int64_t, bool>;
using PyConvInput = std::pair<PyForm, PyConv>;
// num_groups, eps, pool_size, clamp_min, clamp_max
using PyNumbers = std::tuple<int64_t, double, Pair, double, double>;
using PyCard = std::tuple<int, int, int>;  // compute capability, multiprocessors, shared bytes of a block

void* pointer(uintptr_t address) { return reinterpret_cast<void*>(address); }

Tensor to_tensor(const PyForm& from) {
  const auto& [dtype, size, stride] = from;
  return {nullptr,
          static_cast<DType>(dtype),
          {size[0], size[1], size[2], size[3]},
          {stride[0], stride[1], stride[2], stride[3]}};
}

Conv to_conv(const PyConv& from) {
  const auto& [weight, stride, padding, dilation, groups, tf32] = from;
  return {to_tensor(weight),
          {},
          {stride[0], stride[1]},
          {padding[0], padding[1]},
          {dilation[0], dilation[1]},
          tf32,
          groups};
}

// The gradient of the input has the same form.
ConvBackward to_conv_backward(const PyConvInput& from) {
  const Tensor input = to_tensor(from.first);
  return {input, to_conv(from.second), input, nullptr};
}

Arguments to_arguments(const PyNumbers& from) {
  const auto& [num_groups, eps, pool, clamp_min, clamp_max] = from;
  return {{}, num_groups, eps, {pool[0], pool[1]}, clamp_min, clamp_max};
}

// The tensors that a launch reads, and those whose gradients backward writes: channels' parameters, and
// others.
enum Slot : size_t { kInput = kGradientKinds, kWeight, kGrad, kStatistics, kSlots };
constexpr const char* kOtherNames[] = {"input", "weight", "grad", "statistics"};

size_t find_slot(const std::string& name) {
  for (size_t slot = 0; slot < kSlots; ++slot)
    if (name == (slot < kInput ? kParameterNames[slot] : kOtherNames[slot - kInput])) return slot;
  throw std::invalid_argument("fusedconv: no tensor is called '" + name + "'");
}

// Where each of the named tensors is; null for all others.
using Places = std::array<void*, kSlots>;

// Some of the tensors, in the order in which runs bring their pointers.
class Named {
 public:
  explicit Named(const std::vector<std::string>& names) {
    for (const std::string& name : names) slots_.push_back(find_slot(name));
  }

  explicit Named(const std::vector<PyTensor>& tensors) {
    for (const auto& [name, dtype] : tensors) {
      slots_.push_back(find_slot(name));
      dtypes_[slots_.back()] = static_cast<DType>(dtype);
    }
  }

  Places places(const std::vector<uintptr_t>& pointers) const {
    if (pointers.size() != slots_.size())
      throw std::invalid_argument("fusedconv: the pointers are not those that were named");
    Places at{};
    for (size_t i = 0; i < slots_.size(); ++i) at[slots_[i]] = pointer(pointers[i]);
    return at;
  }

  bool has(size_t slot) const { return std::find(slots_.begin(), slots_.end(), slot) != slots_.end(); }
  DType dtype(size_t slot) const { return dtypes_[slot]; }
  Parameter parameter(size_t slot, const Places& at) const { return {at[slot], dtypes_[slot]}; }

  void set_parameters(Arguments& arguments, const Places& at) const {
    for (size_t k = 0; k < kChainParameters; ++k) arguments.parameters[k] = parameter(k, at);
  }

 private:
  std::vector<size_t> slots_;
  std::array<DType, kSlots> dtypes_{};
};

// What was prepared for a device, if anything was.
template <class Prepared>
const Prepared& prepared(const std::optional<Prepared>& cuda) {
  if (!cuda || !cuda->run) throw std::invalid_argument("fusedconv: this launch is not prepared for CUDA");
  return *cuda;
}

// A problem that is made once and run often, by several threads at a time: each run brings its own pointers.
class Launch {
 public:
  // tensors: names and dtypes of those whose pointers a run brings, in their order.
  Launch(const std::string& chain, const std::vector<PyTensor>& tensors, const PyForm& input,
         const std::optional<PyConv>& conv, const PyNumbers& numbers, const PyForm& output)
      : chain_(chain),
        cpu_kernel_(find_on_cpu(chain)),
        tensors_(tensors),
        problem_{to_tensor(input), nullptr, to_arguments(numbers), to_tensor(output)} {
    if (conv) conv_ = to_conv(*conv);
  }

  void on_cpu(const std::vector<uintptr_t>& pointers, uintptr_t output, uintptr_t statistics,
              int threads) const {
    run(pointers, output, statistics,
        [&](const Problem& problem) { run_on_cpu(cpu_kernel_, problem, threads); });
  }

  Plan prepare_cuda(int device) {
    Problem problem = problem_;
    if (conv_) problem.conv = &*conv_;
    cuda_ = prepare_on_cuda(chain_, problem, device);
    return cuda_->plan;
  }

  void on_cuda(const std::vector<uintptr_t>& pointers, uintptr_t output, uintptr_t statistics,
               uintptr_t workspace, uintptr_t stream) const {
    const CudaRun<Problem>& cuda = prepared(cuda_);
    run(pointers, output, statistics,
        [&](const Problem& problem) { cuda.run(problem, pointer(workspace), pointer(stream)); });
  }

 private:
  template <class RunOnDevice>
  void run(const std::vector<uintptr_t>& pointers, uintptr_t output, uintptr_t statistics,
           const RunOnDevice& run_on_device) const {
    const Places at = tensors_.places(pointers);
    Problem problem = problem_;
    Conv conv;
    if (conv_) {
      conv = *conv_;
      conv.weight.data = at[kWeight];
      conv.bias = tensors_.parameter(kConvBias, at);
      problem.conv = &conv;
    }
    problem.input.data = at[kInput];
    tensors_.set_parameters(problem.arguments, at);
    problem.output.data = pointer(output);
    problem.statistics = static_cast<GroupStatistics*>(pointer(statistics));

    const py::gil_scoped_release release;
    run_on_device(problem);
  }

  std::string chain_;
  Kernel cpu_kernel_;  // every chain has one
  Named tensors_;
  std::optional<Conv> conv_;
  std::optional<CudaRun<Problem>> cuda_;
  Problem problem_;
};

// The same for backward.
class Backward {
 public:
  // tensors: names and dtypes of those whose pointers a run brings. gradients: names of those whose gradients
  // it brings memory for.
  Backward(const std::string& chain, const std::vector<PyTensor>& tensors, const PyForm& v,
           const std::optional<PyConvInput>& conv, const PyNumbers& numbers, int grad_v_dtype,
           const std::vector<std::string>& gradients, bool wants_v)
      : chain_(chain), cpu_kernel_(find_on_cpu(chain)), tensors_(tensors), gradients_(gradients) {
    problem_.v = to_tensor(v);
    problem_.grad_dtype = tensors_.dtype(kGrad);
    problem_.arguments = to_arguments(numbers);
    problem_.grad_v_dtype = static_cast<DType>(grad_v_dtype);
    problem_.wants = {wants_v, gradients_.has(kInput), gradients_.has(kWeight), {}};
    for (size_t k = 0; k < kGradientKinds; ++k) problem_.wants.parameters[k] = gradients_.has(k);
    if (conv) conv_ = to_conv_backward(*conv);
  }

  void on_cpu(const std::vector<uintptr_t>& pointers, const std::vector<uintptr_t>& gradients,
              uintptr_t grad_v, int threads) const {
    run(tensors_.places(pointers), gradients_.places(gradients), grad_v,
        [&](const BackwardProblem& problem) { run_backward_on_cpu(cpu_kernel_, problem, threads); });
  }

  Plan prepare_cuda(int device) {
    BackwardProblem problem = problem_;
    if (conv_) problem.conv = &*conv_;
    cuda_ = prepare_on_cuda(chain_, problem, device);
    return cuda_->plan;
  }

  void on_cuda(const std::vector<uintptr_t>& pointers, const std::vector<uintptr_t>& gradients,
               uintptr_t grad_v, uintptr_t workspace, uintptr_t stream) const {
    const CudaRun<BackwardProblem>& cuda = prepared(cuda_);
    run(tensors_.places(pointers), gradients_.places(gradients), grad_v,
        [&](const BackwardProblem& problem) { cuda.run(problem, pointer(workspace), pointer(stream)); });
  }

 private:
  template <class RunOnDevice>
  void run(const Places& at, const Places& gradient, uintptr_t grad_v,
           const RunOnDevice& run_on_device) const {
    BackwardProblem problem = problem_;
    ConvBackward conv;
    if (conv_) {
      conv = *conv_;
      conv.input.data = at[kInput];
      conv.conv.weight.data = at[kWeight];
      conv.conv.bias = tensors_.parameter(kConvBias, at);
      conv.grad_input.data = gradient[kInput];
      conv.grad_weight = gradient[kWeight];
      problem.conv = &conv;
    } else {
      problem.v.data = at[kInput];
    }
    problem.grad = at[kGrad];
    problem.statistics = static_cast<const GroupStatistics*>(at[kStatistics]);
    tensors_.set_parameters(problem.arguments, at);
    problem.grad_v = pointer(grad_v);
    std::copy_n(gradient.begin(), kGradientKinds, problem.grad_parameters);

    const py::gil_scoped_release release;
    run_on_device(problem);
  }

  std::string chain_;
  Kernel cpu_kernel_;
  Named tensors_;
  Named gradients_;
  std::optional<ConvBackward> conv_;
  std::optional<CudaRun<BackwardProblem>> cuda_;
  BackwardProblem problem_{};
};

std::map<std::string, int64_t> numbers_of(const Plan& plan) {
  std::map<std::string, int64_t> numbers;
  for (const Remark& remark : plan.remarks)
    for (const auto& [name, value] : numbers_of(remark)) numbers[name] = value;
  return numbers;
}

std::string reason_of(const Plan& plan) {
  return plan.remarks.empty() ? "" : name_of(plan.remarks.front().reason);
}

std::string repr_of(const Plan& plan) {
  const std::string workspace =
      plan.workspace == 0 ? "" : ", " + std::to_string(plan.workspace) + " bytes of workspace";
  return "<fusedconv._C.Plan: " + text_of(plan) + workspace + ">";
}

// Plans divide by these. Operators' own arguments have been checked in Python.
template <class Values>
void check_least(const char* name, const Values& values, int64_t least) {
  for (const int64_t value : values)
    if (value < least)
      throw std::invalid_argument("fusedconv: " + std::string(name) + " must be " + std::to_string(least) +
                                  " or more in a plan, but is " + std::to_string(value));
}

InputAndConv checked(const PyForm& input, const PyConv& conv) {
  const auto& [weight, stride, padding, dilation, groups, tf32] = conv;
  check_least("a size of input", std::get<1>(input), 0);
  check_least("a size of weight", std::get<1>(weight), 1);
  check_least("stride", stride, 1);
  check_least("padding", padding, 0);
  check_least("dilation", dilation, 1);
  check_least("groups", std::array{groups}, 1);
  return {to_tensor(input), to_conv(conv)};
}

Plan plan_conv(const PyForm& input, const PyConv& conv, const std::string& instructions) {
  const InputAndConv from = checked(input, conv);
  return plan_conv_on_cpu(from.input, from.conv, instructions_named(instructions));
}

Plan plan_v(const PyForm& input, const PyConv& conv, bool stores, const std::string& instructions) {
  return plan_v_on_cpu(checked(input, conv), stores, instructions_named(instructions));
}

std::optional<DType> to_dtype(std::optional<int> code) {
  return code ? std::optional<DType>(static_cast<DType>(*code)) : std::nullopt;
}

Plan plan_backward(const PyForm& v, std::optional<int> grad, bool has_infinite_bounds,
                   const std::optional<PyConvInput>& conv, const std::string& instructions) {
  std::optional<InputAndConv> from;
  if (conv) from = checked(conv->first, conv->second);
  check_least("a size of v", std::get<1>(v), 0);
  return plan_backward_on_cpu(to_tensor(v), to_dtype(grad), has_infinite_bounds, from,
                              instructions_named(instructions));
}

Plan plan_chain(int v, std::optional<int> grad, bool has_infinite_bounds) {
  return plan_chain_backward(static_cast<DType>(v), to_dtype(grad), has_infinite_bounds);
}

// For tests of what no machine at hand has.
Plan plan_for_card(const PyForm& input, const PyConv& conv, const PyForm& output,
                   const std::optional<Pair>& pool, bool waits_for_norms, const PyCard& card) {
  const InputAndConv from = checked(input, conv);
  const auto& [capability, multiprocessors, shared_bytes] = card;
  check_least("a size of input", std::get<1>(input), 1);
  check_least("a size of output", std::get<1>(output), 1);
  check_least("pool", pool.value_or(Pair{1, 1}), 1);
  check_least("card", std::array{multiprocessors, shared_bytes}, 1);
  Problem problem{from.input, &from.conv, {}, to_tensor(output)};
  for (int d = 0; d < 2; ++d) {
    const Checked span = Checked(from.conv.dilation[d]) * (from.conv.weight.size[2 + d] - 1);
    const Checked side = from.input.size[2 + d] + 2 * Checked(from.conv.padding[d]) - span;
    check_least("a side of the conv's output", std::array{side.value()}, 1);
    problem.arguments.pool[d] = pool ? (*pool)[d] : 1;
    const int64_t conv_side = (side.value() - 1) / from.conv.stride[d] + 1;
    check_least("a side of the pooled output", std::array{conv_side / problem.arguments.pool[d]}, 1);
  }
  const Instructions instructions = capability < 80    ? Instructions::kNone
                                    : capability == 90 ? Instructions::kSm90a
                                                       : Instructions::kSm80;
  return told(cuda::plan_conv(problem, {pool.has_value(), waits_for_norms},
                              {capability, multiprocessors, shared_bytes, capability >= 90, instructions}));
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
  // Sizes that do not fit (core/checked.h); to pybind11 it would be an OverflowError.
  py::register_local_exception_translator([](std::exception_ptr thrown) {
    try {
      std::rethrow_exception(thrown);
    } catch (const std::overflow_error& error) {
      PyErr_SetString(PyExc_RuntimeError, (std::string("fusedconv: ") + error.what()).c_str());
    }
  });
  check_cuda_source();  // a wrong name is an ImportError, not one of some later call
  asked_cpu_path();
  module.attr("FLOAT32") = static_cast<int>(DType::kFloat32);
  module.attr("FLOAT64") = static_cast<int>(DType::kFloat64);
  module.attr("BFLOAT16") = static_cast<int>(DType::kBFloat16);
  module.attr("FLOAT16") = static_cast<int>(DType::kFloat16);
  module.attr("CHANNEL_PARAMETERS") =
      py::tuple(py::cast(std::vector<std::string>(std::begin(kParameterNames), std::end(kParameterNames))));
  py::class_<Plan>(module, "Plan")
      .def_property_readonly("path", [](const Plan& plan) { return name_of(plan.path); })
      .def_property_readonly("instructions", [](const Plan& plan) { return name_of(plan.instructions); })
      .def_property_readonly("reason", &reason_of)
      .def_property_readonly("numbers", py::overload_cast<const Plan&>(&numbers_of))
      .def_property_readonly("words", py::overload_cast<const Plan&>(&words_of))
      .def_property_readonly("workspace_bytes", [](const Plan& plan) { return plan.workspace; })
      .def_property_readonly("is_ours", &Plan::is_ours)
      .def_property_readonly("terms", [](const Plan& plan) { return plan.terms; })
      .def("__str__", &text_of)
      .def("__repr__", &repr_of)
      .def(py::self == py::self);
  py::class_<Launch>(module, "Launch")
      .def(py::init<const std::string&, const std::vector<PyTensor>&, const PyForm&,
                    const std::optional<PyConv>&, const PyNumbers&, const PyForm&>())
      .def("on_cpu", &Launch::on_cpu)
      .def("on_cuda", &Launch::on_cuda)
      .def("prepare_cuda", &Launch::prepare_cuda);
  py::class_<Backward>(module, "Backward")
      .def(py::init<const std::string&, const std::vector<PyTensor>&, const PyForm&,
                    const std::optional<PyConvInput>&, const PyNumbers&, int, const std::vector<std::string>&,
                    bool>())
      .def("on_cpu", &Backward::on_cpu)
      .def("on_cuda", &Backward::on_cuda)
      .def("prepare_cuda", &Backward::prepare_cuda);
  module.def("plan_conv_on_cpu", &plan_conv);
  module.def("plan_v_on_cpu", &plan_v);
  module.def("plan_backward_on_cpu", &plan_backward);
  module.def("plan_chain_backward", &plan_chain);
  module.def("plan_for_card", &plan_for_card);
  module.def("cuda_chains", [] { return py::tuple(py::cast(cuda_chains())); });
  module.def("cuda_status", &cuda_status);
  module.def("build_info", &build_info);
  module.def("cpu_isa", &cpu_isa);
  module.def("cpu_isas", [] { return py::tuple(py::cast(cpu_isas())); });
}

}  // namespace fusedconv

// The module fusedconv._C: what Python passes becomes the structs of core/problem.h. See
// python/fusedconv/_C.pyi.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <map>
#include <string>
#include <tuple>

#include "core/problem.h"
#include "cpu/dispatch.h"
#include "cuda/entry.h"

namespace py = pybind11;

namespace fusedconv {
namespace {

using Pair = std::array<int64_t, 2>;
using Quad = std::array<int64_t, 4>;
// data_ptr, dtype, sizes, strides
using PyTensor = std::tuple<uintptr_t, int, Quad, Quad>;
// bias, scale, norm_weight, norm_bias, num_groups, eps, pool_h, pool_w, clamp_min, clamp_max
using PyArguments =
    std::tuple<uintptr_t, uintptr_t, uintptr_t, uintptr_t, int64_t, double, int64_t, int64_t, double, double>;

void* pointer(uintptr_t address) { return reinterpret_cast<void*>(address); }

Tensor to_tensor(const PyTensor& from) {
  const auto& [address, dtype, size, stride] = from;
  return {pointer(address),
          static_cast<DType>(dtype),
          {size[0], size[1], size[2], size[3]},
          {stride[0], stride[1], stride[2], stride[3]}};
}

Arguments to_arguments(const PyArguments& from) {
  const auto& [bias, scale, norm_weight, norm_bias, num_groups, eps, pool_h, pool_w, clamp_min, clamp_max] =
      from;
  return {pointer(bias),      pointer(scale), pointer(norm_weight),
          pointer(norm_bias), num_groups,     eps,
          {pool_h, pool_w},   clamp_min,      clamp_max};
}

void cpu_conv2d(const std::string& chain, const PyTensor& input, const PyTensor& weight, uintptr_t conv_bias,
                const Pair& stride, const Pair& padding, const Pair& dilation, const PyArguments& arguments,
                const PyTensor& output, int threads) {
  const Conv conv{to_tensor(weight),
                  pointer(conv_bias),
                  {stride[0], stride[1]},
                  {padding[0], padding[1]},
                  {dilation[0], dilation[1]}};
  const py::gil_scoped_release release;
  run_on_cpu(chain, {to_tensor(input), &conv, to_arguments(arguments), to_tensor(output)}, threads);
}

void cpu_chain(const std::string& chain, const PyTensor& input, const PyArguments& arguments,
               const PyTensor& output, int threads) {
  const py::gil_scoped_release release;
  run_on_cpu(chain, {to_tensor(input), nullptr, to_arguments(arguments), to_tensor(output)}, threads);
}

void cuda_chain(const std::string& chain, const PyTensor& input, const PyArguments& arguments,
                const PyTensor& output, int device, uintptr_t stream) {
  const py::gil_scoped_release release;
  run_on_cuda(chain, {to_tensor(input), nullptr, to_arguments(arguments), to_tensor(output)}, device,
              pointer(stream));
}

std::map<std::string, std::string> build_info() {
  return {{"version", FUSEDCONV_VERSION},
          {"compiler", FUSEDCONV_COMPILER},
          {"cuda", cuda_version()},
          {"cuda_architectures", cuda_architectures()}};
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  module.attr("FLOAT32") = static_cast<int>(DType::kFloat32);
  module.attr("FLOAT64") = static_cast<int>(DType::kFloat64);
  module.attr("BFLOAT16") = static_cast<int>(DType::kBFloat16);
  module.attr("FLOAT16") = static_cast<int>(DType::kFloat16);
  module.def("cpu_conv2d", &cpu_conv2d);
  module.def("cpu_chain", &cpu_chain);
  module.def("cuda_chain", &cuda_chain);
  module.def("cuda_chains", [] { return py::tuple(py::cast(cuda_chains())); });
  module.def("cuda_status", &cuda_status);
  module.def("build_info", &build_info);
  module.def("cpu_isa", &cpu_isa);
  module.def("cpu_isas", [] { return py::tuple(py::cast(cpu_isas())); });
}

}  // namespace fusedconv

#include "dispatch.h"

#include <cctype>
#include <cstdlib>
#include <stdexcept>

#include "memory.h"

namespace fusedconv {

namespace baseline {
Kernel find_kernel(const char* chain);
}
#ifdef FUSEDCONV_X86
namespace avx2 {
Kernel find_kernel(const char* chain);
}
namespace avx512 {
Kernel find_kernel(const char* chain);
}
#endif

namespace {

struct Level {
  std::string name;
  Kernel (*find_kernel)(const char* chain);
};

// The levels that this machine runs, best last.
std::vector<Level> machine_levels() {
  std::vector<Level> levels{{"baseline", baseline::find_kernel}};
#ifdef FUSEDCONV_X86
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    levels.push_back({"avx2", avx2::find_kernel});
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
      levels.push_back({"avx512", avx512::find_kernel});
    }
  }
#endif
  return levels;
}

const std::vector<Level>& levels() {
  static const std::vector<Level> found = machine_levels();
  return found;
}

constexpr char kCapVariable[] = "FUSEDCONV_CPU_ISA";

Level choose_level() {
  const char* cap = std::getenv(kCapVariable);
  if (cap == nullptr || *cap == '\0') return levels().back();
  std::string name = cap;
  for (char& letter : name) letter = char(std::tolower(static_cast<unsigned char>(letter)));
  std::string known;
  for (const Level& level : levels()) {
    if (level.name == name) return level;
    known += (known.empty() ? "" : ", ") + level.name;
  }
  throw std::invalid_argument(std::string(kCapVariable) + " must be one of " + known +
                              ", which this machine can run, but is '" + cap + "'");
}

const Level& level_in_use() {
  static const Level level = choose_level();
  return level;
}

size_t element_size(DType dtype) { return dtype == DType::kFloat64 ? 8 : dtype == DType::kFloat32 ? 4 : 2; }

}  // namespace

std::string cpu_isa() { return level_in_use().name; }

std::vector<std::string> cpu_isas() {
  std::vector<std::string> names;
  for (const Level& level : levels()) names.push_back(level.name);
  return names;
}

Kernel find_on_cpu(const std::string& chain) {
  const Kernel kernel = level_in_use().find_kernel(chain.c_str());
  if (kernel.forward == nullptr)
    throw std::invalid_argument("fusedconv: no CPU kernel for chain '" + chain + "'");
  return kernel;
}

void run_on_cpu(const Kernel& kernel, const Problem& problem, int threads) {
  const Tensor& output = problem.output;
  const int64_t elements = element_count(output);
  if (elements == 0) return;
  const bool is_dense = output.size[0] * output.stride[0] == elements;
  if (is_dense) advise_huge_pages(output.data, size_t(elements) * element_size(output.dtype));
  kernel.forward(problem, threads);
}

void run_backward_on_cpu(const Kernel& kernel, const BackwardProblem& problem, int threads) {
  const Tensor& form = problem.conv == nullptr ? problem.v : problem.conv->grad_input;
  void* written = problem.conv == nullptr ? problem.grad_v : form.data;
  if (written != nullptr) advise_huge_pages(written, size_t(element_count(form)) * element_size(form.dtype));
  kernel.backward(problem, threads);
}

}  // namespace fusedconv

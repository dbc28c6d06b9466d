#include <stdexcept>

#include "entry.h"

namespace fusedconv {

std::string cuda_version() { return "not built"; }
std::string cuda_architectures() { return ""; }
std::vector<std::string> cuda_chains() { return {}; }
void check_cuda_source() {}
std::string cuda_status(int) { return "fusedconv was built without CUDA"; }

CudaRun<Problem> prepare_on_cuda(const std::string& chain, const Problem&, int) {
  throw std::invalid_argument("fusedconv: no CUDA kernel for chain '" + chain + "': built without CUDA");
}

CudaRun<BackwardProblem> prepare_on_cuda(const std::string& chain, const BackwardProblem&, int) {
  throw std::invalid_argument("fusedconv: no CUDA kernel for chain '" + chain + "': built without CUDA");
}

}  // namespace fusedconv

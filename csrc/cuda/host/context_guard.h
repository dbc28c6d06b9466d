// Makes a device current for a scope, then puts back the context that was current, even if that was none: a
// cudaSetDevice back to a device that nobody uses would create a context on it.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "error.h"

namespace fusedconv {

class ContextGuard {
 public:
  explicit ContextGuard(int device) {
    // The driver's errors have the numbers that the runtime's have.
    check_cuda(static_cast<cudaError_t>(driver().get(&previous_)), "cuCtxGetCurrent");
    const cudaError_t status = cudaSetDevice(device);
    if (status != cudaSuccess) driver().set(previous_);  // nothing is destroyed that was not constructed
    check_cuda(status, "cudaSetDevice");
  }
  ~ContextGuard() { driver().set(previous_); }
  ContextGuard(const ContextGuard&) = delete;
  ContextGuard& operator=(const ContextGuard&) = delete;

 private:
  // Looked up at run time: linking libcuda would keep the library from loading where there is no driver.
  struct Driver {
    CUresult (*get)(CUcontext*);
    CUresult (*set)(CUcontext);
  };

  static const Driver& driver() {
    static const Driver found{entry<CUresult(CUcontext*)>("cuCtxGetCurrent"),
                              entry<CUresult(CUcontext)>("cuCtxSetCurrent")};
    return found;
  }

  template <class Function>
  static Function* entry(const char* name) {
    constexpr unsigned kVersion = 12000;
    void* address = nullptr;
    cudaDriverEntryPointQueryResult found;
    check_cuda(cudaGetDriverEntryPointByVersion(name, &address, kVersion, cudaEnableDefault, &found), name);
    if (address == nullptr) throw std::runtime_error(std::string("the driver has no ") + name);
    return reinterpret_cast<Function*>(address);
  }

  CUcontext previous_ = nullptr;
};

}  // namespace fusedconv

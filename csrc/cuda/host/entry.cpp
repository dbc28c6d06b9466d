#include "entry.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <stdexcept>

#include "context_guard.h"
#include "core/chain_list.h"
#include "error.h"
#include "images.h"

namespace fusedconv {
namespace {

int attribute_of(int device, cudaDeviceAttr attribute) {
  int value = 0;
  check_cuda(cudaDeviceGetAttribute(&value, attribute, device), "cudaDeviceGetAttribute");
  return value;
}

// A capture on any thread forbids what loading code may do, unless this thread says that it does not mind.
class RelaxedCapture {
 public:
  RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

bool overlaps_kernels(int architecture) {
  int driver = 0;
  check_cuda(cudaDriverGetVersion(&driver), "cudaDriverGetVersion");
  return cuda::may_overlap(architecture, driver);
}

// What runs on a device.
struct Device {
  const cuda::Image* image;
  cuda::Card card;
};

cuda::Card card_of(int device, const cuda::Image& image, int capability, int architecture) {
  return {std::min(capability, architecture), attribute_of(device, cudaDevAttrMultiProcessorCount),
          attribute_of(device, cudaDevAttrMaxSharedMemoryPerBlockOptin), overlaps_kernels(architecture),
          image.instructions};
}

// Whether an error says that an image has no code for a device: then another one may.
bool has_no_code(cudaError_t status) {
  return status == cudaErrorNoKernelImageForDevice || status == cudaErrorInvalidDeviceFunction ||
         status == cudaErrorInvalidKernelImage || status == cudaErrorInvalidPtx ||
         status == cudaErrorUnsupportedPtxVersion;
}

// The best image that the current device runs; sm_80 can be asked for where there is a better one.
Device find_device(int device, const std::string& asked) {
  const RelaxedCapture relaxed;
  const int capability = 10 * attribute_of(device, cudaDevAttrComputeCapabilityMajor) +
                         attribute_of(device, cudaDevAttrComputeCapabilityMinor);
  for (const cuda::Image* image : cuda::kImages) {
    if (asked == "sm_80" && image->instructions == Instructions::kSm90a) continue;
    if (capability < image->first_capability || capability > image->last_capability) continue;
    int architecture = 0;
    const cudaError_t status = image->find_architecture(architecture);
    if (status == cudaSuccess) return {image, card_of(device, *image, capability, architecture)};
    if (!has_no_code(status)) check_cuda(status, "cudaFuncGetAttributes");
    cudaGetLastError();  // the next launch must not report it
  }
  throw std::runtime_error("device " + std::to_string(device) + " has compute capability " +
                           std::to_string(capability / 10) + "." + std::to_string(capability % 10) +
                           ", fusedconv was built for " + cuda_architectures() +
                           (asked.empty() ? "" : ", and FUSEDCONV_CUDA_SOURCE is " + asked));
}

const cuda::Kernel& find_kernel(const cuda::Image& image, const std::string& chain) {
  const cuda::Kernel* const kernel = image.find_kernel(chain);
  if (kernel == nullptr) throw std::invalid_argument("fusedconv: no CUDA kernel for chain '" + chain + "'");
  return *kernel;
}

void load_all_kernels(const Device& device) {
  const RelaxedCapture relaxed;
  for (const std::string& chain : cuda_chains())
    check_cuda(find_kernel(*device.image, chain).load(device.card), "loading kernels");
}

// What runs on the current device, looked up and loaded once for each.
const Device& device_of(int device) {
  static std::mutex mutex;
  static std::map<std::pair<int, std::string>, Device> devices;
  const std::lock_guard<std::mutex> lock(mutex);
  const std::pair<int, std::string> key(device, cuda::asked_source());
  const auto known = devices.find(key);
  if (known != devices.end()) return known->second;
  const Device found = find_device(device, key.second);
  load_all_kernels(found);
  return devices.emplace(key, found).first->second;
}

std::string version_text(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

// Why the device can not run the kernels; empty if it can.
std::string reason_against(int device) {
  int driver = 0;
  cudaDriverGetVersion(&driver);
  if (driver == 0) return "there is no CUDA driver";
  if (driver / 1000 < CUDART_VERSION / 1000) {
    return "the driver supports CUDA " + version_text(driver) + ", fusedconv was built with " +
           cuda_version();
  }
  try {
    const ContextGuard guard(device);
    device_of(device);
    return "";
  } catch (const std::runtime_error& error) {
    return error.what();
  }
}

// What goes wrong in a call says in which operator.
template <class Call>
decltype(auto) naming(const std::string& name, const Call& call) {
  try {
    return call();
  } catch (const std::runtime_error& error) {
    throw std::runtime_error("fusedconv: " + name + ": " + error.what());
  }
}

// Sizes beyond what can be computed are left to PyTorch.
template <class Prepare>
auto unless_too_large(const Prepare& prepare) -> decltype(prepare()) {
  try {
    return prepare();
  } catch (const std::overflow_error&) {
    return {two_step({Reason::kTooLarge}), {}};
  }
}

// A chain's kernels for a device, and by which name errors call what they are asked for.
struct Target {
  std::string name;
  int device;
  const cuda::Card& card;  // of static storage, as the kernels are
  const cuda::Kernel& kernel;
};

Target find_target(const std::string& name, const std::string& chain, int device) {
  const Device& on = naming(name, [&]() -> const Device& {
    const ContextGuard guard(device);
    return device_of(device);
  });
  return {name, device, on.card, find_kernel(*on.image, chain)};
}

// launch: the kernel's, of a plan of which `told` is what there is to tell.
template <class AnyProblem, class AnyPlan>
CudaRun<AnyProblem> prepared(const Target& target, const Plan& told, const AnyPlan& plan,
                             cudaError_t (*launch)(const AnyProblem&, const AnyPlan&, void*,
                                                   const cuda::Card&, cudaStream_t)) {
  if (!told.is_ours()) return {told, {}};
  return {told, [target, plan, launch](const AnyProblem& pointers, void* workspace, void* stream) {
            naming(target.name, [&] {
              const ContextGuard guard(target.device);
              check_cuda(launch(pointers, plan, workspace, target.card, static_cast<cudaStream_t>(stream)),
                         "launch");
            });
          }};
}

}  // namespace

std::string cuda_version() { return version_text(CUDART_VERSION); }
std::string cuda_architectures() { return FUSEDCONV_CUDA_ARCHITECTURE_LIST; }

std::vector<std::string> cuda_chains() {
#define FUSEDCONV_NAME(name) #name,
  return {FUSEDCONV_FOR_EACH_CHAIN(FUSEDCONV_NAME)};
#undef FUSEDCONV_NAME
}

void check_cuda_source() { cuda::asked_source(); }

std::string cuda_status(int device) {
  const std::string reason = reason_against(device);
  cudaGetLastError();  // the next launch must not report what went wrong here
  return reason;
}

CudaRun<Problem> prepare_on_cuda(const std::string& chain, const Problem& problem, int device) {
  const bool has_conv = problem.conv != nullptr;
  const Target target = find_target((has_conv ? "conv2d_" : "") + chain, chain, device);
  const cuda::Kernel& kernel = target.kernel;
  const auto prepare = [&] {
    const cuda::ConvPlan plan =
        has_conv ? cuda::plan_conv(problem, kernel.shape, target.card) : cuda::ConvPlan{};
    Plan told = has_conv ? cuda::told(plan) : Plan{Path::kChain};
    if (told.is_ours()) told.workspace = kernel.workspace(problem, plan, target.card);
    return prepared(target, told, plan, kernel.launch);
  };
  return has_conv ? unless_too_large(prepare) : naming(target.name, prepare);
}

CudaRun<BackwardProblem> prepare_on_cuda(const std::string& chain, const BackwardProblem& problem,
                                         int device) {
  const Target target =
      find_target((problem.conv != nullptr ? "conv2d_" : "") + chain + " backward", chain, device);
  const cuda::Kernel& kernel = target.kernel;
  if (kernel.plan_backward == nullptr)
    throw std::invalid_argument("fusedconv: chain '" + chain + "' has no backward on CUDA");
  return unless_too_large([&] {
    const cuda::BackwardPlan plan = kernel.plan_backward(problem, target.card);
    return prepared(target, cuda::told(plan), plan, kernel.launch_backward);
  });
}

}  // namespace fusedconv

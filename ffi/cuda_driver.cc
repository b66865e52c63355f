#include "cuda_driver.h"

#include <dlfcn.h>

#include <mutex>
#include <string>

namespace jax_ssd {
namespace {

template <typename Function>
bool Resolve(void* library, const char* symbol, Function*& function) {
  function = reinterpret_cast<Function*>(dlsym(library, symbol));
  return function != nullptr;
}

Status Open(Driver& driver) {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* why = dlerror();
    return Internal(std::string("the CUDA driver cannot be opened: ") + (why == nullptr ? "libcuda.so.1" : why));
  }
#define JAX_SSD_RESOLVE(member, symbol)                                                                       \
  if (!Resolve(library, symbol, driver.member)) {                                                             \
    return Internal("the CUDA driver has no " symbol ": CUDA 13 needs a driver of the r580 series or later"); \
  }
  JAX_SSD_RESOLVE(cuInit, "cuInit")
  JAX_SSD_RESOLVE(cuGetErrorName, "cuGetErrorName")
  JAX_SSD_RESOLVE(cuGetErrorString, "cuGetErrorString")
  JAX_SSD_RESOLVE(cuStreamGetCtx, "cuStreamGetCtx")
  JAX_SSD_RESOLVE(cuCtxPushCurrent, "cuCtxPushCurrent_v2")
  JAX_SSD_RESOLVE(cuCtxPopCurrent, "cuCtxPopCurrent_v2")
  JAX_SSD_RESOLVE(cuCtxGetDevice, "cuCtxGetDevice")
  JAX_SSD_RESOLVE(cuLibraryLoadData, "cuLibraryLoadData")
  JAX_SSD_RESOLVE(cuLibraryUnload, "cuLibraryUnload")
  JAX_SSD_RESOLVE(cuLibraryGetKernel, "cuLibraryGetKernel")
  JAX_SSD_RESOLVE(cuKernelGetFunction, "cuKernelGetFunction")
  JAX_SSD_RESOLVE(cuKernelSetAttribute, "cuKernelSetAttribute")
  JAX_SSD_RESOLVE(cuLaunchKernelEx, "cuLaunchKernelEx")
  JAX_SSD_RESOLVE(cuTensorMapEncodeTiled, "cuTensorMapEncodeTiled")
#undef JAX_SSD_RESOLVE
  return CudaStatus(driver, driver.cuInit(0), "cuInit");
}

}  // namespace

Status OpenDriver(const Driver** driver) {
  static std::mutex mutex;
  static Driver opened;
  static bool is_open = false;
  std::lock_guard<std::mutex> lock(mutex);
  // A failure is not remembered: the driver may be mounted, or the device become free, later.
  if (!is_open) {
    Status status = Open(opened);
    if (!status.ok()) return status;
    is_open = true;
  }
  *driver = &opened;
  return {};
}

Status CudaStatus(const Driver& driver, CUresult result, const std::string& what) {
  if (result == 0) return {};
  const char* name = nullptr;
  const char* words = nullptr;
  if (driver.cuGetErrorName(result, &name) != 0 || name == nullptr) name = "unknown CUDA error";
  if (driver.cuGetErrorString(result, &words) != 0 || words == nullptr) words = "no description";
  return Internal(what + ": " + name + " (" + std::to_string(result) + ", " + words + ")");
}

}  // namespace jax_ssd

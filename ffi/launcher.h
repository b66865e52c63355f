// Runs a launch plan through a driver table. Knows nothing of XLA: the handler is a shell around LoadedPlan.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "cuda_driver.h"
#include "plan.h"
#include "status.h"

namespace jax_ssd {

using OpenDriverFunction = std::function<Status(const Driver**)>;

// One cubin in this process: loaded when first needed, unloaded with its last user. Thread-safe.
class CubinImage {
 public:
  explicit CubinImage(std::string bytes) : bytes_(std::move(bytes)) {}
  ~CubinImage();
  CubinImage(const CubinImage&) = delete;
  CubinImage& operator=(const CubinImage&) = delete;

  const std::string& bytes() const { return bytes_; }

  // The kernel `symbol`, loading the cubin if need be.
  Status GetKernel(const Driver& driver, const std::string& symbol, CUkernel* kernel);

  // Loads `kernel` into the current context, which belongs to `device`, and lets it use at least `shared_memory` bytes
  // of dynamic shared memory there. Never lowers what another plan asked for.
  Status Prepare(const Driver& driver, CUkernel kernel, CUdevice device, uint32_t shared_memory);

 private:
  const std::string bytes_;
  std::mutex mutex_;
  const Driver* driver_ = nullptr;
  CUlibrary library_ = nullptr;
  std::map<std::pair<CUkernel, CUdevice>, uint32_t> shared_memory_;
};

// The cubins of this process by digest, shared between all plans that use them.
class CubinRegistry {
 public:
  explicit CubinRegistry(OpenDriverFunction open_driver) : open_driver_(std::move(open_driver)) {}

  Status Acquire(const std::string& digest, std::string_view bytes, std::shared_ptr<CubinImage>* image);
  Status OpenDriver(const Driver** driver) const { return open_driver_(driver); }
  size_t size();  // images alive

  // Never destroyed: executables may outlive static objects at exit.
  static CubinRegistry& OfProcess();

 private:
  const OpenDriverFunction open_driver_;
  std::mutex mutex_;
  std::unordered_map<std::string, std::weak_ptr<CubinImage>> images_;
};

// A buffer as XLA hands it over.
struct BufferView {
  void* data;
  uint32_t type;
  const int64_t* dims;
  size_t rank;
};

// A plan bound to its cubins. Initialize may run for several devices, Execute on several streams at once.
class LoadedPlan {
 public:
  // Decodes `plan` and takes hold of its cubins; touches no driver, so that it works where nothing can be launched.
  static Status Create(CubinRegistry& registry, std::string_view plan, std::string_view cubins,
                       std::unique_ptr<LoadedPlan>* loaded);

  // Loads everything for the device of `stream`; a second call for the same device returns at once.
  Status Initialize(CUstream stream);

  // Launches on `stream` and returns: no allocation on the device, no synchronization, no loading.
  Status Execute(CUstream stream, const BufferView* operands, size_t num_operands, const BufferView* results,
                 size_t num_results) const;

  const Plan& plan() const { return plan_; }

 private:
  LoadedPlan(CubinRegistry& registry, Plan plan) : registry_(registry), plan_(std::move(plan)) {}

  Status CheckBuffers(const char* kind, const BufferView* views, size_t count, size_t first, size_t expected) const;
  Status Run(const Launch& launch, CUkernel kernel, CUstream stream, const std::vector<void*>& addresses) const;

  CubinRegistry& registry_;
  const Plan plan_;
  std::vector<std::shared_ptr<CubinImage>> images_;  // one a cubin
  std::mutex mutex_;                                 // guards the two below
  std::vector<CUcontext> contexts_;                  // those that are ready
  std::vector<CUkernel> kernels_;                    // one a launch; never changed once driver_ is set
  std::atomic<const Driver*> driver_{nullptr};
};

}  // namespace jax_ssd

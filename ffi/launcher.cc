#include "launcher.h"

#include <algorithm>
#include <utility>

namespace jax_ssd {
namespace {

// Makes the context of a stream current for a scope.
class ScopedContext {
 public:
  ScopedContext(const Driver& driver, CUcontext context) : driver_(driver), result_(driver.cuCtxPushCurrent(context)) {}
  ~ScopedContext() {
    CUcontext popped;
    if (result_ == 0) (void)driver_.cuCtxPopCurrent(&popped);
  }
  ScopedContext(const ScopedContext&) = delete;
  ScopedContext& operator=(const ScopedContext&) = delete;

  CUresult result() const { return result_; }

 private:
  const Driver& driver_;
  const CUresult result_;
};

// Host memory of a launch, kept by each thread so that executing allocates nothing once warm.
struct Parameters {
  std::vector<void*> pointers;       // values of pointer arguments
  std::vector<CUtensorMap> tensors;  // values of tensor map arguments
  std::vector<void*> values;         // where each argument's value is
};

Status EncodeTensorMap(const Driver& driver, const Argument& argument, void* address, CUtensorMap* map) {
  const TensorMapSpec& spec = argument.tensor_map;
  return CudaStatus(
      driver,
      driver.cuTensorMapEncodeTiled(map, static_cast<int>(spec.data_type), spec.dims.size(), address, spec.dims.data(),
                                    spec.strides.data(), spec.box.data(), spec.element_strides.data(),
                                    static_cast<int>(spec.interleave), static_cast<int>(spec.swizzle),
                                    static_cast<int>(spec.l2_promotion), static_cast<int>(spec.oob_fill)),
      "cuTensorMapEncodeTiled");
}

}  // namespace

CubinImage::~CubinImage() {
  // At exit the driver may be gone already, so a failure means nothing.
  if (library_ != nullptr) (void)driver_->cuLibraryUnload(library_);
}

Status CubinImage::GetKernel(const Driver& driver, const std::string& symbol, CUkernel* kernel) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (library_ == nullptr) {
    CUlibrary library = nullptr;
    Status status =
        CudaStatus(driver, driver.cuLibraryLoadData(&library, bytes_.data(), nullptr, nullptr, 0, nullptr, nullptr, 0),
                   "loading the cubin of kernel '" + symbol + "'");
    if (!status.ok()) return status;
    library_ = library;
    driver_ = &driver;
  }
  return CudaStatus(driver, driver.cuLibraryGetKernel(kernel, library_, symbol.c_str()),
                    "finding kernel '" + symbol + "' in its cubin");
}

Status CubinImage::Prepare(const Driver& driver, CUkernel kernel, CUdevice device, uint32_t shared_memory) {
  std::lock_guard<std::mutex> lock(mutex_);
  CUfunction function;
  Status status = CudaStatus(driver, driver.cuKernelGetFunction(&function, kernel), "loading a kernel");
  if (!status.ok()) return status;
  uint32_t& allowed = shared_memory_[{kernel, device}];
  if (shared_memory <= allowed) return {};
  status = CudaStatus(driver,
                      driver.cuKernelSetAttribute(kFuncAttributeMaxDynamicSharedSizeBytes,
                                                  static_cast<int>(shared_memory), kernel, device),
                      "allowing " + std::to_string(shared_memory) + " bytes of dynamic shared memory");
  if (status.ok()) allowed = shared_memory;
  return status;
}

Status CubinRegistry::Acquire(const std::string& digest, std::string_view bytes, std::shared_ptr<CubinImage>* image) {
  std::lock_guard<std::mutex> lock(mutex_);
  for (auto it = images_.begin(); it != images_.end();) {
    it = it->second.expired() ? images_.erase(it) : std::next(it);
  }
  std::weak_ptr<CubinImage>& entry = images_[digest];
  *image = entry.lock();
  if (*image == nullptr) {
    *image = std::make_shared<CubinImage>(std::string(bytes));
    entry = *image;
  } else if ((*image)->bytes() != bytes) {
    return InvalidArgument("two different cubins carry the digest " + digest);
  }
  return {};
}

size_t CubinRegistry::size() {
  std::lock_guard<std::mutex> lock(mutex_);
  return std::count_if(images_.begin(), images_.end(), [](const auto& entry) { return !entry.second.expired(); });
}

CubinRegistry& CubinRegistry::OfProcess() {
  static auto* registry = new CubinRegistry(&jax_ssd::OpenDriver);
  return *registry;
}

Status LoadedPlan::Create(CubinRegistry& registry, std::string_view bytes, std::string_view cubins,
                          std::unique_ptr<LoadedPlan>* loaded) {
  Plan plan;
  Status status = DecodePlan(bytes, cubins.size(), &plan);
  if (!status.ok()) return status;
  std::unique_ptr<LoadedPlan> result(new LoadedPlan(registry, std::move(plan)));
  for (const CubinSpec& cubin : result->plan_.cubins) {
    std::shared_ptr<CubinImage> image;
    status = registry.Acquire(cubin.digest, cubins.substr(cubin.offset, cubin.size), &image);
    if (!status.ok()) return status;
    result->images_.push_back(std::move(image));
  }
  *loaded = std::move(result);
  return {};
}

Status LoadedPlan::Initialize(CUstream stream) {
  const Driver* driver = driver_.load(std::memory_order_acquire);
  if (driver == nullptr) {
    Status status = registry_.OpenDriver(&driver);
    if (!status.ok()) return status;
  }
  CUcontext context = nullptr;
  Status status = CudaStatus(*driver, driver->cuStreamGetCtx(stream, &context), "asking a stream for its context");
  if (!status.ok()) return status;
  std::lock_guard<std::mutex> lock(mutex_);
  if (std::find(contexts_.begin(), contexts_.end(), context) != contexts_.end()) return {};
  ScopedContext current(*driver, context);
  status = CudaStatus(*driver, current.result(), "entering a stream's context");
  if (!status.ok()) return status;
  CUdevice device = 0;
  status = CudaStatus(*driver, driver->cuCtxGetDevice(&device), "asking a context for its device");
  if (!status.ok()) return status;

  std::vector<CUkernel> kernels(plan_.launches.size());
  for (size_t i = 0; i < kernels.size(); ++i) {
    const Launch& launch = plan_.launches[i];
    CubinImage& image = *images_[launch.cubin];
    status = image.GetKernel(*driver, launch.symbol, &kernels[i]);
    if (status.ok()) status = image.Prepare(*driver, kernels[i], device, launch.shared_memory);
    if (!status.ok()) {
      status.message = "plan " + plan_.name + ", kernel '" + launch.symbol + "': " + status.message;
      return status;
    }
  }
  contexts_.push_back(context);
  if (driver_.load(std::memory_order_relaxed) == nullptr) {
    // A library's kernels are the same in every context, so the first device's serve all.
    kernels_ = std::move(kernels);
    driver_.store(driver, std::memory_order_release);
  }
  return {};
}

Status LoadedPlan::CheckBuffers(const char* kind, const BufferView* views, size_t count, size_t first,
                                size_t expected) const {
  if (count != expected) {
    return InvalidArgument("plan " + plan_.name + ": expected " + std::to_string(expected) + " " + kind + "s, got " +
                           std::to_string(count));
  }
  for (size_t i = 0; i < count; ++i) {
    const BufferSpec& spec = plan_.buffers[first + i];
    const BufferView& view = views[i];
    if (view.type == spec.type && view.rank == spec.dims.size() &&
        std::equal(spec.dims.begin(), spec.dims.end(), view.dims)) {
      continue;
    }
    return InvalidArgument("plan " + plan_.name + ": expected " + kind + " " + std::to_string(i) + " ('" + spec.name +
                           "') to be " + ShapeText(spec.type, spec.dims.data(), spec.dims.size()) + ", got " +
                           ShapeText(view.type, view.dims, view.rank));
  }
  return {};
}

Status LoadedPlan::Run(const Launch& launch, CUkernel kernel, CUstream stream,
                       const std::vector<void*>& addresses) const {
  const Driver& driver = *driver_.load(std::memory_order_relaxed);
  static thread_local Parameters parameters;
  const size_t count = launch.arguments.size();
  // Sized before any address of an element is taken.
  parameters.pointers.resize(count);
  parameters.tensors.resize(count);
  parameters.values.resize(count);
  for (size_t i = 0; i < count; ++i) {
    const Argument& argument = launch.arguments[i];
    if (argument.kind == Argument::kConstant) {
      parameters.values[i] = const_cast<char*>(argument.constant.data());
      continue;
    }
    void* address = static_cast<char*>(addresses[argument.buffer]) + argument.offset;
    if (argument.kind == Argument::kPointer) {
      parameters.pointers[i] = address;
      parameters.values[i] = &parameters.pointers[i];
    } else {
      Status status = EncodeTensorMap(driver, argument, address, &parameters.tensors[i]);
      if (!status.ok()) return status;
      parameters.values[i] = &parameters.tensors[i];
    }
  }

  CUlaunchAttribute attributes[2] = {};
  unsigned int num_attributes = 0;
  if (launch.has_cluster()) {
    CUlaunchAttribute& attribute = attributes[num_attributes++];
    attribute.id = kLaunchAttributeClusterDimension;
    attribute.value.clusterDim = {launch.cluster[0], launch.cluster[1], launch.cluster[2]};
  }
  if (launch.programmatic_dependent_launch) {
    CUlaunchAttribute& attribute = attributes[num_attributes++];
    attribute.id = kLaunchAttributeProgrammaticStreamSerialization;
    attribute.value.programmaticStreamSerializationAllowed = 1;
  }
  CUlaunchConfig config = {};
  config.gridDimX = launch.grid[0];
  config.gridDimY = launch.grid[1];
  config.gridDimZ = launch.grid[2];
  config.blockDimX = launch.block[0];
  config.blockDimY = launch.block[1];
  config.blockDimZ = launch.block[2];
  config.sharedMemBytes = launch.shared_memory;
  config.hStream = stream;
  config.attrs = attributes;
  config.numAttrs = num_attributes;
  // The driver takes a library's kernel where it takes a function, in the context of the stream.
  const CUresult result =
      driver.cuLaunchKernelEx(&config, reinterpret_cast<CUfunction>(kernel), parameters.values.data(), nullptr);
  return result == 0 ? Status{} : CudaStatus(driver, result, "launching");
}

Status LoadedPlan::Execute(CUstream stream, const BufferView* operands, size_t num_operands, const BufferView* results,
                           size_t num_results) const {
  if (driver_.load(std::memory_order_acquire) == nullptr) {
    return Internal("plan " + plan_.name + ": executed before it was initialized");
  }
  Status status = CheckBuffers("operand", operands, num_operands, 0, plan_.operands);
  if (!status.ok()) return status;
  status = CheckBuffers("result", results, num_results, plan_.operands, plan_.buffers.size() - plan_.operands);
  if (!status.ok()) return status;
  static thread_local std::vector<void*> addresses;
  addresses.clear();
  for (size_t i = 0; i < num_operands; ++i) addresses.push_back(operands[i].data);
  for (size_t i = 0; i < num_results; ++i) addresses.push_back(results[i].data);
  for (size_t i = 0; i < plan_.launches.size(); ++i) {
    status = Run(plan_.launches[i], kernels_[i], stream, addresses);
    if (!status.ok()) {
      status.message = "plan " + plan_.name + ", kernel '" + plan_.launches[i].symbol + "': " + status.message;
      return status;
    }
  }
  return {};
}

}  // namespace jax_ssd

// The plan decoder and the launcher against a driver that only records what it is asked to do. Built and run by
// tests/test_ffi.py, with sanitizers. Prints the number of checks, or the first failure and exits with 1.
#include "launcher.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <vector>

using jax_ssd::BufferView;
using jax_ssd::Code;
using jax_ssd::CubinRegistry;
using jax_ssd::Driver;
using jax_ssd::LoadedPlan;
using jax_ssd::Status;

namespace {

std::atomic<int> checks{0};

#define CHECK(condition)                                                   \
  do {                                                                     \
    ++checks;                                                              \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                        \
    }                                                                      \
  } while (false)

void CheckContains(const std::string& text, const std::string& part) {
  ++checks;
  if (text.find(part) == std::string::npos) {
    std::fprintf(stderr, "expected \"%s\" in \"%s\"\n", part.c_str(), text.c_str());
    std::exit(1);
  }
}

// ---- a driver that records ----------------------------------------------------------------------------------------

struct RecordedLaunch {
  CUlaunchConfig config;
  std::vector<CUlaunchAttribute> attributes;
  CUfunction function;
  std::vector<std::vector<char>> params;
};

struct FakeDriver {
  std::mutex mutex;
  int loads = 0, unloads = 0, kernel_loads = 0, pushes = 0, pops = 0;
  CUcontext current = nullptr;
  std::vector<std::string> loaded;                      // the bytes of each library's cubin
  std::vector<std::string> symbols;                     // a kernel handle is an index into this, plus one
  std::vector<std::pair<CUdevice, int>> shared_memory;  // what was set, in order
  std::vector<size_t> param_sizes;                      // of the kernels under test
  std::vector<RecordedLaunch> launches;
  CUtensorMap encoded = {};
  std::vector<uint64_t> tensor_dims, tensor_strides;
  CUresult load_result = 0, launch_result = 0, symbol_result = 0;
} fake;

void Reset() {
  fake.loads = fake.unloads = fake.kernel_loads = fake.pushes = fake.pops = 0;
  fake.loaded.clear();
  fake.symbols.clear();
  fake.shared_memory.clear();
  fake.param_sizes.clear();
  fake.launches.clear();
  fake.load_result = fake.launch_result = fake.symbol_result = 0;
}

// Streams are small integers; stream n belongs to context n / 10, which belongs to device n / 10 - 1.
CUstream StreamNumber(uintptr_t number) { return reinterpret_cast<CUstream>(number); }

const Driver kFakeDriver = {
    /*cuInit=*/[](unsigned int) -> CUresult { return 0; },
    /*cuGetErrorName=*/
    [](CUresult error, const char** name) -> CUresult {
      *name = error == 209 ? "CUDA_ERROR_NO_BINARY_FOR_GPU" : "CUDA_ERROR_OTHER";
      return error == 999 ? 1 : 0;
    },
    /*cuGetErrorString=*/
    [](CUresult error, const char** words) -> CUresult {
      *words = "no kernel image is available";
      return error == 999 ? 1 : 0;
    },
    /*cuStreamGetCtx=*/
    [](CUstream stream, CUcontext* context) -> CUresult {
      *context = reinterpret_cast<CUcontext>(reinterpret_cast<uintptr_t>(stream) / 10);
      return 0;
    },
    /*cuCtxPushCurrent=*/
    [](CUcontext context) -> CUresult {
      ++fake.pushes;
      fake.current = context;
      return 0;
    },
    /*cuCtxPopCurrent=*/
    [](CUcontext* context) -> CUresult {
      ++fake.pops;
      *context = fake.current;
      fake.current = nullptr;
      return 0;
    },
    /*cuCtxGetDevice=*/
    [](CUdevice* device) -> CUresult {
      *device = static_cast<int>(reinterpret_cast<uintptr_t>(fake.current)) - 1;
      return 0;
    },
    /*cuLibraryLoadData=*/
    [](CUlibrary* library, const void* code, void*, void**, unsigned int, void*, void**, unsigned int) -> CUresult {
      std::lock_guard<std::mutex> lock(fake.mutex);
      if (fake.load_result != 0) return fake.load_result;
      ++fake.loads;
      fake.loaded.push_back(static_cast<const char*>(code));
      *library = reinterpret_cast<CUlibrary>(fake.loaded.size());
      return 0;
    },
    /*cuLibraryUnload=*/
    [](CUlibrary) -> CUresult {
      ++fake.unloads;
      return 0;
    },
    /*cuLibraryGetKernel=*/
    [](CUkernel* kernel, CUlibrary, const char* name) -> CUresult {
      std::lock_guard<std::mutex> lock(fake.mutex);
      if (fake.symbol_result != 0) return fake.symbol_result;
      for (size_t i = 0; i < fake.symbols.size(); ++i) {
        if (fake.symbols[i] == name) {
          *kernel = reinterpret_cast<CUkernel>(i + 1);
          return 0;
        }
      }
      fake.symbols.push_back(name);
      *kernel = reinterpret_cast<CUkernel>(fake.symbols.size());
      return 0;
    },
    /*cuKernelGetFunction=*/
    [](CUfunction* function, CUkernel kernel) -> CUresult {
      std::lock_guard<std::mutex> lock(fake.mutex);
      ++fake.kernel_loads;
      *function = reinterpret_cast<CUfunction>(kernel);
      return 0;
    },
    /*cuKernelSetAttribute=*/
    [](int attribute, int value, CUkernel, CUdevice device) -> CUresult {
      CHECK(attribute == 8);
      fake.shared_memory.push_back({device, value});
      return 0;
    },
    /*cuLaunchKernelEx=*/
    [](const CUlaunchConfig* config, CUfunction function, void** params, void** extra) -> CUresult {
      CHECK(extra == nullptr);
      std::lock_guard<std::mutex> lock(fake.mutex);
      if (fake.launch_result != 0) return fake.launch_result;
      RecordedLaunch launch = {*config, {config->attrs, config->attrs + config->numAttrs}, function, {}};
      for (size_t i = 0; i < fake.param_sizes.size(); ++i) {
        const char* value = static_cast<const char*>(params[i]);
        launch.params.emplace_back(value, value + fake.param_sizes[i]);
      }
      fake.launches.push_back(launch);
      return 0;
    },
    /*cuTensorMapEncodeTiled=*/
    [](CUtensorMap* map, int, uint32_t rank, void* address, const uint64_t* dims, const uint64_t* strides,
       const uint32_t*, const uint32_t*, int, int, int, int) -> CUresult {
      CHECK(reinterpret_cast<uintptr_t>(map) % 64 == 0);
      fake.tensor_dims.assign(dims, dims + rank);
      fake.tensor_strides.assign(strides, strides + rank - 1);
      map->opaque[0] = reinterpret_cast<uintptr_t>(address);
      fake.encoded = *map;
      return 0;
    },
};

Status OpenFake(const Driver** driver) {
  *driver = &kFakeDriver;
  return {};
}

// ---- plans --------------------------------------------------------------------------------------------------------

class Writer {
 public:
  Writer& U32(std::initializer_list<uint32_t> values) {
    for (uint32_t value : values) Append(&value, 4);
    return *this;
  }
  Writer& U64(std::initializer_list<uint64_t> values) {
    for (uint64_t value : values) Append(&value, 8);
    return *this;
  }
  Writer& String(const std::string& text) {
    U32({static_cast<uint32_t>(text.size())});
    return Append(text.data(), text.size());
  }
  Writer& Append(const void* data, size_t size) {
    bytes_.append(static_cast<const char*>(data), size);
    return *this;
  }
  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

constexpr uint32_t kF32 = 11, kBf16 = 16;

// Two launches of one cubin: the first with every kind of argument, the second with the options of a launch.
struct Sample {
  std::string digest = "digest";
  uint64_t pointer_offset = 64;
  uint32_t buffer = 0;
  uint32_t grid_x = 70000;
  uint32_t shared_memory = 100000;
  uint64_t cubin_size = 10;
  uint32_t version = 1;

  std::string Bytes() const {
    Writer out;
    out.Append("JSSD", 4).U32({version}).String("sample");
    out.U32({1}).String("x").U32({kBf16, 2}).U64({4, 64});
    out.U32({2}).String("y").U32({kF32, 1}).U64({uint64_t{1} << 33}).String("scratch").U32({kF32, 0});
    out.U32({1}).String(digest).U64({0, cubin_size});
    out.U32({2});
    out.U32({0}).String("first").U32({grid_x, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0});
    out.U32({4});
    out.U32({0, buffer}).U64({pointer_offset});
    out.U32({1}).String(std::string("\x01\x02\x03\x04", 4));
    out.U32({0, 1}).U64({uint64_t{1} << 34});
    out.U32({2, 0}).U64({0}).U32({9, 2}).U64({64, 4}).U64({128}).U32({64, 1, 1, 1, 0, 3, 0, 0});
    out.U32({0}).String("second").U32({4, 2, 2, 128, 1, 1, 2, 1, 1, shared_memory, 1});
    out.U32({1}).U32({0, 2}).U64({0});
    return out.bytes();
  }
};

const std::string kCubin = "the cubin!";

std::unique_ptr<LoadedPlan> Load(CubinRegistry& registry, const Sample& sample = {}) {
  std::unique_ptr<LoadedPlan> plan;
  Status status = LoadedPlan::Create(registry, sample.Bytes(), kCubin, &plan);
  if (!status.ok()) std::fprintf(stderr, "%s\n", status.message.c_str());
  CHECK(status.ok() && plan != nullptr);
  return plan;
}

Status Decode(const std::string& bytes) {
  jax_ssd::Plan plan;
  return jax_ssd::DecodePlan(bytes, kCubin.size(), &plan);
}

struct Buffers {
  int64_t x_dims[2] = {4, 64};
  int64_t y_dims[1] = {int64_t{1} << 33};
  std::vector<BufferView> operands = {{reinterpret_cast<void*>(0x1000), kBf16, x_dims, 2}};
  std::vector<BufferView> results = {{reinterpret_cast<void*>(0x2000), kF32, y_dims, 1},
                                     {reinterpret_cast<void*>(0x3000), kF32, nullptr, 0}};

  Status Execute(const LoadedPlan& plan, CUstream stream) const {
    return plan.Execute(stream, operands.data(), operands.size(), results.data(), results.size());
  }
};

template <typename T>
T Value(const std::vector<char>& bytes) {
  T value;
  CHECK(bytes.size() >= sizeof(T));
  std::memcpy(&value, bytes.data(), sizeof(T));
  return value;
}

// ---- tests --------------------------------------------------------------------------------------------------------

void TestLaunches() {
  Reset();
  CubinRegistry registry(OpenFake);
  auto plan = Load(registry);
  CHECK(plan->Initialize(StreamNumber(10)).ok());
  Buffers buffers;
  fake.param_sizes = {8};  // all that is recorded: the second kernel has one parameter
  CHECK(buffers.Execute(*plan, StreamNumber(11)).ok());
  CHECK(fake.launches.size() == 2);
  const RecordedLaunch& second = fake.launches[1];
  CHECK(Value<uintptr_t>(second.params[0]) == 0x3000);
  CHECK(second.config.gridDimX == 4 && second.config.gridDimY == 2 && second.config.gridDimZ == 2);
  CHECK(second.config.blockDimX == 128 && second.config.sharedMemBytes == 100000);
  CHECK(second.config.hStream == StreamNumber(11));
  CHECK(second.attributes.size() == 2);
  CHECK(second.attributes[0].id == 4 && second.attributes[0].value.clusterDim.x == 2);
  CHECK(second.attributes[1].id == 6 && second.attributes[1].value.programmaticStreamSerializationAllowed == 1);
  CHECK(fake.symbols[reinterpret_cast<uintptr_t>(second.function) - 1] == "second");
  CHECK(fake.launches[0].config.gridDimX == 70000 && fake.launches[0].attributes.empty());
}

void TestArguments() {
  Reset();
  Buffers buffers;
  // Record all four parameters of the first kernel, and nothing of the second, which has one.
  fake.param_sizes = {8, 4, 8, 128};
  static CUresult (*const launch)(const CUlaunchConfig*, CUfunction, void**, void**) = kFakeDriver.cuLaunchKernelEx;
  Driver first_only = kFakeDriver;
  first_only.cuLaunchKernelEx = [](const CUlaunchConfig* config, CUfunction function, void** params,
                                   void** extra) -> CUresult {
    return config->gridDimX == 70000 ? launch(config, function, params, extra) : 0;
  };
  CubinRegistry registry([&](const Driver** driver) {
    *driver = &first_only;
    return Status{};
  });
  auto plan = Load(registry);
  CHECK(plan->Initialize(StreamNumber(10)).ok());
  CHECK(buffers.Execute(*plan, StreamNumber(10)).ok());
  CHECK(fake.launches.size() == 1);
  const auto& params = fake.launches[0].params;
  CHECK(Value<uintptr_t>(params[0]) == 0x1000 + 64);
  CHECK(Value<uint32_t>(params[1]) == 0x04030201);
  CHECK(Value<uintptr_t>(params[2]) == 0x2000 + (uintptr_t{1} << 34));  // beyond 32 bits
  CHECK(Value<uint64_t>(params[3]) == 0x1000);
  CHECK((fake.tensor_dims == std::vector<uint64_t>{64, 4} && fake.tensor_strides == std::vector<uint64_t>{128}));
}

void TestCubinsAreShared() {
  Reset();
  CubinRegistry registry(OpenFake);
  auto one = Load(registry);
  auto two = Load(registry);
  CHECK(fake.loads == 0);  // instantiating touches no driver
  CHECK(registry.size() == 1);
  CHECK(one->Initialize(StreamNumber(10)).ok() && two->Initialize(StreamNumber(10)).ok());
  CHECK(fake.loads == 1 && fake.loaded[0].substr(0, kCubin.size()) == kCubin);
  one.reset();
  CHECK(fake.unloads == 0);
  Buffers buffers;
  CHECK(buffers.Execute(*two, StreamNumber(10)).ok());
  two.reset();
  CHECK(fake.unloads == 1 && registry.size() == 0);
  // The same content again is loaded again.
  auto three = Load(registry);
  CHECK(three->Initialize(StreamNumber(10)).ok());
  CHECK(fake.loads == 2);
}

void TestDigestOfOtherContent() {
  CubinRegistry registry(OpenFake);
  auto plan = Load(registry);
  std::unique_ptr<LoadedPlan> other;
  Status status = LoadedPlan::Create(registry, Sample().Bytes(), "0123456789", &other);
  CHECK(status.code == Code::kInvalidArgument && other == nullptr);
  CheckContains(status.message, "two different cubins carry the digest digest");
}

void TestInitializeOncePerDevice() {
  Reset();
  CubinRegistry registry(OpenFake);
  auto plan = Load(registry);
  for (int repeat = 0; repeat < 3; ++repeat) CHECK(plan->Initialize(StreamNumber(10 + repeat)).ok());
  CHECK(fake.kernel_loads == 2 && fake.pushes == 1 && fake.pops == 1);
  CHECK((fake.shared_memory == std::vector<std::pair<CUdevice, int>>{{0, 100000}}));
  CHECK(plan->Initialize(StreamNumber(25)).ok());  // another device
  CHECK(fake.loads == 1 && fake.kernel_loads == 4 && fake.pops == 2);
  CHECK(fake.shared_memory.size() == 2 && fake.shared_memory[1].first == 1);
}

void TestSharedMemoryIsNeverLowered() {
  Reset();
  CubinRegistry registry(OpenFake);
  Sample less, more;
  less.shared_memory = 60000;
  more.shared_memory = 120000;
  auto one = Load(registry), two = Load(registry, less), three = Load(registry, more);
  CHECK(one->Initialize(StreamNumber(10)).ok());
  CHECK(two->Initialize(StreamNumber(10)).ok());
  CHECK(fake.shared_memory.size() == 1);
  CHECK(three->Initialize(StreamNumber(10)).ok());
  CHECK(fake.shared_memory.back().second == 120000);
}

void TestErrorsCarryTheDriversWords() {
  Reset();
  CubinRegistry registry(OpenFake);
  auto plan = Load(registry);
  fake.load_result = 209;
  Status status = plan->Initialize(StreamNumber(10));
  CHECK(status.code == Code::kInternal);
  CheckContains(status.message, "plan sample, kernel 'first'");
  CheckContains(status.message, "CUDA_ERROR_NO_BINARY_FOR_GPU (209, no kernel image is available)");
  fake.load_result = 0;
  Buffers buffers;
  CheckContains(buffers.Execute(*plan, StreamNumber(10)).message, "executed before it was initialized");
  fake.symbol_result = 500;
  CheckContains(plan->Initialize(StreamNumber(10)).message, "finding kernel 'first' in its cubin: CUDA_ERROR_OTHER");
  fake.symbol_result = 0;
  CHECK(plan->Initialize(StreamNumber(10)).ok());  // a failure can be tried again
  fake.launch_result = 999;
  CheckContains(buffers.Execute(*plan, StreamNumber(10)).message, "kernel 'first': launching: unknown CUDA error (999");
  CubinRegistry without([](const Driver**) { return jax_ssd::Internal("no driver here"); });
  CHECK(Load(without)->Initialize(StreamNumber(10)).message == "no driver here");
}

void TestBuffersAreChecked() {
  Reset();
  CubinRegistry registry(OpenFake);
  auto plan = Load(registry);
  CHECK(plan->Initialize(StreamNumber(10)).ok());
  Buffers wrong_size, wrong_type, too_few;
  wrong_size.x_dims[1] = 65;
  Status status = wrong_size.Execute(*plan, StreamNumber(10));
  CHECK(status.code == Code::kInvalidArgument);
  CheckContains(status.message, "expected operand 0 ('x') to be bf16[4,64], got bf16[4,65]");
  wrong_type.results[1].type = kBf16;
  CheckContains(wrong_type.Execute(*plan, StreamNumber(10)).message,
                "expected result 1 ('scratch') to be f32[], got bf16[]");
  too_few.results.pop_back();
  CheckContains(too_few.Execute(*plan, StreamNumber(10)).message, "expected 2 results, got 1");
  CHECK(fake.launches.empty());
}

void TestMalformedPlans() {
  const std::string good = Sample().Bytes();
  CHECK(Decode(good).ok());
  for (size_t size = 0; size < good.size(); ++size) {
    Status status = Decode(good.substr(0, size));
    CHECK(status.code == Code::kInvalidArgument);
    CheckContains(status.message, "malformed launch plan");
  }
  CheckContains(Decode(good + "x").message, "1 bytes follow its end");
  CheckContains(Decode("JSSX" + good.substr(4)).message, "does not begin with JSSD");
  auto message = [](auto change) {
    Sample sample;
    change(sample);
    return Decode(sample.Bytes()).message;
  };
  CheckContains(message([](Sample& s) { s.version = 2; }), "version 2, this build of jax_ssd reads version 1");
  CheckContains(message([](Sample& s) { s.buffer = 7; }), "an argument names buffer 7 of 3");
  CheckContains(message([](Sample& s) { s.pointer_offset = 513; }), "byte 513 of buffer 'x', which has 512");
  CheckContains(message([](Sample& s) { s.grid_x = 0; }), "the grid (0, 1, 1)");
  CheckContains(message([](Sample& s) { s.cubin_size = 11; }), "cubin digest lies at [0, +11) of 10 bytes");
  CheckContains(message([](Sample& s) { s.digest = ""; }), "a cubin has no digest");
}

// Any single damaged byte is either refused or gives a plan that is safe to print and to launch.
void TestDamagedPlans() {
  const std::string good = Sample().Bytes();
  for (size_t at = 0; at < good.size(); ++at) {
    for (int flip : {1, 0x80, 0xff}) {
      std::string damaged = good;
      damaged[at] = static_cast<char>(damaged[at] ^ flip);
      jax_ssd::Plan plan;
      Status status = jax_ssd::DecodePlan(damaged, kCubin.size(), &plan);
      if (status.ok()) CHECK(!jax_ssd::DescribePlan(plan).empty());
    }
  }
}

void TestThreads() {
  Reset();
  CubinRegistry registry(OpenFake);
  auto plan = Load(registry);
  CHECK(plan->Initialize(StreamNumber(10)).ok());
  fake.param_sizes = {8};
  std::vector<std::thread> threads;
  for (int i = 0; i < 8; ++i) {
    threads.emplace_back([&, i] {
      Buffers buffers;
      for (int repeat = 0; repeat < 50; ++repeat) {
        CHECK(plan->Initialize(StreamNumber(10 + i)).ok());
        CHECK(buffers.Execute(*plan, StreamNumber(10 + i)).ok());
        auto other = Load(registry);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(fake.launches.size() == 800 && fake.loads == 1);
}

void TestRealDriverIsNamedWhenMissing() {
  const Driver* driver = nullptr;
  Status status = jax_ssd::OpenDriver(&driver);
  if (!status.ok()) {
    CheckContains(status.message, "driver");
  } else {
    CHECK(driver != nullptr);
  }
}

}  // namespace

int main() {
  TestLaunches();
  TestArguments();
  TestCubinsAreShared();
  TestDigestOfOtherContent();
  TestInitializeOncePerDevice();
  TestSharedMemoryIsNeverLowered();
  TestErrorsCarryTheDriversWords();
  TestBuffersAreChecked();
  TestMalformedPlans();
  TestDamagedPlans();
  TestThreads();
  TestRealDriverIsNamedWhenMissing();
  std::printf("%d checks passed\n", checks.load());
  return 0;
}

// A launch plan as the lowering wrote it: which kernels run, on which grid, with which arguments. Decoding checks
// everything that can be checked without a device, so that the launcher may rely on it.
//
// The bytes are little-endian and packed; strings and arrays are a u32 count and their elements. In order:
//   "JSSD" u32 version; string name
//   u32 operands; buffer...      buffer: string name; u32 XLA data type; u32 rank; i64 dimension...
//   u32 results; buffer...       (scratch included: XLA sees it as results)
//   u32 cubins; cubin...         cubin: string digest; u64 offset; u64 size   (into the bytes of the cubins)
//   u32 launches; launch...      launch: u32 cubin; string symbol; u32 grid[3], block[3], cluster[3] (zeros: none),
//                                        dynamic shared memory, flags (1: programmatic dependent launch);
//                                        u32 arguments; argument...
//   argument: u32 kind; then
//     0 pointer     u32 buffer; u64 byte offset
//     1 constant    u32 size; bytes
//     2 tensor map  u32 buffer; u64 byte offset; u32 data type; u32 rank; u64 dimension...[rank];
//                   u64 byte stride...[rank - 1]; u32 box...[rank]; u32 element stride...[rank];
//                   u32 interleave, swizzle, L2 promotion, out-of-bounds fill   (values of cuda.h)
// Buffers are numbered operands first, then results. One argument is one kernel parameter.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "status.h"

namespace jax_ssd {

constexpr uint32_t kPlanVersion = 1;
constexpr uint32_t kMaxParameterBytes = 4096;
constexpr uint32_t kMaxTensorMapRank = 5;

// The XLA data types that buffers may have. Values are XLA_FFI_DataType's; handler.cc asserts that they are.
struct DataType {
  uint32_t value;
  const char* name;
  uint32_t bytes;
};
const DataType* FindDataType(uint32_t value);

struct BufferSpec {
  std::string name;
  uint32_t type = 0;
  std::vector<int64_t> dims;
  uint64_t bytes = 0;
};

struct CubinSpec {
  std::string digest;
  uint64_t offset = 0;
  uint64_t size = 0;
};

struct TensorMapSpec {
  uint32_t data_type = 0;
  std::vector<uint64_t> dims;
  std::vector<uint64_t> strides;
  std::vector<uint32_t> box;
  std::vector<uint32_t> element_strides;
  uint32_t interleave = 0, swizzle = 0, l2_promotion = 0, oob_fill = 0;
};

struct Argument {
  enum Kind : uint32_t { kPointer = 0, kConstant = 1, kTensorMap = 2 };

  Kind kind = kPointer;
  uint32_t buffer = 0;
  uint64_t offset = 0;
  std::vector<char> constant;
  TensorMapSpec tensor_map;
};

struct Launch {
  uint32_t cubin = 0;
  std::string symbol;
  std::array<uint32_t, 3> grid{}, block{}, cluster{};
  uint32_t shared_memory = 0;
  bool programmatic_dependent_launch = false;
  std::vector<Argument> arguments;

  bool has_cluster() const { return cluster[0] != 0; }
};

struct Plan {
  std::string name;
  uint32_t operands = 0;
  std::vector<BufferSpec> buffers;  // operands, then results
  std::vector<CubinSpec> cubins;
  std::vector<Launch> launches;
};

// `cubin_bytes` is the size of the cubins' bytes that come with the plan.
Status DecodePlan(std::string_view bytes, uint64_t cubin_bytes, Plan* plan);

// "bf16[2,64]"
std::string ShapeText(uint32_t type, const int64_t* dims, size_t rank);

// The plan as text, one line a buffer, cubin and launch.
std::string DescribePlan(const Plan& plan);

}  // namespace jax_ssd

#include "plan.h"

#include <cstring>
#include <limits>
#include <sstream>
#include <utility>

namespace jax_ssd {
namespace {

constexpr DataType kDataTypes[] = {
    {1, "pred", 1}, {2, "s8", 1},  {3, "s16", 2},  {4, "s32", 4},  {5, "s64", 8},  {6, "u8", 1},   {7, "u16", 2},
    {8, "u32", 4},  {9, "u64", 8}, {10, "f16", 2}, {11, "f32", 4}, {12, "f64", 8}, {15, "c64", 8}, {16, "bf16", 2},
};

// Reads the packed bytes. After the first failure every read returns zero and the failure is kept.
class Reader {
 public:
  explicit Reader(std::string_view bytes) : bytes_(bytes) {}

  template <typename T>
  T Read(const char* what) {
    T value{};
    if (Take(sizeof(T), what)) std::memcpy(&value, bytes_.data() + position_ - sizeof(T), sizeof(T));
    return value;
  }

  uint32_t U32(const char* what) { return Read<uint32_t>(what); }
  uint64_t U64(const char* what) { return Read<uint64_t>(what); }

  // A count of elements that take at least `element` bytes each: more than the bytes left could hold is an error here,
  // before anything of that size is allocated.
  uint32_t Count(size_t element, const char* what) {
    const uint32_t count = U32(what);
    if (status_.ok() && count > (bytes_.size() - position_) / element) {
      Fail(std::string(what) + " is " + std::to_string(count) + ", more than the plan's remaining bytes hold");
    }
    return status_.ok() ? count : 0;
  }

  std::string_view Bytes(const char* what) {
    const uint32_t size = Count(1, what);
    return Take(size, what) ? bytes_.substr(position_ - size, size) : std::string_view();
  }

  std::string String(const char* what) { return std::string(Bytes(what)); }

  template <typename T>
  std::vector<T> Array(size_t count, const char* what) {
    std::vector<T> values(count);
    for (T& value : values) value = Read<T>(what);
    return values;
  }

  std::array<uint32_t, 3> Triple(const char* what) { return {U32(what), U32(what), U32(what)}; }

  void Fail(std::string message) {
    if (status_.ok()) status_ = InvalidArgument("malformed launch plan: " + std::move(message));
  }

  bool ok() const { return status_.ok(); }
  const Status& status() const { return status_; }
  size_t left() const { return bytes_.size() - position_; }

 private:
  bool Take(size_t size, const char* what) {
    if (!status_.ok()) return false;
    if (size > left()) {
      Fail(std::string("it ends inside ") + what);
      return false;
    }
    position_ += size;
    return true;
  }

  std::string_view bytes_;
  size_t position_ = 0;
  Status status_;
};

// Product that reports overflow instead of wrapping.
bool Multiply(uint64_t a, uint64_t b, uint64_t* product) {
  if (b != 0 && a > std::numeric_limits<uint64_t>::max() / b) return false;
  *product = a * b;
  return true;
}

BufferSpec ReadBuffer(Reader& in) {
  BufferSpec buffer;
  buffer.name = in.String("a buffer's name");
  buffer.type = in.U32("a buffer's data type");
  const uint32_t rank = in.Count(sizeof(int64_t), "a buffer's rank");
  buffer.dims = in.Array<int64_t>(rank, "a buffer's dimensions");
  if (!in.ok()) return buffer;
  const DataType* type = FindDataType(buffer.type);
  if (type == nullptr) {
    in.Fail("buffer '" + buffer.name + "' has the unsupported data type " + std::to_string(buffer.type));
    return buffer;
  }
  buffer.bytes = type->bytes;
  for (int64_t dim : buffer.dims) {
    if (dim < 0 || !Multiply(buffer.bytes, static_cast<uint64_t>(dim), &buffer.bytes)) {
      in.Fail("buffer '" + buffer.name + "' has no valid size");
      return buffer;
    }
  }
  return buffer;
}

CubinSpec ReadCubin(Reader& in, uint64_t cubin_bytes) {
  CubinSpec cubin;
  cubin.digest = in.String("a cubin's digest");
  cubin.offset = in.U64("a cubin's offset");
  cubin.size = in.U64("a cubin's size");
  if (!in.ok()) return cubin;
  if (cubin.digest.empty()) in.Fail("a cubin has no digest");
  if (cubin.size == 0 || cubin.offset > cubin_bytes || cubin.size > cubin_bytes - cubin.offset) {
    in.Fail("cubin " + cubin.digest + " lies at [" + std::to_string(cubin.offset) + ", +" + std::to_string(cubin.size) +
            ") of " + std::to_string(cubin_bytes) + " bytes");
  }
  return cubin;
}

TensorMapSpec ReadTensorMap(Reader& in) {
  TensorMapSpec map;
  map.data_type = in.U32("a tensor map's data type");
  const uint32_t rank = in.U32("a tensor map's rank");
  if (in.ok() && (rank < 1 || rank > kMaxTensorMapRank)) in.Fail("a tensor map has rank " + std::to_string(rank));
  if (!in.ok()) return map;
  map.dims = in.Array<uint64_t>(rank, "a tensor map's dimensions");
  map.strides = in.Array<uint64_t>(rank - 1, "a tensor map's strides");
  map.box = in.Array<uint32_t>(rank, "a tensor map's box");
  map.element_strides = in.Array<uint32_t>(rank, "a tensor map's element strides");
  map.interleave = in.U32("a tensor map's interleave");
  map.swizzle = in.U32("a tensor map's swizzle");
  map.l2_promotion = in.U32("a tensor map's L2 promotion");
  map.oob_fill = in.U32("a tensor map's out-of-bounds fill");
  return map;
}

void ReadBufferReference(Reader& in, const std::vector<BufferSpec>& buffers, Argument& argument) {
  argument.buffer = in.U32("an argument's buffer");
  argument.offset = in.U64("an argument's offset");
  if (!in.ok()) return;
  if (argument.buffer >= buffers.size()) {
    in.Fail("an argument names buffer " + std::to_string(argument.buffer) + " of " + std::to_string(buffers.size()));
  } else if (argument.offset > buffers[argument.buffer].bytes) {
    const BufferSpec& buffer = buffers[argument.buffer];
    in.Fail("an argument starts at byte " + std::to_string(argument.offset) + " of buffer '" + buffer.name +
            "', which has " + std::to_string(buffer.bytes));
  }
}

Argument ReadArgument(Reader& in, const std::vector<BufferSpec>& buffers) {
  Argument argument;
  const uint32_t kind = in.U32("an argument's kind");
  switch (kind) {
    case Argument::kPointer:
      ReadBufferReference(in, buffers, argument);
      break;
    case Argument::kConstant: {
      const std::string_view bytes = in.Bytes("a constant argument");
      argument.constant.assign(bytes.begin(), bytes.end());
      if (bytes.empty()) in.Fail("a constant argument is empty");
      break;
    }
    case Argument::kTensorMap:
      ReadBufferReference(in, buffers, argument);
      argument.tensor_map = ReadTensorMap(in);
      break;
    default:
      in.Fail("an argument is of the unknown kind " + std::to_string(kind));
  }
  argument.kind = static_cast<Argument::Kind>(kind);
  return argument;
}

size_t ParameterBytes(const Argument& argument) {
  switch (argument.kind) {
    case Argument::kPointer:
      return sizeof(void*);
    case Argument::kConstant:
      return argument.constant.size();
    case Argument::kTensorMap:
      return 128;
  }
  return 0;
}

std::string TripleText(const std::array<uint32_t, 3>& triple) {
  return "(" + std::to_string(triple[0]) + ", " + std::to_string(triple[1]) + ", " + std::to_string(triple[2]) + ")";
}

void CheckGeometry(Reader& in, const Launch& launch) {
  const auto& [grid, block] = std::pair(launch.grid, launch.block);
  if (grid[0] < 1 || grid[1] < 1 || grid[2] < 1 || grid[0] > 0x7fffffffu || grid[1] > 65535 || grid[2] > 65535) {
    in.Fail("kernel '" + launch.symbol + "' has the grid " + TripleText(grid));
  }
  const uint64_t threads = uint64_t{block[0]} * block[1] * block[2];
  if (threads < 1 || block[0] > 1024 || block[1] > 1024 || block[2] > 64 || threads > 1024) {
    in.Fail("kernel '" + launch.symbol + "' has the block " + TripleText(block));
  }
  for (int axis = 0; launch.has_cluster() && axis < 3; ++axis) {
    if (launch.cluster[axis] < 1 || grid[axis] % launch.cluster[axis] != 0) {
      in.Fail("kernel '" + launch.symbol + "' has the cluster " + TripleText(launch.cluster) + " in the grid " +
              TripleText(grid));
    }
  }
}

Launch ReadLaunch(Reader& in, const Plan& plan) {
  Launch launch;
  launch.cubin = in.U32("a launch's cubin");
  launch.symbol = in.String("a launch's symbol");
  launch.grid = in.Triple("a launch's grid");
  launch.block = in.Triple("a launch's block");
  launch.cluster = in.Triple("a launch's cluster");
  launch.shared_memory = in.U32("a launch's shared memory");
  const uint32_t flags = in.U32("a launch's flags");
  launch.programmatic_dependent_launch = (flags & 1) != 0;
  const uint32_t count = in.Count(sizeof(uint32_t), "a launch's arguments");
  if (!in.ok()) return launch;
  if (launch.cubin >= plan.cubins.size()) {
    in.Fail("a launch names cubin " + std::to_string(launch.cubin) + " of " + std::to_string(plan.cubins.size()));
  }
  if (launch.symbol.empty()) in.Fail("a launch has no symbol");
  if (launch.shared_memory > 0x7fffffffu) in.Fail("kernel '" + launch.symbol + "' asks for too much shared memory");
  if (flags > 1) in.Fail("kernel '" + launch.symbol + "' has the unknown flags " + std::to_string(flags));
  CheckGeometry(in, launch);
  size_t bytes = 0;
  for (uint32_t i = 0; i < count && in.ok(); ++i) {
    launch.arguments.push_back(ReadArgument(in, plan.buffers));
    bytes += ParameterBytes(launch.arguments.back());
  }
  if (bytes > kMaxParameterBytes) {
    in.Fail("kernel '" + launch.symbol + "' takes " + std::to_string(bytes) + " bytes of parameters, at most " +
            std::to_string(kMaxParameterBytes) + " are possible");
  }
  return launch;
}

std::string ArgumentText(const Argument& argument, const Plan& plan) {
  if (argument.kind == Argument::kConstant) {
    static const char* const digits = "0123456789abcdef";
    std::string text = "0x";
    for (auto byte = argument.constant.rbegin(); byte != argument.constant.rend(); ++byte) {
      text += digits[static_cast<unsigned char>(*byte) >> 4];
      text += digits[static_cast<unsigned char>(*byte) & 15];
    }
    return text;
  }
  std::string text = argument.kind == Argument::kTensorMap ? "tensor map of " : "";
  text += plan.buffers[argument.buffer].name;
  if (argument.offset != 0) text += "+" + std::to_string(argument.offset);
  return text;
}

}  // namespace

const DataType* FindDataType(uint32_t value) {
  for (const DataType& type : kDataTypes) {
    if (type.value == value) return &type;
  }
  return nullptr;
}

Status DecodePlan(std::string_view bytes, uint64_t cubin_bytes, Plan* plan) {
  Reader in(bytes);
  char magic[4];
  for (char& letter : magic) letter = in.Read<char>("its magic");
  if (in.ok() && std::memcmp(magic, "JSSD", 4) != 0) in.Fail("it does not begin with JSSD");
  const uint32_t version = in.U32("its version");
  if (in.ok() && version != kPlanVersion) {
    in.Fail("version " + std::to_string(version) + ", this build of jax_ssd reads version " +
            std::to_string(kPlanVersion));
  }
  plan->name = in.String("its name");
  // The least that one element of each list takes: an empty string is 4 bytes, and so on.
  plan->operands = in.Count(12, "the operands' count");
  for (uint32_t i = 0; i < plan->operands && in.ok(); ++i) plan->buffers.push_back(ReadBuffer(in));
  const uint32_t results = in.Count(12, "the results' count");
  for (uint32_t i = 0; i < results && in.ok(); ++i) plan->buffers.push_back(ReadBuffer(in));
  const uint32_t cubins = in.Count(20, "the cubins' count");
  for (uint32_t i = 0; i < cubins && in.ok(); ++i) plan->cubins.push_back(ReadCubin(in, cubin_bytes));
  const uint32_t launches = in.Count(56, "the launches' count");
  for (uint32_t i = 0; i < launches && in.ok(); ++i) plan->launches.push_back(ReadLaunch(in, *plan));
  if (in.ok() && in.left() != 0) in.Fail(std::to_string(in.left()) + " bytes follow its end");
  return in.status();
}

std::string ShapeText(uint32_t type, const int64_t* dims, size_t rank) {
  const DataType* known = FindDataType(type);
  std::string text = known == nullptr ? "type" + std::to_string(type) : known->name;
  text += "[";
  for (size_t i = 0; i < rank; ++i) text += (i == 0 ? "" : ",") + std::to_string(dims[i]);
  return text + "]";
}

std::string DescribePlan(const Plan& plan) {
  std::ostringstream out;
  out << "plan " << plan.name << "\n";
  for (size_t i = 0; i < plan.buffers.size(); ++i) {
    const BufferSpec& buffer = plan.buffers[i];
    out << (i < plan.operands ? "operand " : "result ") << buffer.name << " "
        << ShapeText(buffer.type, buffer.dims.data(), buffer.dims.size()) << "\n";
  }
  for (const CubinSpec& cubin : plan.cubins) out << "cubin " << cubin.digest << " " << cubin.size << " bytes\n";
  for (const Launch& launch : plan.launches) {
    out << "launch " << launch.symbol << " grid " << TripleText(launch.grid) << " block " << TripleText(launch.block);
    if (launch.has_cluster()) out << " cluster " << TripleText(launch.cluster);
    if (launch.shared_memory != 0) out << " shared memory " << launch.shared_memory;
    if (launch.programmatic_dependent_launch) out << " programmatic";
    out << " arguments (";
    const char* separator = "";
    for (const Argument& argument : launch.arguments) {
      out << std::exchange(separator, ", ") << ArgumentText(argument, plan);
    }
    out << ")\n";
  }
  return out.str();
}

}  // namespace jax_ssd

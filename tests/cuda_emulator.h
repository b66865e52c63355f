// Runs CUDA C++ kernels on a CPU, one block at a time: every thread is a fiber, warp instructions and barriers are
// where fibers wait for each other, in a random order in between. tests/cuda_emulator.py turns inline PTX into calls of
// `emulator::execute`. Shared memory starts as NaNs, copies that run beside the thread arrive when they are waited for.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__
#define __builtin_assume(condition)
#define __align__(n) __attribute__((aligned(n)))

struct float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

struct __nv_bfloat16 {
  unsigned short bits = 0;
};
struct __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
struct __half {
  _Float16 value = 0;
};
inline __nv_bfloat16 __float2bfloat16_rn(float value) {
  unsigned word;
  std::memcpy(&word, &value, 4);
  if (std::isnan(value)) return {0x7fff};
  return {static_cast<unsigned short>((word + 0x7fff + (word >> 16 & 1)) >> 16)};
}
inline float __bfloat162float(__nv_bfloat16 value) {
  const unsigned word = static_cast<unsigned>(value.bits) << 16;
  float result;
  std::memcpy(&result, &word, 4);
  return result;
}
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
  return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)};
}
inline float __half2float(__half value) { return value.value; }
inline __half __float2half_rn(float value) { return {static_cast<_Float16>(value)}; }

namespace jax_ssd {
alignas(1024) unsigned char memory[256 * 1024];  // what `extern __shared__` of the kernels names
}

namespace emulator {

constexpr int kMostThreads = 1024, kStack = 256 * 1024;
constexpr unsigned kAll = ~0u;

struct Index {
  unsigned x = 0, y = 0, z = 0;
};

// What fibers of a warp, or of the block, exchange while they wait for each other.
struct Meeting {
  int arrived = 0;
  unsigned generation = 0;
};

struct Copy {
  unsigned to;
  const void* from;
  int bytes;
};

struct Fiber {
  ucontext_t context;
  jmp_buf jump;
  bool started = false, done = false;
  std::vector<unsigned char> stack;
  std::vector<Copy> copies;
  uint64_t slots[80];  // operands of a warp instruction
};

inline std::vector<Fiber> fibers(kMostThreads);
inline Meeting warps[kMostThreads / 32], block, groups[kMostThreads / 128];
inline int threads = 0, current = 0, vote = 0;
inline size_t limit = 0;  // bytes of shared memory that the launch asks for
inline Index thread_index, block_index, grid_size;
inline jmp_buf scheduler;
inline void (*body)() = nullptr;

[[noreturn]] inline void fail(const std::string& words) {
  std::fprintf(stderr, "cuda_emulator: %s (thread %d of block %u)\n", words.c_str(), current, block_index.x);
  std::abort();
}

inline void yield() {
  const int own = current;
  if (_setjmp(fibers[own].jump) == 0) _longjmp(scheduler, 1);
  current = own;
  thread_index.x = own;
}

// Waits until `count` fibers have come; the last one runs `action` before all go on.
template <class Action>
void meet(Meeting& meeting, int count, Action action) {
  const unsigned generation = meeting.generation;
  if (++meeting.arrived == count) {
    action();
    meeting.arrived = 0;
    ++meeting.generation;
    return;
  }
  while (meeting.generation == generation) yield();
}

inline Fiber& lane(int l) { return fibers[current / 32 * 32 + l]; }
template <class Action>
void warp(Action action) {
  meet(warps[current / 32], 32, action);
}

inline void entry() {
  body();
  fibers[current].done = true;
  _longjmp(scheduler, 1);
}

// Runs a block of `count` threads, each of which calls `function`.
inline void run_block(int count, void (*function)(), unsigned seed) {
  threads = count;
  body = function;
  std::memset(jax_ssd::memory, 0xff, sizeof jax_ssd::memory);
  block = {};
  for (auto& meeting : warps) meeting = {};
  for (auto& meeting : groups) meeting = {};
  std::vector<int> order(count);
  for (int i = 0; i < count; ++i) {
    order[i] = i;
    fibers[i].started = fibers[i].done = false;
    fibers[i].copies.clear();
    fibers[i].stack.resize(kStack);
  }
  std::mt19937 random(seed);
  for (int left = count; left > 0;) {
    std::shuffle(order.begin(), order.end(), random);
    bool moved = false;
    for (int i : order) {
      Fiber& fiber = fibers[i];
      if (fiber.done) continue;
      current = i;
      thread_index.x = i;
      if (_setjmp(scheduler) == 0) {
        if (fiber.started) _longjmp(fiber.jump, 1);
        fiber.started = true;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack.data();
        fiber.context.uc_stack.ss_size = kStack;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, entry, 0);
        setcontext(&fiber.context);
      }
      if (fiber.done) --left;
      moved = true;
    }
    if (!moved) fail("no thread can go on");
  }
  for (size_t i = limit; i < sizeof jax_ssd::memory; ++i) {
    if (jax_ssd::memory[i] != 0xff) fail("a write beyond the launch's shared memory");
  }
}

inline unsigned char* shared(unsigned address, int bytes, int alignment) {
  if (address + bytes > limit) fail("address beyond the launch's shared memory");
  if (address % alignment != 0) fail("misaligned shared address");
  return jax_ssd::memory + address;
}

inline float bfloat16(unsigned bits) {
  const unsigned word = bits << 16;
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}
inline float from_bits(uint64_t bits) {
  const unsigned word = static_cast<unsigned>(bits);
  float value;
  std::memcpy(&value, &word, 4);
  return value;
}
inline unsigned to_bits(float value) {
  unsigned word;
  std::memcpy(&word, &value, 4);
  return word;
}
inline float tf32(uint64_t bits) { return from_bits(bits & 0xffffe000u); }

// An operand of inline PTX: where it is, and how wide.
struct Operand {
  void* at;
  uint64_t value;
  int bytes;
  uint64_t get() const {
    if (at == nullptr) return value;
    uint64_t bits = 0;
    std::memcpy(&bits, at, bytes);
    return bits;
  }
  void set(uint64_t bits) const { std::memcpy(at, &bits, bytes); }
};
template <class T>
Operand out(T& place) {
  return {&place, 0, static_cast<int>(sizeof(T))};
}
template <class T>
Operand in(T value) {
  Operand operand{nullptr, 0, static_cast<int>(sizeof(T))};
  std::memcpy(&operand.value, &value, sizeof(T));
  return operand;
}

enum class Opcode {
  kNothing,
  kThread,
  kLoad,
  kStore,
  kMatrix,
  kMatrixTransposed,
  kStoreMatrix,
  kMmaBfloat16,
  kMmaTf32,
  kRound,
  kFma,
  kCopy,
  kWait,
  kExp2,
  kTanh
};

inline Opcode opcode(const std::string& text) {
  const auto starts = [&](const char* prefix) { return text.rfind(prefix, 0) == 0; };
  if (starts("ldmatrix")) return text.find(".trans") == std::string::npos ? Opcode::kMatrix : Opcode::kMatrixTransposed;
  if (starts("stmatrix.sync.aligned.m8n8.x4.shared")) return Opcode::kStoreMatrix;
  if (starts("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32")) return Opcode::kMmaBfloat16;
  if (starts("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32")) return Opcode::kMmaTf32;
  if (starts("ld.shared.")) return Opcode::kLoad;
  if (starts("st.shared.")) return Opcode::kStore;
  if (starts("mov.u32 %0, %%tid.x")) return Opcode::kThread;
  if (starts("cvt.rna.tf32")) return Opcode::kRound;
  if (starts("fma.rn.bf16x2")) return Opcode::kFma;
  if (starts("cp.async.c")) return Opcode::kCopy;
  if (starts("cp.async.wait_all")) return Opcode::kWait;
  if (starts("ex2.approx")) return Opcode::kExp2;
  if (starts("tanh.approx")) return Opcode::kTanh;
  if (starts("prefetch.") || starts("fence.")) return Opcode::kNothing;
  fail("unknown PTX: " + text);
}

template <int Outputs, int Count>
void execute(Opcode code, const Operand (&o)[Count]) {
  Fiber& own = fibers[current];
  switch (code) {
    case Opcode::kNothing:
      return;
    case Opcode::kThread:
      o[0].set(current);
      return;
    case Opcode::kLoad: {
      unsigned words[4];
      std::memcpy(words, shared(o[Outputs].get(), 4 * Outputs, 4 * Outputs), 4 * Outputs);
      for (int i = 0; i < Outputs; ++i) o[i].set(words[i]);
      return;
    }
    case Opcode::kStore: {
      unsigned words[4];
      for (int i = 1; i < Count; ++i) words[i - 1] = static_cast<unsigned>(o[i].get());
      std::memcpy(shared(o[0].get(), 4 * (Count - 1), 4 * (Count - 1)), words, 4 * (Count - 1));
      return;
    }
    case Opcode::kCopy: {
      const int bytes = Count > 2 ? static_cast<int>(o[2].get()) : 16;
      std::memset(shared(o[0].get(), bytes, bytes), 0xff, bytes);
      if (o[1].get() % bytes != 0) fail("misaligned global address");
      own.copies.push_back({static_cast<unsigned>(o[0].get()), reinterpret_cast<const void*>(o[1].get()), bytes});
      return;
    }
    case Opcode::kWait:
      for (const Copy& copy : own.copies) std::memcpy(shared(copy.to, copy.bytes, copy.bytes), copy.from, copy.bytes);
      own.copies.clear();
      return;
    case Opcode::kExp2: {
      const float value = std::exp2(from_bits(o[1].get()));
      o[0].set(to_bits(std::fabs(value) < 1.17549435e-38f ? 0.0f : value));
      return;
    }
    case Opcode::kTanh:
      o[0].set(to_bits(std::tanh(from_bits(o[1].get()))));
      return;
    case Opcode::kRound: {
      const uint64_t bits = o[1].get();
      const bool finite = std::isfinite(from_bits(bits));
      o[0].set(finite ? (bits + 0x1000u) & 0xffffe000u : bits);
      return;
    }
    case Opcode::kFma: {  // d = a b + d
      unsigned result = 0;
      for (int half = 0; half < 2; ++half) {
        const auto pick = [&](const Operand& x) { return bfloat16(x.get() >> (16 * half) & 0xffff); };
        const __nv_bfloat16 rounded = __float2bfloat16_rn(pick(o[1]) * pick(o[2]) + pick(o[0]));
        unsigned short bits;
        std::memcpy(&bits, &rounded, 2);
        result |= static_cast<unsigned>(bits) << (16 * half);
      }
      o[0].set(result);
      return;
    }
    case Opcode::kMatrix:
    case Opcode::kMatrixTransposed: {
      own.slots[0] = o[4].get();
      warp([&] {
        for (int tile = 0; tile < 4; ++tile) {
          unsigned short rows[8][8];
          for (int r = 0; r < 8; ++r) std::memcpy(rows[r], shared(lane(8 * tile + r).slots[0], 16, 16), 16);
          for (int l = 0; l < 32; ++l) {
            const int i = l / 4, j = l % 4 * 2;
            const bool across = code == Opcode::kMatrixTransposed;
            const unsigned low = across ? rows[j][i] : rows[i][j], high = across ? rows[j + 1][i] : rows[i][j + 1];
            lane(l).slots[1 + tile] = low | high << 16;
          }
        }
      });
      for (int i = 0; i < 4; ++i) o[i].set(own.slots[1 + i]);
      return;
    }
    case Opcode::kStoreMatrix: {
      for (int i = 0; i < Count; ++i) own.slots[i] = o[i].get();
      warp([&] {
        for (int tile = 0; tile < 4; ++tile) {
          for (int l = 0; l < 32; ++l) {
            const unsigned word = static_cast<unsigned>(lane(l).slots[1 + tile]);
            const unsigned row = static_cast<unsigned>(lane(8 * tile + l / 4).slots[0]);
            std::memcpy(shared(row, 16, 16) + l % 4 * 4, &word, 4);
          }
        }
      });
      return;
    }
    case Opcode::kMmaBfloat16:
    case Opcode::kMmaTf32: {
      for (int i = 0; i < Count; ++i) own.slots[i] = o[i].get();
      warp([&] {
        float a[16][16], b[16][8];
        const int depth = code == Opcode::kMmaBfloat16 ? 16 : 8;
        for (int l = 0; l < 32; ++l) {
          const uint64_t* s = lane(l).slots;
          for (int i = 0; i < 4; ++i) {
            const int row = l / 4 + i % 2 * 8;
            if (depth == 8) {
              a[row][l % 4 + i / 2 * 4] = tf32(s[4 + i]);
              if (i < 2) b[l % 4 + i * 4][l / 4] = tf32(s[8 + i]);
            } else {
              for (int e = 0; e < 2; ++e) {
                a[row][l % 4 * 2 + e + i / 2 * 8] = bfloat16(s[4 + i] >> (16 * e) & 0xffff);
                if (i < 2) b[l % 4 * 2 + e + i * 8][l / 4] = bfloat16(s[8 + i] >> (16 * e) & 0xffff);
              }
            }
          }
        }
        for (int l = 0; l < 32; ++l) {
          for (int i = 0; i < 4; ++i) {
            const int row = l / 4 + i / 2 * 8, column = l % 4 * 2 + i % 2;
            float sum = from_bits(lane(l).slots[i]);
            for (int k = 0; k < depth; ++k) sum += a[row][k] * b[k][column];
            lane(l).slots[i] = to_bits(sum);
          }
        }
      });
      for (int i = 0; i < 4; ++i) o[i].set(own.slots[i]);
      return;
    }
  }
}

template <class T, class Source>
T shuffle(T value, Source source) {
  fibers[current].slots[0] = 0;
  std::memcpy(&fibers[current].slots[0], &value, sizeof(T));
  warp([&] {
    for (int l = 0; l < 32; ++l) {
      const int from = source(l);
      lane(l).slots[1] = lane(from < 0 || from > 31 ? l : from).slots[0];
    }
  });
  T result;
  std::memcpy(&result, &fibers[current].slots[1], sizeof(T));
  return result;
}

template <class... Parameters, size_t... I>
void call(void (*kernel)(Parameters...), void** arguments, std::index_sequence<I...>) {
  kernel(*static_cast<Parameters*>(arguments[I])...);
}

template <class... Parameters>
void launch(void (*kernel)(Parameters...), const unsigned* grid, unsigned count, unsigned bytes, void** arguments,
            unsigned seed) {
  static void (*chosen)(Parameters...);
  static void** passed;
  chosen = kernel;
  passed = arguments;
  limit = bytes;
  grid_size = {grid[0], grid[1], grid[2]};
  for (unsigned z = 0; z < grid[2]; ++z) {
    for (unsigned y = 0; y < grid[1]; ++y) {
      for (unsigned x = 0; x < grid[0]; ++x) {
        block_index = {x, y, z};
        run_block(
            static_cast<int>(count), +[] { call(chosen, passed, std::index_sequence_for<Parameters...>{}); }, seed + x);
      }
    }
  }
}

}  // namespace emulator

#define threadIdx emulator::thread_index
#define blockIdx emulator::block_index
#define gridDim emulator::grid_size

inline void __syncthreads() {
  emulator::meet(emulator::block, emulator::threads, [] {});
}
inline int __syncthreads_or(int predicate) {
  using namespace emulator;
  fibers[current].slots[0] = predicate != 0;
  meet(block, threads, [] {
    vote = 0;
    for (int i = 0; i < threads; ++i) vote |= static_cast<int>(fibers[i].slots[0]);
    for (int i = 0; i < threads; ++i) fibers[i].slots[1] = vote;
  });
  return static_cast<int>(fibers[current].slots[1]);
}
inline void __syncwarp(unsigned = ~0u) {
  emulator::warp([] {});
}
template <class T>
T __shfl_sync(unsigned, T value, int source) {
  emulator::fibers[emulator::current].slots[2] = source;
  return emulator::shuffle(value, [](int l) { return static_cast<int>(emulator::lane(l).slots[2]) % 32; });
}
template <class T>
T __shfl_up_sync(unsigned, T value, unsigned distance) {
  return emulator::shuffle(value, [=](int l) { return l - static_cast<int>(distance); });
}
template <class T>
T __shfl_down_sync(unsigned, T value, unsigned distance) {
  return emulator::shuffle(value, [=](int l) { return l + static_cast<int>(distance); });
}
template <class T>
T __shfl_xor_sync(unsigned, T value, int bits) {
  return emulator::shuffle(value, [=](int l) { return l ^ bits; });
}
inline size_t __cvta_generic_to_shared(const void* pointer) {
  return static_cast<const unsigned char*>(pointer) - jax_ssd::memory;
}
inline float __uint_as_float(unsigned bits) { return emulator::from_bits(bits); }
inline float __int_as_float(int bits) { return emulator::from_bits(static_cast<unsigned>(bits)); }
inline int __float2int_rn(float value) { return std::isnan(value) ? 0 : static_cast<int>(std::lrint(value)); }
inline float __sinf(float x) { return std::sin(x); }
inline float __cosf(float x) { return std::cos(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __fdividef(float a, float b) { return a / b; }
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
template <class T>
T __ldcs(const T* from) {
  return *from;
}
template <class T>
void __stcs(T* to, T value) {
  *to = value;
}
template <class T>
void __stwb(T* to, T value) {
  *to = value;
}
inline void sincospif(float x, float* sine, float* cosine) {
  *sine = static_cast<float>(std::sin(M_PI * static_cast<double>(x)));
  *cosine = static_cast<float>(std::cos(M_PI * static_cast<double>(x)));
}
using std::max;
using std::min;

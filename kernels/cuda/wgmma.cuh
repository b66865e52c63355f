// Warpgroup matrix products of sm_90: 64 rows per instruction, 128 threads together, float32 accumulators.
//
// Thread t of the warpgroup (warp w = t / 32, lane l = t % 32) holds of the accumulator d, for every 8 columns j:
//   d[4j], d[4j+1]   row 16w + l/4,     columns 8j + 2(l%4), +1
//   d[4j+2], d[4j+3] row 16w + l/4 + 8, the same columns
// An A operand in registers, 64 x 16, is a[0], a[1] = the pairs of columns 2(l%4) in rows l/4 and l/4 + 8, a[2], a[3] =
// the same 8 columns on: two neighbouring groups of four accumulators, rounded to 16 bits, are such an operand.
//
// Operands in shared memory lie in rows of 128 bytes whose 16-byte pieces are permuted by `swizzled` (as TMA writes
// with a swizzle of 128), tiles start at multiples of 1024 bytes.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "shared_memory.cuh"

namespace jax_ssd {

// Descriptor of an operand whose summed dimension runs along the 128-byte rows: [rows][64] of 16 bits. The next 16
// columns are at +32 bytes, the next 64 in the next tile.
__device__ __forceinline__ unsigned long long row_descriptor(unsigned address) {
  return (unsigned long long)((address & 0x3FFFF) >> 4) | 1ull << 16 | (1024ull >> 4) << 32 | 1ull << 62;
}

// Descriptor of an operand whose summed dimension runs across the rows: [depth][64] of 16 bits. The next 16 of the
// depth are at +2048 bytes; every 64 columns are a tile of their own, `tile_stride` bytes after the one before.
__device__ __forceinline__ unsigned long long column_descriptor(unsigned address, unsigned tile_stride) {
  return (unsigned long long)((address & 0x3FFFF) >> 4) | (unsigned long long)(tile_stride >> 4) << 16 |
         (1024ull >> 4) << 32 | 1ull << 62;
}

// `bytes` further: descriptors count in 16 bytes.
__device__ __forceinline__ unsigned long long advanced(unsigned long long descriptor, unsigned bytes) {
  return descriptor + (bytes >> 4);
}

// Before the first product, and whenever registers of one were written by other instructions.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until at most `Pending` of the committed groups are unfinished.
template <int Pending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

// Keeps the compiler from moving uses of an accumulator across this point: nothing else ties them to `wgmma_wait`.
template <int Size>
__device__ __forceinline__ void pin(float (&d)[Size]) {
#pragma unroll
  for (int i = 0; i < Size; ++i) asm volatile("" : "+f"(d[i]));
}

// The same for operands: an A operand's registers are read until the product is waited for.
template <int Size>
__device__ __forceinline__ void pin(unsigned (&a)[Size][4]) {
#pragma unroll
  for (int i = 0; i < Size; ++i) asm volatile("" : "+r"(a[i][0]), "+r"(a[i][1]), "+r"(a[i][2]), "+r"(a[i][3]));
}

// d (64 x N) = a (64 x 16) b (16 x N), plus d if `accumulate`. `Columns...`: the operand's summed dimension runs across
// its rows in shared memory (`column_descriptor`), not along them.
template <typename T, int N>
struct Wgmma;

#define JAX_SSD_EIGHT(i)                                                                                      \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])

// COUNT accumulators, as text and as constraints; A0.. are the numbers of the operands that follow them.
#define JAX_SSD_WGMMA(T, TYPE, N, COUNT, A0, A1, A2, A3, A4, A5, A6)                                                  \
  template <>                                                                                                         \
  struct Wgmma<T, N> {                                                                                                \
    template <bool ColumnsA = false, bool ColumnsB = false>                                                           \
    static __device__ __forceinline__ void shared(float (&d)[N / 2], unsigned long long a, unsigned long long b,      \
                                                  bool accumulate) {                                                  \
      asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #A2 ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE \
                   "." TYPE " {" JAX_SSD_REGISTERS_##COUNT "}, %" #A0 ", %" #A1 ", p, 1, 1, %" #A3 ", %" #A4 "; }"    \
                   : JAX_SSD_OUTPUTS_##COUNT                                                                          \
                   : "l"(a), "l"(b), "r"(int(accumulate)), "n"(int(ColumnsA)), "n"(int(ColumnsB)));                   \
    }                                                                                                                 \
    template <bool ColumnsB = false>                                                                                  \
    static __device__ __forceinline__ void registers(float (&d)[N / 2], const unsigned (&a)[4], unsigned long long b, \
                                                     bool accumulate) {                                               \
      asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #A5 ", 0; wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE \
                   "." TYPE " {" JAX_SSD_REGISTERS_##COUNT "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #A4       \
                                                           ", p, 1, 1, %" #A6 "; }"                                   \
                   : JAX_SSD_OUTPUTS_##COUNT                                                                          \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)), "n"(int(ColumnsB)));   \
    }                                                                                                                 \
  };
#define JAX_SSD_WGMMA_TYPES(N, COUNT, ...)                    \
  JAX_SSD_WGMMA(__nv_bfloat16, "bf16", N, COUNT, __VA_ARGS__) \
  JAX_SSD_WGMMA(__half, "f16", N, COUNT, __VA_ARGS__)

#define JAX_SSD_REGISTERS_16 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
#define JAX_SSD_OUTPUTS_16 JAX_SSD_EIGHT(0), JAX_SSD_EIGHT(8)
#define JAX_SSD_REGISTERS_32 \
  JAX_SSD_REGISTERS_16       \
  ", "                       \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define JAX_SSD_OUTPUTS_32 JAX_SSD_OUTPUTS_16, JAX_SSD_EIGHT(16), JAX_SSD_EIGHT(24)
#define JAX_SSD_REGISTERS_64                                                         \
  JAX_SSD_REGISTERS_32                                                               \
  ", "                                                                               \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define JAX_SSD_OUTPUTS_64 \
  JAX_SSD_OUTPUTS_32, JAX_SSD_EIGHT(32), JAX_SSD_EIGHT(40), JAX_SSD_EIGHT(48), JAX_SSD_EIGHT(56)
#define JAX_SSD_REGISTERS_96                                                         \
  JAX_SSD_REGISTERS_64                                                               \
  ", "                                                                               \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define JAX_SSD_OUTPUTS_96 \
  JAX_SSD_OUTPUTS_64, JAX_SSD_EIGHT(64), JAX_SSD_EIGHT(72), JAX_SSD_EIGHT(80), JAX_SSD_EIGHT(88)
#define JAX_SSD_REGISTERS_128                                                                    \
  JAX_SSD_REGISTERS_96                                                                           \
  ", "                                                                                           \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define JAX_SSD_OUTPUTS_128 \
  JAX_SSD_OUTPUTS_96, JAX_SSD_EIGHT(96), JAX_SSD_EIGHT(104), JAX_SSD_EIGHT(112), JAX_SSD_EIGHT(120)

JAX_SSD_WGMMA_TYPES(32, 16, 16, 17, 18, 19, 20, 21, 22)
JAX_SSD_WGMMA_TYPES(64, 32, 32, 33, 34, 35, 36, 37, 38)
JAX_SSD_WGMMA_TYPES(128, 64, 64, 65, 66, 67, 68, 69, 70)
JAX_SSD_WGMMA_TYPES(192, 96, 96, 97, 98, 99, 100, 101, 102)
JAX_SSD_WGMMA_TYPES(256, 128, 128, 129, 130, 131, 132, 133, 134)

#undef JAX_SSD_REGISTERS_16
#undef JAX_SSD_OUTPUTS_16
#undef JAX_SSD_REGISTERS_32
#undef JAX_SSD_OUTPUTS_32
#undef JAX_SSD_REGISTERS_64
#undef JAX_SSD_OUTPUTS_64
#undef JAX_SSD_REGISTERS_96
#undef JAX_SSD_OUTPUTS_96
#undef JAX_SSD_REGISTERS_128
#undef JAX_SSD_OUTPUTS_128
#undef JAX_SSD_WGMMA_TYPES
#undef JAX_SSD_WGMMA
#undef JAX_SSD_EIGHT

}  // namespace jax_ssd

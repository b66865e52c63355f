// Warpgroup matrix products of sm_90 in TF32: as in wgmma.cuh, but 8 of the summed dimension at a time, along which
// both operands run in shared memory. Accumulators are the same. An A operand in registers, 64 x 8, is
//   a[0], a[1]   column l%4 in rows 16w + l/4 and + 8,    a[2], a[3]   column l%4 + 4 in these rows.
// Of an operand the low 13 bits are not looked at: `tf32` rounds.
#pragma once

#include "shared_memory.cuh"

namespace jax_ssd {

// To the nearest, ties away from zero, as cvt.rna, but by one instruction where that takes three: half a unit is added
// to the number as an integer, unless that would make a NaN negative. A NaN is one that arithmetic made, 0x7fffffff.
__device__ __forceinline__ unsigned tf32(float v) {
  const unsigned bits = __float_as_uint(v);
  return max(static_cast<int>(bits + 0x1000u), static_cast<int>(bits));
}

// Descriptor of an operand that is not swizzled: pieces of 16 bytes, 4 numbers of a row; those of 8 rows are
// neighbours. piece_stride: bytes to the next pieces of the same rows. row_stride: to those of the next 8 rows.
__device__ __forceinline__ unsigned long long piece_descriptor(unsigned address, unsigned piece_stride,
                                                               unsigned row_stride) {
  return (unsigned long long)((address & 0x3FFFF) >> 4) | (unsigned long long)(piece_stride >> 4) << 16 |
         (unsigned long long)(row_stride >> 4) << 32;
}

// d (64 x N) = a (64 x 8) b (8 x N), plus d if `accumulate`.
template <int N>
struct WgmmaTf32;

#define JAX_SSD_EIGHT(i)                                                                                      \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])

// COUNT accumulators, as text and as constraints; A0.. are the numbers of the operands that follow them.
#define JAX_SSD_WGMMA_TF32(N, COUNT, A0, A1, A2, A3, A4, A5)                                                           \
  template <>                                                                                                          \
  struct WgmmaTf32<N> {                                                                                                \
    static __device__ __forceinline__ void shared(float (&d)[N / 2], unsigned long long a, unsigned long long b,       \
                                                  bool accumulate) {                                                   \
      asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #A2 ", 0; wgmma.mma_async.sync.aligned.m64n" #N                  \
                   "k8.f32.tf32.tf32 {" JAX_SSD_REGISTERS_##COUNT "}, %" #A0 ", %" #A1 ", p, 1, 1; }"                  \
                   : JAX_SSD_OUTPUTS_##COUNT                                                                           \
                   : "l"(a), "l"(b), "r"(int(accumulate)));                                                            \
    }                                                                                                                  \
    static __device__ __forceinline__ void registers(float (&d)[N / 2], const unsigned (&a)[4], unsigned long long b,  \
                                                     bool accumulate) {                                                \
      asm volatile("{ .reg .pred p; setp.ne.b32 p, %" #A5 ", 0; wgmma.mma_async.sync.aligned.m64n" #N                  \
                   "k8.f32.tf32.tf32 {" JAX_SSD_REGISTERS_##COUNT "}, {%" #A0 ", %" #A1 ", %" #A2 ", %" #A3 "}, %" #A4 \
                                                                  ", p, 1, 1; }"                                       \
                   : JAX_SSD_OUTPUTS_##COUNT                                                                           \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(int(accumulate)));                        \
    }                                                                                                                  \
  };

#define JAX_SSD_REGISTERS_32                                                                             \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, " \
  "%22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define JAX_SSD_OUTPUTS_32 JAX_SSD_EIGHT(0), JAX_SSD_EIGHT(8), JAX_SSD_EIGHT(16), JAX_SSD_EIGHT(24)
#define JAX_SSD_REGISTERS_64                                                         \
  JAX_SSD_REGISTERS_32                                                               \
  ", "                                                                               \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define JAX_SSD_OUTPUTS_64 \
  JAX_SSD_OUTPUTS_32, JAX_SSD_EIGHT(32), JAX_SSD_EIGHT(40), JAX_SSD_EIGHT(48), JAX_SSD_EIGHT(56)

JAX_SSD_WGMMA_TF32(64, 32, 32, 33, 34, 35, 36, 37)
JAX_SSD_WGMMA_TF32(128, 64, 64, 65, 66, 67, 68, 69)

#undef JAX_SSD_REGISTERS_32
#undef JAX_SSD_OUTPUTS_32
#undef JAX_SSD_REGISTERS_64
#undef JAX_SSD_OUTPUTS_64
#undef JAX_SSD_WGMMA_TF32
#undef JAX_SSD_EIGHT

}  // namespace jax_ssd

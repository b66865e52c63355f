// Fragments of the tensor cores held by a warp: products of 16 x 8 x 16, transposes inside quads.
#pragma once

#include "numbers16.cuh"

namespace jax_ssd {

template <typename T>
__device__ __forceinline__ float2 both_of(unsigned pair) {
  return {Pair<T>::low(pair), Pair<T>::high(pair)};
}

// d (16 x 8) += a (16 x 16) b (16 x 8). Lane l holds of d the columns 2(l%4), +1 of rows l/4 and l/4 + 8; a and b are
// as `load_tiles` and the header of wgmma.cuh say.
__device__ __forceinline__ void multiply(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1,
                                         __nv_bfloat16) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void multiply(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, __half) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The transpose of an 8 x 8 tile of 16 bits, of which lane l holds the pair of columns 2(l%4) of row l/4.
__device__ __forceinline__ unsigned transposed_tile(unsigned tile) {
  unsigned r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(tile));
  return r;
}

// Register k of lane t of each four lanes becomes what register t of lane k was: four neighbouring tiles of eight
// columns turn into 16 bytes of one row per lane.
__device__ __forceinline__ void transpose_quad(unsigned (&r)[4]) {
  const unsigned lane = threadIdx.x;
  const bool odd = lane & 1, upper = lane & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const unsigned other = __shfl_xor_sync(~0u, odd ? r[i] : r[i + 1], 1);
    r[i] = odd ? other : r[i];
    r[i + 1] = odd ? r[i + 1] : other;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const unsigned other = __shfl_xor_sync(~0u, upper ? r[i] : r[i + 2], 2);
    r[i] = upper ? other : r[i];
    r[i + 2] = upper ? r[i + 2] : other;
  }
}

// Sum over the four lanes of a quad.
__device__ __forceinline__ float quad_sum(float v) {
  v += __shfl_xor_sync(~0u, v, 1);
  return v + __shfl_xor_sync(~0u, v, 2);
}

__device__ __forceinline__ float warp_sum(float v) {
#pragma unroll
  for (int offset = 16; offset; offset >>= 1) v += __shfl_xor_sync(~0u, v, offset);
  return v;
}

}  // namespace jax_ssd

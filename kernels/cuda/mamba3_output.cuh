// What is made of the output of a Mamba-3 head: gates, pairs of values.
#pragma once

#include "mamba3_products.cuh"

namespace jax_ssd {

// Two neighbouring values, as they lie in memory.
__device__ unsigned pair_type(__nv_bfloat16);
__device__ float2 pair_type(float);
__device__ __forceinline__ float2 floats_of(unsigned pair) {
  return make_float2(low_of_pair(pair), high_of_pair(pair));
}
__device__ __forceinline__ float2 floats_of(float2 pair) { return pair; }
__device__ __forceinline__ unsigned pair_of(float a, float b, unsigned) { return bfloat16_pair(a, b); }
__device__ __forceinline__ float2 pair_of(float a, float b, float2) { return make_float2(a, b); }

// v sigmoid(v), by the hardware's tanh within 2**-12 of v where a 16-bit number is made of it.
__device__ __forceinline__ float silu_of_double(float half) {  // of twice the number
  float t;
  asm("tanh.approx.f32 %0, %1;" : "=f"(t) : "f"(half));
  return half + half * t;
}
template <bool Exact>
__device__ __forceinline__ float silu(float v) {
  if constexpr (Exact) return v / (1.0f + expf(-v));
  return silu_of_double(0.5f * v);
}

}  // namespace jax_ssd

// The gate v sigmoid(v) by the hardware's tanh.
#pragma once

namespace jax_ssd {

// Within 2**-11: enough where a number of 16 bits is made of it, or a sum of such.
__device__ __forceinline__ float tanh_fast(float x) {
  float r;
  asm("tanh.approx.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}

// v sigmoid(v) from v / 2.
__device__ __forceinline__ float silu_of_half(float half) { return half + half * tanh_fast(half); }

}  // namespace jax_ssd

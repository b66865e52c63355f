// Pairs of 16-bit numbers in one register, the first in the low half.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace jax_ssd {

template <typename T>
struct Pair;

template <>
struct Pair<__nv_bfloat16> {
  static __device__ __forceinline__ unsigned of(float low, float high) {
    unsigned r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
  }
  static __device__ __forceinline__ float low(unsigned pair) { return __uint_as_float(pair << 16); }
  static __device__ __forceinline__ float high(unsigned pair) { return __uint_as_float(pair & 0xFFFF0000u); }
  static __device__ __forceinline__ unsigned product(unsigned a, unsigned b) {
    unsigned r;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(0x80008000u));  // + -0, which changes nothing
    return r;
  }
  // sum + 0 * pair: stays zero as long as all pairs are finite.
  static __device__ __forceinline__ unsigned plus_zero_times(unsigned sum, unsigned pair) {
    asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(sum) : "r"(pair), "r"(0u));
    return sum;
  }
  // pair with zeros in place of what is not finite.
  static __device__ __forceinline__ unsigned only_finite(unsigned pair) {
    unsigned mask = plus_zero_times(0, pair);
    asm("set.eq.u32.bf16x2 %0, %0, %1;" : "+r"(mask) : "r"(0u));
    return pair & mask;
  }
};

template <>
struct Pair<__half> {
  static __device__ __forceinline__ unsigned of(float low, float high) {
    unsigned r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
  }
  static __device__ __forceinline__ float low(unsigned pair) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(pair & 0xFFFF)));
  }
  static __device__ __forceinline__ float high(unsigned pair) {
    return __half2float(__ushort_as_half(static_cast<unsigned short>(pair >> 16)));
  }
  static __device__ __forceinline__ unsigned product(unsigned a, unsigned b) {
    unsigned r;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(0x80008000u));  // + -0, which changes nothing
    return r;
  }
  static __device__ __forceinline__ unsigned plus_zero_times(unsigned sum, unsigned pair) {
    asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(sum) : "r"(pair), "r"(0u));
    return sum;
  }
  // pair with zeros in place of what is not finite.
  static __device__ __forceinline__ unsigned only_finite(unsigned pair) {
    unsigned mask = plus_zero_times(0, pair);
    asm("set.eq.u32.f16x2 %0, %0, %1;" : "+r"(mask) : "r"(0u));
    return pair & mask;
  }
};

}  // namespace jax_ssd

// Numbers and functions that CUDA C++ has and C++ has not.
#pragma once

#include <math.h>

#include "fibers.h"

#define __device__
#define __host__
#define __global__
#define __forceinline__ inline
#define __noinline__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define threadIdx (emulator::current->thread)
#define blockIdx (emulator::block_index_of(emulator::current->block))
#define blockDim (emulator::block_size)
#define gridDim (emulator::grid_size)

#define EMULATOR_VECTOR(T, NAME, BYTES)                                      \
  struct alignas(2 * BYTES) NAME##2 { T x, y; };                             \
  struct NAME##3 { T x, y, z; };                                             \
  struct alignas(4 * BYTES > 16 ? 16 : 4 * BYTES) NAME##4 { T x, y, z, w; }; \
  inline NAME##2 make_##NAME##2(T x, T y) { return {x, y}; }                 \
  inline NAME##3 make_##NAME##3(T x, T y, T z) { return {x, y, z}; }         \
  inline NAME##4 make_##NAME##4(T x, T y, T z, T w) { return {x, y, z, w}; }
EMULATOR_VECTOR(float, float, 4)
EMULATOR_VECTOR(int, int, 4)
EMULATOR_VECTOR(unsigned, uint, 4)
EMULATOR_VECTOR(short, short, 2)
EMULATOR_VECTOR(unsigned short, ushort, 2)
EMULATOR_VECTOR(double, double, 8)
#undef EMULATOR_VECTOR

namespace emulator {

template <class To, class From>
To bits_as(From value) {
  static_assert(sizeof(To) == sizeof(From));
  To result;
  memcpy(&result, &value, sizeof result);
  return result;
}

inline float bfloat16_value(unsigned bits) { return bits_as<float>(bits << 16); }
inline unsigned short bfloat16_bits(float v) {  // to nearest, ties to even
  const unsigned word = bits_as<unsigned>(v);
  if (v != v) return 0x7FFF;
  return static_cast<unsigned short>((word + 0x7FFF + (word >> 16 & 1)) >> 16);
}

inline float half_value(unsigned bits) {
  const unsigned sign = (bits & 0x8000) << 16, exponent = bits >> 10 & 31, mantissa = bits & 0x3FF;
  if (exponent == 31) return bits_as<float>(sign | 0x7F800000u | mantissa << 13);
  const float size = exponent ? ldexpf(float(1024 + mantissa), int(exponent) - 25) : ldexpf(float(mantissa), -24);
  return sign ? -size : size;
}
inline unsigned short half_bits(float v) {  // to nearest, ties to even
  const unsigned short sign = bits_as<unsigned>(v) >> 16 & 0x8000;
  const float size = fabsf(v);
  if (v != v) return 0x7FFF;
  if (size >= 65520.0f) return sign | 0x7C00;
  int exponent = -14;
  if (size >= ldexpf(1.0f, -14)) exponent = ilogbf(size);
  const float units = nearbyintf(ldexpf(size, 10 - exponent));  // exact but for the rounding
  const int whole = int(units);
  if (whole < 1024) return sign | whole;
  return sign | static_cast<unsigned short>(((exponent + 15) << 10) + (whole - 1024));
}

inline float flushed(float v) { return fabsf(v) < 1.17549435e-38f ? copysignf(0.0f, v) : v; }

}  // namespace emulator

struct __nv_bfloat16 {
  unsigned short bits;
  __nv_bfloat16() = default;
  __nv_bfloat16(float v) : bits(emulator::bfloat16_bits(v)) {}
  operator float() const { return emulator::bfloat16_value(bits); }
};
struct __half {
  unsigned short bits;
  __half() = default;
  __half(float v) : bits(emulator::half_bits(v)) {}
  operator float() const { return emulator::half_value(bits); }
};
struct alignas(4) __nv_bfloat162 {
  __nv_bfloat16 x, y;
};
struct alignas(4) __half2 {
  __half x, y;
};

inline float __bfloat162float(__nv_bfloat16 v) { return v; }
inline __nv_bfloat16 __float2bfloat16(float v) { return v; }
inline __nv_bfloat16 __float2bfloat16_rn(float v) { return v; }
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {x, y}; }
inline float2 __bfloat1622float2(__nv_bfloat162 v) { return {v.x, v.y}; }
inline float __low2float(__nv_bfloat162 v) { return v.x; }
inline float __high2float(__nv_bfloat162 v) { return v.y; }
inline float __half2float(__half v) { return v; }
inline __half __float2half(float v) { return v; }
inline __half __float2half_rn(float v) { return v; }
inline __half2 __floats2half2_rn(float x, float y) { return {x, y}; }
inline float2 __half22float2(__half2 v) { return {v.x, v.y}; }
inline __half __ushort_as_half(unsigned short v) { return emulator::bits_as<__half>(v); }
inline unsigned short __half_as_ushort(__half v) { return v.bits; }
inline __nv_bfloat16 __ushort_as_bfloat16(unsigned short v) { return emulator::bits_as<__nv_bfloat16>(v); }
inline unsigned short __bfloat16_as_ushort(__nv_bfloat16 v) { return v.bits; }

inline float __uint_as_float(unsigned v) { return emulator::bits_as<float>(v); }
inline float __int_as_float(int v) { return emulator::bits_as<float>(v); }
inline unsigned __float_as_uint(float v) { return emulator::bits_as<unsigned>(v); }
inline int __float_as_int(float v) { return emulator::bits_as<int>(v); }
inline int __float2int_rn(float v) {
  if (v != v) return 0;
  return v >= 2147483648.0f ? 2147483647 : v <= -2147483648.0f ? -2147483647 - 1 : int(lrintf(v));
}
inline int __float2int_rd(float v) { return __float2int_rn(floorf(v)); }

inline float __expf(float v) { return emulator::flushed(expf(v)); }
inline float __logf(float v) { return logf(v); }
inline float __log2f(float v) { return log2f(v); }
inline float __sinf(float v) { return sinf(v); }
inline float __cosf(float v) { return cosf(v); }
inline void __sincosf(float v, float* sine, float* cosine) { *sine = sinf(v), *cosine = cosf(v); }
inline float __fdividef(float a, float b) { return fabsf(b) > 8.507059e37f && fabsf(b) < INFINITY ? (a - a) : a / b; }
inline float __frcp_rn(float v) { return 1.0f / v; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float rsqrtf(float v) { return float(1.0 / sqrt(double(v))); }
inline void sincospif(float v, float* sine, float* cosine) {
  const double angle = M_PI * remainder(double(v), 2.0);
  *sine = float(sin(angle)), *cosine = float(cos(angle));
}
inline int __popc(unsigned v) { return __builtin_popcount(v); }
inline int __ffs(int v) { return __builtin_ffs(v); }
inline int __clz(int v) { return v ? __builtin_clz(v) : 32; }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t both = uint64_t(b) << 32 | a;
  unsigned result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned choice = selector >> (4 * i) & 15, byte = both >> (8 * (choice & 7)) & 255;
    result |= (choice & 8 ? (byte & 128 ? 255u : 0u) : byte) << (8 * i);
  }
  return result;
}

#define EMULATOR_LEAST(T)                                    \
  inline constexpr T min(T a, T b) { return b < a ? b : a; } \
  inline constexpr T max(T a, T b) { return a < b ? b : a; }
EMULATOR_LEAST(int)
EMULATOR_LEAST(unsigned)
EMULATOR_LEAST(long)
EMULATOR_LEAST(unsigned long)
EMULATOR_LEAST(long long)
EMULATOR_LEAST(unsigned long long)
#undef EMULATOR_LEAST
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }

template <class T>
T __ldg(const T* from) {
  return *from;
}
template <class T>
T __ldca(const T* from) {
  return *from;
}
template <class T>
T __ldcg(const T* from) {
  return *from;
}
template <class T>
T __ldcs(const T* from) {
  return *from;
}
template <class T>
T __ldlu(const T* from) {
  return *from;
}
template <class T>
T __ldcv(const T* from) {
  return *from;
}
template <class T>
void __stcg(T* to, T value) {
  *to = value;
}
template <class T>
void __stcs(T* to, T value) {
  *to = value;
}
template <class T>
void __stwb(T* to, T value) {
  *to = value;
}
template <class T>
void __stwt(T* to, T value) {
  *to = value;
}
inline void __threadfence() {}
inline void __threadfence_block() {}

template <class T>
T atomicAdd(T* at, T value) {
  const T before = *at;
  *at = before + value;
  ++emulator::releases;
  return before;
}
template <class T>
T atomicExch(T* at, T value) {
  const T before = *at;
  *at = value;
  ++emulator::releases;
  return before;
}

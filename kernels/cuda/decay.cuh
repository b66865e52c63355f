// Step sizes and decays: what is computed from dt, A and dt_bias. Decays are in log2 units, every exponential is an
// exp2.
#pragma once

namespace jax_ssd {

constexpr float LOG2E = 1.4426950408889634f;
// ln 2 = high + low; n * high is exact for small n.
constexpr float LN2_HIGH = 0.693145751953125f, LN2_LOW = 1.42860682030941723212e-6f;
// A decay of 2**-160 is zero in float32. Cutting each step there changes no result and keeps running sums small, so
// that small decays after a huge one are still exact as differences of sums.
constexpr float FLOOR = -160.0f;

// 2**v by the hardware; what is too small for a normal float32 becomes zero.
__device__ __forceinline__ float exp2_fast(float v) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}

// log2(v) by the hardware; -inf for 0.
__device__ __forceinline__ float log2_fast(float v) {
  float r;
  asm("lg2.approx.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}

// 1 / v by the hardware; zero where that is not a normal float32.
__device__ __forceinline__ float rcp_fast(float v) {
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}

// exp(v) for v <= 0 within about one rounding; the hardware exponential alone loses log2(|v|) bits.
__device__ __forceinline__ float exp_of_negative(float v) {
  v = v < -104.0f ? -104.0f : v;  // zero in float32 below; a NaN stays
  const float n = floorf(v * LOG2E + 0.5f);
  const float rest = (v - n * LN2_HIGH) - n * LN2_LOW;
  return exp2f(rest * LOG2E) * exp2f(n);
}

// log(1 + exp(v)), relatively exact in both tails: max(v, 0) + log1p(exp(-|v|)), log1p(u) as 2 atanh(u / (2 + u)).
__device__ __forceinline__ float softplus(float v) {
  const float u = exp_of_negative(v < 0.0f ? v : -v);
  const float s = u / (2.0f + u);  // in [0, 1/3]: eight terms of the series reach float32
  const float q = s * s;
  float series = 1.0f / 13.0f + q * (1.0f / 15.0f + q * (1.0f / 17.0f));
  series = 1.0f / 7.0f + q * (1.0f / 9.0f + q * (1.0f / 11.0f + q * series));
  series = 1.0f + q * (1.0f / 3.0f + q * (1.0f / 5.0f + q * series));
  return (v < 0.0f ? 0.0f : v) + 2.0f * s * series;
}

// clamp(softplus?(v), low, high); comparisons are written so that a NaN passes through.
template <bool Softplus>
__device__ __forceinline__ float step_size(float v, float low, float high) {
  if constexpr (Softplus) v = softplus(v);
  v = v < low ? low : v;
  return v > high ? high : v;
}

// step * A in log2 units, cut at FLOOR.
__device__ __forceinline__ float log2_decay(float step, float A) {
  const float v = step * (A * LOG2E);
  return v < FLOOR ? FLOOR : v;
}

}  // namespace jax_ssd

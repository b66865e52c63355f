// The rotary phase of Mamba-3, counted in units of 2**-32 turns and summed in wrapping 32-bit integers: exact, and the
// same for every order of summation. The arithmetic is that of jax_ssd/mamba3/phase.py.
#pragma once

#include "decay.cuh"

namespace jax_ssd {

// The nearest number of units, modulo a turn; 0 for what is not a finite number (see is_finite).
__device__ __forceinline__ unsigned phase_of_turns(float turns) {
  float part = turns - rintf(turns);
  part = part >= 0.5f ? part - 1.0f : part;  // half a turn is -2**31: 2**31 is no int
  return static_cast<unsigned>(__float2int_rn(part * 4294967296.0f));
}

__device__ __forceinline__ unsigned phase_of_radians(float angle) {
  return phase_of_turns(angle * 0.15915494309189535f);
}

// pi tanh(angle) dt in turns. Not by the hardware's tanh: its error of 2**-11 is systematic and would grow with the
// length.
__device__ __forceinline__ float turns_of_step(float angle, float dt) { return 0.5f * tanhf(angle) * dt; }

// The same by the hardware's exponential, within 2**-23 of dt, as pi dt - 2 pi dt / (1 + exp(2 x)). The constant is too
// small by 1.3e-8: angles of one sign lose some 3e-10 of a turn a token, 7e-5 radians in 32,768.
__device__ __forceinline__ float turns_of_step_fast(float angle, float dt) {
  return fmaf(-dt, rcp_fast(1.0f + exp2_fast(angle * 2.8853900817779268f)), 0.5f * dt);
}

// In [-pi, pi].
__device__ __forceinline__ float radians_of_phase(unsigned phase) {
  return static_cast<float>(static_cast<int>(phase)) * 1.4629180792671596e-9f;
}

// Within a rounding or two.
__device__ __forceinline__ void sincos_of_phase(unsigned phase, float& sine, float& cosine) {
  sincospif(static_cast<float>(static_cast<int>(phase)) * 4.656612873077393e-10f, &sine, &cosine);
}

// By the hardware: within 2**-21, which is enough where a 16-bit number is made of it.
__device__ __forceinline__ void sincos_of_phase_fast(unsigned phase, float& sine, float& cosine) {
  const float angle = radians_of_phase(phase);
  sine = __sinf(angle);
  cosine = __cosf(angle);
}

__device__ __forceinline__ bool is_finite(float v) { return fabsf(v) < __int_as_float(0x7f800000); }

// (a, b) rotated by the phase, rounded alike wherever it is.
__device__ __forceinline__ void rotate(float& a, float& b, float sine, float cosine) {
  const float first = fmaf(a, cosine, -(b * sine));
  b = fmaf(a, sine, b * cosine);
  a = first;
}

}  // namespace jax_ssd

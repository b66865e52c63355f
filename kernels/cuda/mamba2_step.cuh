// What the steps of Mamba-2 have in common.
#pragma once

#include "packs.cuh"

namespace jax_ssd {

// log(1 + exp(v)), exact in both tails; a NaN comes through the second term.
__device__ __forceinline__ float softplus(float v) { return fmaxf(v, 0.0f) + log1pf(expf(-fabsf(v))); }

__device__ __forceinline__ float silu(float v) { return __fdividef(v, 1.0f + expf(-v)); }

// Not fminf and fmaxf, which swallow a NaN.
__device__ __forceinline__ float clamp(float v, float low, float high) { return v < low ? low : (v > high ? high : v); }

// The sums over a unit's lanes of Held values in each. While a lane holds more than one, a pair of lanes swaps halves:
// afterwards lane i holds the sums of rows i * Held / Lanes and following (several lanes the same if Held < Lanes).
template <int Held, int Offset>
__device__ __forceinline__ void sum_over_lanes(float* values, int lane) {
  if constexpr (Offset > 0) {
    if constexpr (Held > 1) {
      const bool upper = lane & Offset;
#pragma unroll
      for (int i = 0; i < Held / 2; ++i) {
        const float kept = upper ? values[i + Held / 2] : values[i];
        const float given = upper ? values[i] : values[i + Held / 2];
        values[i] = kept + __shfl_xor_sync(0xffffffff, given, Offset);
      }
    } else {
      values[0] += __shfl_xor_sync(0xffffffff, values[0], Offset);
    }
    sum_over_lanes<larger(1, Held / 2), Offset / 2>(values, lane);
  }
}

}  // namespace jax_ssd

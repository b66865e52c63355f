// What is made of the output of a Mamba-3 head: pairs of values, gates, the fold of ranks.
#pragma once

#include "gates.cuh"
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

// By the hardware where a 16-bit number is made of it.
template <bool Exact>
__device__ __forceinline__ float silu(float v) {
  if constexpr (Exact) return v / (1.0f + expf(-v));
  return silu_of_half(0.5f * v);
}

// What a thread gates and folds of the output: two neighbouring columns of some tokens.
template <class H>
struct OutputStage {
  using S = typename H::S;
  using O = typename H::O;
  static constexpr int kPairs = S::kHeadDim / 2, kTogether = 128 / kPairs;
  static constexpr int kTurns = (H::kTokens + kTogether - 1) / kTogether, kAtOnce = (kTurns + 3) / 4;
  static constexpr bool kKeeps = O::kWeighted && !O::kFolds;  // the ranks
  static constexpr int kToken = (kKeeps ? S::kRank : 1) * S::kHeads * S::kHeadDim;
  unsigned gates[kTurns];
  const __nv_bfloat16* z;  // of the next chunk to load, and to store
  __nv_bfloat16* y;

  static __device__ __forceinline__ int column() { return threadIdx.x % 128 % kPairs * 2; }
  static __device__ __forceinline__ int first_token() { return threadIdx.x % 128 / kPairs; }

  // At the first token and the head, of its first rank if ranks are kept.
  __device__ __forceinline__ OutputStage(const __nv_bfloat16* z, __nv_bfloat16* y)
      : z(z + first_token() * (S::kHeads * S::kHeadDim) + column()), y(y + first_token() * kToken + column()) {}

  __device__ __forceinline__ void load(int count) {
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      if (first_token() < kTogether && first_token() + i * kTogether < count) {
        gates[i] = *reinterpret_cast<const unsigned*>(z + i * (kTogether * S::kHeads * S::kHeadDim));
      }
    }
    z += (long long)count * (S::kHeads * S::kHeadDim);
  }

  // o: [row][kOutStride]. scale, opening: [rank][head_dim] by which outputs and halves of gates are multiplied.
  __device__ __forceinline__ void store(int count, const float* o, const float* scale, const float* opening) {
    const int c = column();
    o += first_token() * S::kRank * H::kOutStride + c;
    float by[S::kRank][2], opened[S::kRank][2];
#pragma unroll
    for (int rank = 0; rank < S::kRank; ++rank) {
      load_pair(by[rank], scale + rank * S::kHeadDim + c);
      if constexpr (O::kGate) load_pair(opened[rank], opening + rank * S::kHeadDim + c);
    }
    __nv_bfloat16* to = y;
#pragma unroll 1
    for (int token = first_token(); token < count && first_token() < kTogether; token += kAtOnce * kTogether) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        float total[2] = {0.0f, 0.0f};
        const float gate[2] = {low_of_pair(gates[i]), high_of_pair(gates[i])};
        const bool is_there = kAtOnce == 1 || token + i * kTogether < count;
#pragma unroll
        for (int rank = 0; rank < S::kRank; ++rank) {
          float x[2];
          load_pair(x, o + (i * kTogether * S::kRank + rank) * H::kOutStride);
          x[0] *= by[rank][0], x[1] *= by[rank][1];
          if constexpr (O::kGate) {
            x[0] *= silu_of_half(gate[0] * opened[rank][0]);
            x[1] *= silu_of_half(gate[1] * opened[rank][1]);
          }
          if (kKeeps && is_there) {
            *reinterpret_cast<unsigned*>(to + i * (kTogether * kToken) + rank * (S::kHeads * S::kHeadDim)) =
                bfloat16_pair(x[0], x[1]);
          }
          total[0] += x[0];
          total[1] += x[1];
        }
        if (!kKeeps && is_there) {
          *reinterpret_cast<unsigned*>(to + i * (kTogether * kToken)) = bfloat16_pair(total[0], total[1]);
        }
      }
#pragma unroll
      for (int i = 0; i + kAtOnce < kTurns; ++i) gates[i] = gates[i + kAtOnce];
      o += kAtOnce * kTogether * S::kRank * H::kOutStride;
      to += kAtOnce * kTogether * kToken;
    }
    y += (long long)count * kToken;
  }

 private:
  static __device__ __forceinline__ void load_pair(float (&to)[2], const float* from) {
    const float2 pair = *reinterpret_cast<const float2*>(from);
    to[0] = pair.x, to[1] = pair.y;
  }
};

}  // namespace jax_ssd

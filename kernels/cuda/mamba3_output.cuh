// What is made of the output of a Mamba-3 head: pairs of values, gates, the fold of ranks.
#pragma once

#include "gates.cuh"
#include "mamba3_rows.cuh"

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

// What a thread gates and folds of the output, columns of the head in rows: two neighbouring ones, of its own tokens
// and ranks (see `RowOrder`).
template <class H>
struct OutputStage {
  using S = typename H::S;
  using O = typename H::O;
  using Order = RowOrder<S::kRank>;
  static constexpr int kTogether = Order::kTogether;
  static constexpr bool kKeeps = O::kWeighted && !O::kFolds;  // the ranks
  static constexpr int kLine = S::kHeads * S::kHeadDim, kToken = (kKeeps ? S::kRank : 1) * kLine;
  unsigned gates[Order::kOwn];
  float scale[kTogether][2], opening[kTogether][2];  // by which outputs and halves of gates are multiplied
  const __nv_bfloat16* z;                            // of the next chunk to load, and to store
  __nv_bfloat16* y;

  static __device__ __forceinline__ int column() { return threadIdx.x % 128 / 4 * 2; }
  static __device__ __forceinline__ bool is_there() { return column() < S::kHeadDim; }

  // At the first token and the head, of its first rank if ranks are kept. mimo_o, mimo_z: [rank][head_dim] of the head.
  __device__ __forceinline__ OutputStage(const __nv_bfloat16* z, __nv_bfloat16* y, const float* mimo_o,
                                         const float* mimo_z, const float* norm_weight)
      : z(z + column()), y(y + column()) {
#pragma unroll
    for (int rank = 0; rank < kTogether; ++rank) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int p = is_there() ? column() + e : 0, ranked = Order::own_rank(rank) * S::kHeadDim + p;
        const float norm = O::kNorm ? norm_weight[p] : 1.0f;
        scale[rank][e] = O::kFolds ? norm * mimo_o[ranked] : norm;
        opening[rank][e] = O::kWeighted && O::kGate ? 0.5f * mimo_z[ranked] : 0.5f;
      }
    }
  }

  __device__ __forceinline__ void load(int count) {
    if constexpr (!O::kGate) return;
#pragma unroll
    for (int i = 0; i < Order::kOwn; ++i) {
      const int token = Order::own_token(i);
      if (token < count && is_there()) gates[i] = *reinterpret_cast<const unsigned*>(z + token * kLine);
    }
    z += (long long)count * kLine;
  }

  // What the outputs are multiplied by.
  __device__ __forceinline__ void make_gates(float (&by)[32]) const {
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const int half = i / 2 % 2, own = i / 4 * 2 + i % 2, rank = own % kTogether;
      by[i] = scale[rank][half];
      if constexpr (O::kGate) {
        const unsigned gate = gates[own / kTogether];
        by[i] *= silu_of_half((half ? high_of_pair(gate) : low_of_pair(gate)) * opening[rank][half]);
      }
    }
  }

  __device__ __forceinline__ void store(int count, const float (&o)[32], const float (&by)[32]) {
#pragma unroll
    for (int i = 0; i < Order::kOwn; ++i) {
      const int token = Order::own_token(i);
      float total[2] = {0.0f, 0.0f};
#pragma unroll
      for (int rank = 0; rank < kTogether; ++rank) {
        const int own = i * kTogether + rank, at = own / 2 * 4 + own % 2;
        const float x[2] = {o[at] * by[at], o[at + 2] * by[at + 2]};
        if constexpr (kKeeps) {
          if (token < count && is_there()) {
            *reinterpret_cast<unsigned*>(y + token * kToken + Order::own_rank(rank) * kLine) =
                bfloat16_pair(x[0], x[1]);
          }
        }
        total[0] += x[0];
        total[1] += x[1];
      }
      if constexpr (!kKeeps) {
#pragma unroll
        for (int other = 1; other < Order::kLanes; other *= 2) {
#pragma unroll
          for (int e = 0; e < 2; ++e) total[e] += __shfl_xor_sync(~0u, total[e], other);
        }
        if (threadIdx.x % Order::kLanes == 0 && token < count && is_there()) {
          *reinterpret_cast<unsigned*>(y + token * kToken) = bfloat16_pair(total[0], total[1]);
        }
      }
    }
    y += (long long)count * kToken;
  }
};

}  // namespace jax_ssd

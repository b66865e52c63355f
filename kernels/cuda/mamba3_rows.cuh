// The order of a chunk's tokens and ranks in the rows of the matrices of the Mamba-3 pipeline.
#pragma once

#include "mamba3_staging.cuh"

namespace jax_ssd {

// In accumulators a thread has 16 columns, 8 j + 2 (lane % 4) + b. The order is such that they are up to four ranks of
// few tokens: what tokens have in common is computed once, and a token's ranks are summed up in a thread. Tokens and
// ranks of rows that are 16 apart differ by 16 / Rank tokens and no rank.
template <int Rank>
struct RowOrder {
  static_assert(Rank <= 16 && (Rank & (Rank - 1)) == 0, "ranks are bits of a row's number");
  static constexpr int kTogether = Rank < 4 ? Rank : 4;  // ranks of a token that a thread has
  static constexpr int kLanes = Rank / kTogether;        // lanes that have the others
  static constexpr int kOwn = 16 / kTogether;            // tokens that a thread has
  static constexpr int kApart = 16 / Rank;               // tokens from a row to that 16 below

  static __device__ __forceinline__ int token(int row) {
    return Rank < 4 ? row / Rank : row / 16 * kApart + row % 8 / 2 / kLanes;
  }
  static __device__ __forceinline__ int rank(int row) {
    return Rank < 4 ? row % Rank : row % 2 + row / 8 % 2 * 2 + row % 8 / 2 % kLanes * 4;
  }
  // The tokens and ranks of a thread's columns: that at j and b is of the own token (2 j + b) / kTogether.
  static __device__ __forceinline__ int own_token(int i) {
    return token(i * kTogether / 2 * 8 + threadIdx.x % 4 * 2 + i * kTogether % 2);
  }
  static __device__ __forceinline__ int own_rank(int i) { return rank(i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2); }

  // Of an array over tokens, that of an own token; of neighbours, loaded at once, the second one is in `next`.
  static __device__ __forceinline__ float load_own(int i, const float* of_tokens, float& next) {
    if constexpr (Rank > 1) return of_tokens[own_token(i)];
    if (i % 2 != 0) return next;
    const float2 pair = *reinterpret_cast<const float2*>(of_tokens + own_token(i));
    next = pair.y;
    return pair.x;
  }
};

// Scores of a chunk, queries in rows, to what keys' values count for outputs: 16-bit numbers, zero for later tokens
// whatever their scores are. m: accumulators of a warpgroup. skip: is added on the diagonal.
template <int Rank, int Tokens>
__device__ __forceinline__ void weigh_scores(unsigned (&words)[16], float (&m)[32], const Schedule<Tokens>& weights,
                                             float skip) {
  using Order = RowOrder<Rank>;
  constexpr int kLate = Rank < 4 ? 2 : 1;  // tokens of a thread's two rows
  const int thread = threadIdx.x % 128, warp = thread / 32, row = warp * 16 + thread % 32 / 4;
  float sum[kLate], gamma[kLate], next_sum = 0.0f, next_f = 0.0f;
#pragma unroll
  for (int late = 0; late < kLate; ++late) {
    sum[late] = weights.sum[Order::token(row + 8 * late)];
    gamma[late] = weights.gamma[Order::token(row + 8 * late)];
  }
#pragma unroll
  for (int i = 0; i < Order::kOwn; ++i) {
    const int early = Order::own_token(i);
    const float early_sum = Order::load_own(i, weights.sum, next_sum), f = Order::load_own(i, weights.f, next_f);
    float by[kLate];
#pragma unroll
    for (int late = 0; late < kLate; ++late) {
      // Can the tokens be the same?
      const bool meets = Rank >= 4 || i * Order::kTogether / 2 % 2 == late;
      const bool same = meets && Order::token(row + 8 * late) == early;
      by[late] = same ? gamma[late] : exp2_fast(sum[late] - early_sum) * f;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int late = kLate == 1 ? 0 : half, token = Order::token(row + 8 * late);
      const float weight = by[late];
#pragma unroll
      for (int column = i * Order::kTogether; column < (i + 1) * Order::kTogether; ++column) {
        const int j = column / 2, b = column % 2;
        float& at = m[4 * j + 2 * half + b];
        const bool diagonal = row % 8 == threadIdx.x % 4 * 2 + b && warp == j / 2;
        at = half == j % 2 ? at * weight + (diagonal ? skip : 0.0f) : at * weight;
        if (Rank == 1 && token < early) at = 0.0f;
        if (b == 1) {
          unsigned& word = words[2 * j + half];
          word = bfloat16_pair(m[4 * j + 2 * half], at);
          if (Rank > 1 && token < early) word = 0;
        }
      }
    }
  }
}

}  // namespace jax_ssd

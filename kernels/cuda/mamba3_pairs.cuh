// Weights of the scores of a chunk: what an earlier token's key counts for a later token's query.
#pragma once

#include "mamba3_staging.cuh"

namespace jax_ssd {

// Where ranks divide the columns of an accumulator, the weights of all pairs of tokens are made once, in a table that
// their ranks share. A thread's are neighbours: [later token][which tokens of 8 columns][block of 8 columns].
template <class S, int Rows, int Tokens>
struct PairWeights {
  static constexpr bool kTable = S::kRank > 1 && 8 % S::kRank == 0;
  static constexpr int kBlocks = Rows / 8, kRow = Rows / S::kRank, kSize = kTable ? Tokens * kRow : 0;
  static constexpr int kBytes = padded(kSize * 4, 16);

  static __device__ __forceinline__ int token_of(int row) {
    const int token = row / S::kRank;
    return S::kRank * Tokens == Rows ? token : min(token, Tokens - 1);  // rows beyond are zero
  }

  // Of an array over tokens, the elements of two neighbouring rows, the first one even.
  static __device__ __forceinline__ float2 pair_of_rows(const float* of_tokens, int row) {
    const float first = of_tokens[token_of(row)];
    return make_float2(first, S::kRank % 2 == 0 ? first : of_tokens[token_of(row + 1)]);
  }

  template <int Threads>
  static __device__ __forceinline__ void make(float* table, const Schedule<Tokens>& weights, int thread) {
#pragma unroll
    for (int start = 0; start < kSize; start += Threads) {
      const int i = start + thread;
      if (kSize % Threads != 0 && i >= kSize) break;
      const int late = i / kRow, early = i % kBlocks * (8 / S::kRank) + i % kRow / kBlocks;
      table[i] = late >= early ? weight(weights, late, early) : 0.0f;
    }
  }

  // Of the later token's output with the earlier one's, or its own, key.
  static __device__ __forceinline__ float weight(const Schedule<Tokens>& weights, int late, int early) {
    float exponent = weights.sum[late] - weights.sum[early];
    if constexpr (S::kExact) exponent += weights.rest[late] - weights.rest[early];
    return late == early ? weights.gamma[late] : exp2_of<S::kExact>(exponent) * weights.f[early];
  }

  // Scores to weighted scores, zero for later tokens. m: accumulators of all columns in rows `row` and `row` + 8.
  static __device__ __forceinline__ void weigh(float (&m)[Rows / 2], const float* table,
                                               const Schedule<Tokens>& weights, int row) {
    const int early = token_of(row), late = token_of(row + 8), column = threadIdx.x % 4 * 2;
    if constexpr (kTable) {
      const float* up = table + early * kRow + column / S::kRank * kBlocks;
      const float* low = up + (late - early) * kRow;
#pragma unroll
      for (int block = 0; block < kBlocks; block += 2) {
        const float2 x = *reinterpret_cast<const float2*>(up + block);
        const float2 y = *reinterpret_cast<const float2*>(low + block);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          m[4 * block + e] *= x.x, m[4 * block + 2 + e] *= y.x;
          m[4 * block + 4 + e] *= x.y, m[4 * block + 6 + e] *= y.y;
        }
      }
    } else {
#pragma unroll
      for (int i = 0; i < Rows / 2; i += 4) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int c = token_of(i * 2 + column + e);
          m[i + e] *= early >= c ? weight(weights, early, c) : 0.0f;
          m[i + 2 + e] *= late >= c ? weight(weights, late, c) : 0.0f;
        }
      }
    }
  }

  // The skip, on the diagonal.
  static __device__ __forceinline__ void add_skip(float (&m)[Rows / 2], float skip, int row) {
    const int column = threadIdx.x % 4 * 2;
    const float even = row % 8 == column ? skip : 0.0f, odd = row % 8 == column + 1 ? skip : 0.0f;
#pragma unroll
    for (int i = 0; i < Rows / 2; i += 8) {
      if (i / 8 == row / 16) m[i] += even, m[i + 1] += odd, m[i + 6] += even, m[i + 7] += odd;
    }
  }
};

}  // namespace jax_ssd

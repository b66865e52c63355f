// The state of a Mamba-3 head in the accumulators of warps: [head_dim][state], tiles of 16 rows.
#pragma once

#include "mamba3_call.cuh"

namespace jax_ssd {

// The part of the state that a thread holds. H::kHolders: threads that hold it together. kTiles: of 16 rows that the
// state has. kHeld: columns that a warp has. kPairedRows: a thread's two rows in a tile are neighbours in the head.
template <class S, class H>
struct Part {
  int row, column;  // of the head, of the state: of the thread's first accumulator

  __device__ Part() {
    const int thread = thread_here() % H::kHolders, warp = thread / 32, lane = thread % 32;
    row = warp % H::kTiles * 16 + lane / 4 * (H::kPairedRows ? 2 : 1);
    column = warp / H::kTiles * H::kHeld + lane % 4 * 2;
  }

  // function(accumulator, row of the head, column of the state) for the real ones.
  template <class Function>
  __device__ __forceinline__ void each(Function function) const {
#pragma unroll
    for (int i = 0; i < H::kSizeState; ++i) {
      const int p = row + i / 2 % 2 * (H::kPairedRows ? 1 : 8), n = column + i / 4 * 8 + i % 2;
      if (p < S::kHeadDim && n < S::kState) function(i, p, n);
    }
  }
};

// The state that a sequence begins with, the half step that is still owed to its last key included. state: its row in
// the arrays of states. schedule: of its first token in those.
template <class S, class H, class O>
__device__ void begin_state(float (&s)[H::kSizeState], const Arrays<S>& in, long long state, long long schedule,
                            const float* mimo_v) {
#pragma unroll
  for (int i = 0; i < H::kSizeState; ++i) s[i] = 0.0f;
  if constexpr (O::kInitialState) {
    const float owed = sigmoid(-in.trap[schedule]) * in.dt[schedule];
    const float* ssm = in.state_ssm + state * (S::kHeadDim * S::kState);
    const float* k = in.state_k + state * (S::kRank * S::kState);
    const float* v = in.state_v + state * S::kHeadDim;
    Part<S, H>().each([&](int i, int p, int n) {
      float sum = 0.0f;
#pragma unroll
      for (int rank = 0; rank < S::kRank; ++rank) {
        sum += (O::kWeighted ? mimo_v[rank * S::kHeadDim + p] : 1.0f) * k[rank * S::kState + n];
      }
      s[i] = ssm[p * S::kState + n] + owed * v[p] * sum;
    });
  }
}

// The angles that a sequence begins with; null for zeros.
template <class S, class O>
__device__ const float* begin_angles(const Arrays<S>& in, long long state) {
  if constexpr (!O::kInitialState) return nullptr;
  return in.state_angle + state * S::kPairs;
}

// Adds to a decayed state that of an earlier segment, turned by rotations of one token. ssm: [head_dim][state].
template <class S, class H, class Table>
__device__ void add_turned(float (&s)[H::kSizeState], float decay, const float* ssm, const Table& table) {
  Part<S, H>().each([&](int i, int p, int n) {
    const bool second = S::kHalf ? n >= S::kState / 2 : n % 2 != 0;
    const int pair = S::kHalf ? n % (S::kState / 2) : n / 2, other = S::kHalf ? S::kState / 2 : 1;
    float x = ssm[p * S::kState + n];
    if (pair < S::kPairs) {
      const float partner = ssm[p * S::kState + (second ? n - other : n + other)];
      const int to = table.place(0, pair);
      x = x * table.cosine[to] + (second ? partner : -partner) * table.sine[to];
    }
    s[i] = decay * s[i] + x;
  });
}

}  // namespace jax_ssd

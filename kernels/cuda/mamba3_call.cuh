// A call of the Mamba-3 scan: its options and arrays, and where in it a block is.
#pragma once

#include "mamba3_staging.cuh"

namespace jax_ssd {

// SharedParams: parameters have one row for all of the batch. Weighted: mimo_v is given. Folds: mimo_o is.
template <bool SharedParams, bool Weighted, bool Folds, bool Gate, bool Skip, bool Norm, bool InitialState, bool Packed,
          bool FinalState>
struct Options {
  static constexpr bool kSharedParams = SharedParams, kWeighted = Weighted, kFolds = Folds, kGate = Gate, kSkip = Skip,
                        kNorm = Norm, kInitialState = InitialState, kPacked = Packed, kFinalState = FinalState;
};

// The arrays of a call; which of them exist is for the options to say.
template <class S>
struct Arrays {
  const typename S::Value *q, *k, *v, *z;
  const float *q_bias, *k_bias, *mimo_v, *mimo_o, *mimo_z, *D, *norm_weight;
  const float *angles, *adt, *dt, *trap;
  const float *state_angle, *state_ssm, *state_k, *state_v;
  const int* cu_seqlens;
};

// Where a block is: its row of the batch, its head, and the sequence that its tokens belong to.
struct Place {
  int row, head, segment;
  int sequence, first, end;  // the sequence's number and tokens

  // Which of the [batch][sequences][heads] states.
  __device__ long long state(int sequences, int heads) const {
    return ((long long)row * sequences + sequence) * heads + head;
  }

  // Where sequence j begins; the bounds of a row begin at `bounds`. Only those between two sequences are read.
  static __device__ int start_of(int j, const int* bounds, int sequences, int seq) {
    return j == 0 ? 0 : j == sequences ? seq : min(max(bounds[j], 0), seq);
  }

  // The sequence, not an empty one, that token t belongs to. Whatever the bounds are, first <= t < end.
  __device__ void find(const int* bounds, int sequences, int t, int seq) {
    int low = 0, high = sequences;  // the last sequence that begins at t or before
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (bounds[middle] <= t) {
        low = middle;
      } else {
        high = middle;
      }
    }
    sequence = low;
    first = start_of(low, bounds, sequences, seq);
    end = start_of(high, bounds, sequences, seq);
  }
};

// The state after each sequence, [batch][sequences][heads] of each piece.
struct FinalState {
  float *angle, *ssm, *k, *v;
};

// An empty sequence passes its state through. By all threads of a block.
template <class S, class O>
__device__ void pass_empty_sequences(const FinalState& to, const Arrays<S>& in, const Place& at, const int* bounds,
                                     int sequences, int seq) {
  for (int j = 0; j < sequences; ++j) {
    if (at.start_of(j, bounds, sequences, seq) != at.start_of(j + 1, bounds, sequences, seq)) continue;
    const long long state = ((long long)at.row * sequences + j) * S::kHeads + at.head;
    const auto pass = [&](float* to, const float* from, int size) {
      for (int i = threadIdx.x; i < size; i += blockDim.x) {
        to[state * size + i] = O::kInitialState ? from[state * size + i] : 0.0f;
      }
    };
    for (int pair = threadIdx.x; pair < S::kPairs; pair += blockDim.x) {
      const float angle = O::kInitialState ? in.state_angle[state * S::kPairs + pair] : 0.0f;
      to.angle[state * S::kPairs + pair] = radians_of_phase(phase_of_radians(angle)) + (angle - angle);
    }
    pass(to.ssm, in.state_ssm, S::kHeadDim * S::kState);
    pass(to.k, in.state_k, S::kRank * S::kState);
    pass(to.v, in.state_v, S::kHeadDim);
  }
}

}  // namespace jax_ssd

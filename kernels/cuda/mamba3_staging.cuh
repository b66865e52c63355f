// What a chunk of Mamba-3 tokens needs before its matrix products, made by the threads of one block in shared memory:
// weights and decays, the table of rotations, rotated keys and queries, values of every rank.
//
// Tokens and ranks of a chunk are the rows of its matrices, row = token * Rank + rank. Rows beyond the chunk's tokens
// keep what an earlier chunk left there: it is finite, and their weights are zero.
#pragma once

#include <cuda_bf16.h>

#include "decay.cuh"
#include "mamba3_phase.cuh"
#include "mamba3_products.cuh"
#include "values.cuh"

namespace jax_ssd {

// The sizes of a call. Half: rotated pairs are (i, i + State / 2), else (2i, 2i + 1).
template <typename Value_, int Heads, int Groups, int Rank, int HeadDim, int State, int Pairs, bool Half>
struct Sizes {
  using Value = Value_;
  static constexpr int kHeads = Heads, kGroups = Groups, kRank = Rank, kHeadDim = HeadDim, kState = State,
                       kPairs = Pairs;
  static constexpr bool kHalf = Half;
  static constexpr bool kExact = sizeof(Value) == 4;  // sines and exponentials to the last bit or two
};

__device__ __forceinline__ void load_values(float (&v)[4], const float* from) {
  const float4 w = *reinterpret_cast<const float4*>(from);
  v[0] = w.x, v[1] = w.y, v[2] = w.z, v[3] = w.w;
}
__device__ __forceinline__ void load_values(float (&v)[8], const float* from) {
  const float4 a = reinterpret_cast<const float4*>(from)[0], b = reinterpret_cast<const float4*>(from)[1];
  v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}
__device__ __forceinline__ void load_values(float (&v)[4], const __nv_bfloat16* from) {
  const uint2 w = *reinterpret_cast<const uint2*>(from);
  v[0] = low_of_pair(w.x), v[1] = high_of_pair(w.x), v[2] = low_of_pair(w.y), v[3] = high_of_pair(w.y);
}
__device__ __forceinline__ void load_values(float (&v)[8], const __nv_bfloat16* from) {
  const uint4 w = *reinterpret_cast<const uint4*>(from);
  v[0] = low_of_pair(w.x), v[1] = high_of_pair(w.x), v[2] = low_of_pair(w.y), v[3] = high_of_pair(w.y);
  v[4] = low_of_pair(w.z), v[5] = high_of_pair(w.z), v[6] = low_of_pair(w.w), v[7] = high_of_pair(w.w);
}

__device__ __forceinline__ float sigmoid(float v) { return 1.0f / (1.0f + expf(-v)); }

template <bool Exact>
__device__ __forceinline__ float exp2_of(float v) {
  if constexpr (Exact) return exp2f(v);
  return exp2_fast(v);
}

// Weights and decays of a chunk's tokens, all arrays [Tokens]. Padding has weight 0.
template <int Tokens>
struct Schedule {
  float sum[Tokens], rest[Tokens];  // log2 decay from the chunk's start up to and with the token; what float32 drops
  float gamma[Tokens];              // weight of a token with itself
  float f[Tokens];                  // weight of its key with later tokens: gamma and the next token's delta
  float kept[Tokens];               // f decayed to the chunk's end
  float from_start[Tokens];         // decay of the state before the chunk
};

// By one warp. The arrays begin at the chunk's first token; `more`: a token of the same sequence follows the chunk.
template <bool Exact, int Tokens>
__device__ void make_schedule(Schedule<Tokens>& to, const float* adt, const float* dt, const float* trap, int count,
                              bool more) {
  constexpr int kEach = (Tokens + 31) / 32;
  const int lane = threadIdx.x % 32;
  double sums[kEach], total = 0.0;
  float gamma[kEach], f[kEach];
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    const int c = lane * kEach + e;
    double step = 0.0;
    gamma[e] = f[e] = 0.0f;
    if (c < count) {
      step = static_cast<double>(adt[c]) * 1.4426950408889634;
      step = step < FLOOR ? FLOOR : step;  // a NaN stays
      gamma[e] = f[e] = sigmoid(trap[c]) * dt[c];
      if (c + 1 < count || more) f[e] += sigmoid(-trap[c + 1]) * dt[c + 1];
    }
    total += step;
    sums[e] = total;
  }
  double scan = total;
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const double before = __shfl_up_sync(~0u, scan, distance);
    if (lane >= distance) scan += before;
  }
  const double last = __shfl_sync(~0u, scan, 31);
  double before = __shfl_up_sync(~0u, scan, 1);  // not scan - total: a NaN would reach the lane's earlier tokens
  if (lane == 0) before = 0.0;
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    const int c = lane * kEach + e;
    if (c < Tokens) {
      const double sum = before + sums[e];
      to.sum[c] = static_cast<float>(sum);
      to.rest[c] = static_cast<float>(sum - static_cast<double>(to.sum[c]));
      to.gamma[c] = gamma[e];
      to.f[c] = f[e];
      to.kept[c] = f[e] * exp2_of<Exact>(static_cast<float>(last - sum));
      to.from_start[c] = exp2_of<Exact>(static_cast<float>(sum));
    }
  }
}

// Sines and cosines of a chunk's phases in shared memory. Four neighbouring pairs are loaded at once; where rows are
// whole lines of 32 banks, pieces of 8 are permuted so that threads that write for four parts of the tokens do not
// meet.
template <class S, int Tokens>
struct Rotations {
  static constexpr int kSpan = (Tokens + 3) / 4;  // tokens of one part
  static constexpr int kPadded = padded(S::kPairs, 4);
  static constexpr int kBytes = 2 * Tokens * kPadded * 4;
  float *sine, *cosine;

  __device__ explicit Rotations(void* memory)
      : sine(static_cast<float*>(memory)), cosine(static_cast<float*>(memory) + Tokens * kPadded) {}

  static __device__ __forceinline__ int place(int token, int pair) {
    if constexpr (kPadded % 32 == 0) pair ^= token / kSpan % 4 * 8;
    return token * kPadded + pair;
  }

  // Pairs that are there to fill up four do not rotate.
  template <int Threads>
  __device__ void fill() const {
    constexpr int kExtra = kPadded - S::kPairs;
    for (int i = threadIdx.x; i < Tokens * kExtra; i += Threads) {
      const int at = place(i / kExtra, S::kPairs + i % kExtra);
      sine[at] = 0.0f;
      cosine[at] = 1.0f;
    }
  }
};

// The running phases of a head: every group of 8 lanes with the same lane / 8 is a part of the chunk's tokens, every
// warp has 8 pairs, or as many sets of them as there must be. An integer cannot be NaN: `lost`, in shared memory, is
// nonzero for pairs that met a number that is not finite. Only the warp that has a pair reads and writes it.
template <class S, int Tokens, int Threads>
struct PhaseWalk {
  static constexpr int kSpan = Rotations<S, Tokens>::kSpan;
  static constexpr int kSets = (S::kPairs + Threads / 4 - 1) / (Threads / 4);
  unsigned phase[kSets];  // after the last token so far

  static __device__ __forceinline__ int pair(int set) {
    return set * (Threads / 4) + threadIdx.x / 32 * 8 + threadIdx.x % 8;
  }

  // From the phases of an earlier part, which lie where `lost` will.
  __device__ void begin(unsigned* lost) {
#pragma unroll
    for (int set = 0; set < kSets; ++set) phase[set] = pair(set) < S::kPairs ? lost[pair(set)] : 0u;
    clear(lost);
  }

  // From angles, or from zero if there are none. Whether all are finite.
  __device__ bool begin(const float* angles, unsigned* lost) {
    clear(lost);
    bool finite = true;
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
      const float angle = angles != nullptr && pair(set) < S::kPairs ? angles[pair(set)] : 0.0f;
      phase[set] = phase_of_radians(angle);
      if (is_finite(angle)) continue;
      lost[pair(set)] = 1;
      finite = false;
    }
    return finite;
  }

  // Marks the pairs that lose their phase in tokens that `advance` walked over. Apart from it, for it is rare.
  static __device__ void lose(const float* angles, const float* dt, int count, unsigned* lost) {
    for (int set = 0; set < kSets; ++set) {
      if (pair(set) >= S::kPairs) continue;
#pragma unroll 1
      for (int c = threadIdx.x % 32 / 8; c < count; c += 4) {
        const float angle = angles[(long long)c * (S::kHeads * S::kPairs) + pair(set)];
        if (angle != angle || !is_finite(dt[c])) lost[pair(set)] = 1;
      }
    }
    __syncwarp();
  }

  __device__ void clear(unsigned* lost) {
    __syncwarp();
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
      if (threadIdx.x % 32 < 8 && pair(set) < S::kPairs) lost[pair(set)] = 0;
    }
    __syncwarp();
  }

  // Over `count` tokens from the ones that angles [token][heads][pairs] and dt [token] point at; their rotations go to
  // the table. A token with a number that is not finite is marked in `bad`, and the result is true.
  __device__ bool advance(const float* angles, const float* dt, int count, const Rotations<S, Tokens>& table,
                          int* bad) {
    const int lane = threadIdx.x % 32, part = lane / 8;
    bool found = false;
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
      const bool real = pair(set) < S::kPairs;
      float turns[kSpan];
#pragma unroll
      for (int i = 0; i < kSpan; ++i) {
        const int c = part * kSpan + i;
        turns[i] = real && c < count ? angles[(long long)c * (S::kHeads * S::kPairs) + pair(set)] : 0.0f;
      }
      unsigned sums[kSpan], sum = 0;
#pragma unroll
      for (int i = 0; i < kSpan; ++i) {
        const int c = part * kSpan + i;
        const float step = turns_of_step(turns[i], c < count ? dt[c] : 0.0f);
        if (!is_finite(step)) {
          bad[c] = 1;
          found = true;
        }
        sum += phase_of_turns(step);
        sums[i] = sum;
      }
      unsigned scan = sum;
      const unsigned one = __shfl_up_sync(~0u, scan, 8);
      if (part >= 1) scan += one;
      const unsigned two = __shfl_up_sync(~0u, scan, 16);
      if (part >= 2) scan += two;
      const unsigned before = phase[set] + scan - sum;
      phase[set] += __shfl_sync(~0u, scan, 24 + lane % 8);
#pragma unroll
      for (int i = 0; i < kSpan; ++i) {
        const int c = part * kSpan + i;
        if (real && c < count) {
          float sine, cosine;
          if constexpr (S::kExact) {
            sincos_of_phase(before + sums[i], sine, cosine);
          } else {
            sincos_of_phase_fast(before + sums[i], sine, cosine);
          }
          const int at = Rotations<S, Tokens>::place(c, pair(set));
          table.sine[at] = sine;
          table.cosine[at] = cosine;
        }
      }
    }
    return found;
  }
};

// Eight coordinates of a key or query in four pairs.
template <class S>
struct Unit {
  static constexpr int kCount = S::kState / 8;
  float v[8];

  __device__ __forceinline__ Unit() {}

  template <typename T>
  __device__ __forceinline__ Unit(const T* row, int unit) {
    if constexpr (S::kHalf) {
      float low[4], high[4];
      load_values(low, row + 4 * unit);
      load_values(high, row + S::kState / 2 + 4 * unit);
#pragma unroll
      for (int i = 0; i < 4; ++i) v[i] = low[i], v[4 + i] = high[i];
    } else {
      load_values(v, row + 8 * unit);
    }
  }

  template <class Table>
  __device__ __forceinline__ void rotate_by(const Table& table, int token, int unit) {
    if (4 * unit >= S::kPairs) return;
    const int at = Table::place(token, 4 * unit);
    float sine[4], cosine[4];
    load_values(sine, table.sine + at);
    load_values(cosine, table.cosine + at);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (S::kHalf) {
        rotate(v[i], v[4 + i], sine[i], cosine[i]);
      } else {
        rotate(v[2 * i], v[2 * i + 1], sine[i], cosine[i]);
      }
    }
  }

  template <bool Finite, class M>
  __device__ __forceinline__ bool store(const M& matrix, int row, int unit) const {
    if constexpr (!S::kHalf) return matrix.template store<Finite>(row, 8 * unit, v);
    const float low[4] = {v[0], v[1], v[2], v[3]}, high[4] = {v[4], v[5], v[6], v[7]};
    const bool first = matrix.template store<Finite>(row, 4 * unit, low);
    return matrix.template store<Finite>(row, S::kState / 2 + 4 * unit, high) && first;
  }

  __device__ __forceinline__ void write(float* row, int unit) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      row[S::kHalf ? (i < 4 ? 4 * unit + i : S::kState / 2 + 4 * unit + i - 4) : 8 * unit + i] = v[i];
    }
  }
};

// Where rotated keys and queries come from: arrays at the chunk's first token and the head's group, biases at the head.
template <class S>
struct KeySource {
  const typename S::Value *q, *k;
  const float *q_bias, *k_bias;
};

// Keys, and queries if they are wanted, of a chunk. `last_key`: where the key of token `last` is written in float32
// too. A key that is not finite becomes zero and marks its token in `bad`; then the result is true.
template <class S, int Tokens, int Threads, bool Queries, class M>
__device__ bool stage_keys(const KeySource<S>& source, const Rotations<S, Tokens>& table, int count, const M& queries,
                           const M& keys, int* bad, int last, float* last_key) {
  // Eight lanes share a row and take neighbouring units; these slots go to tokens, ranks, q or k, and parts of the row,
  // so that a warp works on rotated units only or on others only, where it can.
  constexpr int kSlots = Threads / 8, kKinds = Queries ? 2 : 1, kParts = (Unit<S>::kCount + 7) / 8;
  constexpr int kJobs = kParts * kKinds * S::kRank, kTogether = kSlots > kJobs ? kSlots / kJobs : 1;
  const int slot = threadIdx.x / 8;
  bool found = false;
  for (int job = slot / kTogether; job < kJobs; job += kSlots / kTogether) {
    const int rank = job % S::kRank, unit = job / (S::kRank * kKinds) * 8 + threadIdx.x % 8;
    const bool is_query = Queries && job / S::kRank % kKinds != 0;
    if (unit >= Unit<S>::kCount) continue;
    const Unit<S> bias((is_query ? source.q_bias : source.k_bias) + rank * S::kState, unit);
    const typename S::Value* from = (is_query ? source.q : source.k) + rank * (S::kGroups * S::kState);
    constexpr int kStride = S::kRank * S::kGroups * S::kState;
#pragma unroll 4
    for (int c = slot % kTogether; c < count; c += kTogether) {
      Unit<S> x(from + (long long)c * kStride, unit);
#pragma unroll
      for (int i = 0; i < 8; ++i) x.v[i] += bias.v[i];
      x.rotate_by(table, c, unit);
      if (is_query) {
        x.template store<false>(queries, c * S::kRank + rank, unit);
      } else {
        if (c == last) x.write(last_key + rank * S::kState, unit);
        if (!x.template store<true>(keys, c * S::kRank + rank, unit)) {
          bad[c] = 1;
          found = true;
        }
      }
    }
  }
  return found;
}

// Values of a chunk, expanded to ranks by weights [Rank][HeadDim] (Weighted, else there is one rank). v begins at the
// chunk's first token and the head. What is not finite is treated as in `stage_keys`.
template <class S, int Threads, bool Weighted, class M>
__device__ bool stage_values(const typename S::Value* v, const float* weights, int count, const M& values, int* bad) {
  constexpr int kPieces = S::kHeadDim / 8;
  bool found = false;
#pragma unroll 2
  for (int i = threadIdx.x; i < count * kPieces; i += Threads) {
    const int c = i / kPieces, column = i % kPieces * 8;
    float x[8];
    load_values(x, v + (long long)c * (S::kHeads * S::kHeadDim) + column);
#pragma unroll
    for (int rank = 0; rank < S::kRank; ++rank) {
      float row[8];
      if constexpr (Weighted) load_values(row, weights + rank * S::kHeadDim + column);
#pragma unroll
      for (int e = 0; e < 8; ++e) row[e] = Weighted ? row[e] * x[e] : x[e];
      if (!values.template store<true>(c * S::kRank + rank, column, row)) {
        bad[c] = 1;
        found = true;
      }
    }
  }
  return found;
}

// Brings the lines of `bytes` bytes at an address towards the L2 cache.
__device__ __forceinline__ void prefetch(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

}  // namespace jax_ssd

// The gradients of a Mamba-3 scan, chunk by chunk, with states and their adjoints recomputed.
//
// Tokens and ranks of a chunk are the rows of a tile: row c * kRanks + r, kRanks the rank rounded up to a power of two,
// so that a thread's rows of an mma accumulator have known ranks. Rows of no token or no rank are zero. Columns of q
// and k are kept in the order in which rotated pairs are neighbours, whatever the order in memory: a thread's two
// neighbouring accumulators are then one pair. Notation of a chunk, a the running sum of adt in it, T the adjoint of
// the state after it, f = gamma + delta of the next token:
//
//   M = Q K' w,  dM = dO V' w,  w_ij = exp(a_i - a_j) f_j for an earlier token j, gamma_i for the same one
//   dV = M' dO + f exp(a_last - a) K T          dQ = dM K + exp(a) dO s'       dK = dM' Q + f exp(a_last - a) V T'
//
// Kernels, in order: schedule (weights, sums and phases of every token), walk (states forward, adjoints backward),
// [normalize (the adjoint ahead of a norm),] chunk (everything that one chunk gives, heads one after another so that
// the gradients of q and k are summed over a group in a fixed order), and the sums over chunks, groups and time.
// The sizes are macros: see plan_backward.py.

#include <cuda_bf16.h>

#include "async_copy.cuh"
#include "decay.cuh"
#include "fragments.cuh"
#include "mamba3_backward_numbers.cuh"
#include "mamba3_phase.cuh"
#include "shared_memory.cuh"

namespace {

using namespace jax_ssd;
using Value = VALUE;  // of q, k, v, z and dy, of tiles and of the states that are kept

constexpr int kSeq = SEQ, kHeads = HEADS, kGroups = GROUPS, kRank = RANK, kRanks = RANKS, kN = STATE, kP = HEAD_DIM;
constexpr int kBatch = BATCH, kPairs = PAIRS, kRows = ROWS, kTokens = TOKENS;  // rotated pairs; rows, tokens of a chunk
constexpr int kParts = PARTS;                                                  // blocks that share a group's heads
constexpr bool kSharedParams = SHARED_PARAMS, kHalf = HALF_ROTARY, kSiso = SISO, kKeepsRank = KEEPS_RANK;
constexpr bool kHasGate = HAS_GATE, kHasSkip = HAS_SKIP, kHasNorm = HAS_NORM, kHasState = HAS_STATE;
constexpr bool kHasFinal = HAS_FINAL, kPacked = PACKED;
constexpr bool kExact = sizeof(Value) == 4;  // sums of decays, sines and cosines to the last bit or two
constexpr int kPasses = PASSES;              // of float32 products
constexpr bool kPanels = PANELS;             // states are kept as warpgroups keep them
constexpr float kNormEps = NORM_EPS;

constexpr int kSequences = SEQUENCES;  // that a row holds
constexpr int kSpan = SPAN;            // tokens over which phases' gradients are summed; whole chunks
// Pieces of so many tokens that a row is cut into.
__host__ __device__ constexpr int pieces(int tokens) {
  return kPacked ? kSeq / tokens + kSequences : (kSeq + tokens - 1) / tokens;
}
constexpr int kChunks = pieces(kTokens), kSpans = pieces(kSpan);
constexpr int kGroupHeads = kHeads / kGroups;
constexpr int kPartHeads = (kGroupHeads + kParts - 1) / kParts;
constexpr int kWideN = (kN + 63) / 64 * 64, kWideP = (kP + 31) / 32 * 32;  // of tiles
constexpr int kUnit = 16 / sizeof(Value);                                  // numbers in 16 bytes
// 16 bytes more: no bank conflicts.
constexpr int kPitchN = kWideN + kUnit, kPitchP = kWideP + kUnit, kPitchM = kRows + kUnit;
constexpr int kRankedToken = kHeads * kP * (kKeepsRank ? kRank : 1);  // of dy
constexpr float kPi = 3.14159265358979f;

static_assert(kTokens * kRanks <= kRows && kRank <= kRanks && kSpan % kTokens == 0);
static_assert(kRows == 32 || kRows == 64);

// A chunk's part of the parameters' gradients, of one head: float32, in this order.
constexpr int kQBiasAt = 0, kKBiasAt = kRank * kN, kMimoVAt = 2 * kRank * kN, kMimoOAt = kMimoVAt + kRank * kP;
constexpr int kMimoZAt = kMimoOAt + kRank * kP, kNormAt = kMimoZAt + kRank * kP, kSkipAt = kNormAt + kP;
constexpr int kRecord = kSkipAt + 4;

// Where column n of a tile is in memory.
__device__ constexpr int column(int n) { return kHalf ? n % 2 * (kN / 2) + n / 2 : n; }

__device__ inline long long token_head(int b, int t, int h) { return ((long long)b * kSeq + t) * kHeads + h; }
__device__ inline long long head_token(int b, int h, int t) { return ((long long)b * kHeads + h) * kSeq + t; }
__device__ inline int param_row(int b) { return kSharedParams ? 0 : b; }

// Of the states that sequence j of a row begins or ends with.
__device__ inline long long state_row(int b, int j, int h) { return ((long long)b * kSequences + j) * kHeads + h; }

// One of the packed sequences of a row, or all of the row; tokens from first to end. The bounds of rows are data:
// whatever they are, 0 <= first, end <= kSeq.
struct Sequence {
  int number, first, end;

  __device__ int tokens() const { return max(0, end - first); }
  // Pieces of Tokens tokens are cut from each sequence's start. The first of them, among the row's.
  template <int Tokens>
  __device__ int piece() const {
    return first / Tokens + number;
  }
};

__device__ inline int start_of(const int* bounds, int j) {
  return j == 0 ? 0 : j == kSequences ? kSeq : min(max(bounds[j], 0), kSeq);
}

__device__ inline Sequence sequence_of(const int* bounds, int b, int j) {
  if constexpr (!kPacked) return {0, 0, kSeq};
  bounds += (long long)b * (kSequences + 1);
  return {j, start_of(bounds, j), start_of(bounds, j + 1)};
}

// A piece of Tokens tokens of a row, from t0 to t0 + last; -1 if it has none.
struct Piece {
  Sequence of;
  int t0, last;
};

template <int Tokens>
__device__ inline Piece piece_of(const int* bounds, int b, int piece) {
  int low = 0;
  if constexpr (kPacked) {
    for (int high = kSequences; high - low > 1;) {  // the last sequence that begins with this piece or before
      const int middle = (low + high) / 2;
      (start_of(bounds + (long long)b * (kSequences + 1), middle) / Tokens + middle <= piece ? low : high) = middle;
    }
  }
  const Sequence of = sequence_of(bounds, b, low);
  const int t0 = of.first + (piece - of.piece<Tokens>()) * Tokens;
  return {of, t0, max(0, min(Tokens, of.end - t0)) - 1};
}

__device__ inline float sigmoid(float x) {  // 0 for -inf
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(1.0f + exp2_fast(-LOG2E * x)));
  return r;
}

// Of the previous token's key and value, at a token.
__device__ inline float delta_of(float dt, float trap) { return dt / (1.0f + expf(trap)); }

// Sums of decays in base 2.
template <bool Exact>
struct SumOf {
  using Type = float;
  static __device__ inline float log2_decay(float adt) { return jax_ssd::log2_decay(1.0f, adt); }
};
template <>
struct SumOf<true> {
  using Type = double;
  static __device__ inline double log2_decay(float adt) {
    const double step = adt * 1.4426950408889634;
    return step < FLOOR ? FLOOR : step;  // a NaN stays
  }
};

__device__ inline void sincos_of(unsigned phase, float& sine, float& cosine) {
  if constexpr (kExact) {
    sincos_of_phase(phase, sine, cosine);
  } else {
    sincos_of_phase_fast(phase, sine, cosine);
  }
}

__device__ inline float tanh_of(float x) { return kExact ? tanhf(x) : 1.0f - 2.0f * sigmoid(-2.0f * x); }

// By every kernel, first of all: the next one may be launched while this one ends, as this one may have been.
__device__ inline void begin() {
#if __CUDA_ARCH__ >= 900
  let_next_kernel_start();
  wait_for_earlier_kernels();
#endif
}

// The same in all lanes, for the compiler to know.
__device__ inline int warp_of_block() { return __shfl_sync(0xffffffff, static_cast<int>(threadIdx.x) / 32, 0); }

// Brings the line at an address to the L2 cache.
__device__ inline void want(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

__device__ inline void copy_async(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

// Sums over the lanes of a warp that hold rows of one rank, or of one token, in an mma accumulator. A lane's row is
// lane / 4, so ranks are the low bits of that.
__device__ inline float sum_over_tokens(float x) {
#pragma unroll
  for (int offset = 4 * kRanks; offset < 32; offset *= 2) x += __shfl_xor_sync(0xffffffff, x, offset);
  return x;
}

__device__ inline float sum_over_ranks(float x) {
#pragma unroll
  for (int offset = 4; offset < 4 * kRanks; offset *= 2) x += __shfl_xor_sync(0xffffffff, x, offset);
  return x;
}

// The same of Count values in each lane, for fewer shuffles: a lane with rank r keeps the sums of the values from
// r * Count / kRanks on, at the beginning of x.
template <int Count, int Offset = 2 * kRanks>
__device__ inline void share_over_ranks(float* x) {
  if constexpr (Offset >= 4) {
    const bool upper = threadIdx.x & Offset;
#pragma unroll
    for (int i = 0; i < Count / 2; ++i) {
      const float other = __shfl_xor_sync(0xffffffff, upper ? x[i] : x[i + Count / 2], Offset);
      x[i] = (upper ? x[i + Count / 2] : x[i]) + other;
    }
    share_over_ranks<Count / 2, Offset / 2>(x);
  }
}

// What share_over_ranks leaves of eight values, [row][two columns] of an accumulator's rows, in memory. to: for the
// first of the rows. rest: tokens after its own that there are.
__device__ inline void store_shared(Value* to, const float* x, int rank, int rest, bool inside) {
  constexpr int kOwn = 8 / kRanks;
  if constexpr (kOwn == 1) {
    if (inside && rank / 2 <= rest) store_one(to + rank / 2 * kHeads * kP + rank % 2, x[0]);
  } else {
#pragma unroll
    for (int i = 0; i < kOwn; i += 2) {
      const int later = (rank * kOwn + i) / 2 * 8 / kRanks;
      if (inside && later <= rest) store_pair(to + later * kHeads * kP, x[i], x[i + 1]);
    }
  }
}

// The token, in a chunk, of a thread's column of an accumulator.
__device__ inline int tokens_of_columns(int first, int offset, int e) {
  const int column = first + threadIdx.x % 4 * 2;
  return kRanks == 1 ? column + offset + e : column / kRanks + offset / kRanks;
}

__device__ inline float sum_over_rows(float x) {
#pragma unroll
  for (int offset = 4; offset < 32; offset *= 2) x += __shfl_xor_sync(0xffffffff, x, offset);
  return x;
}

// ---------------------------------------------------------------------------------------------------------------------
// What staging a tile needs to know of a chunk.

// What products are made of.
__device__ inline void store_tile(Value* to, float a, float b) {
  store_pair(to, for_products<Value, kPasses>(a), for_products<Value, kPasses>(b));
}

template <int Count, int Size>
__device__ inline void store_tile(Value* to, const float (&x)[Size], int first = 0) {
  float rounded[Count];
#pragma unroll
  for (int i = 0; i < Count; ++i) rounded[i] = for_products<Value, kPasses>(x[first + i]);
  store_run<Count>(to, rounded);
}

// Four pairs of a row of q or k, in the order of the tile: rotated by cos and sin where there are any.
__device__ inline void turn_columns(float (&x)[8], const float (&cosine)[4], const float (&sine)[4], int pair) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (pair + i < kPairs) rotate(x[2 * i], x[2 * i + 1], sine[i], cosine[i]);
  }
}

// The eight columns of a tile from 2 * pair on, of a row in memory.
__device__ inline Eight<Value> load_columns(const Value* row, int pair) {
  return kHalf ? eight_of(row + pair, row + kN / 2 + pair) : eight_at(row + 2 * pair);
}

__device__ inline void add_columns(const float* row, int pair, float (&x)[8]) {
  float y[8];
  unpack8(kHalf ? eight_of(row + pair, row + kN / 2 + pair) : eight_at(row + 2 * pair), y);
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] += y[i];
}

// The phases of four pairs from `pair` on, of a token; zeros beyond the rotated ones.
__device__ inline uint4 load_phases(const unsigned* token, int pair) {
  uint4 phase = make_uint4(0, 0, 0, 0);
  if constexpr (kPairs % 4 == 0) {
    if (pair < kPairs) phase = *reinterpret_cast<const uint4*>(token + pair);
  } else {
    if (pair < kPairs) phase.x = token[pair];
    if (pair + 1 < kPairs) phase.y = token[pair + 1];
    if (pair + 2 < kPairs) phase.z = token[pair + 2];
    if (pair + 3 < kPairs) phase.w = token[pair + 3];
  }
  return phase;
}

__device__ inline long long dy_at(int b, int t, int r, int h) {
  return (kKeepsRank ? (((long long)b * kSeq + t) * kRank + r) * kHeads + h : token_head(b, t, h)) * kP;
}

__device__ inline long long q_at(int b, int t, int r, int g) {
  return ((((long long)b * kSeq + t) * kRank + r) * kGroups + g) * kN;
}

// ---------------------------------------------------------------------------------------------------------------------
// Staging a chunk of one head, tokens t0 to t0 + last. Columns beyond the sizes are not touched.

// What a thread will stage of a head's chunk, and its row's weights.
template <int Threads>
struct Ahead {
  static constexpr int kKeys = (kRows * (kN / 8) + Threads - 1) / Threads,
                       kValues = (kRows * (kP / 8) + Threads - 1) / Threads;
  // Where rows of units repeat after the threads of a block, all units of a thread have the same columns and rank.
  static constexpr int kBiases = Threads % (kN / 8) == 0 && Threads / (kN / 8) % kRanks == 0 ? 1 : kKeys;
  static constexpr int kWeights = Threads % (kP / 8) == 0 && Threads / (kP / 8) % kRanks == 0 ? 1 : kValues;
  Eight<Value> q[kKeys], k[kKeys], v[kValues], dy[kValues], z[kValues];
  uint4 phase[kKeys];
  float total, decay, rest, left, f, gamma;  // left: a_last - a
};

template <int Threads>
__device__ inline void load_keys(Ahead<Threads>& to, const Value* q, const Value* k, const unsigned* phases, int b,
                                 int t0, int last, int h) {
  using A = Ahead<Threads>;
#pragma unroll
  for (int i = 0; i < A::kKeys; ++i) {
    const int unit = threadIdx.x + i * Threads, row = unit / (kN / 8), pair = unit % (kN / 8) * 4, c = row / kRanks,
              r = row % kRanks;
    to.q[i] = to.k[i] = Eight<Value>{};
    to.phase[i] = make_uint4(0, 0, 0, 0);
    if (row < kRows && c <= last && r < kRank) {
      const long long at = q_at(b, t0 + c, r, h / kGroupHeads);
      to.q[i] = load_columns(q + at, pair);
      to.k[i] = load_columns(k + at, pair);
      to.phase[i] = load_phases(phases + token_head(b, t0 + c, h) * kPairs, pair);
    }
  }
}

template <int Threads>
__device__ inline void load_values(Ahead<Threads>& to, const Value* v, const Value* z, const Value* dy,
                                   const Value* normed, int b, int t0, int last, int h) {
  using A = Ahead<Threads>;
#pragma unroll
  for (int i = 0; i < A::kValues; ++i) {
    const int unit = threadIdx.x + i * Threads, row = unit / (kP / 8), p = unit % (kP / 8) * 8, c = row / kRanks,
              r = row % kRanks;
    to.v[i] = to.dy[i] = to.z[i] = Eight<Value>{};
    if (row < kRows && c <= last && r < kRank) {
      const long long at = token_head(b, t0 + c, h) * kP + p;
      to.v[i] = eight_at(v + at);
      if constexpr (kHasNorm) {
        to.dy[i] = eight_at(normed + ((head_token(b, h, t0) + c) * kRank + r) * kP + p);
      } else {
        to.dy[i] = eight_at(dy + dy_at(b, t0 + c, r, h) + p);
        if constexpr (kHasGate) to.z[i] = eight_at(z + at);
      }
    }
  }
}

template <typename T>
__device__ inline void want_row(const T* from, int size) {
  for (int i = 0; i < size; i += 128 / sizeof(T)) want(from + i);
}

// Brings what the two above load, but for q and k, to the L2 cache: a thread has one of four arrays of a token.
__device__ inline void want_head(const Value* v, const Value* z, const Value* dy, const Value* normed,
                                 const unsigned* phases, int b, int t0, int last, int h) {
  const int c = threadIdx.x / 4;
  if (c > last) return;
  const long long at = token_head(b, t0 + c, h);
  const int which = threadIdx.x % 4;
  if (which == 0) want_row(v + at * kP, kP);
  if (which == 1) want_row(phases + at * kPairs, kPairs);
  if (which == 2 && kHasGate && !kHasNorm) want_row(z + at * kP, kP);
  if (which == 3 && kHasNorm) want_row(normed + (head_token(b, h, t0) + c) * kRank * kP, kRank * kP);
  if (which == 3 && !kHasNorm) {
    for (int r = 0; r < (kKeepsRank ? kRank : 1); ++r) want_row(dy + dy_at(b, t0 + c, r, h), kP);
  }
}

// Rotated rows of q and k, and the table [token][pair] of cosines and sines. The biases are the head's.
template <int Threads>
__device__ inline void stage_keys(const Ahead<Threads>& from, Value* Q, Value* K, float2* trig, int last,
                                  const float* q_bias, const float* k_bias) {
  using A = Ahead<Threads>;
  float bias_q[8], bias_k[8];
#pragma unroll
  for (int i = 0; i < A::kKeys; ++i) {
    const int unit = threadIdx.x + i * Threads, row = unit / (kN / 8), pair = unit % (kN / 8) * 4, c = row / kRanks,
              r = row % kRanks;
    if (i < A::kBiases) {
#pragma unroll
      for (int e = 0; e < 8; ++e) bias_q[e] = bias_k[e] = 0.0f;
      if (r < kRank) {
        add_columns(q_bias + r * kN, pair, bias_q);
        add_columns(k_bias + r * kN, pair, bias_k);
      }
    }
    if (row >= kRows) continue;
    float x[8] = {}, y[8] = {};
    if (c <= last && r < kRank) {
      float cosine[4] = {}, sine[4] = {};
      unpack8(from.q[i], x);
      unpack8(from.k[i], y);
#pragma unroll
      for (int e = 0; e < 8; ++e) x[e] += bias_q[e], y[e] += bias_k[e];
      const unsigned phase[4] = {from.phase[i].x, from.phase[i].y, from.phase[i].z, from.phase[i].w};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (pair + e >= kPairs) continue;
        sincos_of(phase[e], sine[e], cosine[e]);
        if (r == 0) trig[c * kPairs + pair + e] = make_float2(cosine[e], sine[e]);
      }
      turn_columns(x, cosine, sine, pair);
      turn_columns(y, cosine, sine, pair);
    }
    store_tile<8>(Q + row * kPitchN + 2 * pair, x);
    store_tile<8>(K + row * kPitchN + 2 * pair, y);
  }
}

// Rows of V and, where there is no norm, of dO: dy folded back and gated. The weights are the head's.
template <int Threads>
__device__ inline void stage_values(const Ahead<Threads>& from, Value* V, Value* dO, const float* mimo_v,
                                    const float* mimo_o, const float* mimo_z) {
  using A = Ahead<Threads>;
  float weight_v[8], weight_o[8], weight_z[8];
#pragma unroll
  for (int i = 0; i < A::kValues; ++i) {
    const int unit = threadIdx.x + i * Threads, row = unit / (kP / 8), p = unit % (kP / 8) * 8;
    const bool ranked = row % kRanks < kRank;
    if (!kSiso && i < A::kWeights && ranked) {
      const int at = row % kRanks * kP + p;
      load8(mimo_v + at, weight_v);
      if constexpr (!kHasNorm && !kKeepsRank) load8(mimo_o + at, weight_o);
      if constexpr (!kHasNorm && kHasGate) load8(mimo_z + at, weight_z);
    }
    if (row >= kRows) continue;
    float x[8], y[8], gate[8];
    unpack8(from.v[i], x);
    unpack8(from.dy[i], y);
    unpack8(from.z[i], gate);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      if (!kSiso) x[e] = ranked ? x[e] * weight_v[e] : 0.0f;
      if constexpr (!kHasNorm) {
        if (!kSiso && !kKeepsRank) y[e] = ranked ? y[e] * weight_o[e] : 0.0f;
        if constexpr (kHasGate) {
          if (!kSiso) gate[e] = ranked ? gate[e] * weight_z[e] : 0.0f;
          y[e] *= gate[e] * sigmoid(gate[e]);
        }
      }
    }
    store_tile<8>(V + row * kPitchP + p, x);
    store_tile<8>(dO + row * kPitchP + p, y);
  }
}

// A state or an adjoint, by copies that the next commit_group takes.
template <int Threads>
__device__ inline void stage_state(Value* to, const Value* from) {
  for (int i = threadIdx.x; i < kN * (kP / kUnit); i += Threads) {
    const int n = i / (kP / kUnit), p = i % (kP / kUnit) * kUnit;
    copy_async(to + n * kPitchP + p, from + n * kP + p);
  }
}

__device__ inline long long state_at(int b, int h, int chunk) {
  return (((long long)b * kHeads + h) * kChunks + chunk) * kN * kP;
}

__device__ inline long long record_at(int b, int chunk, int h) {
  return (((long long)b * kChunks + chunk) * kHeads + h) * kRecord;
}

}  // namespace

// ---------------------------------------------------------------------------------------------------------------------
// Per head: gamma, f and the running sum of adt in base 2 of every token, within its chunk, and every token's phase.
// rest: what float32 drops of such a sum, where numbers are float32. The phases lie where the gradient of the angles
// will: the kernel `chunk` reads them before it writes. One block per sequence and head.

template <int Threads>
__global__ void __launch_bounds__(Threads)
    mamba3_schedule(const float* angles, const float* adt, const float* dt, const float* trap, const float* start,
                    const int* cu_seqlens, float* gamma, float* f, float* decay, float* rest, unsigned* phases) {
  using Sum = typename SumOf<kExact>::Type;
  __shared__ unsigned ends[Threads / 32][32];
  begin();
  const int h = blockIdx.x % kHeads, j = blockIdx.x / kHeads % kSequences, b = blockIdx.x / (kHeads * kSequences);
  const int warp = warp_of_block(), lane = threadIdx.x % 32;
  const Sequence own = sequence_of(cu_seqlens, b, j);
  const long long head = head_token(b, h, 0);
  adt += head, dt += head, trap += head, gamma += head, f += head, decay += head;
  if constexpr (kExact) rest += head;

  for (int t = own.first + threadIdx.x; t < own.end; t += Threads) {
    const float step = dt[t], mix = 1.0f / (1.0f + expf(-trap[t]));
    gamma[t] = mix * step;
    f[t] = mix * step + (t + 1 < own.end ? delta_of(dt[t + 1], trap[t + 1]) : 0.0f);
  }
  for (int t0 = own.first + warp * kTokens; t0 < own.end; t0 += Threads / 32 * kTokens) {
    const int c = 2 * lane, t = t0 + c;
    const auto step = [&](int i) -> Sum {
      if (c + i >= kTokens || t + i >= own.end) return 0;
      return SumOf<kExact>::log2_decay(adt[t + i]);
    };
    const Sum first = step(0);
    Sum sum = first + step(1);
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const Sum other = __shfl_up_sync(0xffffffff, sum, offset);
      if (lane >= offset) sum += other;
    }
    Sum before = __shfl_up_sync(0xffffffff, sum, 1);
    if (lane == 0) before = 0;
    const Sum both[2] = {before + first, sum};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (c + i >= kTokens || t + i >= own.end) continue;
      decay[t + i] = both[i];
      if constexpr (kExact) rest[t + i] = both[i] - decay[t + i];
    }
  }

  // Phases, in rounds: a warp has kRun tokens of one.
  constexpr int kRun = 16, kRound = Threads / 32 * kRun;
  for (int pair = lane; pair < (kPairs + 31) / 32 * 32; pair += 32) {
    const bool there = pair < kPairs;
    const long long at = token_head(b, 0, h) * kPairs + min(pair, kPairs - 1);
    unsigned before = 0;
    if (kHasState && there) before = phase_of_radians(start[state_row(b, j, h) * kPairs + pair]);
    for (int round = own.first; round < own.end; round += kRound) {
      const int begin = round + warp * kRun;
      float angle[kRun], step[kRun];
#pragma unroll
      for (int i = 0; i < kRun; ++i) {
        const int t = min(begin + i, own.end - 1);
        angle[i] = angles[at + (long long)t * kHeads * kPairs];
        step[i] = dt[t];
      }
      if (const int later = begin + kRound + lane; lane < kRun && later < own.end) {
        want(angles + at - lane + (long long)later * kHeads * kPairs);
      }
      unsigned sum[kRun], total = 0;
#pragma unroll
      for (int i = 0; i < kRun; ++i) {
        total += begin + i < own.end ? phase_of_turns(turns_of_step(angle[i], step[i])) : 0;
        sum[i] = total;
      }
      ends[warp][lane] = total;
      __syncthreads();
      unsigned ahead = before;
      for (int w = 0; w < Threads / 32; ++w) {
        const unsigned other = ends[w][lane];
        if (w < warp) ahead += other;
        before += other;
      }
#pragma unroll
      for (int i = 0; i < kRun; ++i) {
        if (there && begin + i < own.end) phases[at + (long long)(begin + i) * kHeads * kPairs] = ahead + sum[i];
      }
      __syncthreads();
    }
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// States before each chunk, walking forward (direction 0), and adjoints of the states after it, walking backward (1).
// A block has a part of the columns of the state of one head, in registers, and walks along one sequence; what it
// stores is [state][head_dim] in the order of tiles.

constexpr int kWalkN = WALK_COLUMNS;      // columns of a part
constexpr int kWalkThreads = 4 * kWalkN;  // a warp has 16 columns and half of head_dim
constexpr int kWalkP = kWideP;
constexpr int kWalkPitch = kWalkN + 8, kValuePitch = kWalkP + 8;
constexpr int kWalkNs = kWalkP / 16;               // 8-wide accumulators of a warp, 4 warps by 2
constexpr int kWalkRow = kExact ? 1 : 8;           // columns of the state from a thread's first to its second
constexpr int kStored = kWalkNs % 4 == 0 ? 8 : 4;  // neighbours that are stored at once
constexpr int kWalkShared =
    2 * kRows * (kWalkPitch + kValuePitch) * sizeof(Value) + kRanks * (2 * kWalkN + 3 * kWalkP) * 4;

namespace {

constexpr int kKeyUnits = kRows * kWalkN / 8 / kWalkThreads;
constexpr int kValueUnits = (kRows * kWalkP / 8 + kWalkThreads - 1) / kWalkThreads;

// Column p of a tile, placed so that the accumulators of a thread are of neighbouring columns. A warp's products of
// float32 have their columns side by side.
__device__ constexpr int place(int p) {
  const int base = p / (kWalkP / 2) * (kWalkP / 2), inner = p - base, lane = inner / (2 * kWalkNs),
            rest = inner % (2 * kWalkNs);
  return base + (kExact ? (2 * lane + rest % 2) * kWalkNs + rest / 2 : rest / 2 * 8 + 2 * lane + rest % 2);
}

// body(n, p, entry) for the entries of the state that a thread has.
template <class Body>
__device__ inline void each_entry(float (&state)[1][kWalkNs][4], int column0, int p0, Body body) {
#pragma unroll
  for (int i = 0; i < kWalkNs; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int n = column0 + e / 2 * kWalkRow, p = p0 + 2 * i + e % 2;
      if (n < kN && p < kP) body(n, p, state[0][i][e]);
    }
  }
}

struct Raw {  // what a thread will stage of a chunk
  Eight<Value> key[kKeyUnits], value[kValueUnits], gate[kValueUnits];
  uint4 phase[kKeyUnits];
  float scale[kValueUnits];
  float total;
};

}  // namespace

template <int Threads>
__global__ void __launch_bounds__(Threads, 512 / Threads)
    mamba3_walk(const Value* q, const Value* k, const Value* v, const Value* z, const Value* dy, const Value* normed,
                const float* q_bias, const float* k_bias, const float* mimo_v, const float* mimo_o, const float* mimo_z,
                const float* f, const float* decay, const float* rest, const unsigned* phases, const float* dt,
                const float* trap, const float* state_ssm, const float* state_k, const float* state_v,
                const float* d_final, const int* cu_seqlens, Value* states, Value* adjoints, float* d_state_ssm,
                int first_direction) {
  extern __shared__ __align__(16) char memory[];
  Value* keys = reinterpret_cast<Value*>(memory);                            // 2 x [row][column]
  Value* values = keys + 2 * kRows * kWalkPitch;                             // 2 x [row][place(p)]
  float* bias = reinterpret_cast<float*>(values + 2 * kRows * kValuePitch);  // [rank][column of the tile]
  float* weights = bias + kRanks * kWalkN;                                   // [rank][p]: mimo_v, or mimo_o
  float* gates = weights + kRanks * kWalkP;                                  // [rank][p]: mimo_z

  const bool backward = blockIdx.z / kSequences + first_direction == 1;
  const int part = blockIdx.x, h = blockIdx.y % kHeads, b = blockIdx.y / kHeads, g = h / kGroupHeads;
  const Sequence own = sequence_of(cu_seqlens, b, blockIdx.z % kSequences);
  const int chunks = (own.tokens() + kTokens - 1) / kTokens, first_chunk = own.piece<kTokens>();
  const int thread = threadIdx.x, lane = thread % 32, warp = warp_of_block();
  const long long head = head_token(b, h, 0), param = ((long long)param_row(b) * kHeads + h) * kRank;
  f += head, decay += head;
  if constexpr (kExact) rest += head;

  for (int i = thread; i < kRanks * kWalkN; i += Threads) {
    const int r = i / kWalkN, n = part * kWalkN + i % kWalkN;
    bias[i] = r < kRank && n < kN ? (backward ? q_bias : k_bias)[(param + r) * kN + column(n)] : 0.0f;
  }
  for (int i = thread; i < kRanks * kWalkP; i += Threads) {
    const int r = i / kWalkP, p = i % kWalkP;
    const bool there = r < kRank && p < kP;
    const float* folded = backward ? mimo_o : mimo_v;
    const bool has = backward ? !kSiso && !kKeepsRank : !kSiso;
    weights[i] = !there ? 0.0f : has ? folded[(param + r) * kP + p] : 1.0f;
    gates[i] = !there ? 0.0f : kHasGate && !kSiso ? mimo_z[(param + r) * kP + p] : 1.0f;
  }

  // A warp has 16 columns of the state and half of head_dim; a thread 2 columns and 2 * kWalkNs neighbours of head_dim.
  float state[1][kWalkNs][4] = {};
  const int column0 = part * kWalkN + warp / 2 * 16 + lane / 4 * (kExact ? 2 : 1);
  const int p0 = warp % 2 * (kWalkP / 2) + lane % 4 * 2 * kWalkNs;
  const long long given = state_row(b, own.number, h), whole = given * kP * kN;
  if (kHasState && !backward && chunks > 0) {
    const float pending = delta_of(dt[head + own.first], trap[head + own.first]);
    each_entry(state, column0, p0, [&](int n, int p, float& x) {
      x = state_ssm[whole + (long long)p * kN + column(n)];
      for (int r = 0; r < kRank; ++r) {
        const float key = state_k[(given * kRank + r) * kN + column(n)], value = state_v[given * kP + p];
        x += pending * key * value * (kSiso ? 1.0f : mimo_v[(param + r) * kP + p]);
      }
    });
  }
  if (kHasFinal && backward) {
    each_entry(state, column0, p0, [&](int n, int p, float& x) { x = d_final[whole + (long long)p * kN + column(n)]; });
  }

  // The decay, in base 2, from one token to a later one of its chunk.
  const auto between = [&](int from, int to) {
    float sum = decay[to] - decay[from];
    if constexpr (kExact) sum += rest[to] - rest[from];
    return sum;
  };
  const auto load = [&](int chunk) {
    Raw raw;
    const int t0 = own.first + chunk * kTokens, last = min(kTokens, own.end - t0) - 1;
    raw.total = decay[t0 + last];
#pragma unroll
    for (int i = 0; i < kKeyUnits; ++i) {
      const int unit = thread + i * Threads, row = unit / (kWalkN / 8), c = row / kRanks, r = row % kRanks;
      const int pair = part * (kWalkN / 2) + unit % (kWalkN / 8) * 4;
      raw.key[i] = Eight<Value>{};
      raw.phase[i] = make_uint4(0, 0, 0, 0);
      if (c <= last && r < kRank && 2 * pair < kN) {
        raw.key[i] = load_columns((backward ? q : k) + q_at(b, t0 + c, r, g), pair);
        raw.phase[i] = load_phases(phases + token_head(b, t0 + c, h) * kPairs, pair);
      }
    }
#pragma unroll
    for (int i = 0; i < kValueUnits; ++i) {
      const int unit = thread + i * Threads, row = unit / (kWalkP / 8), c = row / kRanks, r = row % kRanks;
      const int p = unit % (kWalkP / 8) * 8, t = t0 + c;
      raw.value[i] = raw.gate[i] = Eight<Value>{};
      raw.scale[i] = 0.0f;
      if (c <= last && r < kRank && p < kP) {
        if (!backward) {
          raw.value[i] = eight_at(v + token_head(b, t, h) * kP + p);
          raw.scale[i] = f[t] * exp2_fast(between(t, t0 + last));
        } else {
          raw.scale[i] = exp2_fast(decay[t]);
          if constexpr (kHasNorm) {
            raw.value[i] = eight_at(normed + ((head + t) * kRank + r) * kP + p);
          } else {
            raw.value[i] = eight_at(dy + dy_at(b, t, r, h) + p);
            if constexpr (kHasGate) raw.gate[i] = eight_at(z + token_head(b, t, h) * kP + p);
          }
        }
      }
    }
    return raw;
  };

  const auto stage = [&](const Raw& raw, int chunk, int buffer) {
    const int last = min(kTokens, own.tokens() - chunk * kTokens) - 1;
#pragma unroll
    for (int i = 0; i < kKeyUnits; ++i) {
      const int unit = thread + i * Threads, row = unit / (kWalkN / 8), c = row / kRanks, r = row % kRanks;
      const int inner = unit % (kWalkN / 8) * 8, pair = (part * kWalkN + inner) / 2;
      float x[8], offset[8], cosine[4], sine[4];
      unpack8(raw.key[i], x);
      load8(bias + r * kWalkN + inner, offset);
#pragma unroll
      for (int j = 0; j < 8; ++j) x[j] = c <= last && r < kRank ? x[j] + offset[j] : 0.0f;
      const unsigned phase[4] = {raw.phase[i].x, raw.phase[i].y, raw.phase[i].z, raw.phase[i].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) sincos_of(phase[j], sine[j], cosine[j]);
      turn_columns(x, cosine, sine, pair);
      store_tile<8>(keys + (buffer * kRows + row) * kWalkPitch + inner, x);
    }
#pragma unroll
    for (int i = 0; i < kValueUnits; ++i) {
      const int unit = thread + i * Threads, row = unit / (kWalkP / 8), r = row % kRanks;
      const int p = unit % (kWalkP / 8) * 8;
      if (kRows * kWalkP / 8 % Threads != 0 && row >= kRows) continue;
      float x[8], weight[8];
      unpack8(raw.value[i], x);
      if (!(kHasNorm && backward)) {
        load8(weights + r * kWalkP + p, weight);
#pragma unroll
        for (int j = 0; j < 8; ++j) x[j] *= weight[j];
        if (kHasGate && backward) {
          float gate[8];
          unpack8(raw.gate[i], gate);
          load8(gates + r * kWalkP + p, weight);
#pragma unroll
          for (int j = 0; j < 8; ++j) x[j] *= gate[j] * weight[j] * sigmoid(gate[j] * weight[j]);
        }
      }
      Value* to = values + (buffer * kRows + row) * kValuePitch;
#pragma unroll
      for (int j = 0; j < 8; j += kExact ? 1 : 2) {
        if constexpr (kExact) {
          store_one(to + place(p + j), for_products<Value, kPasses>(raw.scale[i] * x[j]));
        } else {
          store_tile(to + place(p + j), raw.scale[i] * x[j], raw.scale[i] * x[j + 1]);
        }
      }
    }
  };

  Value* stored = backward ? adjoints : states;
  __syncthreads();
  Raw raw;
  if (chunks > 0) raw = load(backward ? chunks - 1 : 0);
  for (int step = 0; step < chunks; ++step) {
    const int chunk = backward ? chunks - 1 - step : step, buffer = step % 2;
    const float total = raw.total;
    stage(raw, chunk, buffer);
    __syncthreads();
    if (step + 1 < chunks) raw = load(backward ? chunk - 1 : chunk + 1);

    Value* to = stored + state_at(b, h, first_chunk + chunk);
    const float keep = exp2_fast(total);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int n = column0 + half * kWalkRow;
      float run[2 * kWalkNs];
#pragma unroll
      for (int i = 0; i < 2 * kWalkNs; ++i) {
        float& x = state[0][i / 2][2 * half + i % 2];
        run[i] = x;
        x *= keep;
      }
#pragma unroll
      for (int i = 0; i < 2 * kWalkNs; i += kStored) {
        if (n < kN && p0 + i < kP) store_tile<kStored>(to + n * kP + p0 + i, run, i);
      }
    }
    add_product_of_columns<kPasses, kWalkNs, kRows / 16>(
        state, keys + buffer * kRows * kWalkPitch + warp / 2 * 16, kWalkPitch,
        values + buffer * kRows * kValuePitch + warp % 2 * (kWalkP / 2), kValuePitch);
  }
  if (kHasState && backward) {
    each_entry(state, column0, p0,
               [&](int n, int p, float& x) { d_state_ssm[whole + (long long)p * kN + column(n)] = x; });
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// All that one chunk gives: heads of a group, or of a part of one, in order. The first half of the warps has the side
// of q and of the output, the second half that of k and v.

constexpr int kTileN = kRows * kPitchN, kTileP = kRows * kPitchP, kTileS = kWideN * kPitchP, kTileM = kRows * kPitchM;
constexpr int kBankBytes = 2 * sizeof(Value) * (kTileN + kTileP + kTileS + kTileM);
// What the phases get lies where M and dM were, if it fits there and memory is scarce.
constexpr bool kPhasesInM = kExact && kTokens * kPairs <= kTileM;
constexpr int kTableFloats = (kPhasesInM ? 2 : 4) * kTokens * kPairs;
constexpr int kDown = kRows / 32, kBlocks = kRows / 16;  // of 32 and of 16 rows
constexpr int kSlotFloats = 14 * kRows + 5 * 4 * kRows + 16 + 8 + (kSiso ? 0 : 3 * kDown * kRanks * kWideP);
constexpr int kChunkShared = kBankBytes + 4 * (kTableFloats + kSlotFloats);
static_assert(kChunkShared == CHUNK_SHARED && kWalkShared == WALK_SHARED);

namespace {

// Of a slot, over the rows of 32.
__device__ inline float sum_of_rows(const float* slot) { return kDown == 1 ? *slot : slot[0] + slot[kRanks * kWideP]; }

}  // namespace

template <int Threads>
__global__ void __launch_bounds__(Threads, 1)
    mamba3_chunk(const Value* q, const Value* k, const Value* v, const Value* z, const Value* dy, const Value* normed,
                 const float* q_bias, const float* k_bias, const float* mimo_v, const float* mimo_o,
                 const float* mimo_z, const float* D, const float* gamma, const float* f, const float* decay,
                 const float* rest, const Value* states, const Value* adjoints, const float* d_final_angle,
                 const float* d_final_k, const float* d_final_v, const int* cu_seqlens, float* angles, float* d_adt,
                 float* d_f, float* d_gamma, Value* d_v, Value* d_z, float* q_sums, float* k_sums, float* records) {
  extern __shared__ __align__(16) char memory[];
  Value* Q = reinterpret_cast<Value*>(memory);  // [row][column]
  Value* K = Q + kTileN;
  Value* V = K + kTileN;  // [row][p]
  Value* dO = V + kTileP;
  Value* S = dO + kTileP;  // [column][p]
  Value* T = S + kTileS;
  Value* M = T + kTileS;  // [row][row]
  Value* dM = M + kTileM;
  float2* trig = reinterpret_cast<float2*>(dM + kTileM);  // [token][pair]: cosine, sine
  float* free = reinterpret_cast<float*>(trig + kTokens * kPairs);
  float* d_phase = kPhasesInM ? reinterpret_cast<float*>(M) : free;  // [q, k][token][pair]
  float* rows = free + (kPhasesInM ? 0 : 2 * kTokens * kPairs);      // 2 x 7 x [row]
  float* along = rows + 14 * kRows;                                  // [4][row]: sums of strict dM QK along a row
  float* same = along + 4 * kRows;                                   // of dM QK / gamma in a token
  float* down = same + 4 * kRows;                                    // [4][row]: sums of strict dM QK / f down a column
  float* read = down + 4 * kRows;                                    // [4][row]: dO . Q s
  float* written = read + 4 * kRows;                                 // [4][row]: V . K T
  float* carried = written + 4 * kRows;                              // [16]: <T, s>
  float* skipped = carried + 16;                                     // [8]: dO . V
  float* sum_v = skipped + 8;                                        // [kDown][rank][p]
  float *sum_o = sum_v + kDown * kRanks * kWideP, *sum_z = sum_o + kDown * kRanks * kWideP;

  const int thread = threadIdx.x, lane = thread % 32, warp = warp_of_block();
  int index = blockIdx.x;
  const int part = index % kParts;
  const int g = index / kParts % kGroups;
  const int chunk = index / (kParts * kGroups) % kChunks, b = index / (kParts * kGroups * kChunks);
  const Piece piece = piece_of<kTokens>(cu_seqlens, b, chunk);
  const int t0 = piece.t0, last = piece.last;  // in the chunk
  const int lane_row = lane / 4, lane_column = lane % 4 * 2, rank = lane_row % kRanks;
  const bool has_rank = rank < kRank;

  const int head0 = g * kGroupHeads + part * kPartHeads;
  const int head1 = min(head0 + kPartHeads, (g + 1) * kGroupHeads);
  if (kPacked && last < 0) {  // no sequence needs this chunk
    for (int i = thread; i < (head1 - head0) * kRecord; i += Threads) records[record_at(b, chunk, head0) + i] = 0.0f;
    return;
  }
  for (int i = thread; i < kChunkShared / 4; i += Threads) reinterpret_cast<float*>(memory)[i] = 0.0f;
  __syncthreads();

  constexpr int kSide = Threads / 64, kAcross = kSide / kDown;  // warps of a side, and of 32 rows of [row][p]
  constexpr int kOwnN = kWideN / (8 * kSide), kOwnP = kWideP / (8 * kAcross);  // accumulators in a row of blocks
  constexpr int kTurned = (2 * kPairs - 1) / (8 * kSide) + 1;                  // of kOwnN, those that can rotate
  // Of a thread's rows, and of what phases get in one: ranks share them.
  constexpr int kHalves = kRows / 8, kTurns = kHalves < kRanks ? padded(kTurned, kRanks / kHalves) : kTurned;
  const bool output_side = warp < kSide;
  // A warp has all rows, and columns that lie apart: often the first half of all columns rotates.
  constexpr int kApart = 8 * kSide;
  const int n0 = warp % kSide * 8, column0 = n0 + lane_column;
  // Or 32 rows and a part of head_dim.
  const int across = warp % kAcross, m0 = warp / kAcross % kDown * 32, p0 = across * (kWideP / kAcross);
  float group_sum[kBlocks][kOwnN][4] = {};  // dQ or dK, turned back, over the heads

  // bfloat16 is loaded before there is room for it; registers hold no more.
  constexpr bool kLoadsAhead = !kExact;
  const unsigned* phases = reinterpret_cast<const unsigned*>(angles);
  const auto ahead = [&](int h) {
    Ahead<Threads> next;
    if constexpr (kLoadsAhead) {
      load_keys<Threads>(next, q, k, phases, b, t0, last, h);
      load_values<Threads>(next, v, z, dy, normed, b, t0, last, h);
    }
    const long long head = head_token(b, h, t0);
    const int c = thread % kRows / kRanks;
    next.total = decay[head + last];
    next.decay = decay[head + min(c, last)];
    next.left = next.total - next.decay;
    if constexpr (kExact) {
      next.rest = rest[head + min(c, last)];
      next.left += rest[head + last] - next.rest;
    }
    next.f = c <= last ? f[head + c] : 0.0f;
    next.gamma = c <= last ? gamma[head + c] : 0.0f;
    return next;
  };
  const auto ahead_states = [&](int h) {
    stage_state<Threads>(S, states + state_at(b, h, chunk));
    stage_state<Threads>(T, adjoints + state_at(b, h, chunk));
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  ahead_states(head0);
  Ahead<Threads> now = ahead(head0);
#pragma unroll 1
  for (int h = head0; h < head1; ++h) {
    const long long head = head_token(b, h, t0), row0 = (long long)param_row(b) * kHeads + h;
    const long long record = record_at(b, chunk, h), given = state_row(b, piece.of.number, h);
    float* row_a = rows + h % 2 * 7 * kRows;  // while one warp sums up a head, the others begin the next
    float *row_f = row_a + kRows, *row_gamma = row_f + kRows, *row_in = row_gamma + kRows;
    float *row_out = row_in + kRows, *row_left = row_out + kRows;  // exp(a), f exp(a_last - a), exp(a_last - a)
    float* row_rest = row_left + kRows;
    const float a_last = now.total;
    if (thread < kRows) {
      row_a[thread] = now.decay;
      row_f[thread] = now.f;
      row_gamma[thread] = now.gamma;
      row_in[thread] = exp2_fast(now.decay);
      row_left[thread] = exp2_fast(now.left);
      row_out[thread] = now.f * exp2_fast(now.left);
      if constexpr (kExact) row_rest[thread] = now.rest;
    }
    if constexpr (!kLoadsAhead) load_keys<Threads>(now, q, k, phases, b, t0, last, h);
    stage_keys<Threads>(now, Q, K, trig, last, q_bias + row0 * kRank * kN, k_bias + row0 * kRank * kN);
    if constexpr (!kLoadsAhead) load_values<Threads>(now, v, z, dy, normed, b, t0, last, h);
    stage_values<Threads>(now, V, dO, mimo_v + row0 * kRank * kP, mimo_o + row0 * kRank * kP,
                          mimo_z + row0 * kRank * kP);
    __syncthreads();

    if (!kLoadsAhead && h + 1 < head1) want_head(v, z, dy, normed, phases, b, t0, last, h + 1);
    // Rows against rows: blocks of 16 x 16 of the lower triangle.
#pragma unroll 1
    for (int block = warp; block < kBlocks * kBlocks; block += 2 * kSide) {
      const int i0 = block / kBlocks * 16, j0 = block % kBlocks * 16;
      if (j0 > i0) continue;
      float qk[1][2][4] = {}, ov[1][2][4] = {};
      add_product<kPasses, 1, 2, kWideN / 16, false, true>(qk, Q + i0 * kPitchN, kPitchN, K + j0 * kPitchN, kPitchN);
      add_product<kPasses, 1, 2, kWideP / 16, false, true>(ov, dO + i0 * kPitchP, kPitchP, V + j0 * kPitchP, kPitchP);
      float right[2] = {}, token[2] = {};
      const bool earlier = j0 < i0;  // all of them
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        float column_sum[2] = {};
        const int j = j0 + n * 8 + lane_column;
        const float2 a_j = load_pair(row_a + j), f_j = load_pair(row_f + j);
        const float2 rest_j = kExact ? load_pair(row_rest + j) : make_float2(0.0f, 0.0f);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int i = i0 + half * 8 + lane_row;
          const float a_i = row_a[i], rest_i = kExact ? row_rest[i] : 0.0f;
          float m[2], dm[2];
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const float x = qk[0][n][2 * half + e], y = ov[0][n][2 * half + e];
            const int before = (i0 + lane_row) / kRanks + half * 8 / kRanks - tokens_of_columns(j0, n * 8, e);
            m[e] = dm[e] = 0.0f;
            if (earlier || before > 0) {
              float sum = a_i - (e ? a_j.y : a_j.x);
              if constexpr (kExact) sum += rest_i - (e ? rest_j.y : rest_j.x);
              const float e_ij = exp2_fast(sum), weight = e ? f_j.y : f_j.x;
              const float product = x * y * e_ij, w = e_ij * weight;
              right[half] += product * weight;
              column_sum[e] += product;
              m[e] = x * w;
              dm[e] = y * w;
            } else if (before == 0) {
              const float w = row_gamma[i];
              token[half] += x * y;
              m[e] = x * w;
              dm[e] = y * w;
            }
          }
          store_tile(M + i * kPitchM + j, m[0], m[1]);
          store_tile(dM + i * kPitchM + j, dm[0], dm[1]);
        }
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float sum = sum_over_rows(column_sum[e]);
          if (lane_row == 0) down[block / kBlocks * kRows + j + e] = sum;
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float sum = quad_sum(right[half]), sum_same = quad_sum(token[half]);
        if (lane % 4 == 0) {
          along[block % kBlocks * kRows + i0 + half * 8 + lane_row] = sum;
          same[block % kBlocks * kRows + i0 + half * 8 + lane_row] = sum_same;
        }
      }
    }
    asm volatile("cp.async.wait_group 0;" ::: "memory");
    __syncthreads();

    {  // <T, s>
      float sum = 0.0f;
      for (int unit = thread; unit < kWideN * (kWideP / 8); unit += Threads) {
        const int at = unit / (kWideP / 8) * kPitchP + unit % (kWideP / 8) * 8;
        float x[8], y[8];
        unpack8(eight_at(S + at), x);
        unpack8(eight_at(T + at), y);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum += x[i] * y[i];
      }
      sum = warp_sum(sum);
      if (lane == 0) carried[warp] = sum;
    }

    {  // The output and what depends on it, or dV: 32 rows and a part of head_dim for a warp.
      float d[2][kOwnP][4] = {};
      add_product<kPasses, 2, kOwnP, kWideN / 16, false, false>(d, (output_side ? Q : K) + m0 * kPitchN, kPitchN,
                                                                (output_side ? S : T) + p0, kPitchP);
      const Value* other = (output_side ? dO : V) + p0 + lane_column;
      const float* scale = output_side ? row_in : row_out;
#pragma unroll
      for (int m = 0; m < 2; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = m0 + m * 16 + half * 8 + lane_row;
          float sum = 0.0f;
#pragma unroll
          for (int n = 0; n < kOwnP; ++n) {
            const float2 with = load_pair(other + row * kPitchP + n * 8);
            sum += d[m][n][2 * half] * with.x + d[m][n][2 * half + 1] * with.y;
            d[m][n][2 * half] *= scale[row];
            d[m][n][2 * half + 1] *= scale[row];
          }
          sum = quad_sum(sum);
          if (lane % 4 == 0) (output_side ? read : written)[across * kRows + row] = sum;
        }
      }
      const float skip = kHasSkip ? D[row0] : 0.0f;
      const int first_token = m0 / kRanks + lane_row / kRanks;  // of this thread's rows
      if (output_side) {
        if constexpr (!kHasNorm && (kHasGate || (!kSiso && !kKeepsRank))) {
          add_product<kPasses, 2, kOwnP, kBlocks, false, false, Zeros::kAbove>(d, M + m0 * kPitchM, kPitchM, V + p0,
                                                                               kPitchP, m0 / 16);
          const long long first = token_head(b, t0 + first_token, h) * kP + p0 + lane_column;
          const Value* up_from = dy + dy_at(b, t0 + first_token, rank, h) + p0 + lane_column;
          const long long param = (row0 * kRank + rank) * kP + p0 + lane_column;
#pragma unroll
          for (int n = 0; n < kOwnP; ++n) {
            const int p = p0 + n * 8 + lane_column;
            const bool inside = has_rank && p < kP;
            float2 fold = make_float2(1.0f, 1.0f), spread = fold, d_fold = make_float2(0.0f, 0.0f), d_spread = d_fold;
            float d_gate[8];  // [row of the thread][two columns]
            if (!kSiso && inside) {
              if constexpr (!kKeepsRank) fold = load_pair(mimo_o + param + n * 8);
              if constexpr (kHasGate) spread = load_pair(mimo_z + param + n * 8);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const int m = i / 2, half = i % 2, later = i * 8 / kRanks;
              const bool there = inside && first_token + later <= last;
              float2 up = make_float2(0.0f, 0.0f), raw = up;
              float2 out = load_pair(V + (m0 + lane_row + i * 8) * kPitchP + p);
              out.x = d[m][n][2 * half] + skip * out.x;
              out.y = d[m][n][2 * half + 1] + skip * out.y;
              if (there) {
                up = load_pair(up_from + later * kRankedToken + n * 8);
                if constexpr (kHasGate) raw = load_pair(z + first + later * kHeads * kP + n * 8);
              }
              if constexpr (kHasGate) {
                const float2 gate = make_float2(raw.x * spread.x, raw.y * spread.y);
                const float2 on = make_float2(sigmoid(gate.x), sigmoid(gate.y));
                const float2 seen = make_float2(up.x * out.x * on.x, up.y * out.y * on.y);
                d_fold.x += seen.x * gate.x;
                d_fold.y += seen.y * gate.y;
                const float dx = seen.x * fold.x * (1.0f + gate.x * (1.0f - on.x));
                const float dy_ = seen.y * fold.y * (1.0f + gate.y * (1.0f - on.y));
                d_spread.x += dx * raw.x;
                d_spread.y += dy_ * raw.y;
                d_gate[2 * i] = dx * spread.x;
                d_gate[2 * i + 1] = dy_ * spread.y;
              } else {
                d_fold.x += up.x * out.x;
                d_fold.y += up.y * out.y;
              }
            }
            if constexpr (kHasGate) {
              share_over_ranks<8>(d_gate);
              store_shared(d_z + first + n * 8, d_gate, rank, last - first_token, p < kP);
            }
            if constexpr (!kSiso) {
              d_fold = make_float2(sum_over_tokens(d_fold.x), sum_over_tokens(d_fold.y));
              d_spread = make_float2(sum_over_tokens(d_spread.x), sum_over_tokens(d_spread.y));
              if (lane_row < kRanks) {
                const int slot = (m0 / 32 * kRanks + rank) * kWideP + p;
                *reinterpret_cast<float2*>(sum_o + slot) = d_fold;
                *reinterpret_cast<float2*>(sum_z + slot) = d_spread;
              }
            }
          }
        }
      } else {
        add_product<kPasses, 2, kOwnP, kBlocks, true, false, Zeros::kBelow>(d, M + m0, kPitchM, dO + p0, kPitchP,
                                                                            m0 / 16);
        float d_skip = 0.0f;
        const long long first = token_head(b, t0 + first_token, h) * kP + p0 + lane_column;
        const long long param = (row0 * kRank + rank) * kP + p0 + lane_column;
#pragma unroll
        for (int n = 0; n < kOwnP; ++n) {
          const int p = p0 + n * 8 + lane_column;
          const bool inside = has_rank && p < kP;
          float2 spread = make_float2(inside, inside), d_spread = make_float2(0.0f, 0.0f);
          float d_value[8];  // [row of the thread][two columns]
          if (!kSiso && inside) spread = load_pair(mimo_v + param + n * 8);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int m = i / 2, half = i % 2, later = i * 8 / kRanks, row = m0 + lane_row + i * 8;
            const float2 up = load_pair(dO + row * kPitchP + p), wide = load_pair(V + row * kPitchP + p);
            const float dx = d[m][n][2 * half] + skip * up.x, dy_ = d[m][n][2 * half + 1] + skip * up.y;
            d_skip += up.x * wide.x + up.y * wide.y;
            if (!kSiso && inside && first_token + later <= last) {
              const float2 raw = load_pair(v + first + later * kHeads * kP + n * 8);
              d_spread.x += dx * raw.x;
              d_spread.y += dy_ * raw.y;
            }
            d_value[2 * i] = dx * spread.x;
            d_value[2 * i + 1] = dy_ * spread.y;
          }
          if (kHasFinal && rank == 0 && p < kP) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              if (t0 + first_token + i * 8 / kRanks != piece.of.end - 1) continue;
              d_value[2 * i] += d_final_v[given * kP + p];
              d_value[2 * i + 1] += d_final_v[given * kP + p + 1];
            }
          }
          share_over_ranks<8>(d_value);
          store_shared(d_v + first + n * 8, d_value, rank, last - first_token, p < kP);
          if constexpr (!kSiso) {
            d_spread = make_float2(sum_over_tokens(d_spread.x), sum_over_tokens(d_spread.y));
            if (lane_row < kRanks) {
              *reinterpret_cast<float2*>(sum_v + (m0 / 32 * kRanks + rank) * kWideP + p) = d_spread;
            }
          }
        }
        if constexpr (kHasSkip) {
          d_skip = warp_sum(d_skip);
          if (lane == 0) skipped[warp - kSide] = d_skip;
        }
      }
    }

    {  // dQ or dK: all rows and an eighth of the columns for a warp.
      float d[kBlocks][kOwnN][4] = {};
      add_product<kPasses, kBlocks, kOwnN, kWideP / 16, false, true, Zeros::kNone, kApart>(
          d, output_side ? dO : V, kPitchP, (output_side ? S : T) + n0 * kPitchP, kPitchP);
      const float* scale = output_side ? row_in : row_out;
#pragma unroll
      for (int m = 0; m < kBlocks; ++m) {
        const float low = scale[m * 16 + lane_row], high = scale[m * 16 + 8 + lane_row];
#pragma unroll
        for (int n = 0; n < kOwnN; ++n) d[m][n][0] *= low, d[m][n][1] *= low, d[m][n][2] *= high, d[m][n][3] *= high;
      }
      if (output_side) {
        add_product<kPasses, kBlocks, kOwnN, kBlocks, false, false, Zeros::kAbove, kApart>(d, dM, kPitchM, K + n0,
                                                                                           kPitchN);
      } else {
        add_product<kPasses, kBlocks, kOwnN, kBlocks, true, false, Zeros::kBelow, kApart>(d, dM, kPitchM, Q + n0,
                                                                                          kPitchN);
      }
      if constexpr (kPhasesInM) __syncthreads();
      const Value* turned_rows = output_side ? Q : K;
      float* d_phase_here = d_phase + (output_side ? 0 : kTokens * kPairs);
      float turn[kHalves * kTurns];  // [row of the thread][pair]: what the pair's phase gets
#pragma unroll
      for (int n = 0; n < kOwnN; ++n) {
        const int at = column0 + n * kApart, pair = at / 2;
        const bool rotated = pair < kPairs;
        float bias_sum[2] = {};
#pragma unroll
        for (int i = 0; i < kHalves; ++i) {
          const int m = i / 2, half = i % 2, c = lane_row / kRanks + i * 8 / kRanks;
          float x = d[m][n][2 * half], y = d[m][n][2 * half + 1];
          if (kHasFinal && !output_side && c == last && t0 + c == piece.of.end - 1 && has_rank && at < kN) {
            const long long key = (given * kRank + rank) * kN;
            x += d_final_k[key + column(at)];
            y += d_final_k[key + column(at + 1)];
          }
          if (n < kTurns) turn[i * kTurns + n] = 0.0f;
          if (n < kTurned && rotated && c < kTokens) {
            const float2 was = load_pair(turned_rows + (lane_row + i * 8) * kPitchN + at);
            const float2 cs = trig[c * kPairs + pair];
            turn[i * kTurns + n] = y * was.x - x * was.y;
            const float back = x * cs.x + y * cs.y;
            y = y * cs.x - x * cs.y;
            x = back;
          }
          bias_sum[0] += x, bias_sum[1] += y;
          group_sum[m][n][2 * half] += x;
          group_sum[m][n][2 * half + 1] += y;
        }
        bias_sum[0] = sum_over_tokens(bias_sum[0]), bias_sum[1] = sum_over_tokens(bias_sum[1]);
        if (lane_row < kRank && at < kN) {
          float* to = records + record + (output_side ? kQBiasAt : kKBiasAt) + rank * kN + at;
          *reinterpret_cast<float2*>(to) = make_float2(bias_sum[0], bias_sum[1]);
        }
      }
      constexpr int kOwnTurns = kHalves * kTurns / kRanks;
      share_over_ranks<kHalves * kTurns>(turn);
#pragma unroll
      for (int i = 0; i < kOwnTurns; ++i) {
        const int row = (rank * kOwnTurns + i) / kTurns, n = (rank * kOwnTurns + i) % kTurns;
        const int c = lane_row / kRanks + row * 8 / kRanks, pair = (column0 + n * kApart) / 2;
        if (n < kTurned && pair < kPairs && c < kTokens) d_phase_here[c * kPairs + pair] = turn[i];
      }
    }
    if (h + 1 < head1) now = ahead(h + 1);
    __syncthreads();
    if (h + 1 < head1) ahead_states(h + 1);

    for (int i = thread; i < (last + 1) * kPairs; i += Threads) {
      const int c = i / kPairs, pair = i % kPairs;
      float sum = d_phase[i] + d_phase[kTokens * kPairs + i];
      if (kHasFinal && t0 + c == piece.of.end - 1) sum += d_final_angle[given * kPairs + pair];
      angles[token_head(b, t0 + c, h) * kPairs + pair] = sum;
    }
    if constexpr (!kSiso) {
      for (int i = thread; i < kRank * kP; i += Threads) {
        const int slot = i / kP * kWideP + i % kP;
        records[record + kMimoVAt + i] = sum_of_rows(sum_v + slot);
        if constexpr (!kHasNorm) {
          records[record + kMimoOAt + i] = sum_of_rows(sum_o + slot);
          records[record + kMimoZAt + i] = sum_of_rows(sum_z + slot);
        }
      }
    }
    if (warp == 1 && kHasSkip) {
      const float sum = warp_sum(lane < 8 ? skipped[lane] : 0.0f);
      if (lane == 0) records[record + kSkipAt] = sum;
    }
    if (warp == 0) {                    // Decays and weights of tokens.
      constexpr int kOwn = kRows / 32;  // rows of a lane
      float e[kOwn], weight[kOwn], diagonal[kOwn], ends = 0.0f, suffix = 0.0f;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const int row = kOwn * lane + i;
        const auto four = [&](const float* slots) {
          return slots[row] + slots[kRows + row] + (slots[2 * kRows + row] + slots[3 * kRows + row]);
        };
        const float below = four(down), out = four(written);
        e[i] = four(along) - row_f[row] * below + row_in[row] * four(read) - row_out[row] * out;
        weight[i] = below + row_left[row] * out;
        diagonal[i] = four(same);
        ends += row_out[row] * out;
        suffix += e[i];
      }
      ends = warp_sum(ends) + exp2_fast(a_last) * warp_sum(lane < 16 ? carried[lane] : 0.0f);
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        const float other = __shfl_down_sync(0xffffffff, suffix, offset);
        if (lane + offset < 32) suffix += other;
      }
      const float after = __shfl_down_sync(0xffffffff, suffix, 1);
      if constexpr (kRanks < kOwn) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int c = 2 * lane + i;
          if (c > last) continue;
          d_adt[head + c] = (i == 0 ? suffix : e[1] + (lane == 31 ? 0.0f : after)) + ends;
          d_f[head + c] = weight[i];
          d_gamma[head + c] = diagonal[i];
        }
      } else {
        float sum_f = 0.0f, sum_gamma = 0.0f;
#pragma unroll
        for (int i = 0; i < kOwn; ++i) sum_f += weight[i], sum_gamma += diagonal[i];
#pragma unroll
        for (int offset = 1; offset < kRanks / kOwn; offset *= 2) {
          sum_f += __shfl_xor_sync(0xffffffff, sum_f, offset);
          sum_gamma += __shfl_xor_sync(0xffffffff, sum_gamma, offset);
        }
        const int c = kOwn * lane / kRanks;
        if (kOwn * lane % kRanks == 0 && c <= last) {
          d_adt[head + c] = suffix + ends;
          d_f[head + c] = sum_f;
          d_gamma[head + c] = sum_gamma;
        }
      }
    }
  }

  float* sums = output_side ? q_sums : k_sums;
#pragma unroll
  for (int m = 0; m < kBlocks; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int c = (m * 16 + half * 8 + lane_row) / kRanks;
      if (c > last || !has_rank) continue;
      float* to = sums + (long long)part * kBatch * kSeq * kRank * kGroups * kN + q_at(b, t0 + c, rank, g);
#pragma unroll
      for (int n = 0; n < kOwnN; ++n) {
        const int at = column0 + n * kApart;
        if (at < kN)
          *reinterpret_cast<float2*>(to + at) = make_float2(group_sum[m][n][2 * half], group_sum[m][n][2 * half + 1]);
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// ---------------------------------------------------------------------------------------------------------------------
// Where there is a norm: the output is made again and its adjoint ahead of the norm is kept, [batch, heads, seq, rank,
// p]. One block per chunk, head and row of the batch.

constexpr int kNormalizeShared = sizeof(Value) * (2 * kTileN + kTileP + kTileS + kTileM) + 8 * kTokens * kPairs +
                                 4 * (4 * kRows + 8 * kRows + kDown * (2 * kRanks + 1) * kWideP);
static_assert(kNormalizeShared == NORMALIZE_SHARED);

template <int Threads>
__global__ void __launch_bounds__(Threads)
    mamba3_normalize(const Value* q, const Value* k, const Value* v, const Value* z, const Value* dy,
                     const float* q_bias, const float* k_bias, const float* mimo_v, const float* mimo_o,
                     const float* mimo_z, const float* D, const float* norm_weight, const float* gamma, const float* f,
                     const float* decay, const float* rest, const unsigned* phases, const Value* states,
                     const int* cu_seqlens, Value* normed, Value* d_z, float* records) {
  static_assert(Threads == 4 * kRows);  // four warps for 32 rows
  extern __shared__ __align__(16) char memory[];
  Value* Q = reinterpret_cast<Value*>(memory);
  Value* K = Q + kTileN;
  Value* V = K + kTileN;
  Value* S = V + kTileP;
  Value* M = S + kTileS;
  float2* trig = reinterpret_cast<float2*>(M + kTileM);
  float* row_a = reinterpret_cast<float*>(trig + kTokens * kPairs);
  float *row_f = row_a + kRows, *row_gamma = row_f + kRows, *row_rest = row_gamma + kRows;
  float *squares = row_rest + kRows, *products = squares + 4 * kRows;             // [4][row]: of o, and of m hat
  float *sum_o = products + 4 * kRows, *sum_z = sum_o + kDown * kRanks * kWideP;  // [kDown][rank][p]
  float* sum_weight = sum_z + kDown * kRanks * kWideP;                            // [kDown][p]

  const int chunk = blockIdx.x, h = blockIdx.y % kHeads, b = blockIdx.y / kHeads;
  const int lane = threadIdx.x % 32, warp = warp_of_block(), lane_row = lane / 4, lane_column = lane % 4 * 2;
  const Piece piece = piece_of<kTokens>(cu_seqlens, b, chunk);
  const int t0 = piece.t0, last = piece.last, rank = lane_row % kRanks;
  if (kPacked && last < 0) return;
  const bool has_rank = rank < kRank;
  const long long head = head_token(b, h, t0), row0 = (long long)param_row(b) * kHeads + h;
  for (int i = threadIdx.x; i < kNormalizeShared / 4; i += Threads) reinterpret_cast<float*>(memory)[i] = 0.0f;
  __syncthreads();

  stage_state<Threads>(S, states + state_at(b, h, chunk));
  asm volatile("cp.async.commit_group;" ::: "memory");
  if (threadIdx.x < kRows) {
    const int c = threadIdx.x / kRanks;
    const bool there = c <= last;
    row_a[threadIdx.x] = decay[head + (there ? c : last)];
    row_f[threadIdx.x] = there ? f[head + c] : 0.0f;
    row_gamma[threadIdx.x] = there ? gamma[head + c] : 0.0f;
    if constexpr (kExact) row_rest[threadIdx.x] = rest[head + (there ? c : last)];
  }
  Ahead<Threads> keys;
  load_keys<Threads>(keys, q, k, phases, b, t0, last, h);
  stage_keys<Threads>(keys, Q, K, trig, last, q_bias + row0 * kRank * kN, k_bias + row0 * kRank * kN);
  for (int unit = threadIdx.x; unit < kRows * (kP / 8); unit += Threads) {
    const int row = unit / (kP / 8), p = unit % (kP / 8) * 8, c = row / kRanks, r = row % kRanks;
    float x[8] = {};
    if (c <= last && r < kRank) {
      unpack8(eight_at(v + token_head(b, t0 + c, h) * kP + p), x);
      if constexpr (!kSiso) {
        float weight[8];
        load8(mimo_v + (row0 * kRank + r) * kP + p, weight);
#pragma unroll
        for (int i = 0; i < 8; ++i) x[i] *= weight[i];
      }
    }
    store_tile<8>(V + row * kPitchP + p, x);
  }
  __syncthreads();

  for (int block = warp; block < kBlocks * kBlocks; block += Threads / 32) {
    const int i0 = block / kBlocks * 16, j0 = block % kBlocks * 16;
    if (j0 > i0) continue;
    float qk[1][2][4] = {};
    add_product<kPasses, 1, 2, kWideN / 16, false, true>(qk, Q + i0 * kPitchN, kPitchN, K + j0 * kPitchN, kPitchN);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = i0 + half * 8 + lane_row, j = j0 + n * 8 + lane_column;
        float m[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int ci = i / kRanks, cj = (j + e) / kRanks;
          float sum = row_a[i] - row_a[j + e];
          if constexpr (kExact) sum += row_rest[i] - row_rest[j + e];
          const float w = cj < ci ? exp2_fast(sum) * row_f[j + e] : row_gamma[i];
          m[e] = cj <= ci ? qk[0][n][2 * half + e] * w : 0.0f;
        }
        store_tile(M + i * kPitchM + j, m[0], m[1]);
      }
    }
  }
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  __syncthreads();

  constexpr int kOwnP = kWideP / 32;
  const int m0 = warp / 4 * 32, p0 = warp % 4 * (kWideP / 4);
  float d[2][kOwnP][4] = {};
  add_product<kPasses, 2, kOwnP, kWideN / 16, false, false>(d, Q + m0 * kPitchN, kPitchN, S + p0, kPitchP);
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    const float low = exp2_fast(row_a[m0 + m * 16 + lane_row]), high = exp2_fast(row_a[m0 + m * 16 + 8 + lane_row]);
#pragma unroll
    for (int n = 0; n < kOwnP; ++n) d[m][n][0] *= low, d[m][n][1] *= low, d[m][n][2] *= high, d[m][n][3] *= high;
  }
  add_product<kPasses, 2, kOwnP, kBlocks, false, false, Zeros::kAbove>(d, M + m0 * kPitchM, kPitchM, V + p0, kPitchP,
                                                                       m0 / 16);
  const float skip = kHasSkip ? D[row0] : 0.0f;
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = m0 + m * 16 + half * 8 + lane_row;
      float sum = 0.0f;
#pragma unroll
      for (int n = 0; n < kOwnP; ++n) {
        const float2 wide = load_pair(V + row * kPitchP + p0 + n * 8 + lane_column);
        const float x = d[m][n][2 * half] += skip * wide.x, y = d[m][n][2 * half + 1] += skip * wide.y;
        sum += x * x + y * y;
      }
      sum = quad_sum(sum);
      if (lane % 4 == 0) squares[warp % 4 * kRows + row] = sum;
    }
  }
  __syncthreads();

  const auto four = [](const float* slots, int row) {
    return slots[row] + slots[kRows + row] + (slots[2 * kRows + row] + slots[3 * kRows + row]);
  };
  float scale[2][2], adjoint[2][kOwnP][4], sums[2][2] = {};  // of the rows; d becomes o normalised
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      scale[m][half] = rsqrtf(four(squares, m0 + m * 16 + half * 8 + lane_row) / kP + kNormEps);
    }
  }
#pragma unroll
  for (int n = 0; n < kOwnP; ++n) {
    const int p = p0 + n * 8 + lane_column;
    const bool inside = has_rank && p < kP;
    const long long param = (row0 * kRank + rank) * kP + p;
    float2 fold = make_float2(1.0f, 1.0f), spread = fold, weight = make_float2(0.0f, 0.0f);
    float2 d_fold = weight, d_spread = weight, d_weight = weight;
    if (inside) {
      if constexpr (!kSiso && !kKeepsRank) fold = load_pair(mimo_o + param);
      if constexpr (!kSiso && kHasGate) spread = load_pair(mimo_z + param);
      weight = load_pair(norm_weight + row0 * kP + p);
    }
#pragma unroll
    for (int m = 0; m < 2; ++m) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int c = (m0 + m * 16 + half * 8 + lane_row) / kRanks, t = t0 + c;
        const bool there = inside && c <= last;
        float2 up = make_float2(0.0f, 0.0f), raw = up, on = make_float2(1.0f, 1.0f), gated = on;
        if (there) {
          up = load_pair(dy + dy_at(b, t, rank, h) + p);
          if constexpr (kHasGate) raw = load_pair(z + token_head(b, t, h) * kP + p);
        }
        const float2 hat = make_float2(d[m][n][2 * half] * scale[m][half], d[m][n][2 * half + 1] * scale[m][half]);
        const float2 out = make_float2(hat.x * weight.x, hat.y * weight.y);
        const float2 u = make_float2(up.x * fold.x, up.y * fold.y);
        if constexpr (kHasGate) {
          const float2 gate = make_float2(raw.x * spread.x, raw.y * spread.y);
          on = make_float2(sigmoid(gate.x), sigmoid(gate.y));
          gated = make_float2(gate.x * on.x, gate.y * on.y);
          const float dx = u.x * out.x * on.x * (1.0f + gate.x * (1.0f - on.x));
          const float dy_ = u.y * out.y * on.y * (1.0f + gate.y * (1.0f - on.y));
          d_spread.x += dx * raw.x, d_spread.y += dy_ * raw.y;
          const float low = sum_over_ranks(dx * spread.x), high = sum_over_ranks(dy_ * spread.y);
          if (there && rank == 0) store_pair(d_z + token_head(b, t, h) * kP + p, low, high);
        }
        d_fold.x += up.x * out.x * gated.x, d_fold.y += up.y * out.y * gated.y;
        const float2 dn = make_float2(u.x * gated.x, u.y * gated.y);
        d_weight.x += dn.x * hat.x, d_weight.y += dn.y * hat.y;
        adjoint[m][n][2 * half] = dn.x * weight.x, adjoint[m][n][2 * half + 1] = dn.y * weight.y;
        d[m][n][2 * half] = hat.x, d[m][n][2 * half + 1] = hat.y;
        sums[m][half] += dn.x * weight.x * hat.x + dn.y * weight.y * hat.y;
      }
    }
    d_weight = make_float2(sum_over_rows(d_weight.x), sum_over_rows(d_weight.y));
    if (lane_row == 0) *reinterpret_cast<float2*>(sum_weight + warp / 4 * kWideP + p) = d_weight;
    if constexpr (!kSiso) {
      d_fold = make_float2(sum_over_tokens(d_fold.x), sum_over_tokens(d_fold.y));
      d_spread = make_float2(sum_over_tokens(d_spread.x), sum_over_tokens(d_spread.y));
      if (lane_row < kRanks) {
        const int slot = (warp / 4 * kRanks + rank) * kWideP + p;
        *reinterpret_cast<float2*>(sum_o + slot) = d_fold;
        *reinterpret_cast<float2*>(sum_z + slot) = d_spread;
      }
    }
  }
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float sum = quad_sum(sums[m][half]);
      if (lane % 4 == 0) products[warp % 4 * kRows + m0 + m * 16 + half * 8 + lane_row] = sum;
    }
  }
  __syncthreads();
#pragma unroll
  for (int m = 0; m < 2; ++m) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = m0 + m * 16 + half * 8 + lane_row, c = row / kRanks;
      const float mean = four(products, row) / kP;
      if (!has_rank || c > last) continue;
#pragma unroll
      for (int n = 0; n < kOwnP; ++n) {
        const int p = p0 + n * 8 + lane_column;
        if (p >= kP) continue;
        store_pair(normed + ((head + c) * kRank + rank) * kP + p,
                   scale[m][half] * (adjoint[m][n][2 * half] - d[m][n][2 * half] * mean),
                   scale[m][half] * (adjoint[m][n][2 * half + 1] - d[m][n][2 * half + 1] * mean));
      }
    }
  }
  float* record = records + record_at(b, chunk, h);
  for (int p = threadIdx.x; p < kP; p += Threads) {
    record[kNormAt + p] = kDown == 1 ? sum_weight[p] : sum_weight[p] + sum_weight[kWideP + p];
  }
  if constexpr (!kSiso) {
    for (int i = threadIdx.x; i < kRank * kP; i += Threads) {
      const int slot = i / kP * kWideP + i % kP;
      record[kMimoOAt + i] = sum_of_rows(sum_o + slot);
      record[kMimoZAt + i] = sum_of_rows(sum_z + slot);
    }
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Sums over the parts of a group, back in the order of memory. blockIdx.y: 0 for q, 1 for k. A thread has 8 columns.

template <int Threads>
__global__ void __launch_bounds__(Threads)
    mamba3_group_sums(const float* q_sums, const float* k_sums, Value* d_q, Value* d_k) {
  begin();
  constexpr long long kRowsOfAll = (long long)kBatch * kSeq * kRank * kGroups, kSize = kRowsOfAll * kN;
  const long long unit = (long long)blockIdx.x * Threads + threadIdx.x;
  if (unit >= kSize / 8) return;
  const float* from = (blockIdx.y ? k_sums : q_sums) + unit * 8;
  float x[8];
  load8(from, x);
  for (int part = 1; part < kParts; ++part) {
    float y[8];
    load8(from + part * kSize, y);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] += y[i];
  }
  Value* to = (blockIdx.y ? d_k : d_q) + unit / (kN / 8) * kN;
  const int pair = int(unit % (kN / 8)) * 4;
  if constexpr (kHalf) {
    const float apart[8] = {x[0], x[2], x[4], x[6], x[1], x[3], x[5], x[7]};
    store_run<4>(to + pair, apart);
    store_run<4>(to + kN / 2 + pair, apart, 4);
  } else {
    store_run<8>(to + 2 * pair, x);
  }
}

// Sums of the chunks' records: gradients of the parameters, one row per entry of the batch (blockIdx.y). A thread has
// two neighbouring elements. of_states: what mimo_v gets of initial states besides.
template <int Threads>
__global__ void __launch_bounds__(Threads)
    mamba3_parameter_sums(const float* records, float* d_q_bias, float* d_k_bias, float* d_mimo_v, float* d_mimo_o,
                          float* d_mimo_z, float* d_norm_weight, float* d_D, const float* of_states) {
  begin();
  const int i = 2 * (blockIdx.x * Threads + threadIdx.x), b = blockIdx.y;
  if (i >= kHeads * kRecord) return;
  const int h = i / kRecord, at = i % kRecord;
  const long long head = (long long)b * kHeads + h;
  float* to = nullptr;
  int second = 1;  // where the other element is
  if (at < kMimoVAt) {
    const int inner = at % kKBiasAt, n = inner % kN;
    to = (at < kKBiasAt ? d_q_bias : d_k_bias) + (head * kRank + inner / kN) * kN + column(n);
    second = column(n + 1) - column(n);
  } else if (at < kNormAt) {
    const int inner = at - kMimoVAt, which = inner / (kRank * kP);
    const bool has = !kSiso && (which == 0 || (which == 1 ? !kKeepsRank : kHasGate));
    if (has) to = (which == 0 ? d_mimo_v : which == 1 ? d_mimo_o : d_mimo_z) + head * kRank * kP + inner % (kRank * kP);
  } else if (at < kSkipAt) {
    if (kHasNorm) to = d_norm_weight + head * kP + at - kNormAt;
  } else if (at == kSkipAt && kHasSkip) {
    to = d_D + head;
    second = 0;
  }
  if (to == nullptr) return;
  const float* from = records + (long long)b * kChunks * kHeads * kRecord + i;
  float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll 8
  for (int n = 0; n < kChunks; ++n) {
    const float2 own = load_pair(from + (long long)n * kHeads * kRecord);
    sum.x += own.x, sum.y += own.y;
  }
  if (kHasState && !kSiso && at >= kMimoVAt && at < kMimoOAt) {
    for (int j = 0; j < kSequences; ++j) {
      const float2 own = load_pair(of_states + state_row(b, j, h) * kRank * kP + at - kMimoVAt);
      sum.x += own.x, sum.y += own.y;
    }
  }
  if (second) to[second] = sum.y;
  *to = sum.x;
}

namespace {

// Of the pair's rows a and b in a state S, and in its adjoint dS: the sum over p of dS_a S_b - dS_b S_a. In states that
// warpgroups keep, row p of a panel has 64 columns, swizzled.
__device__ inline float moment_of(const Value* adjoint, const Value* state, int pair) {
  float sum = 0.0f;
  if constexpr (kPanels) {
    const int at = pair / 32 * (64 * kP) + pair % 4 * 2, unit = pair % 32 / 4;
#pragma unroll 8
    for (int p = 0; p < kP; ++p) {
      const int place = at + p * 64 + (unit ^ p % 8) * 8;
      const float2 x = load_pair(adjoint + place), y = load_pair(state + place);
      sum += x.x * y.y - x.y * y.x;
    }
  } else {
#pragma unroll 2
    for (int p = 0; p < kP; p += 8) {
      float dx[8], dy[8], x[8], y[8];
      unpack8(eight_at(adjoint + 2 * pair * kP + p), dx);
      unpack8(eight_at(adjoint + (2 * pair + 1) * kP + p), dy);
      unpack8(eight_at(state + 2 * pair * kP + p), x);
      unpack8(eight_at(state + (2 * pair + 1) * kP + p), y);
#pragma unroll
      for (int i = 0; i < 8; ++i) sum += dx[i] * y[i] - dy[i] * x[i];
    }
  }
  return sum;
}

}  // namespace

// Spans of tokens, pieces of their sequence. What a span's phases get of all that follows it: turning all later tokens
// by an angle is turning the state between the other way, and the end of the sequence with them. So it is the moment of
// that state with its adjoint, sum over p of dS_a S_b - dS_b S_a for a rotated pair (a, b), and what the last span gets
// of itself and of the sequence's end. It does not add up rounding errors as the sum over all later tokens would.
//
// A thread has a pair at the end of a span.
template <int Threads>
__global__ void __launch_bounds__(Threads)
    mamba3_moments(const Value* states, const Value* adjoints, const float* d_phases, const int* cu_seqlens,
                   float* moments) {
  begin();
  const long long index = (long long)blockIdx.x * Threads + threadIdx.x;
  if (index >= (long long)kBatch * kHeads * kSpans * kPairs) return;
  const int pair = index % kPairs, span = index / kPairs % kSpans, row = index / ((long long)kPairs * kSpans);
  const int h = row % kHeads, b = row / kHeads;
  const Piece piece = piece_of<kSpan>(cu_seqlens, b, span);
  if (piece.last < 0) return;
  const auto moment = [&](int t) {  // of the state before token t
    const int chunk = piece.of.piece<kTokens>() + (t - piece.of.first) / kTokens;
    return moment_of(adjoints + state_at(b, h, chunk - 1), states + state_at(b, h, chunk), pair);
  };
  float sum = 0.0f;
  if (const int next = piece.t0 + kSpan; next < piece.of.end) {
    sum = moment(next);
    if constexpr (kHasFinal) {
      const int last = piece.of.first + (piece.of.tokens() - 1) / kSpan * kSpan;
      sum -= moment(last);
      for (int t = last; t < piece.of.end; ++t) sum += d_phases[token_head(b, t, h) * kPairs + pair];
    }
  }
  moments[index] = sum;
}

// Along a span, of one head: d_phases (in the memory of d_angles) summed from the end, and with them dt, trap, angles.
// A warp has a span. d_delta: of the weight of an initial state's key.
template <int Threads>
__global__ void __launch_bounds__(Threads)
    mamba3_time_gradients(const float* angles, const float* dt, const float* trap, const float* d_f,
                          const float* d_gamma, const float* moments, const float* d_delta, const int* cu_seqlens,
                          float* d_angles, float* d_dt, float* d_trap, float* d_start) {
  constexpr int kRun = 8, kOwn = (kPairs + 31) / 32;  // tokens that are loaded at once, pairs of a lane
  begin();
  const long long index = (long long)blockIdx.x * (Threads / 32) + warp_of_block();
  if (index >= (long long)kBatch * kHeads * kSpans) return;
  const int span = index % kSpans, lane = threadIdx.x % 32, h = index / kSpans % kHeads, b = index / kSpans / kHeads;
  const Piece piece = piece_of<kSpan>(cu_seqlens, b, span);
  if (piece.last < 0) return;
  const long long head = head_token(b, h, 0), first = token_head(b, 0, h) * kPairs;
  dt += head, trap += head, d_f += head, d_gamma += head, d_dt += head, d_trap += head;
  float total[kOwn];  // of all later tokens
#pragma unroll
  for (int i = 0; i < kOwn; ++i) total[i] = lane + 32 * i < kPairs ? moments[index * kPairs + lane + 32 * i] : 0.0f;
  const int end = piece.t0 + piece.last;
  struct Run {
    float phase[kOwn][kRun], angle[kOwn][kRun];
  };
  const auto load = [&](int begin) {
    Run run;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
#pragma unroll
      for (int j = 0; j < kRun; ++j) {
        const bool there = lane + 32 * i < kPairs && begin + j <= end;
        const long long at = first + (long long)(begin + j) * kHeads * kPairs + lane + 32 * i;
        run.phase[i][j] = there ? d_angles[at] : 0.0f;
        run.angle[i][j] = there ? angles[at] : 0.0f;
      }
    }
    return run;
  };
  Run next = load(piece.t0 + piece.last / kRun * kRun);
  for (int begin = piece.t0 + piece.last / kRun * kRun; begin >= piece.t0; begin -= kRun) {
    const Run run = next;
    if (begin > piece.t0) next = load(begin - kRun);
    float d_step[kRun];
#pragma unroll
    for (int j = kRun - 1; j >= 0; --j) {
      const int t = begin + j;
      const float step = dt[min(t, end)];
      d_step[j] = 0.0f;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        total[i] += run.phase[i][j];
        const float tanh_angle = tanh_of(run.angle[i][j]);
        if (lane + 32 * i < kPairs && t <= end) {
          d_angles[first + (long long)t * kHeads * kPairs + lane + 32 * i] =
              total[i] * kPi * step * (1.0f - tanh_angle * tanh_angle);
          d_step[j] += total[i] * kPi * tanh_angle;
        }
      }
    }
#pragma unroll
    for (int offset = 16, count = kRun / 2; offset >= 4; offset /= 2, count /= 2) {  // eight lanes for eight tokens
#pragma unroll
      for (int j = 0; j < count; ++j) {
        const bool upper = lane & offset;
        const float other = __shfl_xor_sync(0xffffffff, upper ? d_step[j] : d_step[j + count], offset);
        d_step[j] = (upper ? d_step[j + count] : d_step[j]) + other;
      }
    }
    const float sum_step = quad_sum(d_step[0]);
    const int t = begin + lane / 4;
    if (lane % 4 == 0 && t <= end) {
      const float step = dt[t], mix = 1.0f / (1.0f + expf(-trap[t]));
      const float weight = d_f[t], own_weight = weight + d_gamma[t];
      const float before = t > piece.of.first ? d_f[t - 1]
                           : kHasState        ? d_delta[state_row(b, piece.of.number, h)]
                                              : 0.0f;
      d_dt[t] = sum_step + mix * own_weight + (1.0f - mix) * before;
      d_trap[t] = step * (own_weight - before) * mix * (1.0f - mix);
    }
  }
  if (kHasState && piece.t0 == piece.of.first) {
    d_start += state_row(b, piece.of.number, h) * kPairs;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (lane + 32 * i < kPairs) d_start[lane + 32 * i] = total[i];
    }
  }
}

// What the initial state gives beyond its matrix, whose gradient d_ssm is there: one block per sequence and head. An
// empty sequence passes its state through.
template <int Threads>
__global__ void __launch_bounds__(Threads)
    mamba3_state_gradients(const float* dt, const float* trap, const float* mimo_v, const float* state_k,
                           const float* state_v, const float* d_ssm, const float* d_final_angle, const float* d_final_k,
                           const float* d_final_v, const int* cu_seqlens, float* d_angle, float* d_k, float* d_v,
                           float* d_mimo_v, float* d_delta) {
  __shared__ float pending[kRank][kP], total[Threads / 32];
  begin();
  const int h = blockIdx.x % kHeads, j = blockIdx.x / kHeads % kSequences, b = blockIdx.x / (kHeads * kSequences);
  const int lane = threadIdx.x % 32, warp = warp_of_block();
  const Sequence own = sequence_of(cu_seqlens, b, j);
  const long long row = state_row(b, j, h), param = ((long long)param_row(b) * kHeads + h) * kRank * kP;
  d_ssm += row * kP * kN, state_k += row * kRank * kN, state_v += row * kP;
  d_k += row * kRank * kN, d_v += row * kP, d_mimo_v += row * kRank * kP;
  if (own.tokens() == 0) {
    const auto pass = [&](float* to, const float* from, int size) {
      for (int i = threadIdx.x; i < size; i += Threads) to[i] = kHasFinal ? from[row * size + i] : 0.0f;
    };
    pass(d_angle + row * kPairs, d_final_angle, kPairs);
    pass(d_k, d_final_k, kRank * kN);
    pass(d_v, d_final_v, kP);
    if constexpr (!kSiso) {
      for (int i = threadIdx.x; i < kRank * kP; i += Threads) d_mimo_v[i] = 0.0f;
    }
    return;
  }
  const long long first = head_token(b, h, own.first);
  const float weight = delta_of(dt[first], trap[first]);

  for (int i = warp; i < kRank * kP; i += Threads / 32) {  // sums over the state's columns
    const int r = i / kP, p = i % kP;
    float sum = 0.0f;
    for (int n = lane; n < kN; n += 32) sum += d_ssm[p * kN + n] * state_k[r * kN + n];
    sum = warp_sum(sum);
    if (lane == 0) pending[r][p] = sum;
  }
  __syncthreads();
  float d_weight = 0.0f;
  for (int p = threadIdx.x; p < kP; p += Threads) {
    float sum = 0.0f;
    for (int r = 0; r < kRank; ++r) {
      sum += pending[r][p] * (kSiso ? 1.0f : mimo_v[param + r * kP + p]);
      if (!kSiso) d_mimo_v[r * kP + p] = weight * pending[r][p] * state_v[p];
    }
    d_v[p] = weight * sum;
    d_weight += sum * state_v[p];
  }
  d_weight = warp_sum(d_weight);
  if (lane == 0) total[warp] = d_weight;
  for (int i = threadIdx.x; i < kRank * kN; i += Threads) {
    const int r = i / kN, n = i % kN;
    float sum = 0.0f;
    for (int p = 0; p < kP; ++p) {
      sum += d_ssm[p * kN + n] * state_v[p] * (kSiso ? 1.0f : mimo_v[param + r * kP + p]);
    }
    d_k[i] = weight * sum;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    float sum = 0.0f;
    for (int w = 0; w < Threads / 32; ++w) sum += total[w];
    d_delta[row] = sum;
  }
}

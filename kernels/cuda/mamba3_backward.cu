// The gradients of a Mamba-3 scan in bfloat16, chunk by chunk, with states and their adjoints recomputed.
//
// Tokens and ranks of a chunk are the 64 rows of a tile: row c * kRanks + r, kRanks the rank rounded up to a power of
// two, so that a thread's rows of an mma accumulator have known ranks. Rows of no token or no rank are zero. Columns of
// q and k are kept in the order in which rotated pairs are neighbours, whatever the order in memory: a thread's two
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
#include "mamba3_phase.cuh"
#include "mamba3_products.cuh"
#include "shared_memory.cuh"

namespace {

using namespace jax_ssd;
using bf16 = __nv_bfloat16;

constexpr int kSeq = SEQ, kHeads = HEADS, kGroups = GROUPS, kRank = RANK, kRanks = RANKS, kN = STATE, kP = HEAD_DIM;
constexpr int kBatch = BATCH, kPairs = PAIRS, kTokens = TOKENS;  // rotated pairs; tokens of a chunk
constexpr int kParts = PARTS;                                    // blocks that share the heads of a group
constexpr bool kSharedParams = SHARED_PARAMS, kHalf = HALF_ROTARY, kSiso = SISO, kKeepsRank = KEEPS_RANK;
constexpr bool kHasGate = HAS_GATE, kHasSkip = HAS_SKIP, kHasNorm = HAS_NORM, kHasState = HAS_STATE;
constexpr bool kHasFinal = HAS_FINAL;
constexpr float kNormEps = NORM_EPS;

constexpr int kRows = 64;
constexpr int kChunks = (kSeq + kTokens - 1) / kTokens;
constexpr int kGroupHeads = kHeads / kGroups;
constexpr int kPartHeads = (kGroupHeads + kParts - 1) / kParts;
constexpr int kWideN = (kN + 63) / 64 * 64, kWideP = (kP + 31) / 32 * 32;       // of tiles
constexpr int kPitchN = kWideN + 8, kPitchP = kWideP + 8, kPitchM = kRows + 8;  // 16 bytes more: no bank conflicts
constexpr int kRankedToken = kHeads * kP * (kKeepsRank ? kRank : 1);            // of dy
constexpr float kPi = 3.14159265358979f;

static_assert(kTokens * kRanks <= kRows && kRank <= kRanks);

// A chunk's part of the parameters' gradients, of one head: float32, in this order.
constexpr int kQBiasAt = 0, kKBiasAt = kRank * kN, kMimoVAt = 2 * kRank * kN, kMimoOAt = kMimoVAt + kRank * kP;
constexpr int kMimoZAt = kMimoOAt + kRank * kP, kNormAt = kMimoZAt + kRank * kP, kSkipAt = kNormAt + kP;
constexpr int kRecord = kSkipAt + 4;

// Where column n of a tile is in memory.
__device__ constexpr int column(int n) { return kHalf ? n % 2 * (kN / 2) + n / 2 : n; }

__device__ inline long long token_head(int b, int t, int h) { return ((long long)b * kSeq + t) * kHeads + h; }
__device__ inline long long head_token(int b, int h, int t) { return ((long long)b * kHeads + h) * kSeq + t; }
__device__ inline int param_row(int b) { return kSharedParams ? 0 : b; }

__device__ inline float sigmoid(float x) {  // 0 for -inf
  float r;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(1.0f + exp2_fast(-LOG2E * x)));
  return r;
}

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

__device__ inline float2 unpack(unsigned pair) { return make_float2(low_of_pair(pair), high_of_pair(pair)); }

__device__ inline void unpack8(uint4 words, float* values) {
  const unsigned word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = unpack(word[i]);
    values[2 * i] = pair.x;
    values[2 * i + 1] = pair.y;
  }
}

__device__ inline float2 load_pair(const bf16* p) { return unpack(*reinterpret_cast<const unsigned*>(p)); }
__device__ inline void store_pair(bf16* p, float a, float b) { *reinterpret_cast<unsigned*>(p) = bfloat16_pair(a, b); }

__device__ inline void copy_async(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

template <bool Transposed>
__device__ inline void load_matrices(unsigned (&d)[4], unsigned address) {
  if constexpr (Transposed) {
    load_tiles_transposed(d, address);
  } else {
    load_tiles(d, address);
  }
}

using Fragments = Product<bf16, 1>;

enum class Zeros { kNone, kAbove, kBelow };  // where the 16 x 16 blocks of the first factor are zero and skipped

// d += A B for one warp: d is Ms x 16 by Ns x 8, the sum goes over Ks x 16. A is stored [m][k], or [k][m] if
// TransposedA; B is stored [k][n], or [n][k] if TransposedB. first_m: the block row at which `a` begins.
// Apart: from one eight columns of B that a warp takes to the next.
template <int Ms, int Ns, int Ks, bool TransposedA, bool TransposedB, Zeros Skipped = Zeros::kNone, int Apart = 8>
__device__ inline void add_product(float (&d)[Ms][Ns][4], const bf16* a, int pitch_a, const bf16* b, int pitch_b,
                                   int first_m = 0) {
  const int lane = threadIdx.x % 32, low = lane % 8, second = lane / 8 % 2, third = lane / 16;
  unsigned at_a, at_b;
  int next_a, next_m, next_b, next_n;  // bytes from one block of 16 to the next
  if constexpr (TransposedA) {
    at_a = shared_address(a + (third * 8 + low) * pitch_a + second * 8);
    next_a = 32 * pitch_a, next_m = 32;
  } else {
    at_a = shared_address(a + (second * 8 + low) * pitch_a + third * 8);
    next_a = 32, next_m = 32 * pitch_a;
  }
  if constexpr (TransposedB) {
    at_b = shared_address(b + (third * Apart + low) * pitch_b + second * 8);
    next_b = 32, next_n = 4 * Apart * pitch_b;
  } else {
    at_b = shared_address(b + (second * 8 + low) * pitch_b + third * Apart);
    next_b = 32 * pitch_b, next_n = 4 * Apart;
  }
  const auto skipped = [&](int m, int k) {
    if constexpr (Skipped == Zeros::kAbove) return first_m + m < k;
    if constexpr (Skipped == Zeros::kBelow) return first_m + m > k;
    return false;
  };
#pragma unroll
  for (int k = 0; k < Ks; ++k) {
    if (skipped(Skipped == Zeros::kAbove ? Ms - 1 : 0, k)) continue;
    unsigned fragments[(Ns + 1) / 2][4];
#pragma unroll
    for (int n = 0; n < (Ns + 1) / 2; ++n) load_matrices<!TransposedB>(fragments[n], at_b + k * next_b + n * next_n);
#pragma unroll
    for (int m = 0; m < Ms; ++m) {
      if (skipped(m, k)) continue;
      Fragments::A rows;
      load_matrices<TransposedA>(rows.r, at_a + k * next_a + m * next_m);
#pragma unroll
      for (int n = 0; n < Ns; ++n) {
        const unsigned* pair = fragments[n / 2] + n % 2 * 2;
        Fragments::add(d[m][n], 0, rows, {pair[0], pair[1]});
      }
    }
  }
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
__device__ inline void store_shared(bf16* to, const float* x, int rank, int rest, bool inside) {
  constexpr int kOwn = 8 / kRanks;
  if constexpr (kOwn == 1) {
    if (inside && rank / 2 <= rest) to[rank / 2 * kHeads * kP + rank % 2] = __float2bfloat16_rn(x[0]);
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

// Four pairs of a row of q or k: biased, rotated by cos and sin where there are any, in the order of the tile.
__device__ inline uint4 turned(const float (&x)[8], const float (&cosine)[4], const float (&sine)[4], int pair) {
  unsigned words[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float a = x[2 * i], b = x[2 * i + 1];
    words[i] = pair + i < kPairs ? bfloat16_pair(a * cosine[i] - b * sine[i], a * sine[i] + b * cosine[i])
                                 : bfloat16_pair(a, b);
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// The eight columns of a tile from 2 * pair on, of a row in memory.
__device__ inline void load_columns(const bf16* row, int pair, float (&x)[8]) {
  if constexpr (kHalf) {
    const uint2 first = *reinterpret_cast<const uint2*>(row + pair);
    const uint2 second = *reinterpret_cast<const uint2*>(row + kN / 2 + pair);
    const float2 a = unpack(first.x), b = unpack(first.y), c = unpack(second.x), d = unpack(second.y);
    x[0] = a.x, x[2] = a.y, x[4] = b.x, x[6] = b.y;
    x[1] = c.x, x[3] = c.y, x[5] = d.x, x[7] = d.y;
  } else {
    unpack8(*reinterpret_cast<const uint4*>(row + 2 * pair), x);
  }
}

__device__ inline void add_columns(const float* row, int pair, float (&x)[8]) {
  if constexpr (kHalf) {
    const float4 a = *reinterpret_cast<const float4*>(row + pair);
    const float4 b = *reinterpret_cast<const float4*>(row + kN / 2 + pair);
    x[0] += a.x, x[2] += a.y, x[4] += a.z, x[6] += a.w;
    x[1] += b.x, x[3] += b.y, x[5] += b.z, x[7] += b.w;
  } else {
    const float4 a = *reinterpret_cast<const float4*>(row + 2 * pair);
    const float4 b = *reinterpret_cast<const float4*>(row + 2 * pair + 4);
    x[0] += a.x, x[1] += a.y, x[2] += a.z, x[3] += a.w;
    x[4] += b.x, x[5] += b.y, x[6] += b.z, x[7] += b.w;
  }
}

__device__ inline void load8(const float* p, float (&x)[8]) {
  const float4 a = reinterpret_cast<const float4*>(p)[0], b = reinterpret_cast<const float4*>(p)[1];
  x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
}

// Eight values of a row of V: the value expanded to rank r.
__device__ inline void expanded(const uint4 v, const float* mimo_v, int at, float (&x)[8]) {
  unpack8(v, x);
  if constexpr (!kSiso) {
    float weight[8];
    load8(mimo_v + at, weight);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] *= weight[i];
  }
}

// Eight values of a row of dO where there is no norm: dy, folded back and gated.
__device__ inline void ungated(const uint4 dy, const uint4 z, const float* mimo_o, const float* mimo_z, int at,
                               float (&x)[8]) {
  unpack8(dy, x);
  float weight[8];
  if constexpr (!kSiso && !kKeepsRank) {
    load8(mimo_o + at, weight);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] *= weight[i];
  }
  if constexpr (kHasGate) {
    float gate[8];
    unpack8(z, gate);
    if constexpr (!kSiso) {
      load8(mimo_z + at, weight);
#pragma unroll
      for (int i = 0; i < 8; ++i) gate[i] *= weight[i];
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] *= gate[i] * sigmoid(gate[i]);
  }
}

__device__ inline long long dy_at(int b, int t, int r, int h) {
  return (kKeepsRank ? (((long long)b * kSeq + t) * kRank + r) * kHeads + h : token_head(b, t, h)) * kP;
}

__device__ inline long long q_at(int b, int t, int r, int g) {
  return ((((long long)b * kSeq + t) * kRank + r) * kGroups + g) * kN;
}

// ---------------------------------------------------------------------------------------------------------------------
// Staging a chunk of one head, tokens t0 to t0 + last. Columns beyond the sizes are not touched.

// Rotated rows of q and k, and the table [token][pair] of cosines and sines.
template <int Threads>
__device__ inline void stage_keys(bf16* Q, bf16* K, float2* trig, const bf16* q, const bf16* k, const float* q_bias,
                                  const float* k_bias, const unsigned* phases, int b, int t0, int last, int h) {
  const long long param = ((long long)param_row(b) * kHeads + h) * kRank;
  for (int unit = threadIdx.x; unit < kRows * (kN / 8); unit += Threads) {
    const int row = unit / (kN / 8), pair = unit % (kN / 8) * 4, c = row / kRanks, r = row % kRanks;
    uint4 words_q = make_uint4(0, 0, 0, 0), words_k = words_q;
    if (c <= last && r < kRank) {
      float x[8], y[8], cosine[4] = {}, sine[4] = {};
      const long long at = q_at(b, t0 + c, r, h / kGroupHeads);
      load_columns(q + at, pair, x);
      load_columns(k + at, pair, y);
      add_columns(q_bias + (param + r) * kN, pair, x);
      add_columns(k_bias + (param + r) * kN, pair, y);
      const unsigned* phase = phases + token_head(b, t0 + c, h) * kPairs + pair;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (pair + i >= kPairs) continue;
        sincos_of_phase_fast(phase[i], sine[i], cosine[i]);
        if (r == 0) trig[c * kPairs + pair + i] = make_float2(cosine[i], sine[i]);
      }
      words_q = turned(x, cosine, sine, pair);
      words_k = turned(y, cosine, sine, pair);
    }
    *reinterpret_cast<uint4*>(Q + row * kPitchN + 2 * pair) = words_q;
    *reinterpret_cast<uint4*>(K + row * kPitchN + 2 * pair) = words_k;
  }
}

__device__ inline void store8(bf16* to, const float (&x)[8]) {
  *reinterpret_cast<uint4*>(to) = make_uint4(bfloat16_pair(x[0], x[1]), bfloat16_pair(x[2], x[3]),
                                             bfloat16_pair(x[4], x[5]), bfloat16_pair(x[6], x[7]));
}

// What a thread will stage of a head's chunk, and its row's weights: loaded before there is room for it.
template <int Threads>
struct Ahead {
  static constexpr int kKeys = (kRows * (kN / 8) + Threads - 1) / Threads,
                       kValues = (kRows * (kP / 8) + Threads - 1) / Threads;
  // Where rows of units repeat after the threads of a block, all units of a thread have the same columns and rank.
  static constexpr int kBiases = Threads % (kN / 8) == 0 && Threads / (kN / 8) % kRanks == 0 ? 1 : kKeys;
  static constexpr int kWeights = Threads % (kP / 8) == 0 && Threads / (kP / 8) % kRanks == 0 ? 1 : kValues;
  uint4 q[kKeys], k[kKeys], phase[kKeys], v[kValues], dy[kValues], z[kValues];
  float total, decay, f, gamma;
};

// Eight columns of a row of q or k, in the order of the tile.
__device__ inline uint4 load_units(const bf16* row, int pair) {
  if constexpr (!kHalf) return *reinterpret_cast<const uint4*>(row + 2 * pair);
  const uint2 a = *reinterpret_cast<const uint2*>(row + pair), b = *reinterpret_cast<const uint2*>(row + kN / 2 + pair);
  return make_uint4(__byte_perm(a.x, b.x, 0x5410), __byte_perm(a.x, b.x, 0x7632), __byte_perm(a.y, b.y, 0x5410),
                    __byte_perm(a.y, b.y, 0x7632));
}

template <int Threads>
__device__ inline void load_keys(Ahead<Threads>& to, const bf16* q, const bf16* k, const unsigned* phases, int b,
                                 int t0, int last, int h) {
  using A = Ahead<Threads>;
#pragma unroll
  for (int i = 0; i < A::kKeys; ++i) {
    const int unit = threadIdx.x + i * Threads, row = unit / (kN / 8), pair = unit % (kN / 8) * 4, c = row / kRanks,
              r = row % kRanks;
    to.q[i] = to.k[i] = to.phase[i] = make_uint4(0, 0, 0, 0);
    if (row < kRows && c <= last && r < kRank) {
      const long long at = q_at(b, t0 + c, r, h / kGroupHeads);
      to.q[i] = load_units(q + at, pair);
      to.k[i] = load_units(k + at, pair);
      const unsigned* phase = phases + token_head(b, t0 + c, h) * kPairs + pair;
      if constexpr (kPairs % 4 == 0) {
        if (pair < kPairs) to.phase[i] = *reinterpret_cast<const uint4*>(phase);
      } else {
        if (pair < kPairs) to.phase[i].x = phase[0];
        if (pair + 1 < kPairs) to.phase[i].y = phase[1];
        if (pair + 2 < kPairs) to.phase[i].z = phase[2];
        if (pair + 3 < kPairs) to.phase[i].w = phase[3];
      }
    }
  }
}

template <int Threads>
__device__ inline void load_values(Ahead<Threads>& to, const bf16* v, const bf16* z, const bf16* dy, const bf16* normed,
                                   int b, int t0, int last, int h) {
  using A = Ahead<Threads>;
#pragma unroll
  for (int i = 0; i < A::kValues; ++i) {
    const int unit = threadIdx.x + i * Threads, row = unit / (kP / 8), p = unit % (kP / 8) * 8, c = row / kRanks,
              r = row % kRanks;
    to.v[i] = to.dy[i] = to.z[i] = make_uint4(0, 0, 0, 0);
    if (row < kRows && c <= last && r < kRank) {
      const long long at = token_head(b, t0 + c, h) * kP + p;
      to.v[i] = *reinterpret_cast<const uint4*>(v + at);
      if constexpr (kHasNorm) {
        to.dy[i] = *reinterpret_cast<const uint4*>(normed + ((head_token(b, h, t0) + c) * kRank + r) * kP + p);
      } else {
        to.dy[i] = *reinterpret_cast<const uint4*>(dy + dy_at(b, t0 + c, r, h) + p);
        if constexpr (kHasGate) to.z[i] = *reinterpret_cast<const uint4*>(z + at);
      }
    }
  }
}

// Rotated rows of q and k, rows of V and dO, and the table [token][pair] of cosines and sines.
template <int Threads>
__device__ inline void stage_ahead(const Ahead<Threads>& from, bf16* Q, bf16* K, bf16* V, bf16* dO, float2* trig,
                                   int last, const float* q_bias, const float* k_bias, const float* mimo_v,
                                   const float* mimo_o, const float* mimo_z) {
  using A = Ahead<Threads>;
  float bias_q[8], bias_k[8], weight_v[8], weight_o[8], weight_z[8];  // the head's
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
    uint4 words_q = make_uint4(0, 0, 0, 0), words_k = words_q;
    if (c <= last && r < kRank) {
      float x[8], y[8], cosine[4] = {}, sine[4] = {};
      unpack8(from.q[i], x);
      unpack8(from.k[i], y);
#pragma unroll
      for (int e = 0; e < 8; ++e) x[e] += bias_q[e], y[e] += bias_k[e];
      const unsigned phase[4] = {from.phase[i].x, from.phase[i].y, from.phase[i].z, from.phase[i].w};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (pair + e >= kPairs) continue;
        sincos_of_phase_fast(phase[e], sine[e], cosine[e]);
        if (r == 0) trig[c * kPairs + pair + e] = make_float2(cosine[e], sine[e]);
      }
      words_q = turned(x, cosine, sine, pair);
      words_k = turned(y, cosine, sine, pair);
    }
    *reinterpret_cast<uint4*>(Q + row * kPitchN + 2 * pair) = words_q;
    *reinterpret_cast<uint4*>(K + row * kPitchN + 2 * pair) = words_k;
  }
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
    store8(V + row * kPitchP + p, x);
    store8(dO + row * kPitchP + p, y);
  }
}

// A state or an adjoint, by copies that the next commit_group takes.
template <int Threads>
__device__ inline void stage_state(bf16* to, const bf16* from) {
  for (int i = threadIdx.x; i < kN * (kP / 8); i += Threads) {
    const int n = i / (kP / 8), p = i % (kP / 8) * 8;
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
// The phases lie where the gradient of the angles will: the kernel `chunk` reads them before it writes.
// One block per row of the batch and head.

template <int Threads>
__global__ void __launch_bounds__(Threads)
    mamba3_schedule(const float* angles, const float* adt, const float* dt, const float* trap, const float* start,
                    float* gamma, float* f, float* decay, unsigned* phases) {
  __shared__ unsigned ends[Threads / 32][32];
  begin();
  const int h = blockIdx.x % kHeads, b = blockIdx.x / kHeads, warp = warp_of_block(), lane = threadIdx.x % 32;
  const long long head = head_token(b, h, 0);
  adt += head, dt += head, trap += head, gamma += head, f += head, decay += head;

  for (int t = threadIdx.x; t < kSeq; t += Threads) {
    const float step = dt[t], mix = 1.0f / (1.0f + expf(-trap[t]));
    const float next = t + 1 < kSeq ? dt[t + 1] / (1.0f + expf(trap[t + 1])) : 0.0f;
    gamma[t] = mix * step;
    f[t] = mix * step + next;
  }
  for (int n = warp; n < kChunks; n += Threads / 32) {
    const int c = 2 * lane, t = n * kTokens + c;
    const float first = c < kTokens && t < kSeq ? log2_decay(1.0f, adt[t]) : 0.0f;
    const float both = first + (c + 1 < kTokens && t + 1 < kSeq ? log2_decay(1.0f, adt[t + 1]) : 0.0f);
    float sum = both;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const float other = __shfl_up_sync(0xffffffff, sum, offset);
      if (lane >= offset) sum += other;
    }
    float before = __shfl_up_sync(0xffffffff, sum, 1);
    if (lane == 0) before = 0.0f;
    if (c < kTokens && t < kSeq) decay[t] = (before + first);
    if (c + 1 < kTokens && t + 1 < kSeq) decay[t + 1] = sum;
  }

  // Phases, in rounds: a warp has kRun tokens of one.
  constexpr int kRun = 16, kRound = Threads / 32 * kRun;
  for (int pair = lane; pair < (kPairs + 31) / 32 * 32; pair += 32) {
    const bool there = pair < kPairs;
    const long long at = token_head(b, 0, h) * kPairs + min(pair, kPairs - 1);
    unsigned before = 0;
    if (kHasState && there) before = phase_of_radians(start[((long long)b * kHeads + h) * kPairs + pair]);
    for (int round = 0; round < kSeq; round += kRound) {
      const int begin = round + warp * kRun;
      float angle[kRun], step[kRun];
#pragma unroll
      for (int i = 0; i < kRun; ++i) {
        const int t = min(begin + i, kSeq - 1);
        angle[i] = angles[at + (long long)t * kHeads * kPairs];
        step[i] = dt[t];
      }
      if (const int later = begin + kRound + lane; lane < kRun && later < kSeq) {
        want(angles + at - lane + (long long)later * kHeads * kPairs);
      }
      unsigned sum[kRun], total = 0;
#pragma unroll
      for (int i = 0; i < kRun; ++i) {
        total += begin + i < kSeq ? phase_of_turns(turns_of_step(angle[i], step[i])) : 0;
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
        if (there && begin + i < kSeq) phases[at + (long long)(begin + i) * kHeads * kPairs] = ahead + sum[i];
      }
      __syncthreads();
    }
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// States before each chunk, walking forward (blockIdx.z 0), and adjoints of the states after it, walking backward (1).
// A block has a part of the columns of the state of one head, in registers; what it stores is [state][head_dim] in the
// order of tiles.

constexpr int kWalkN = WALK_COLUMNS;      // columns of a part
constexpr int kWalkThreads = 4 * kWalkN;  // a warp has 16 columns and half of head_dim
constexpr int kWalkPitch = kWalkN + 8;
constexpr int kWalkP = kWideP;
constexpr int kWalkNs = kWalkP / 16;               // 8-wide accumulators of a warp, 4 warps by 2
constexpr int kStored = kWalkNs % 4 == 0 ? 4 : 2;  // of them in one word
constexpr int kWalkShared = 2 * kRows * (kWalkPitch + kPitchP) * 2 + kRanks * (2 * kWalkN + 3 * kWalkP) * 4;

namespace {

constexpr int kKeyUnits = kRows * kWalkN / 8 / kWalkThreads;
constexpr int kValueUnits = (kRows * kWalkP / 8 + kWalkThreads - 1) / kWalkThreads;

// Column p of a tile, placed so that the accumulators of a thread are of neighbouring columns.
__device__ constexpr int place(int p) {
  const int base = p / (kWalkP / 2) * (kWalkP / 2), inner = p - base, lane = inner / (2 * kWalkNs),
            rest = inner % (2 * kWalkNs);
  return base + rest / 2 * 8 + 2 * lane + rest % 2;
}

// body(n, p, entry) for the entries of the state that a thread has.
template <class Body>
__device__ inline void each_entry(float (&state)[1][kWalkNs][4], int column0, int p0, Body body) {
#pragma unroll
  for (int i = 0; i < kWalkNs; ++i) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const int n = column0 + e / 2 * 8, p = p0 + 2 * i + e % 2;
      if (n < kN && p < kP) body(n, p, state[0][i][e]);
    }
  }
}

struct Raw {  // what a thread will stage of a chunk
  uint4 key[kKeyUnits], value[kValueUnits], gate[kValueUnits];
  uint4 phase[kKeyUnits];
  float scale[kValueUnits];
  float total;
};

}  // namespace

template <int Threads>
__global__ void __launch_bounds__(Threads, 512 / Threads)
    mamba3_walk(const bf16* q, const bf16* k, const bf16* v, const bf16* z, const bf16* dy, const bf16* normed,
                const float* q_bias, const float* k_bias, const float* mimo_v, const float* mimo_o, const float* mimo_z,
                const float* f, const float* decay, const unsigned* phases, const float* dt, const float* trap,
                const float* state_ssm, const float* state_k, const float* state_v, const float* d_final, bf16* states,
                bf16* adjoints, float* d_state_ssm, int first_direction) {
  extern __shared__ __align__(16) char memory[];
  bf16* keys = reinterpret_cast<bf16*>(memory);                          // 2 x [row][column]
  bf16* values = keys + 2 * kRows * kWalkPitch;                          // 2 x [row][place(p)]
  float* bias = reinterpret_cast<float*>(values + 2 * kRows * kPitchP);  // [rank][column of the tile]
  float* weights = bias + kRanks * kWalkN;                               // [rank][p]: mimo_v, or mimo_o
  float* gates = weights + kRanks * kWalkP;                              // [rank][p]: mimo_z

  const bool backward = blockIdx.z + first_direction == 1;
  const int part = blockIdx.x, h = blockIdx.y % kHeads, b = blockIdx.y / kHeads, g = h / kGroupHeads;
  const int thread = threadIdx.x, lane = thread % 32, warp = warp_of_block();
  const long long head = head_token(b, h, 0), param = ((long long)param_row(b) * kHeads + h) * kRank;
  f += head, decay += head;

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
  const int column0 = part * kWalkN + warp / 2 * 16 + lane / 4;
  const int p0 = warp % 2 * (kWalkP / 2) + lane % 4 * 2 * kWalkNs;
  const long long whole = ((long long)b * kHeads + h) * kP * kN;
  if (kHasState && !backward) {
    const float pending = dt[head] / (1.0f + expf(trap[head]));
    each_entry(state, column0, p0, [&](int n, int p, float& x) {
      x = state_ssm[whole + (long long)p * kN + column(n)];
      for (int r = 0; r < kRank; ++r) {
        const float key = state_k[(((long long)b * kHeads + h) * kRank + r) * kN + column(n)];
        const float value = state_v[((long long)b * kHeads + h) * kP + p];
        x += pending * key * value * (kSiso ? 1.0f : mimo_v[(param + r) * kP + p]);
      }
    });
  }
  if (kHasFinal && backward) {
    each_entry(state, column0, p0, [&](int n, int p, float& x) { x = d_final[whole + (long long)p * kN + column(n)]; });
  }

  const auto load = [&](int chunk) {
    Raw raw;
    const int t0 = chunk * kTokens, last = min(kTokens, kSeq - t0) - 1;
    raw.total = decay[t0 + last];
#pragma unroll
    for (int i = 0; i < kKeyUnits; ++i) {
      const int unit = thread + i * Threads, row = unit / (kWalkN / 8), c = row / kRanks, r = row % kRanks;
      const int pair = part * (kWalkN / 2) + unit % (kWalkN / 8) * 4;
      const bool there = c <= last && r < kRank && 2 * pair < kN;
      raw.key[i] = make_uint4(0, 0, 0, 0);
      raw.phase[i] = make_uint4(0, 0, 0, 0);
      if (there) {
        const bf16* from = (backward ? q : k) + q_at(b, t0 + c, r, g);
        if constexpr (kHalf) {
          const uint2 first = *reinterpret_cast<const uint2*>(from + pair);
          const uint2 second = *reinterpret_cast<const uint2*>(from + kN / 2 + pair);
          raw.key[i] = make_uint4(__byte_perm(first.x, second.x, 0x5410), __byte_perm(first.x, second.x, 0x7632),
                                  __byte_perm(first.y, second.y, 0x5410), __byte_perm(first.y, second.y, 0x7632));
        } else {
          raw.key[i] = *reinterpret_cast<const uint4*>(from + 2 * pair);
        }
        const unsigned* phase = phases + token_head(b, t0 + c, h) * kPairs + pair;
        if (kPairs % 4 == 0) {
          if (pair < kPairs) raw.phase[i] = *reinterpret_cast<const uint4*>(phase);
        } else {
          if (pair < kPairs) raw.phase[i].x = phase[0];
          if (pair + 1 < kPairs) raw.phase[i].y = phase[1];
          if (pair + 2 < kPairs) raw.phase[i].z = phase[2];
          if (pair + 3 < kPairs) raw.phase[i].w = phase[3];
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kValueUnits; ++i) {
      const int unit = thread + i * Threads, row = unit / (kWalkP / 8), c = row / kRanks, r = row % kRanks;
      const int p = unit % (kWalkP / 8) * 8, t = t0 + c;
      raw.value[i] = raw.gate[i] = make_uint4(0, 0, 0, 0);
      raw.scale[i] = 0.0f;
      if (c <= last && r < kRank && p < kP) {
        if (!backward) {
          raw.value[i] = *reinterpret_cast<const uint4*>(v + token_head(b, t, h) * kP + p);
          raw.scale[i] = f[t] * exp2_fast(raw.total - decay[t]);
        } else {
          raw.scale[i] = exp2_fast(decay[t]);
          if constexpr (kHasNorm) {
            raw.value[i] = *reinterpret_cast<const uint4*>(normed + ((head + t) * kRank + r) * kP + p);
          } else {
            raw.value[i] = *reinterpret_cast<const uint4*>(dy + dy_at(b, t, r, h) + p);
            if constexpr (kHasGate) raw.gate[i] = *reinterpret_cast<const uint4*>(z + token_head(b, t, h) * kP + p);
          }
        }
      }
    }
    return raw;
  };

  const auto stage = [&](const Raw& raw, int chunk, int buffer) {
    const int last = min(kTokens, kSeq - chunk * kTokens) - 1;
#pragma unroll
    for (int i = 0; i < kKeyUnits; ++i) {
      const int unit = thread + i * Threads, row = unit / (kWalkN / 8), c = row / kRanks, r = row % kRanks;
      const int inner = unit % (kWalkN / 8) * 8, pair = (part * kWalkN + inner) / 2;
      float x[8], offset[8], cosine[4], sine[4];
      unpack8(raw.key[i], x);
      load8(bias + r * kWalkN + inner, offset);
#pragma unroll
      for (int j = 0; j < 8; ++j) x[j] += offset[j];
      const unsigned phase[4] = {raw.phase[i].x, raw.phase[i].y, raw.phase[i].z, raw.phase[i].w};
#pragma unroll
      for (int j = 0; j < 4; ++j) sincos_of_phase_fast(phase[j], sine[j], cosine[j]);
      const bool there = c <= last && r < kRank;
      *reinterpret_cast<uint4*>(keys + (buffer * kRows + row) * kWalkPitch + inner) =
          there ? turned(x, cosine, sine, pair) : make_uint4(0, 0, 0, 0);
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
      bf16* to = values + (buffer * kRows + row) * kPitchP;
#pragma unroll
      for (int j = 0; j < 8; j += 2) store_pair(to + place(p + j), raw.scale[i] * x[j], raw.scale[i] * x[j + 1]);
    }
  };

  bf16* stored = backward ? adjoints : states;
  __syncthreads();
  Raw raw = load(backward ? kChunks - 1 : 0);
  for (int step = 0; step < kChunks; ++step) {
    const int chunk = backward ? kChunks - 1 - step : step, buffer = step % 2;
    const float total = raw.total;
    stage(raw, chunk, buffer);
    __syncthreads();
    if (step + 1 < kChunks) raw = load(backward ? chunk - 1 : chunk + 1);

    bf16* to = stored + state_at(b, h, chunk);
    const float keep = exp2_fast(total);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int n = column0 + half * 8;
#pragma unroll
      for (int i = 0; i < kWalkNs; i += kStored) {
        unsigned words[kStored];
#pragma unroll
        for (int j = 0; j < kStored; ++j) {
          words[j] = bfloat16_pair(state[0][i + j][2 * half], state[0][i + j][2 * half + 1]);
          state[0][i + j][2 * half] *= keep;
          state[0][i + j][2 * half + 1] *= keep;
        }
        const int p = p0 + 2 * i;
        if (n < kN && p < kP) {
          if constexpr (kStored == 4) {
            *reinterpret_cast<uint4*>(to + n * kP + p) = make_uint4(words[0], words[1], words[2], words[3]);
          } else {
            *reinterpret_cast<uint2*>(to + n * kP + p) = make_uint2(words[0], words[1]);
          }
        }
      }
    }
    add_product<1, kWalkNs, kRows / 16, true, false>(
        state, keys + buffer * kRows * kWalkPitch + warp / 2 * 16, kWalkPitch,
        values + buffer * kRows * kPitchP + warp % 2 * (kWalkP / 2), kPitchP);
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
constexpr int kBankBytes = 2 * (2 * kTileN + 2 * kTileP + 2 * kTileS + 2 * kTileM);
constexpr int kTableFloats = 4 * kTokens * kPairs;
constexpr int kSlotFloats = 12 * kRows + 5 * 4 * kRows + 16 + 8 + (kSiso ? 0 : 6 * kRanks * kWideP);
constexpr int kChunkShared = kBankBytes + 4 * (kTableFloats + kSlotFloats);
static_assert(kChunkShared == CHUNK_SHARED && kWalkShared == WALK_SHARED);

template <int Threads>
__global__ void __launch_bounds__(Threads, 1)
    mamba3_chunk(const bf16* q, const bf16* k, const bf16* v, const bf16* z, const bf16* dy, const bf16* normed,
                 const float* q_bias, const float* k_bias, const float* mimo_v, const float* mimo_o,
                 const float* mimo_z, const float* D, const float* gamma, const float* f, const float* decay,
                 const bf16* states, const bf16* adjoints, const float* d_final_angle, const float* d_final_k,
                 const float* d_final_v, float* angles, float* d_adt, float* d_f, float* d_gamma, bf16* d_v, bf16* d_z,
                 float* q_sums, float* k_sums, float* records) {
  extern __shared__ __align__(16) char memory[];
  bf16* Q = reinterpret_cast<bf16*>(memory);  // [row][column]
  bf16* K = Q + kTileN;
  bf16* V = K + kTileN;  // [row][p]
  bf16* dO = V + kTileP;
  bf16* S = dO + kTileP;  // [column][p]
  bf16* T = S + kTileS;
  bf16* M = T + kTileS;  // [row][row]
  bf16* dM = M + kTileM;
  float2* trig = reinterpret_cast<float2*>(dM + kTileM);               // [token][pair]: cosine, sine
  float* d_phase = reinterpret_cast<float*>(trig + kTokens * kPairs);  // [q, k][token][pair]
  float* rows = d_phase + 2 * kTokens * kPairs;                        // 2 x 6 x [row]
  float* along = rows + 12 * kRows;                                    // [4][row]: sums of strict dM QK along a row
  float* same = along + 4 * kRows;                                     // of dM QK / gamma in a token
  float* down = same + 4 * kRows;        // [4][row]: sums of strict dM QK / f down a column
  float* read = down + 4 * kRows;        // [4][row]: dO . Q s
  float* written = read + 4 * kRows;     // [4][row]: V . K T
  float* carried = written + 4 * kRows;  // [16]: <T, s>
  float* skipped = carried + 16;         // [8]: dO . V
  float* sum_v = skipped + 8;            // [2][rank][p]
  float *sum_o = sum_v + 2 * kRanks * kWideP, *sum_z = sum_o + 2 * kRanks * kWideP;

  const int thread = threadIdx.x, lane = thread % 32, warp = warp_of_block();
  int index = blockIdx.x;
  const int part = index % kParts;
  const int g = index / kParts % kGroups;
  const int chunk = index / (kParts * kGroups) % kChunks, b = index / (kParts * kGroups * kChunks);
  const int t0 = chunk * kTokens, last = min(kTokens, kSeq - t0) - 1;  // in the chunk
  const int lane_row = lane / 4, lane_column = lane % 4 * 2, rank = lane_row % kRanks;
  const bool has_rank = rank < kRank;

  for (int i = thread; i < kChunkShared / 4; i += Threads) reinterpret_cast<float*>(memory)[i] = 0.0f;
  __syncthreads();

  constexpr int kSide = Threads / 64, kAcross = kSide / 2;  // warps of one side, and of one row of blocks of [row][p]
  constexpr int kOwnN = kWideN / (8 * kSide), kOwnP = kWideP / (8 * kAcross);  // accumulators in a row of blocks
  constexpr int kTurned = (2 * kPairs - 1) / (8 * kSide) + 1;                  // of kOwnN, those that can rotate
  const bool output_side = warp < kSide;
  // A warp has all rows, and columns that lie apart: often the first half of all columns rotates.
  constexpr int kApart = 8 * kSide;
  const int n0 = warp % kSide * 8, column0 = n0 + lane_column;
  // Or 32 rows and a part of head_dim.
  const int across = warp % kAcross, m0 = warp / kAcross % 2 * 32, p0 = across * (kWideP / kAcross);
  float group_sum[4][kOwnN][4] = {};  // dQ or dK, turned back, over the heads

  const int head0 = g * kGroupHeads + part * kPartHeads;
  const int head1 = min(head0 + kPartHeads, (g + 1) * kGroupHeads);
  const auto ahead = [&](int h) {
    Ahead<Threads> next;
    load_keys<Threads>(next, q, k, reinterpret_cast<const unsigned*>(angles), b, t0, last, h);
    load_values<Threads>(next, v, z, dy, normed, b, t0, last, h);
    const long long head = head_token(b, h, t0);
    const int c = thread % kRows / kRanks;
    next.total = decay[head + last];
    next.decay = decay[head + min(c, last)];
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
    const long long record = record_at(b, chunk, h);
    float* row_a = rows + h % 2 * 6 * kRows;  // while one warp sums up a head, the others begin the next
    float *row_f = row_a + kRows, *row_gamma = row_f + kRows, *row_in = row_gamma + kRows;
    float *row_out = row_in + kRows, *row_left = row_out + kRows;  // exp(a), f exp(a_last - a), exp(a_last - a)
    const float a_last = now.total;
    if (thread < kRows) {
      row_a[thread] = now.decay;
      row_f[thread] = now.f;
      row_gamma[thread] = now.gamma;
      row_in[thread] = exp2_fast(now.decay);
      row_left[thread] = exp2_fast(a_last - now.decay);
      row_out[thread] = now.f * exp2_fast(a_last - now.decay);
    }
    stage_ahead<Threads>(now, Q, K, V, dO, trig, last, q_bias + row0 * kRank * kN, k_bias + row0 * kRank * kN,
                         mimo_v + row0 * kRank * kP, mimo_o + row0 * kRank * kP, mimo_z + row0 * kRank * kP);
    __syncthreads();

    // Rows against rows: blocks of 16 x 16 of the lower triangle.
#pragma unroll 1
    for (int block = warp; block < 16; block += 2 * kSide) {
      const int i0 = block / 4 * 16, j0 = block % 4 * 16;
      if (j0 > i0) continue;
      float qk[1][2][4] = {}, ov[1][2][4] = {};
      add_product<1, 2, kWideN / 16, false, true>(qk, Q + i0 * kPitchN, kPitchN, K + j0 * kPitchN, kPitchN);
      add_product<1, 2, kWideP / 16, false, true>(ov, dO + i0 * kPitchP, kPitchP, V + j0 * kPitchP, kPitchP);
      float right[2] = {}, token[2] = {};
      const bool earlier = j0 < i0;  // all of them
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        float column_sum[2] = {};
        const int j = j0 + n * 8 + lane_column;
        const float2 a_j = *reinterpret_cast<const float2*>(row_a + j),
                     f_j = *reinterpret_cast<const float2*>(row_f + j);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int i = i0 + half * 8 + lane_row;
          const float a_i = row_a[i];
          float m[2], dm[2];
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const float x = qk[0][n][2 * half + e], y = ov[0][n][2 * half + e];
            const int before = (i0 + lane_row) / kRanks + half * 8 / kRanks - tokens_of_columns(j0, n * 8, e);
            m[e] = dm[e] = 0.0f;
            if (earlier || before > 0) {
              const float e_ij = exp2_fast(a_i - (e ? a_j.y : a_j.x)), weight = e ? f_j.y : f_j.x;
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
          store_pair(M + i * kPitchM + j, m[0], m[1]);
          store_pair(dM + i * kPitchM + j, dm[0], dm[1]);
        }
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const float sum = sum_over_rows(column_sum[e]);
          if (lane_row == 0) down[block / 4 * kRows + j + e] = sum;
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float sum = quad_sum(right[half]), sum_same = quad_sum(token[half]);
        if (lane % 4 == 0) {
          along[block % 4 * kRows + i0 + half * 8 + lane_row] = sum;
          same[block % 4 * kRows + i0 + half * 8 + lane_row] = sum_same;
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
        unpack8(*reinterpret_cast<const uint4*>(S + at), x);
        unpack8(*reinterpret_cast<const uint4*>(T + at), y);
#pragma unroll
        for (int i = 0; i < 8; ++i) sum += x[i] * y[i];
      }
      sum = warp_sum(sum);
      if (lane == 0) carried[warp] = sum;
    }

    {  // The output and what depends on it, or dV: 32 rows and a quarter of head_dim for a warp.
      float d[2][kOwnP][4] = {};
      add_product<2, kOwnP, kWideN / 16, false, false>(d, (output_side ? Q : K) + m0 * kPitchN, kPitchN,
                                                       (output_side ? S : T) + p0, kPitchP);
      const bf16* other = (output_side ? dO : V) + p0 + lane_column;
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
          add_product<2, kOwnP, kRows / 16, false, false, Zeros::kAbove>(d, M + m0 * kPitchM, kPitchM, V + p0, kPitchP,
                                                                         m0 / 16);
          const long long first = token_head(b, t0 + first_token, h) * kP + p0 + lane_column;
          const bf16* up_from = dy + dy_at(b, t0 + first_token, rank, h) + p0 + lane_column;
          const long long param = (row0 * kRank + rank) * kP + p0 + lane_column;
#pragma unroll
          for (int n = 0; n < kOwnP; ++n) {
            const int p = p0 + n * 8 + lane_column;
            const bool inside = has_rank && p < kP;
            float2 fold = make_float2(1.0f, 1.0f), spread = fold, d_fold = make_float2(0.0f, 0.0f), d_spread = d_fold;
            float d_gate[8];  // [row of the thread][two columns]
            if (!kSiso && inside) {
              if constexpr (!kKeepsRank) fold = *reinterpret_cast<const float2*>(mimo_o + param + n * 8);
              if constexpr (kHasGate) spread = *reinterpret_cast<const float2*>(mimo_z + param + n * 8);
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
        add_product<2, kOwnP, kRows / 16, true, false, Zeros::kBelow>(d, M + m0, kPitchM, dO + p0, kPitchP, m0 / 16);
        float d_skip = 0.0f;
        const long long first = token_head(b, t0 + first_token, h) * kP + p0 + lane_column;
        const long long param = (row0 * kRank + rank) * kP + p0 + lane_column;
#pragma unroll
        for (int n = 0; n < kOwnP; ++n) {
          const int p = p0 + n * 8 + lane_column;
          const bool inside = has_rank && p < kP;
          float2 spread = make_float2(inside, inside), d_spread = make_float2(0.0f, 0.0f);
          float d_value[8];  // [row of the thread][two columns]
          if (!kSiso && inside) spread = *reinterpret_cast<const float2*>(mimo_v + param + n * 8);
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
              if (t0 + first_token + i * 8 / kRanks != kSeq - 1) continue;
              d_value[2 * i] += d_final_v[((long long)b * kHeads + h) * kP + p];
              d_value[2 * i + 1] += d_final_v[((long long)b * kHeads + h) * kP + p + 1];
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
      float d[4][kOwnN][4] = {};
      add_product<4, kOwnN, kWideP / 16, false, true, Zeros::kNone, kApart>(
          d, output_side ? dO : V, kPitchP, (output_side ? S : T) + n0 * kPitchP, kPitchP);
      const float* scale = output_side ? row_in : row_out;
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const float low = scale[m * 16 + lane_row], high = scale[m * 16 + 8 + lane_row];
#pragma unroll
        for (int n = 0; n < kOwnN; ++n) d[m][n][0] *= low, d[m][n][1] *= low, d[m][n][2] *= high, d[m][n][3] *= high;
      }
      if (output_side) {
        add_product<4, kOwnN, kRows / 16, false, false, Zeros::kAbove, kApart>(d, dM, kPitchM, K + n0, kPitchN);
      } else {
        add_product<4, kOwnN, kRows / 16, true, false, Zeros::kBelow, kApart>(d, dM, kPitchM, Q + n0, kPitchN);
      }
      const bf16* turned_rows = output_side ? Q : K;
      float* d_phase_here = d_phase + (output_side ? 0 : kTokens * kPairs);
      float turn[8 * kTurned];  // [row of the thread][pair]: what the pair's phase gets
#pragma unroll
      for (int n = 0; n < kOwnN; ++n) {
        const int at = column0 + n * kApart, pair = at / 2;
        const bool rotated = pair < kPairs;
        float bias_sum[2] = {};
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const int m = i / 2, half = i % 2, c = lane_row / kRanks + i * 8 / kRanks;
          float x = d[m][n][2 * half], y = d[m][n][2 * half + 1];
          if (kHasFinal && !output_side && c == last && t0 + c == kSeq - 1 && has_rank && at < kN) {
            const long long key = (((long long)b * kHeads + h) * kRank + rank) * kN;
            x += d_final_k[key + column(at)];
            y += d_final_k[key + column(at + 1)];
          }
          if (n < kTurned) turn[i * kTurned + n] = 0.0f;
          if (n < kTurned && rotated && c < kTokens) {
            const float2 was = load_pair(turned_rows + (lane_row + i * 8) * kPitchN + at);
            const float2 cs = trig[c * kPairs + pair];
            turn[i * kTurned + n] = y * was.x - x * was.y;
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
      share_over_ranks<8 * kTurned>(turn);
#pragma unroll
      for (int i = 0; i < 8 * kTurned / kRanks; ++i) {
        const int row = rank * (8 / kRanks) + i / kTurned, c = lane_row / kRanks + row * 8 / kRanks;
        const int pair = (column0 + i % kTurned * kApart) / 2;
        if (pair < kPairs && c < kTokens) d_phase_here[c * kPairs + pair] = turn[i];
      }
    }
    if (h + 1 < head1) now = ahead(h + 1);
    __syncthreads();
    if (h + 1 < head1) ahead_states(h + 1);

    for (int i = thread; i < (last + 1) * kPairs; i += Threads) {
      const int c = i / kPairs, pair = i % kPairs;
      float sum = d_phase[i] + d_phase[kTokens * kPairs + i];
      if (kHasFinal && t0 + c == kSeq - 1) sum += d_final_angle[((long long)b * kHeads + h) * kPairs + pair];
      angles[token_head(b, t0 + c, h) * kPairs + pair] = sum;
    }
    if constexpr (!kSiso) {
      for (int i = thread; i < kRank * kP; i += Threads) {
        const int slot = i / kP * kWideP + i % kP;
        records[record + kMimoVAt + i] = sum_v[slot] + sum_v[slot + kRanks * kWideP];
        if constexpr (!kHasNorm) {
          records[record + kMimoOAt + i] = sum_o[slot] + sum_o[slot + kRanks * kWideP];
          records[record + kMimoZAt + i] = sum_z[slot] + sum_z[slot + kRanks * kWideP];
        }
      }
    }
    if (warp == 1 && kHasSkip) {
      const float sum = warp_sum(lane < 8 ? skipped[lane] : 0.0f);
      if (lane == 0) records[record + kSkipAt] = sum;
    }
    if (warp == 0) {  // Decays and weights of tokens: a lane has two rows.
      float e[2], weight[2], diagonal[2], ends = 0.0f;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = 2 * lane + i;
        const auto four = [&](const float* slots) {
          return slots[row] + slots[kRows + row] + (slots[2 * kRows + row] + slots[3 * kRows + row]);
        };
        const float below = four(down), out = four(written);
        e[i] = four(along) - row_f[row] * below + row_in[row] * four(read) - row_out[row] * out;
        weight[i] = below + row_left[row] * out;
        diagonal[i] = four(same);
        ends += row_out[row] * out;
      }
      ends = warp_sum(ends) + exp2_fast(a_last) * warp_sum(lane < 16 ? carried[lane] : 0.0f);
      float suffix = e[0] + e[1];
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        const float other = __shfl_down_sync(0xffffffff, suffix, offset);
        if (lane + offset < 32) suffix += other;
      }
      const float after = __shfl_down_sync(0xffffffff, suffix, 1);
      if constexpr (kRanks == 1) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const int c = 2 * lane + i;
          if (c > last) continue;
          d_adt[head + c] = (i == 0 ? suffix : e[1] + (lane == 31 ? 0.0f : after)) + ends;
          d_f[head + c] = weight[i];
          d_gamma[head + c] = diagonal[i];
        }
      } else {
        float sum_f = weight[0] + weight[1], sum_gamma = diagonal[0] + diagonal[1];
#pragma unroll
        for (int offset = 1; offset < kRanks / 2; offset *= 2) {
          sum_f += __shfl_xor_sync(0xffffffff, sum_f, offset);
          sum_gamma += __shfl_xor_sync(0xffffffff, sum_gamma, offset);
        }
        const int c = 2 * lane / kRanks;
        if (2 * lane % kRanks == 0 && c <= last) {
          d_adt[head + c] = suffix + ends;
          d_f[head + c] = sum_f;
          d_gamma[head + c] = sum_gamma;
        }
      }
    }
  }

  float* sums = output_side ? q_sums : k_sums;
#pragma unroll
  for (int m = 0; m < 4; ++m) {
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
// Where there is a norm: the output is made again and its adjoint ahead of the norm is kept, [batch, heads, seq, rank,
// p]. One block per chunk, head and row of the batch.

constexpr int kNormalizeShared = 2 * (2 * kTileN + kTileP + kTileS + kTileM) + 8 * kTokens * kPairs +
                                 4 * (3 * kRows + 8 * kRows + 2 * (2 * kRanks + 1) * kWideP);
static_assert(kNormalizeShared == NORMALIZE_SHARED);

template <int Threads>
__global__ void __launch_bounds__(Threads)
    mamba3_normalize(const bf16* q, const bf16* k, const bf16* v, const bf16* z, const bf16* dy, const float* q_bias,
                     const float* k_bias, const float* mimo_v, const float* mimo_o, const float* mimo_z, const float* D,
                     const float* norm_weight, const float* gamma, const float* f, const float* decay,
                     const unsigned* phases, const bf16* states, bf16* normed, bf16* d_z, float* records) {
  static_assert(Threads == 256);
  extern __shared__ __align__(16) char memory[];
  bf16* Q = reinterpret_cast<bf16*>(memory);
  bf16* K = Q + kTileN;
  bf16* V = K + kTileN;
  bf16* S = V + kTileP;
  bf16* M = S + kTileS;
  float2* trig = reinterpret_cast<float2*>(M + kTileM);
  float* row_a = reinterpret_cast<float*>(trig + kTokens * kPairs);
  float *row_f = row_a + kRows, *row_gamma = row_f + kRows;
  float *squares = row_gamma + kRows, *products = squares + 4 * kRows;        // [4][row]: of o, and of m hat
  float *sum_o = products + 4 * kRows, *sum_z = sum_o + 2 * kRanks * kWideP;  // [2][rank][p]
  float* sum_weight = sum_z + 2 * kRanks * kWideP;                            // [2][p]

  const int chunk = blockIdx.x, h = blockIdx.y % kHeads, b = blockIdx.y / kHeads;
  const int lane = threadIdx.x % 32, warp = warp_of_block(), lane_row = lane / 4, lane_column = lane % 4 * 2;
  const int t0 = chunk * kTokens, last = min(kTokens, kSeq - t0) - 1, rank = lane_row % kRanks;
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
  }
  stage_keys<Threads>(Q, K, trig, q, k, q_bias, k_bias, phases, b, t0, last, h);
  for (int unit = threadIdx.x; unit < kRows * (kP / 8); unit += Threads) {
    const int row = unit / (kP / 8), p = unit % (kP / 8) * 8, c = row / kRanks, r = row % kRanks;
    float x[8] = {};
    if (c <= last && r < kRank) {
      const uint4 words = *reinterpret_cast<const uint4*>(v + token_head(b, t0 + c, h) * kP + p);
      expanded(words, mimo_v + row0 * kRank * kP, r * kP + p, x);
    }
    store8(V + row * kPitchP + p, x);
  }
  __syncthreads();

  for (int block = warp; block < 16; block += Threads / 32) {
    const int i0 = block / 4 * 16, j0 = block % 4 * 16;
    if (j0 > i0) continue;
    float qk[1][2][4] = {};
    add_product<1, 2, kWideN / 16, false, true>(qk, Q + i0 * kPitchN, kPitchN, K + j0 * kPitchN, kPitchN);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int i = i0 + half * 8 + lane_row, j = j0 + n * 8 + lane_column;
        float m[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int ci = i / kRanks, cj = (j + e) / kRanks;
          const float w = cj < ci ? exp2_fast(row_a[i] - row_a[j + e]) * row_f[j + e] : row_gamma[i];
          m[e] = cj <= ci ? qk[0][n][2 * half + e] * w : 0.0f;
        }
        store_pair(M + i * kPitchM + j, m[0], m[1]);
      }
    }
  }
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  __syncthreads();

  constexpr int kOwnP = kWideP / 32;
  const int m0 = warp / 4 * 32, p0 = warp % 4 * (kWideP / 4);
  float d[2][kOwnP][4] = {};
  add_product<2, kOwnP, kWideN / 16, false, false>(d, Q + m0 * kPitchN, kPitchN, S + p0, kPitchP);
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    const float low = exp2_fast(row_a[m0 + m * 16 + lane_row]), high = exp2_fast(row_a[m0 + m * 16 + 8 + lane_row]);
#pragma unroll
    for (int n = 0; n < kOwnP; ++n) d[m][n][0] *= low, d[m][n][1] *= low, d[m][n][2] *= high, d[m][n][3] *= high;
  }
  add_product<2, kOwnP, kRows / 16, false, false, Zeros::kAbove>(d, M + m0 * kPitchM, kPitchM, V + p0, kPitchP,
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
      if constexpr (!kSiso && !kKeepsRank) fold = *reinterpret_cast<const float2*>(mimo_o + param);
      if constexpr (!kSiso && kHasGate) spread = *reinterpret_cast<const float2*>(mimo_z + param);
      weight = *reinterpret_cast<const float2*>(norm_weight + row0 * kP + p);
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
  for (int p = threadIdx.x; p < kP; p += Threads) record[kNormAt + p] = sum_weight[p] + sum_weight[kWideP + p];
  if constexpr (!kSiso) {
    for (int i = threadIdx.x; i < kRank * kP; i += Threads) {
      const int slot = i / kP * kWideP + i % kP;
      record[kMimoOAt + i] = sum_o[slot] + sum_o[slot + kRanks * kWideP];
      record[kMimoZAt + i] = sum_z[slot] + sum_z[slot + kRanks * kWideP];
    }
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Sums over the parts of a group, back in the order of memory. blockIdx.y: 0 for q, 1 for k. A thread has 8 columns.

template <int Threads>
__global__ void __launch_bounds__(Threads)
    mamba3_group_sums(const float* q_sums, const float* k_sums, bf16* d_q, bf16* d_k) {
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
  bf16* to = (blockIdx.y ? d_k : d_q) + unit / (kN / 8) * kN;
  const int pair = int(unit % (kN / 8)) * 4;
  if constexpr (kHalf) {
    *reinterpret_cast<uint2*>(to + pair) = make_uint2(bfloat16_pair(x[0], x[2]), bfloat16_pair(x[4], x[6]));
    *reinterpret_cast<uint2*>(to + kN / 2 + pair) = make_uint2(bfloat16_pair(x[1], x[3]), bfloat16_pair(x[5], x[7]));
  } else {
    *reinterpret_cast<uint4*>(to + 2 * pair) = make_uint4(bfloat16_pair(x[0], x[1]), bfloat16_pair(x[2], x[3]),
                                                          bfloat16_pair(x[4], x[5]), bfloat16_pair(x[6], x[7]));
  }
}

// Sums of the chunks' records: gradients of the parameters, one row per entry of the batch (blockIdx.y). A thread has
// two neighbouring elements.
template <int Threads, typename Record>
__global__ void __launch_bounds__(Threads)
    mamba3_parameter_sums(const Record* records, float* d_q_bias, float* d_k_bias, float* d_mimo_v, float* d_mimo_o,
                          float* d_mimo_z, float* d_norm_weight, float* d_D) {
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
  const Record* from = records + (long long)b * kChunks * kHeads * kRecord + i;
  float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll 8
  for (int n = 0; n < kChunks; ++n) {
    float2 own;
    if constexpr (sizeof(Record) == 2) {
      own = unpack(*reinterpret_cast<const unsigned*>(from + (long long)n * kHeads * kRecord));
    } else {
      own = *reinterpret_cast<const float2*>(from + (long long)n * kHeads * kRecord);
    }
    sum.x += own.x, sum.y += own.y;
  }
  if (second) to[second] = sum.y;
  *to = sum.x;
}

// Along time, of one head: d_phases (in the memory of d_angles) summed from the end, and with them dt, trap, angles.
template <int Threads>
__global__ void __launch_bounds__(Threads)
    mamba3_time_gradients(const float* angles, const float* dt, const float* trap, const float* d_f,
                          const float* d_gamma, float* d_angles, float* d_dt, float* d_trap, float* d_start) {
  constexpr int kRun = 8, kRound = Threads / 32 * kRun, kOwn = (kPairs + 31) / 32;  // tokens of a warp, in rounds
  __shared__ float sums[Threads / 32][kOwn * 32];
  begin();
  const int h = blockIdx.x % kHeads, b = blockIdx.x / kHeads, warp = warp_of_block(), lane = threadIdx.x % 32;
  const long long head = head_token(b, h, 0), first = token_head(b, 0, h) * kPairs;
  dt += head, trap += head, d_f += head, d_gamma += head, d_dt += head, d_trap += head;
  float after[kOwn] = {};  // of all later rounds
  for (int round = (kSeq - 1) / kRound * kRound; round >= 0; round -= kRound) {
    const int begin = round + warp * kRun;
    float sum[kOwn][kRun], rate[kOwn][kRun];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
#pragma unroll
      for (int j = 0; j < kRun; ++j) {
        const bool there = lane + 32 * i < kPairs && begin + j < kSeq;
        const long long at = first + (long long)(begin + j) * kHeads * kPairs + lane + 32 * i;
        sum[i][j] = there ? d_angles[at] : 0.0f;
        rate[i][j] = there ? angles[at] : 0.0f;
      }
    }
    if (const int earlier = begin - kRound + lane % kRun; lane < 2 * kRun && earlier >= 0) {
      want((lane < kRun ? angles : d_angles) + first + (long long)earlier * kHeads * kPairs);
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
#pragma unroll
      for (int j = kRun - 2; j >= 0; --j) sum[i][j] += sum[i][j + 1];
      sums[warp][32 * i + lane] = sum[i][0];
    }
    __syncthreads();
    float own[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      own[i] = after[i];
      for (int w = Threads / 32 - 1; w >= 0; --w) {
        const float other = sums[w][32 * i + lane];
        if (w > warp) own[i] += other;
        after[i] += other;
      }
    }
    float d_step[kRun];
#pragma unroll
    for (int j = 0; j < kRun; ++j) {
      const int t = begin + j;
      const float step = dt[min(t, kSeq - 1)];
      d_step[j] = 0.0f;
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const float tanh_angle = tanhf(rate[i][j]), total = own[i] + sum[i][j];
        if (lane + 32 * i < kPairs && t < kSeq) {
          d_angles[first + (long long)t * kHeads * kPairs + lane + 32 * i] =
              total * kPi * step * (1.0f - tanh_angle * tanh_angle);
          d_step[j] += total * kPi * tanh_angle;
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
    if (lane % 4 == 0 && t < kSeq) {
      const float step = dt[t], mix = 1.0f / (1.0f + expf(-trap[t]));
      const float weight = d_f[t], own_weight = weight + d_gamma[t], before = t > 0 ? d_f[t - 1] : 0.0f;
      d_dt[t] = sum_step + mix * own_weight + (1.0f - mix) * before;
      d_trap[t] = step * (own_weight - before) * mix * (1.0f - mix);
    }
    __syncthreads();
  }
  if (kHasState && warp == 0) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (lane + 32 * i < kPairs) d_start[((long long)b * kHeads + h) * kPairs + lane + 32 * i] = after[i];
    }
  }
}

// What the initial state gives beyond its matrix, whose gradient d_ssm is there: one block per row and head.
template <int Threads>
__global__ void __launch_bounds__(Threads)
    mamba3_state_gradients(const float* dt, const float* trap, const float* mimo_v, const float* state_k,
                           const float* state_v, const float* d_ssm, float* d_k, float* d_v, float* d_mimo_v,
                           float* d_dt, float* d_trap) {
  __shared__ float pending[kRank][kP], total[8];
  begin();
  const int h = blockIdx.x % kHeads, b = blockIdx.x / kHeads, lane = threadIdx.x % 32, warp = warp_of_block();
  const long long row = (long long)b * kHeads + h, param = ((long long)param_row(b) * kHeads + h) * kRank * kP;
  const float step = dt[row * kSeq], mix = 1.0f / (1.0f + expf(-trap[row * kSeq])), weight = (1.0f - mix) * step;
  d_ssm += row * kP * kN, state_k += row * kRank * kN, state_v += row * kP;

  for (int i = warp; i < kRank * kP; i += 8) {  // sums over the state's columns
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
      if (!kSiso) d_mimo_v[row * kRank * kP + r * kP + p] += weight * pending[r][p] * state_v[p];
    }
    d_v[row * kP + p] = weight * sum;
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
    d_k[row * kRank * kN + i] = weight * sum;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    float sum = 0.0f;
    for (int w = 0; w < 8; ++w) sum += total[w];
    d_dt[row * kSeq] += (1.0f - mix) * sum;
    d_trap[row * kSeq] -= step * sum * mix * (1.0f - mix);
  }
}

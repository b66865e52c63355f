// All gradients that one chunk of a Mamba-3 scan gives, on Hopper: products by wgmma, from tiles in shared memory.
//
// Notation of a chunk, a the running sum of adt in it, s the state before it, T the adjoint of the state after it,
// f = gamma + delta of the next token:
//
//   M = Q K' w,  dM = dO V' w,  w_ij = exp(a_i - a_j) f_j for an earlier token j, gamma_i for the same one
//   dV = M' dO + f exp(a_last - a) K T          dQ = dM K + exp(a) dO s'       dK = dM' Q + f exp(a_last - a) V T'
//
// A block takes the heads of a group, or of a part of one, in order, so that the gradients of q and k are summed up in
// registers. Its four warpgroups work at the same time: the query side and the key side make half of M and dM each,
// then dQ and dK; the third the next head's values, then dV, the output and what depends on it; the fourth the next
// head's queries and keys, and the end of the sums of the head before.
//
// Instructions come from a cache of 32 KB at full speed, beyond it at half of that. The loops of all warpgroups are
// more, so both sides run one program in step, and what can be is a short loop instead of a long sequence.

#include "mamba3_backward_tiles.cuh"

namespace jax_ssd {

struct ChunkArrays {
  const bf16 *q, *k, *v, *z, *dy;
  const float *q_bias, *k_bias, *mimo_v, *mimo_o, *mimo_z, *D, *gamma, *f, *decay;
  const unsigned short* phases;
  const bf16 *states, *adjoints;
  const float *d_final_angle, *d_final_k, *d_final_v;
  float *angles, *d_adt, *d_f, *d_gamma;
  bf16 *d_v, *d_z, *d_q, *d_k;
  float *q_sums, *k_sums;
  bf16* records;
  int batch, seq, parts;
};

template <class C>
struct ChunkMemory {
  // Floats or pairs of 16 bits in a row: some more than there are, so that rows begin in different banks.
  static constexpr int kTurnPitch = C::kPairs + 4, kWidePitch = C::kP + 8, kBiasPitch = C::kN / 2 + 4;
  static constexpr bool kOutput = C::kGate || C::kWeighted;  // something depends on the output
  static constexpr bool kSlopes = C::kGate && !C::kWeighted;
  static constexpr int kKinds = C::kWeighted ? 3 : 0;
  // What phases get of a side: see `turn_at`. Where that is much, there is no room for both, nor to collect rows of dV.
  static constexpr int kTurned = C::kTokens * (C::kPairs + (C::kPairs % 32 ? 4 : 0)) * 4;
  static constexpr bool kTurnsApart = kTurned <= kPanel, kValuesByRows = C::kWeighted || kTurnsApart;
  // Tiles of an input, twice; slopes: of the output's gate, times the output's adjoint, without weights of ranks.
  static constexpr int kQ = 0, kK = 2 * kPanel, kV = 4 * kPanel, kAdjoint = 5 * kPanel, kSlope = 6 * kPanel,
                       kInput = (kSlopes ? 7 : 6) * kPanel;
  static constexpr int kState = 2 * kInput, kStateAdjoint = kState + 2 * kPanel, kM = kStateAdjoint + 2 * kPanel,
                       kAdjointM = kM + kPanel, kOutputs = kAdjointM + kPanel,
                       kValueOut = kOutputs + (C::kWeighted ? kPanel : 0),
                       kTables = kValueOut + (kValuesByRows ? kPanel : 0);  // the last two: of all ranks
  // Tables that go with an input, twice: turns of pairs, dy, z and v as they are, weights of ranks, of rows, sums.
  static constexpr int kTurns = 0, kRaw = kTurns + C::kTokens * kTurnPitch * 4,
                       kWeights = kRaw + kKinds * C::kTokens * kWidePitch * 2,
                       kRowsAt = kWeights + (C::kWeighted ? 3 * C::kRank * kWidePitch * 4 : 0),
                       kSums = kRowsAt + 6 * C::kRows * 4, kTable = kSums + (10 * C::kRows + 16) * 4;
  static constexpr int kPhases = kTables + 2 * kTable,
                       kBias = kPhases + (kTurnsApart ? 2 : 1) * kTurned,  // [side][warp][rank][two columns]
      kBarriers = kBias + 8 * C::kRank * kBiasPitch * 4, kBytes = kBarriers + 96;

  char* base;
  // Barriers.
  __device__ unsigned full(int buffer) const { return at(kBarriers + 8 * buffer); }
  __device__ unsigned empty(int buffer) const { return at(kBarriers + 16 + 8 * buffer); }
  __device__ unsigned state_here() const { return at(kBarriers + 32); }
  __device__ unsigned adjoint_here() const { return at(kBarriers + 40); }
  __device__ unsigned products_here() const { return at(kBarriers + 48); }
  __device__ unsigned state_free() const { return at(kBarriers + 56); }
  __device__ unsigned adjoint_free() const { return at(kBarriers + 64); }
  __device__ unsigned products_free() const { return at(kBarriers + 72); }
  __device__ unsigned values_here() const { return at(kBarriers + 80); }
  __device__ unsigned values_free() const { return at(kBarriers + 88); }

  __device__ unsigned at(int offset) const { return shared_address(base) + offset; }
  template <typename T>
  __device__ T* table(int buffer, int offset) const {
    return reinterpret_cast<T*>(base + kTables + buffer * kTable + offset);
  }
  __device__ float* rows(int buffer, int which) const { return table<float>(buffer, kRowsAt) + which * C::kRows; }
  // Sums: strict dM QK along a row, and dM QK / gamma in a token, each of two halves; dO . Q s; V . K T; strict
  // dM QK / f down a column, of four warps; <T, s> and dO . V, of eight warps.
  __device__ float* sums(int buffer, int which) const { return table<float>(buffer, kSums) + which * C::kRows; }
};

enum Rows { kDecay, kF, kGamma, kIn, kOut, kLeft };  // a; f; gamma; exp(a); f exp(a_last - a); exp(a_last - a)
enum Sums { kAlong, kSame = 2, kRead = 4, kWritten, kDown, kCarried = 10 };

// Where a block is.
template <class C>
struct ChunkPlace {
  int b, chunk, chunks, group, part, t0, last, head, heads;  // last: token in the chunk; from that head on, so many
  long long token;                                           // the chunk's first, of all rows

  __device__ ChunkPlace(const ChunkArrays& in) {
    int index = blockIdx.x;
    part = index % in.parts, index /= in.parts;
    group = index % C::kGroups, index /= C::kGroups;
    chunks = (in.seq + C::kTokens - 1) / C::kTokens;
    chunk = index % chunks, b = index / chunks;
    t0 = chunk * C::kTokens;
    last = min(C::kTokens, in.seq - t0) - 1;
    token = (long long)b * in.seq + t0;
    const int each = (C::kGroupHeads + in.parts - 1) / in.parts;
    head = group * C::kGroupHeads + min(part * each, C::kGroupHeads);
    heads = min(each, (group + 1) * C::kGroupHeads - head);
  }
  // Where `size` elements of a token and head begin: a long long, and what is an int inside a chunk.
  __device__ long long token_head(int c, int h, int size) const {
    return token * (C::kHeads * size) + (c * C::kHeads + h) * size;
  }
  __device__ long long head_token(const ChunkArrays& in, int h) const {
    return ((long long)b * C::kHeads + h) * in.seq + t0;
  }
  __device__ long long q_at(int c, int r) const {
    return token * (C::kRank * C::kGroups * C::kN) + ((c * C::kRank + r) * C::kGroups + group) * C::kN;
  }
  __device__ long long param(int h) const { return (long long)C::param_row(b) * C::kHeads + h; }
  __device__ long long state(int h) const {
    return (((long long)b * C::kHeads + h) * chunks + chunk) * (C::kN * C::kP);
  }
  __device__ bf16* record(const ChunkArrays& in, int h) const {
    return in.records + (((long long)b * chunks + chunk) * C::kHeads + h) * C::kRecord;
  }
};

// ---------------------------------------------------------------------------------------------------------------------
// The fourth warpgroup.

constexpr int kTeam = 128;  // threads of a warpgroup

// A head's weights of rows, by one warp: a lane has two rows.
template <class C>
struct RowWeights {
  float total, a[2], f[2], gamma[2];

  static __device__ __forceinline__ int row(int i) { return threadIdx.x % 32 + 32 * i; }

  __device__ __forceinline__ void load(const ChunkArrays& in, const ChunkPlace<C>& place, int h) {
    const long long head = place.head_token(in, h);
    total = in.decay[head + place.last];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int c = row(i) / C::kRank;
      const bool there = c <= place.last;
      a[i] = there ? in.decay[head + c] : total;
      f[i] = there ? in.f[head + c] : 0.0f;
      gamma[i] = there ? in.gamma[head + c] : 0.0f;
    }
  }
  __device__ __forceinline__ void store(const ChunkMemory<C>& memory, int buffer) const {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float left = exp2_fast(total - a[i]);
      memory.rows(buffer, kDecay)[row(i)] = a[i];
      memory.rows(buffer, kF)[row(i)] = f[i];
      memory.rows(buffer, kGamma)[row(i)] = gamma[i];
      memory.rows(buffer, kIn)[row(i)] = exp2_fast(a[i]);
      memory.rows(buffer, kOut)[row(i)] = f[i] * left;
      memory.rows(buffer, kLeft)[row(i)] = left;
    }
  }
};

// Where a warpgroup's thread finds phases: four pairs of token `token(i)`.
template <class C>
struct TurnUnits {
  static constexpr int kUnits = C::kPairs / 4, kEach = (C::kTokens * kUnits + kTeam - 1) / kTeam;
  static constexpr bool kWhole = C::kTokens * kUnits % kTeam == 0;
  int thread;
  uint4 turns[kEach];  // cosines and sines in 16 bits

  __device__ __forceinline__ TurnUnits() : thread(thread_anew()) {}
  __device__ __forceinline__ int token(int i) const { return (thread + i * kTeam) / kUnits; }
  __device__ __forceinline__ int pair(int i) const { return (thread + i * kTeam) % kUnits * 4; }

  __device__ __forceinline__ void load(const ChunkArrays& in, const ChunkPlace<C>& place, int h) {
    uint2 phases[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const long long at = (place.head_token(in, h) + min(token(i), place.last)) * C::kPairs;
      phases[i] = __ldg(reinterpret_cast<const uint2*>(in.phases + at + pair(i)));
    }
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      float sine[4], cosine[4];
      sincos_of_phases(phases[i], sine, cosine);
      turns[i] = make_uint4(Pair<__half>::of(cosine[0], sine[0]), Pair<__half>::of(cosine[1], sine[1]),
                            Pair<__half>::of(cosine[2], sine[2]), Pair<__half>::of(cosine[3], sine[3]));
    }
  }
  // To a table [token][pair].
  __device__ __forceinline__ void store(unsigned* table) const {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      if (!kWhole && token(i) >= C::kTokens) continue;
      *reinterpret_cast<uint4*>(table + token(i) * ChunkMemory<C>::kTurnPitch + pair(i)) = turns[i];
    }
  }
};

// Lines that a later head will be loaded from.
template <class C>
__device__ __forceinline__ void want_head(const ChunkArrays& in, const ChunkPlace<C>& place, int h) {
#pragma unroll
  for (int i = thread_anew(); i < 4 * C::kTokens; i += kTeam) {
    const int which = i / C::kTokens, c = min(i % C::kTokens, place.last);
    if (which == 0) want(in.phases + (place.head_token(in, h) + c) * C::kPairs);
    if (which == 1) want(in.v + place.token_head(c, h, C::kP));
    if (which == 2) want(in.dy + place.token_head(c, h, C::kP));
    if (which == 3 && C::kGate) want(in.z + place.token_head(c, h, C::kP));
  }
}

// Rows of V, the values of every rank, and of dO, the adjoint of the output: dy, unfolded and ungated; of the i-th
// head. What is needed as it is, is copied to its place. By the output's warpgroup, which would only wait for M
// otherwise.
template <class C>
__device__ __forceinline__ void stage_values(const ChunkArrays& in, const ChunkPlace<C>& place,
                                             const ChunkMemory<C>& memory, int i) {
  using Memory = ChunkMemory<C>;
  constexpr int kKind = C::kTokens * Memory::kWidePitch;  // numbers of a table of dy, z or v
  const int first = threadIdx.x % kTeam / 8, piece = threadIdx.x % 8, h = place.head + i, buffer = i % 2;
  char* values = memory.base + buffer * Memory::kInput + Memory::kV;
  const bf16* raw = memory.template table<bf16>(buffer, Memory::kRaw) + piece * 8;
  bf16* raw_v = memory.template table<bf16>(buffer, Memory::kRaw) + 2 * kKind + piece * 8;
  const float* weights = memory.template table<float>(buffer, Memory::kWeights) + piece * 8;
  constexpr int kUnits = C::kTokens * 8 / kTeam;
  const unsigned tile = shared_address(values), row = shared_address(raw), slopes = tile + Memory::kSlope - Memory::kV;
  const auto token = [&](int j) { return first + j * (kTeam / 8); };
  const auto place_of = [&](int j) { return place.token_head(min(token(j), place.last), h, C::kP) + piece * 8; };
  // Tables of dy and z are this warpgroup's own; all else may still be in use.
  uint4 own[kUnits];
#pragma unroll
  for (int j = 0; j < kUnits; ++j) {
    const unsigned to = row + token(j) * (Memory::kWidePitch * 2);
    const bool there = token(j) <= place.last;
    if constexpr (C::kWeighted) {
      copy_piece(to, in.dy + place_of(j), there);
      if constexpr (C::kGate) copy_piece(to + 2 * kKind, in.z + place_of(j), there);
    }
    if constexpr (Memory::kSlopes) copy_piece(slopes + swizzled(token(j), piece), in.z + place_of(j), there);
    if constexpr (Memory::kOutput) {
      own[j] = make_uint4(0, 0, 0, 0);
      if (there) own[j] = read_once((C::kWeighted ? in.v : in.dy) + place_of(j));
    }
  }
  pieces_commit();
  if (i >= 2) barrier_wait(memory.empty(buffer), (i / 2 - 1) & 1);
  if (C::kWeighted && i >= 2) barrier_wait(memory.values_free(), i & 1);
#pragma unroll
  for (int j = 0; j < kUnits; ++j) {
    const unsigned to = swizzled(token(j), piece);
    const bool there = token(j) <= place.last;
    if constexpr (C::kWeighted) {
      *reinterpret_cast<uint4*>(raw_v + token(j) * Memory::kWidePitch) = own[j];
    } else {
      copy_piece(tile + to, in.v + place_of(j), there);
      if constexpr (Memory::kOutput) {
        *reinterpret_cast<uint4*>(values + Memory::kAdjoint - Memory::kV + to) = own[j];
      } else {
        copy_piece(tile + Memory::kAdjoint - Memory::kV + to, in.dy + place_of(j), there);
      }
    }
  }
  if constexpr (C::kWeighted) {
    constexpr int kEach = C::kRank * C::kP / 4;
    const unsigned to = shared_address(memory.template table<float>(buffer, Memory::kWeights));
#pragma unroll
    for (int j = threadIdx.x % kTeam; j < (C::kGate ? 3 : 2) * kEach; j += kTeam) {
      const int which = j / kEach, r = j % kEach / (C::kP / 4), column = j % (C::kP / 4) * 4;
      const float* from = which == 0 ? in.mimo_v : which == 1 ? in.mimo_o : in.mimo_z;
      copy_piece(to + ((which * C::kRank + r) * Memory::kWidePitch + column) * 4,
                 from + (place.param(h) * C::kRank + r) * C::kP + column);
    }
  }
  pieces_commit();
  pieces_wait<C::kWeighted || !Memory::kOutput ? 0 : 1>();
  if constexpr (C::kWeighted) {
    named_barrier(4, kTeam);  // weights are copied by others
#pragma unroll 1
    for (int c = first; c < C::kTokens; c += kTeam / 8) {
      const auto piece_of = [&](int kind) {
        return *reinterpret_cast<const uint4*>(raw + c * Memory::kWidePitch + kind * kKind);
      };
      float value[8], up[8], gate[8];
      unpack8(piece_of(0), up);
      if constexpr (C::kGate) unpack8(piece_of(1), gate);
      unpack8(piece_of(2), value);
#pragma unroll 1
      for (int r = 0; r < C::kRank; ++r) {
        float x[8], y[8];
#pragma unroll
        for (int e = 0; e < 8; e += 4) {
          float4 weight_v, weight_o, weight_z = make_float4(1.0f, 1.0f, 1.0f, 1.0f);
          const float* from = weights + r * Memory::kWidePitch + e;
          weight_v = *reinterpret_cast<const float4*>(from);
          weight_o = *reinterpret_cast<const float4*>(from + C::kRank * Memory::kWidePitch);
          if constexpr (C::kGate) weight_z = *reinterpret_cast<const float4*>(from + 2 * C::kRank * Memory::kWidePitch);
          const float own_v[4] = {weight_v.x, weight_v.y, weight_v.z, weight_v.w},
                      own_o[4] = {weight_o.x, weight_o.y, weight_o.z, weight_o.w},
                      own_z[4] = {weight_z.x, weight_z.y, weight_z.z, weight_z.w};
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            x[e + i] = value[e + i] * own_v[i];
            y[e + i] = up[e + i] * own_o[i];
            if constexpr (C::kGate) y[e + i] *= silu_of_half(0.5f * gate[e + i] * own_z[i]);
          }
        }
        const unsigned to = swizzled(c * C::kRank + r, piece);
        *reinterpret_cast<uint4*>(values + to) = pack8(x);
        *reinterpret_cast<uint4*>(values + Memory::kAdjoint - Memory::kV + to) = pack8(y);
      }
    }
  }
  if constexpr (Memory::kSlopes) {
#pragma unroll 1
    for (int c = first; c < C::kTokens; c += kTeam / 8) {
      uint4* adjoint = reinterpret_cast<uint4*>(values + Memory::kAdjoint - Memory::kV + swizzled(c, piece));
      uint4* slope = reinterpret_cast<uint4*>(values + Memory::kSlope - Memory::kV + swizzled(c, piece));
      float up[8], gate[8];
      unpack8(*adjoint, up), unpack8(*slope, gate);
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const float half_gate = 0.5f * gate[e], tanh_gate = tanh_fast(half_gate), on = 0.5f + 0.5f * tanh_gate;
        gate[e] = up[e] * (on + on * (half_gate - half_gate * tanh_gate));
        up[e] *= half_gate + half_gate * tanh_gate;
      }
      *adjoint = pack8(up), *slope = pack8(gate);
    }
  }
  if constexpr (!C::kWeighted && Memory::kOutput) pieces_wait<0>();
  fence_async_proxy();
  __syncwarp();
  if (threadIdx.x % 32 == 0) barrier_arrive(memory.full(buffer));
}

// Rows of Q and K, which a thread copies to where it will bias and turn them. It keeps its columns and its rank, its
// rows are eight apart; a warp has columns that turn, or none. Beyond the last token it is that token's again: what
// these rows meet is zero.
template <class C>
struct KeyRows {
  static constexpr int kNext = 8 / C::kRank;  // tokens from one row of a thread to the next
  int unit, first;
  char* to;
  float q_bias[8], k_bias[8];

  __device__ __forceinline__ KeyRows(const ChunkMemory<C>& memory, int buffer) {
    const int thread = thread_anew();
    unit = thread / 64 * 8 + thread % 8, first = thread / 8 % 8;
    to = memory.base + buffer * ChunkMemory<C>::kInput + ChunkMemory<C>::kQ + unit / 8 * kPanel +
         swizzled(first, unit % 8);
  }

  __device__ __forceinline__ void copy(const ChunkArrays& in, const ChunkPlace<C>& place) const {
    const long long at = place.q_at(0, first % C::kRank) + (C::kHalf ? 4 : 8) * unit;
    const bf16 *q = in.q + at, *k = in.k + at;
    asm volatile("" : "+l"(q), "+l"(k));  // as they are: sums of the rest are not made anew for each row
    unsigned row = shared_address(to);
    int c = first / C::kRank;
#pragma unroll 1
    for (int i = 0; i < 8; ++i) {
      const int from = min(c, place.last) * (C::kRank * C::kGroups * C::kN);
      copy_unit(row, q + from);
      copy_unit(row + ChunkMemory<C>::kK - ChunkMemory<C>::kQ, k + from);
      row += 1024, c += kNext;
    }
    pieces_commit();
  }

  __device__ __forceinline__ void load_biases(const ChunkArrays& in, const ChunkPlace<C>& place, int h) {
    const long long bias = (place.param(h) * C::kRank + first % C::kRank) * C::kN;
    load_bias<C>(in.q_bias + bias, unit, q_bias);
    load_bias<C>(in.k_bias + bias, unit, k_bias);
  }

  template <bool Turning>
  __device__ __forceinline__ void finish(const unsigned* turns) const {
    using Memory = ChunkMemory<C>;
    turns += first / C::kRank * Memory::kTurnPitch + unit * 4;
    pieces_wait<0>();
    char* row = to;
    const bool turned = C::kPairs % 32 == 0 || unit < C::kPairs / 4;
    uint4 turn = make_uint4(0x3c00, 0x3c00, 0x3c00, 0x3c00);  // cosine 1, sine 0
    uint4 q = copied(row), k = copied(row + Memory::kK - Memory::kQ);
    if (Turning && turned) turn = *reinterpret_cast<const uint4*>(turns);
#pragma unroll 1
    for (int i = 0; i < 8; ++i) {
      float x[8], y[8], cosine[4], sine[4];
      unpack8(q, x), unpack8(k, y);
      if constexpr (Turning) {
        const unsigned words[4] = {turn.x, turn.y, turn.z, turn.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) cosine[e] = Pair<__half>::low(words[e]), sine[e] = Pair<__half>::high(words[e]);
      }
      // The next row is on its way meanwhile, to the same registers; after the last it is that row again.
      const char* next = row + (i < 7 ? 1024 : 0);
      if (i < 7) turns += kNext * Memory::kTurnPitch;
      q = copied(next), k = copied(next + Memory::kK - Memory::kQ);
      if (Turning && turned) turn = *reinterpret_cast<const uint4*>(turns);
#pragma unroll
      for (int e = 0; e < 8; ++e) x[e] += q_bias[e], y[e] += k_bias[e];
      if constexpr (Turning) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          rotate(x[2 * e], x[2 * e + 1], sine[e], cosine[e]);
          rotate(y[2 * e], y[2 * e + 1], sine[e], cosine[e]);
        }
      }
      *reinterpret_cast<uint4*>(row) = pack8(x);
      *reinterpret_cast<uint4*>(row + Memory::kK - Memory::kQ) = pack8(y);
      row += 1024;
    }
  }

 private:
  // Eight columns; where rotated pairs are half a row apart, four of each half.
  static __device__ __forceinline__ void copy_unit(unsigned to, const bf16* from) {
    if constexpr (C::kHalf) {
      asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
      asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to + 8), "l"(from + C::kN / 2) : "memory");
    } else {
      copy_piece(to, from);
    }
  }
  static __device__ __forceinline__ uint4 copied(const char* row) {
    const uint4 x = *reinterpret_cast<const uint4*>(row);
    if constexpr (!C::kHalf) return x;
    return make_uint4(__byte_perm(x.x, x.z, 0x5410), __byte_perm(x.x, x.z, 0x7632), __byte_perm(x.y, x.w, 0x5410),
                      __byte_perm(x.y, x.w, 0x7632));
  }
};

// Gradients of decays and weights of a head's tokens, by one warp: a lane has two neighbouring rows. What the rows gave
// is read before the next head but one takes their place, and decays are summed up once that head is prepared.
template <class C>
struct HeadSums {
  float e[2], ends;

  __device__ __forceinline__ void load(const ChunkArrays& in, const ChunkPlace<C>& place, const ChunkMemory<C>& memory,
                                       int h, int buffer) {
    const int lane = threadIdx.x % 32, c = 2 * lane / C::kRank;
    const auto row_of = [&](int which, int row) { return memory.rows(buffer, which)[row]; };
    const auto sum_of = [&](int which, int row) { return memory.sums(buffer, which)[row]; };
    float weight[2], diagonal[2];
    ends = 0.0f;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = 2 * lane + i;
      const float below =
          sum_of(kDown, row) + sum_of(kDown + 1, row) + (sum_of(kDown + 2, row) + sum_of(kDown + 3, row));
      const float out = sum_of(kWritten, row), leaving = row_of(kOut, row) * out;
      e[i] = sum_of(kAlong, row) + sum_of(kAlong + 1, row) - row_of(kF, row) * below +
             row_of(kIn, row) * sum_of(kRead, row) - leaving;
      weight[i] = below + row_of(kLeft, row) * out;
      diagonal[i] = sum_of(kSame + row / 32, row);
      ends += leaving;
    }
    if (lane < 2) {
      const float4* others = reinterpret_cast<const float4*>(memory.sums(buffer, kCarried)) + 2 * lane;
      const float sum = others[0].x + others[0].y + (others[0].z + others[0].w) + others[1].x + others[1].y +
                        (others[1].z + others[1].w);
      if (lane == 0) ends += exp2_fast(row_of(kDecay, C::kRows - 1)) * sum;
      if (C::kSkip && lane == 1) place.record(in, h)[C::kSkipAt] = __float2bfloat16_rn(sum);
    }
    const long long head = place.head_token(in, h);
    if constexpr (C::kRank == 1) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (c + i <= place.last) in.d_f[head + c + i] = weight[i], in.d_gamma[head + c + i] = diagonal[i];
      }
    } else {
      float sum_f = weight[0] + weight[1], sum_gamma = diagonal[0] + diagonal[1];
#pragma unroll
      for (int offset = 1; offset < C::kRank / 2; offset *= 2) {
        sum_f += __shfl_xor_sync(0xffffffff, sum_f, offset);
        sum_gamma += __shfl_xor_sync(0xffffffff, sum_gamma, offset);
      }
      if (2 * lane % C::kRank == 0 && c <= place.last) in.d_f[head + c] = sum_f, in.d_gamma[head + c] = sum_gamma;
    }
  }

  __device__ __forceinline__ void store(const ChunkArrays& in, const ChunkPlace<C>& place, int h) const {
    const int lane = threadIdx.x % 32, c = 2 * lane / C::kRank;
    const float all = warp_sum(ends);
    float suffix = e[0] + e[1];
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const float other = __shfl_down_sync(0xffffffff, suffix, offset);
      if (lane + offset < 32) suffix += other;
    }
    const float after = __shfl_down_sync(0xffffffff, suffix, 1);
    float* to = in.d_adt + place.head_token(in, h) + c;
    if (2 * lane % C::kRank == 0 && c <= place.last) to[0] = suffix + all;
    if (C::kRank == 1 && c + 1 <= place.last) to[1] = e[1] + (lane == 31 ? 0.0f : after) + all;
  }
};

template <class C>
__device__ __forceinline__ void prepare_heads(const ChunkArrays& in, const ChunkPlace<C>& place,
                                              const ChunkMemory<C>& memory) {
  using Memory = ChunkMemory<C>;
  const int warp = uniform(threadIdx.x / 32 % 4), lane = threadIdx.x % 32;
#pragma unroll 1
  for (int i = 0; i < place.heads + 2; ++i) {
    const int buffer = i % 2, h = place.head + i;
    TurnUnits<C> turning;
    RowWeights<C> weights;
    KeyRows<C> rows(memory, buffer);
    unsigned* turns = memory.template table<unsigned>(buffer, Memory::kTurns);
    if (i < place.heads) {
      rows.load_biases(in, place, h);
      if (warp == 3) weights.load(in, place, h);
      turning.load(in, place, h);
    }
    if (i >= 2) barrier_wait(memory.empty(buffer), (i / 2 - 1) & 1);
    if (i < place.heads) {
      rows.copy(in, place);
      turning.store(turns);
      named_barrier(1, kTeam);
    }
    HeadSums<C> sums;
    if (warp == 3) {
      if (i >= 2) sums.load(in, place, memory, h - 2, buffer);
      __syncwarp();
      if (i < place.heads) weights.store(memory, buffer);
    }
    if (i < place.heads) {
      if (i + 2 < place.heads) want_head<C>(in, place, h + 2);
      if (warp / 2 * 8 < C::kPairs / 4) {
        rows.template finish<true>(turns);
      } else {
        rows.template finish<false>(turns);
      }
      fence_async_proxy();
      __syncwarp();
      if (lane == 0) barrier_arrive(memory.full(buffer));
    }
    if (warp == 3 && i >= 2) sums.store(in, place, h - 2);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// What both sides do with dQ or dK: turn it back, and what the phases, the biases and the group get of it.

// `share_sums` of pairs, which are rounded.
template <int Count, int Offset, int Last>
__device__ __forceinline__ void share_pairs(unsigned* x) {
  if constexpr (Offset >= Last) {
    const bool upper = threadIdx.x & Offset;
#pragma unroll
    for (int i = 0; i < Count / 2; ++i) {
      const unsigned other = __shfl_xor_sync(0xffffffff, upper ? x[i] : x[i + Count / 2], Offset),
                     own = upper ? x[i + Count / 2] : x[i];
      asm("add.rn.bf16x2 %0, %1, %2;" : "=r"(x[i]) : "r"(own), "r"(other));
    }
    share_pairs<Count / 2, Offset / 2, Last>(x);
  }
}

// Sums [rank][column] over the four warps of a side into a record, rounded: they are summed over many chunks.
template <class C>
__device__ __forceinline__ void sum_of_warps(const unsigned* slots, bf16* to) {
  constexpr int kPitch = ChunkMemory<C>::kBiasPitch, kNext = C::kRank * kPitch, kWidth = C::kN / 2,
                kAll = C::kRank * kWidth;
#pragma unroll
  for (int i = 0; i < (kAll + kTeam - 1) / kTeam; ++i) {
    const int at = threadIdx.x % kTeam + i * kTeam, from = at / kWidth * kPitch + at % kWidth;
    if (at >= kAll) continue;
    float2 x[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) x[w] = unpack2(slots[from + w * kNext]);
    reinterpret_cast<unsigned*>(to)[at] =
        Pairs16::of(x[0].x + x[1].x + (x[2].x + x[3].x), x[0].y + x[1].y + (x[2].y + x[3].y));
  }
}

// Where the fragments of 16 columns of a warp's 16 rows begin in a tile, for `load_tiles`.
__device__ __forceinline__ unsigned fragment_at(unsigned tile, int step) {
  const int lane = threadIdx.x % 32;
  return ((tile + swizzled(threadIdx.x / 32 % 4 * 16 + lane % 16, lane / 16)) ^ step % 4 * 32) + step / 4 * kPanel;
}

// The same of a table with rows of `pitch` bytes for tokens: words of 32 bits or pairs of 16, 16 bytes of two columns.
template <class C>
__device__ __forceinline__ unsigned table_fragment_at(unsigned table, int pitch, int step) {
  const int lane = threadIdx.x % 32;
  return table + (threadIdx.x / 32 % 4 * 16 + lane % 16) / C::kRank * pitch + (2 * step + lane / 16) * 16;
}

// tile: the turned rows; turn: what the phases get, [half of the rows][8 columns], then shared among the ranks.
template <class C>
__device__ __forceinline__ void turn_back(const float (&d)[64], float (&group)[64], float (&turn)[C::kPairs / 2],
                                          unsigned tile, unsigned turns, unsigned* bias) {
  using Memory = ChunkMemory<C>;
  constexpr int kTurned = C::kPairs / 4;  // of the 16 columns of accumulators
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  unsigned* to = bias + (warp * C::kRank + lane / 4 % C::kRank) * Memory::kBiasPitch + lane % 4 +
                 lane / (4 * C::kRank) * C::kRank * 4;
#pragma unroll
  for (int panel = 0; panel < 2; ++panel) {
    unsigned sums[8];
#pragma unroll
    for (int step = 4 * panel; step < 4 * panel + 4; ++step) {
      unsigned rows[4], words[4];  // [column][half of the rows]
      if (2 * step < kTurned) {
        load_tiles(rows, fragment_at(tile, step));
        load_tiles(words, table_fragment_at<C>(turns, Memory::kTurnPitch * 4, step));
      }
#pragma unroll
      for (int j = 2 * step; j < 2 * step + 2; ++j) {
        float own[4] = {d[4 * j], d[4 * j + 1], d[4 * j + 2], d[4 * j + 3]};
        if (j < kTurned) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const float x = own[2 * half], y = own[2 * half + 1];
            const float2 was = unpack2(rows[j % 2 * 2 + half]);
            const unsigned cs = words[j % 2 * 2 + half];
            const float cosine = Pair<__half>::low(cs), sine = Pair<__half>::high(cs);
            turn[half * kTurned + j] = y * was.x - x * was.y;
            own[2 * half] = x * cosine + y * sine;
            own[2 * half + 1] = y * cosine - x * sine;
          }
        }
        sums[j % 8] = Pairs16::of(own[0] + own[2], own[1] + own[3]);
#pragma unroll
        for (int e = 0; e < 4; ++e) group[4 * j + e] += own[e];
      }
    }
    share_pairs<8, 16, 4 * C::kRank>(sums);
#pragma unroll
    for (int i = 0; i < C::kRank; ++i) to[32 * panel + 4 * i] = sums[i];
  }
  share_sums<2 * kTurned, 2 * C::kRank, 4>(turn);
}

// Where a token and pair have their place in a table of all of them: four pairs are together, and rows of whole lines
// have these in an order of their own, so that neither columns nor rows meet in the same banks.
template <class C>
__device__ __forceinline__ int turn_at(int token, int pair) {
  if constexpr (C::kPairs % 32) return token * (C::kPairs + 4) + pair;
  return (token * C::kPairs + token % 8 * 4 + pair % 4) ^ (pair / 4 * 4);
}

// What `turn_back` leaves to a lane: kOwn sums of one token, or of two where there is one rank; the i-th belongs to the
// pair pair + 4 * (i % kTurned).
template <class C>
struct OwnTurns {
  using Memory = ChunkMemory<C>;
  static constexpr int kTurned = C::kPairs / 4, kOwn = 2 * kTurned / C::kRank;
  int token, pair;

  __device__ __forceinline__ OwnTurns() {
    const int thread = thread_anew(), lane = thread % 32, row = thread / 32 * 16 + lane / 4, rank = lane / 4 % C::kRank;
    constexpr int kParts = C::kRank == 1 ? 1 : C::kRank / 2;  // of a token's pairs
    token = (row + (C::kRank == 1 ? 0 : rank / kParts * 8)) / C::kRank;
    pair = rank % kParts * kOwn * 4 + lane % 4;
  }
  // To a table, or on top of what is there: see `turn_at`.
  template <bool More>
  __device__ __forceinline__ void store(const ChunkMemory<C>& memory, int table,
                                        const float (&turn)[C::kPairs / 2]) const {
    if constexpr (C::kRank == 1) {
      const int lane = thread_anew() % 32, row = token - lane / 4 + lane % 16;
      const unsigned first = memory.at(table);
#pragma unroll
      for (int i = 0; i < kTurned; i += 2) {
        const int next = i + 1 < kTurned ? i + 1 : i;
        const unsigned at = first + turn_at<C>(row, (i + lane / 16) * 4) * 4;
        const float sums[4] = {turn[i], turn[kTurned + i], turn[next], turn[kTurned + next]};
        unsigned words[4];
        if constexpr (More) load_tiles(words, at);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          words[e] = __float_as_uint(More ? sums[e] + __uint_as_float(words[e]) : sums[e]);
        }
        store_tiles(at, words);
      }
    } else {
      float* first = reinterpret_cast<float*>(memory.base + table);
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        float* to = first + turn_at<C>(token + later(i), pair + further(i));
        *to = More ? turn[i] + *to : turn[i];
      }
    }
  }
  // Tokens and pairs beyond the lane's first.
  static __device__ constexpr int later(int i) { return i / kTurned * 8; }
  static __device__ constexpr int further(int i) { return i % kTurned * 4; }
};

// What a head's phases get of both sides; a warp of one and a warp of the other share their tokens.
template <class C>
__device__ __forceinline__ void store_turns(const ChunkArrays& in, const ChunkPlace<C>& place,
                                            const ChunkMemory<C>& memory, int h, int part) {
  using Memory = ChunkMemory<C>;
  constexpr int kUnits = C::kPairs / 4, kOfWarp = C::kTokens / 4 * kUnits;
  constexpr bool kSamePairs = 64 % kUnits == 0;  // of all units of a thread
  constexpr int kNext = 64 / kUnits;             // tokens from one of them to the next, then
  const int thread = thread_anew(), unit = thread % 32 + 32 * part, first = thread / 32 * (C::kTokens / 4);
  const float* table = reinterpret_cast<const float*>(memory.base + Memory::kPhases);
  int c = first + unit / kUnits, pair = unit % kUnits * 4;
  const float* from = table + turn_at<C>(c, pair);
  float* to = in.angles + place.token_head(c, h, C::kPairs) + pair;
#pragma unroll
  for (int j = 0; j < (kOfWarp + 63) / 64; ++j) {
    if (kOfWarp % 64 && unit + 64 * j >= kOfWarp) continue;
    if (j > 0 && kSamePairs) {
      c += kNext, to += kNext * C::kHeads * C::kPairs;
      from = kNext % 8 == 0 ? from + kNext * C::kPairs : table + turn_at<C>(c, pair);
    } else if (j > 0) {
      c = first + (unit + 64 * j) / kUnits, pair = (unit + 64 * j) % kUnits * 4;
      from = table + turn_at<C>(c, pair), to = in.angles + place.token_head(c, h, C::kPairs) + pair;
    }
    float4 sum = *reinterpret_cast<const float4*>(from);
    if constexpr (Memory::kTurnsApart) {
      const float4 other = *reinterpret_cast<const float4*>(from + Memory::kTurned / 4);
      sum.x += other.x, sum.y += other.y, sum.z += other.z, sum.w += other.w;
    }
    if (C::kFinal && place.t0 + c == in.seq - 1) {
      const float* last = in.d_final_angle + ((long long)place.b * C::kHeads + h) * C::kPairs + pair;
      sum.x += last[0], sum.y += last[1], sum.z += last[2], sum.w += last[3];
    }
    if (c <= place.last) store4(to, sum);
  }
}

// The group's sums: the gradient of q or k, or a part of it, in the order of tiles.
template <class C>
__device__ __forceinline__ void store_group(const ChunkArrays& in, const ChunkPlace<C>& place, bf16* gradient,
                                            float* parts, const float (&group)[64]) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4;
  parts += (long long)place.part * in.batch * in.seq * C::kRank * C::kGroups * C::kN;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int c = (row + 8 * half) / C::kRank;
    if (c > place.last) continue;
    const long long at = place.q_at(c, row % C::kRank);
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      const int n = lane % 4 * 2 + 8 * j;
      const float x = group[4 * j + 2 * half], y = group[4 * j + 2 * half + 1];
      if (in.parts > 1) {
        *reinterpret_cast<float2*>(parts + at + n) = make_float2(x, y);
      } else if (C::kHalf) {
        gradient[at + C::column(n)] = __float2bfloat16_rn(x);
        gradient[at + C::column(n + 1)] = __float2bfloat16_rn(y);
      } else {
        *reinterpret_cast<unsigned*>(gradient + at + n) = Pairs16::of(x, y);
      }
    }
  }
}

// Multiplies the rows of accumulators.
template <int Size>
__device__ __forceinline__ void scale_rows(float (&d)[Size], const float* rows) {
  const int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
  const float low = rows[row], high = rows[row + 8];
#pragma unroll
  for (int i = 0; i < Size; i += 4) d[i] *= low, d[i + 1] *= low, d[i + 2] *= high, d[i + 3] *= high;
}

// The same of 16 rows as a second factor: first those of the first eight rows.
__device__ __forceinline__ unsigned factor_at(unsigned tile) {
  const int lane = threadIdx.x % 32;
  return tile + swizzled(threadIdx.x / 32 % 4 * 16 + lane / 16 * 8 + lane % 8, lane / 8 % 2);
}

// Products of each row of 16 with itself, on the diagonals of two products of matrices: far fewer instructions than by
// the element.
struct RowDots {
  float low[4], high[4];

  __device__ __forceinline__ RowDots() : low{}, high{} {}
  __device__ __forceinline__ void add(const unsigned (&rows)[4], unsigned others) {
    unsigned b[4];
    load_tiles(b, others);
    multiply(low, rows, b[0], b[1], bf16());
    multiply(high, rows, b[2], b[3], bf16());
  }
  // Whether the lane has rows lane / 4 and lane / 4 + 8.
  static __device__ __forceinline__ bool here() { return threadIdx.x % 4 == threadIdx.x % 32 / 8; }
  __device__ __forceinline__ float first() const { return threadIdx.x & 4 ? low[1] : low[0]; }
  __device__ __forceinline__ float second() const { return threadIdx.x & 4 ? high[3] : high[2]; }
  __device__ __forceinline__ float own() const { return here() ? first() + second() : 0.0f; }
};

// Of the rows of two tiles, in the 16 * Steps columns that begin at the step-th 32 bytes of a panel of each.
template <int Steps>
__device__ __forceinline__ RowDots dots_of_tiles(unsigned panel, unsigned other, int step) {
  RowDots dots;
  const unsigned first = fragment_at(panel, 0) ^ 32 * step, second = factor_at(other) ^ 32 * step;
#pragma unroll
  for (int k = 0; k < Steps; ++k) {
    unsigned rows[4];
    load_tiles(rows, first ^ 32 * k);
    dots.add(rows, second ^ 32 * k);
  }
  return dots;
}

// Row sums of d, rounded, times a panel.
__device__ __forceinline__ void store_dots(const float (&d)[32], unsigned panel, float* to) {
  RowDots dots;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    unsigned rows[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) rows[i] = Pairs16::of(d[8 * k + 2 * i], d[8 * k + 2 * i + 1]);
    dots.add(rows, factor_at(panel) ^ 32 * k);
  }
  const int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
  if (RowDots::here()) to[row] = dots.first(), to[row + 8] = dots.second();
}

// ---------------------------------------------------------------------------------------------------------------------
// The query side.

// M and dM from QK' and dO V' in half of the columns, and the sums of their elements. skip: what is on M's diagonal
// besides.
template <class C>
__device__ __forceinline__ void weigh(float (&qk)[16], float (&ov)[16], float (&along)[2], float (&same)[2], float skip,
                                      const ChunkMemory<C>& memory, int buffer, int part) {
  constexpr int kEach = C::kRank == 1 ? 1 : 2;  // neighbouring columns of a thread in one token
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, row = warp * 16 + lane / 4, first = 32 * part;
  const float *decay = memory.rows(buffer, kDecay), *f = memory.rows(buffer, kF), *gamma = memory.rows(buffer, kGamma);
  const float a[2] = {decay[row], decay[row + 8]}, own[2] = {gamma[row], gamma[row + 8]};
  // That of the row, less the offset of the columns'; the same of rows.
  const int token = row / C::kRank - lane % 4 * 2 / C::kRank - first / C::kRank, beyond = row - lane % 4 * 2 - first;
  float down[8] = {};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float2 a_j = *reinterpret_cast<const float2*>(decay + first + 8 * j + lane % 4 * 2),
                 f_j = *reinterpret_cast<const float2*>(f + first + 8 * j + lane % 4 * 2);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool meets = (half - j) % 2 == 0;  // else these eight rows have the diagonal in other columns
      float decayed, diagonal;
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        if (e % kEach == 0) {
          const int before = token + (8 * half - 8 * j) / C::kRank - e;
          decayed = exp2_fast(before > 0 ? a[half] - (e ? a_j.y : a_j.x) : -1e30f);  // 0 for what is not earlier
          diagonal = before == 0 ? 1.0f : 0.0f;
        }
        float &x = qk[4 * j + 2 * half + e], &y = ov[4 * j + 2 * half + e];
        const float product = x * y;
        float w = decayed * (e ? f_j.y : f_j.x);
        down[2 * j + e] += product * decayed;
        along[half] += product * w;
        if (meets) {
          same[half] += product * diagonal;
          w += diagonal * own[half];
        }
        x *= w;
        if (C::kSkip && meets) x += beyond + 8 * half - 8 * j == e ? skip : 0.0f;
        y *= w;
      }
    }
  }
  share_sums<8, 16, 4>(down);
  memory.sums(buffer, kDown)[warp * C::kRows + first + lane / 8 * 8 + lane % 4 * 2 + lane / 4 % 2] = down[0];
}

// Half of the columns of 64 rows, rounded, into a panel.
__device__ __forceinline__ void store_half(unsigned panel, const float (&d)[16], int part) {
  const unsigned to = fragment_at(panel, 0) ^ 64 * part;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float* x = d + 8 * i;
    const unsigned words[4] = {Pairs16::of(x[0], x[1]), Pairs16::of(x[2], x[3]), Pairs16::of(x[4], x[5]),
                               Pairs16::of(x[6], x[7])};
    store_tiles(to ^ 32 * i, words);
  }
}

// A warp's 16 rows of a panel, to memory in whole lines.
template <class C>
__device__ __forceinline__ void store_rows(const char* panel, bf16* to, const ChunkPlace<C>& place, int h) {
  const int thread = thread_anew(), first = thread / 32 * 16 + thread % 32 / 8, piece = thread % 8;
  to += place.token_head(first, h, C::kP) + piece * 8;
#pragma unroll
  for (int t = 0; t < 16; t += 4) {
    const uint4 words = *reinterpret_cast<const uint4*>(panel + swizzled(first + t, piece));
    if (first + t <= place.last) *reinterpret_cast<uint4*>(to + t * C::kHeads * C::kP) = words;
  }
}

// The gate's gradient from the output o: in the place of slopes, which no one else reads, then out in whole rows.
template <class C>
__device__ __forceinline__ void gate_gradients(const float (&o)[32], const ChunkArrays& in, const ChunkPlace<C>& place,
                                               const ChunkMemory<C>& memory, int h, int buffer) {
  const int slopes = buffer * ChunkMemory<C>::kInput + ChunkMemory<C>::kSlope;
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    const unsigned own = fragment_at(memory.at(slopes), step);
    unsigned words[4];  // [column][half of the rows]
    load_tiles(words, own);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 slope = unpack2(words[i]);
      words[i] = Pairs16::of(o[8 * step + 2 * i] * slope.x, o[8 * step + 2 * i + 1] * slope.y);
    }
    store_tiles(own, words);
  }
  __syncwarp();
  store_rows<C>(memory.base + slopes, in.d_z, place, h);
}

// A thread's part of what is summed over ranks and over tokens: two columns of a rank, in one of the kLanes equal parts
// of 64 rows, every so many tokens. Neighbouring lanes have the others. With 8 parts a warpgroup has half of the
// columns.
template <class C, int kLanes>
struct RankColumns {
  static constexpr int kEach = C::kRows / kLanes, kNext = kLanes / C::kRank;  // tokens; from one to the next
  int rank, first, column;

  __device__ __forceinline__ RankColumns(int half) {
    const int thread = thread_anew();
    rank = thread % C::kRank, first = thread % kLanes / C::kRank, column = thread / kLanes * 2 + half * (C::kP / 2);
  }
  __device__ __forceinline__ float2 of_tile(const char* tile, int token) const {
    const int row = token * C::kRank + rank;
    return unpack2(*reinterpret_cast<const unsigned*>(tile + swizzled(row, column / 8) + column % 8 * 2));
  }
  __device__ __forceinline__ float2 of_tokens(const bf16* table, int token) const {
    return unpack2(*reinterpret_cast<const unsigned*>(table + token * ChunkMemory<C>::kWidePitch + column));
  }
  __device__ __forceinline__ float2 weights(const float* of_ranks) const {
    return *reinterpret_cast<const float2*>(of_ranks + rank * ChunkMemory<C>::kWidePitch + column);
  }
  // Sums over the ranks.
  __device__ __forceinline__ float2 folded(float2 x) const {
#pragma unroll
    for (int offset = 1; offset < C::kRank; offset *= 2) {
      x.x += __shfl_xor_sync(0xffffffff, x.x, offset), x.y += __shfl_xor_sync(0xffffffff, x.y, offset);
    }
    return x;
  }
  // Sums over the tokens, to a record [rank][column].
  __device__ __forceinline__ void store(bf16* record, float2 x) const {
#pragma unroll
    for (int offset = C::kRank; offset < kLanes; offset *= 2) {
      x.x += __shfl_xor_sync(0xffffffff, x.x, offset), x.y += __shfl_xor_sync(0xffffffff, x.y, offset);
    }
    if (first == 0) *reinterpret_cast<unsigned*>(record + rank * C::kP + column) = Pairs16::of(x.x, x.y);
  }
};

// What depends on the output o, a tile of all ranks.
template <class C>
__device__ __forceinline__ void output_gradients(const char* o, const ChunkArrays& in, const ChunkPlace<C>& place,
                                                 const ChunkMemory<C>& memory, int h, int buffer) {
  using Memory = ChunkMemory<C>;
  constexpr int kKind = C::kTokens * Memory::kWidePitch, kWeight = C::kRank * Memory::kWidePitch;
  const RankColumns<C, 4> own(0);
  const bf16* raw = memory.template table<bf16>(buffer, Memory::kRaw);
  const float* weights = memory.template table<float>(buffer, Memory::kWeights);
  const float2 fold = own.weights(weights + kWeight);
  float2 spread = make_float2(1.0f, 1.0f);
  if constexpr (C::kGate) spread = own.weights(weights + 2 * kWeight);
  float2 d_fold = make_float2(0.0f, 0.0f), d_spread = d_fold;
  bf16* d_z = in.d_z + place.token_head(own.first, h, C::kP) + own.column;
#pragma unroll 8
  for (int i = 0; i < own.kEach; ++i) {
    const int c = own.first + i * own.kNext;
    const float2 out = own.of_tile(o, c), dy = own.of_tokens(raw, c);
    const float up[2] = {dy.x * out.x, dy.y * out.y};
    if constexpr (C::kGate) {
      const float2 both = own.of_tokens(raw + kKind, c);
      const float z[2] = {both.x, both.y}, of_gate[2] = {spread.x, spread.y};
      float silu[2], dx[2];  // dx: of the gate, but for the fold
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const float half_gate = z[e] * (0.5f * of_gate[e]), tanh_gate = tanh_fast(half_gate);
        const float seen = up[e] * (0.5f + 0.5f * tanh_gate);
        silu[e] = half_gate + half_gate * tanh_gate;
        dx[e] = seen + seen * (half_gate - half_gate * tanh_gate);
      }
      d_fold.x += up[0] * silu[0], d_fold.y += up[1] * silu[1];
      d_spread.x += dx[0] * z[0], d_spread.y += dx[1] * z[1];
      const float2 sum = own.folded(make_float2(dx[0] * (fold.x * spread.x), dx[1] * (fold.y * spread.y)));
      if (own.rank == 0 && c <= place.last) *reinterpret_cast<unsigned*>(d_z) = Pairs16::of(sum.x, sum.y);
      d_z += own.kNext * C::kHeads * C::kP;
    } else {
      d_fold.x += up[0], d_fold.y += up[1];
    }
  }
  bf16* record = place.record(in, h);
  own.store(record + C::kMimoOAt, d_fold);
  own.store(record + C::kMimoZAt, make_float2(d_spread.x * fold.x, d_spread.y * fold.y));
}

// Half of the columns of M and dM of the i-th head, to where both sides and the output read them.
template <class C>
__device__ __forceinline__ void make_products(const ChunkArrays& in, const ChunkPlace<C>& place,
                                              const ChunkMemory<C>& memory, int i, int part) {
  using Memory = ChunkMemory<C>;
  const int thread = threadIdx.x % kTeam, buffer = i % 2, h = place.head + i;
  const unsigned q = memory.at(buffer * Memory::kInput + Memory::kQ), k = q + Memory::kK - Memory::kQ,
                 v = q + Memory::kV - Memory::kQ, adjoint = q + Memory::kAdjoint - Memory::kQ;
  const unsigned m = memory.at(Memory::kM), adjoint_m = memory.at(Memory::kAdjointM), further = part * (kPanel / 2);
  const float skip = C::kSkip ? __ldg(in.D + place.param(h)) : 0.0f;
  float along[2] = {}, same[2] = {}, qk[16], ov[16];
  wgmma_fence();
  multiply_tiles<32, 8, false, false>(qk, q, k + further, false);
  multiply_tiles<32, 4, false, false>(ov, adjoint, v + further, false);
  wgmma_commit();
  wgmma_wait<0>();
  pin(qk), pin(ov);
  weigh<C>(qk, ov, along, same, skip, memory, buffer, part);
  if (i > 0) barrier_wait(memory.products_free(), (i - 1) & 1);
  store_half(m, qk, part);
  store_half(adjoint_m, ov, part);
  float sums[4] = {along[0], along[1], same[0], same[1]};  // of which a lane keeps that of its number in the quad
  share_sums<4, 2, 1>(sums);
  memory.sums(buffer, thread % 4 / 2 * (kSame - kAlong) + part)[thread / 32 * 16 + thread % 32 / 4 + thread % 2 * 8] =
      sums[0];
  fence_async_proxy();
  __syncwarp();
  if (thread % 32 == 0) barrier_arrive(memory.products_here());
}

// ---------------------------------------------------------------------------------------------------------------------
// The output.

// From dV, where there are no weights of ranks.
template <class C>
__device__ __forceinline__ void value_gradients(float (&d)[32], const ChunkArrays& in, const ChunkPlace<C>& place,
                                                const ChunkMemory<C>& memory, int h) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4, column = lane % 4 * 2;
  if constexpr (C::kFinal) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (place.t0 + row + 8 * half != in.seq - 1) continue;
      const float* from = in.d_final_v + ((long long)place.b * C::kHeads + h) * C::kP + column;
#pragma unroll
      for (int j = 0; j < 8; ++j) d[4 * j + 2 * half] += from[8 * j], d[4 * j + 2 * half + 1] += from[8 * j + 1];
    }
  }
  if constexpr (ChunkMemory<C>::kValuesByRows) {
    store_panel(memory.at(ChunkMemory<C>::kValueOut), d);
    __syncwarp();
    store_rows<C>(memory.base + ChunkMemory<C>::kValueOut, in.d_v, place, h);
    __syncwarp();
  } else {
    bf16* d_v = in.d_v + place.token_head(row, h, C::kP) + column;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (row + 8 * half > place.last) continue;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        *reinterpret_cast<unsigned*>(d_v + half * 8 * C::kHeads * C::kP + 8 * j) =
            Pairs16::of(d[4 * j + 2 * half], d[4 * j + 2 * half + 1]);
      }
    }
  }
}

// dV of the i-th head, and what values and their weights get of it.
template <class C>
__device__ __forceinline__ void make_values(const ChunkArrays& in, const ChunkPlace<C>& place,
                                            const ChunkMemory<C>& memory, int i) {
  using Memory = ChunkMemory<C>;
  const int lane = threadIdx.x % 32, buffer = i % 2, h = place.head + i;
  const unsigned k = memory.at(buffer * Memory::kInput + Memory::kK), v = k + Memory::kV - Memory::kK,
                 adjoint = k + Memory::kAdjoint - Memory::kK;
  float dv[32];
  barrier_wait(memory.adjoint_here(), i & 1);
  wgmma_fence();
  multiply_tiles<64, 8, false, false>(dv, k, memory.at(Memory::kStateAdjoint), false);
  wgmma_commit();
  wgmma_wait<0>();
  pin(dv);
  if (lane == 0) barrier_arrive(memory.adjoint_free());
  store_dots(dv, v, memory.sums(buffer, kWritten));
  scale_rows(dv, memory.rows(buffer, kOut));
  barrier_wait(memory.products_here(), i & 1);
  wgmma_fence();
  multiply_tiles<64, 4, true, true>(dv, memory.at(Memory::kM), adjoint, true);
  wgmma_commit();
  wgmma_wait<0>();
  pin(dv);
  if constexpr (C::kWeighted) {
    if (i > 0) barrier_wait(memory.values_free(), (i - 1) & 1);
    store_panel(memory.at(Memory::kValueOut), dv);
    __syncwarp();
    if (lane == 0) barrier_arrive(memory.values_here());
  } else {
    value_gradients<C>(dv, in, place, memory, h);
  }
}

template <class C>
__device__ __forceinline__ void output_side(const ChunkArrays& in, const ChunkPlace<C>& place,
                                            const ChunkMemory<C>& memory) {
  using Memory = ChunkMemory<C>;
  const int thread = threadIdx.x % kTeam;
#pragma unroll 1
  for (int i = -1; i < place.heads; ++i) {
    if (i + 1 < place.heads) stage_values<C>(in, place, memory, i + 1);
    if (i < 0) continue;
    const int buffer = i % 2, h = place.head + i;
    const unsigned q = memory.at(buffer * Memory::kInput + Memory::kQ), v = q + Memory::kV - Memory::kQ,
                   adjoint = q + Memory::kAdjoint - Memory::kQ;
    float o[32];
    barrier_wait(memory.full(buffer), i / 2 & 1);
    make_values<C>(in, place, memory, i);
    barrier_wait(memory.state_here(), i & 1);
    wgmma_fence();
    multiply_tiles<64, 8, false, false>(o, q, memory.at(Memory::kState), false);
    wgmma_commit();
    wgmma_wait<0>();
    pin(o);
    if (thread % 32 == 0) barrier_arrive(memory.state_free());
    store_dots(o, adjoint, memory.sums(buffer, kRead));
    if constexpr (Memory::kOutput) {
      scale_rows(o, memory.rows(buffer, kIn));
      wgmma_fence();
      multiply_tiles<64, 4, false, true>(o, memory.at(Memory::kM), v, true);
      wgmma_commit();
      wgmma_wait<0>();
      pin(o);
      if (thread % 32 == 0) barrier_arrive(memory.products_free());
      if constexpr (Memory::kSlopes) {
        gate_gradients<C>(o, in, place, memory, h, buffer);
      } else {
        store_panel(memory.at(Memory::kOutputs), o);
        named_barrier(4, kTeam);
        output_gradients<C>(memory.base + Memory::kOutputs, in, place, memory, h, buffer);
      }
    } else if (thread % 32 == 0) {
      barrier_arrive(memory.products_free());
    }
    __syncwarp();
    if (thread % 32 == 0) barrier_arrive(memory.empty(buffer));
    named_barrier(4, kTeam);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// The query side and the key side.

// From half of the columns of dV, a tile of all ranks.
template <class C>
__device__ __forceinline__ void rank_value_gradients(const char* d, const ChunkArrays& in, const ChunkPlace<C>& place,
                                                     const ChunkMemory<C>& memory, int h, int buffer, int half) {
  using Memory = ChunkMemory<C>;
  const RankColumns<C, 8> own(half);
  const bf16* values = memory.template table<bf16>(buffer, Memory::kRaw) + 2 * C::kTokens * Memory::kWidePitch;
  const float2 spread = own.weights(memory.template table<float>(buffer, Memory::kWeights));
  float2 d_spread = make_float2(0.0f, 0.0f);
  bf16* d_v = in.d_v + place.token_head(own.first, h, C::kP) + own.column;
#pragma unroll
  for (int i = 0; i < own.kEach; ++i) {
    const int c = own.first + i * own.kNext;
    const float2 dx = own.of_tile(d, c), v = own.of_tokens(values, c);
    d_spread.x += dx.x * v.x, d_spread.y += dx.y * v.y;
    float2 sum = own.folded(make_float2(dx.x * spread.x, dx.y * spread.y));
    if (C::kFinal && place.t0 + c == in.seq - 1) {
      const float* from = in.d_final_v + ((long long)place.b * C::kHeads + h) * C::kP + own.column;
      sum.x += from[0], sum.y += from[1];
    }
    if (own.rank == 0 && c <= place.last) *reinterpret_cast<unsigned*>(d_v) = Pairs16::of(sum.x, sum.y);
    d_v += own.kNext * C::kHeads * C::kP;
  }
  own.store(place.record(in, h) + C::kMimoVAt, d_spread);
}

// The gradient of the last token's keys as part of the final state.
template <class C>
__device__ __forceinline__ void add_final_key(float (&d)[64], const ChunkArrays& in, const ChunkPlace<C>& place,
                                              int h) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (place.t0 + (row + 8 * half) / C::kRank != in.seq - 1) continue;
    const long long key = (((long long)place.b * C::kHeads + h) * C::kRank + row % C::kRank) * C::kN;
#pragma unroll
    for (int j = 0; j < 16; ++j) {
      d[4 * j + 2 * half] += in.d_final_k[key + C::column(8 * j + lane % 4 * 2)];
      d[4 * j + 2 * half + 1] += in.d_final_k[key + C::column(8 * j + lane % 4 * 2 + 1)];
    }
  }
}

// Either side, by one program for both, so that they ask for the same instructions at the same time: half of M and dM,
// then dQ or dK and all that depends on it.
template <class C>
__device__ __forceinline__ void product_side(const ChunkArrays& in, const ChunkPlace<C>& place,
                                             const ChunkMemory<C>& memory, bool query) {
  using Memory = ChunkMemory<C>;
  const int thread = threadIdx.x % kTeam, lane = thread % 32;
  const int team = query ? 2 : 3, part = query ? 0 : 1;  // its barrier; its half
  const unsigned state = memory.at(query ? Memory::kState : Memory::kStateAdjoint),
                 state_here = query ? memory.state_here() : memory.adjoint_here(),
                 state_free = query ? memory.state_free() : memory.adjoint_free(),
                 adjoint_m = memory.at(Memory::kAdjointM);
  unsigned* bias =
      reinterpret_cast<unsigned*>(memory.base + Memory::kBias) + (query ? 0 : 4 * C::kRank * Memory::kBiasPitch);
  const bf16* states = (query ? in.states : in.adjoints) + place.state(place.head);
  const int states_apart = place.chunks * (C::kN * C::kP);
  bf16* record = place.record(in, place.head) + (query ? C::kQBiasAt : C::kKBiasAt);
  const auto ask = [&](bool more) {
    barrier_expect(state_here, 2 * kPanel);
    copy_line_in(state, states, 2 * kPanel, state_here);
    if (more) want(states + states_apart, 2 * kPanel);
  };
  if (thread == 0 && place.heads > 0) ask(place.heads > 1);
  float group[64] = {};
#pragma unroll 1
  for (int i = 0; i < place.heads; ++i) {
    const int buffer = i % 2, h = place.head + i;
    const unsigned q = memory.at(buffer * Memory::kInput + Memory::kQ), k = q + Memory::kK - Memory::kQ,
                   v = q + Memory::kV - Memory::kQ, adjoint = q + Memory::kAdjoint - Memory::kQ;
    barrier_wait(memory.full(buffer), i / 2 & 1);
    make_products<C>(in, place, memory, i, part);
    barrier_wait(memory.state_here(), i & 1);
    barrier_wait(memory.adjoint_here(), i & 1);
    float d[64];
    wgmma_fence();
    multiply_tiles<128, 4, false, true>(d, query ? adjoint : v, state, false);
    wgmma_commit();
    // <T, s> and dO . V in half of the columns.
    float dots[2] = {
        dots_of_tiles<4>(memory.at(Memory::kState) + part * kPanel, memory.at(Memory::kStateAdjoint) + part * kPanel, 0)
            .own(),
        C::kSkip ? dots_of_tiles<2>(adjoint, v, 2 * part).own() : 0.0f};
    share_sums<2, 16, 16>(dots);
#pragma unroll
    for (int offset = 8; offset > 0; offset /= 2) dots[0] += __shfl_xor_sync(0xffffffff, dots[0], offset);
    if (lane % 16 == 0) memory.sums(buffer, kCarried)[lane / 2 + 4 * part + thread / 32] = dots[0];
    fence_async_proxy();  // what was read of the states, ahead of the copies that replace them
    __syncwarp();
    wgmma_wait<0>();
    pin(d);
    if (lane == 0) barrier_arrive(memory.state_free()), barrier_arrive(memory.adjoint_free());
    scale_rows(d, memory.rows(buffer, query ? kIn : kOut));
    barrier_wait(memory.products_here(), i & 1);
    wgmma_fence();
    if (query) {
      multiply_tiles<128, 4, false, true>(d, adjoint_m, k, true);
    } else {
      multiply_tiles<128, 4, true, true>(d, adjoint_m, q, true);
    }
    wgmma_commit();
    wgmma_wait<0>();
    pin(d);
    if (lane == 0) barrier_arrive(memory.products_free());
    if constexpr (C::kFinal) {
      if (!query) add_final_key<C>(d, in, place, h);
    }
    float turn[C::kPairs / 2];
    turn_back<C>(d, group, turn, query ? q : k, memory.at(Memory::kTables + buffer * Memory::kTable + Memory::kTurns),
                 bias);
    __syncwarp();
    if (lane == 0) barrier_arrive(memory.empty(buffer));
    const int pair = 5 + thread / 32;  // the barrier of two warps
    if constexpr (Memory::kTurnsApart) {
      OwnTurns<C>().template store<false>(memory, Memory::kPhases + part * Memory::kTurned, turn);
    } else {
      if (query) OwnTurns<C>().template store<false>(memory, Memory::kPhases, turn);
      named_barrier(pair, 64);
      if (!query) OwnTurns<C>().template store<true>(memory, Memory::kPhases, turn);
    }
    named_barrier(pair, 64);
    store_turns<C>(in, place, memory, h, part);
    named_barrier(team, kTeam);  // sums of biases are those of all warps
    sum_of_warps<C>(bias, record);
    states += states_apart, record += C::kRecord;
    if constexpr (C::kWeighted) {
      barrier_wait(memory.values_here(), i & 1);
      rank_value_gradients<C>(memory.base + Memory::kValueOut, in, place, memory, h, buffer, part);
      __syncwarp();
      if (lane == 0) barrier_arrive(memory.values_free());
    }
    if (thread == 0 && i + 1 < place.heads) {
      barrier_wait(state_free, i & 1);
      ask(i + 2 < place.heads);
    }
    __syncwarp();
  }
  store_group<C>(in, place, query ? in.d_q : in.d_k, query ? in.q_sums : in.k_sums, group);
}

// ---------------------------------------------------------------------------------------------------------------------

template <class C>
__global__ void __launch_bounds__(4 * kTeam, 1)
    mamba3_backward_chunk(const bf16* q, const bf16* k, const bf16* v, const bf16* z, const bf16* dy,
                          const float* q_bias, const float* k_bias, const float* mimo_v, const float* mimo_o,
                          const float* mimo_z, const float* D, const float* gamma, const float* f, const float* decay,
                          const unsigned short* phases, const bf16* states, const bf16* adjoints,
                          const float* d_final_angle, const float* d_final_k, const float* d_final_v, float* angles,
                          float* d_adt, float* d_f, float* d_gamma, bf16* d_v, bf16* d_z, bf16* d_q, bf16* d_k,
                          float* q_sums, float* k_sums, bf16* records, int batch, int seq, int parts) {
  extern __shared__ __align__(1024) char shared[];
  const ChunkArrays in{q,         k,         v,      z,       dy,    q_bias,  k_bias, mimo_v,   mimo_o,
                       mimo_z,    D,         gamma,  f,       decay, phases,  states, adjoints, d_final_angle,
                       d_final_k, d_final_v, angles, d_adt,   d_f,   d_gamma, d_v,    d_z,      d_q,
                       d_k,       q_sums,    k_sums, records, batch, seq,     parts};
  const ChunkMemory<C> memory{shared};
  if (threadIdx.x == 0) {
#pragma unroll
    for (int buffer = 0; buffer < 2; ++buffer) {
      barrier_init(memory.full(buffer), 8);    // warps that prepare
      barrier_init(memory.empty(buffer), 12);  // warps that use
    }
    barrier_init(memory.state_here(), 1);
    barrier_init(memory.adjoint_here(), 1);
    barrier_init(memory.products_here(), 8);
    barrier_init(memory.state_free(), 12);
    barrier_init(memory.adjoint_free(), 12);
    barrier_init(memory.products_free(), 12);
    barrier_init(memory.values_here(), 4);
    barrier_init(memory.values_free(), 8);
    fence_barrier_init();
  }
  let_next_kernel_start();
  wait_for_earlier_kernels();
  __syncthreads();
  const int team = uniform(threadIdx.x / kTeam);
  if (team < 2) {
    take_registers<176>();
    product_side<C>(in, ChunkPlace<C>(in), memory, team == 0);
  } else if (team == 2) {
    give_registers<80>();
    output_side<C>(in, ChunkPlace<C>(in), memory);
  } else {
    give_registers<80>();
    prepare_heads<C>(in, ChunkPlace<C>(in), memory);
  }
}

}  // namespace jax_ssd

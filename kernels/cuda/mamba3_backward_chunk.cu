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
// then dQ and dK; the third dV, the output and what depends on it, and the next head's values; the fourth the next
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

// Descriptors of operands as in wgmma.cuh, but in registers that a warp has in common. zero: 0, unknown to the
// compiler, which would otherwise make all 64 bits anew for every product; so it adds to the lower ones where they are.
__device__ __forceinline__ unsigned long long tile_descriptor(unsigned address, unsigned tile_stride, unsigned zero) {
  return static_cast<unsigned long long>((1u << 30 | 1024 >> 4) + zero) << 32 | (address / 16 + (tile_stride << 12));
}
__device__ __forceinline__ unsigned long long moved(unsigned long long descriptor, unsigned bytes) {
  return (descriptor & 0xffffffff00000000ull) | (static_cast<unsigned>(descriptor) + bytes / 16);
}

// As the other `multiply_tiles`, with descriptors so made.
template <int N, int Steps, bool ColumnsA, bool ColumnsB>
__device__ __forceinline__ void multiply_tiles(float (&d)[N / 2], unsigned a, unsigned b, bool accumulate,
                                               unsigned zero) {
  const unsigned long long first = tile_descriptor(a, ColumnsA ? kPanel : 16, zero),
                           second = tile_descriptor(b, ColumnsB ? kPanel : 16, zero);
#pragma unroll
  for (int k = 0; k < Steps; ++k) {
    const unsigned along = k / 4 * kPanel + k % 4 * 32, across = 2048 * k;
    Wgmma<bf16, N>::template shared<ColumnsA, ColumnsB>(d, moved(first, ColumnsA ? across : along),
                                                        moved(second, ColumnsB ? across : along), accumulate || k > 0);
  }
}

template <class C>
struct ChunkMemory {
  // Floats or pairs of 16 bits in a row: some more than there are, so that rows begin in different banks.
  static constexpr int kTurnPitch = C::kPairs + 4, kWidePitch = C::kP + 8, kBiasPitch = C::kN / 2 + 4;
  static constexpr int kSecondHalves = C::kP / 2 + 4;  // of pieces of a row of weights: see `weight_at`
  static constexpr bool kSlopes = C::kGate && !C::kWeighted;
  static constexpr int kKinds = C::kWeighted ? 3 : 0;
  static constexpr int kParts = C::kWeighted ? 4 : 1;  // of sums over head_dim: see `Sums`
  // What phases get of a side: see `turn_at`. Where that is much, there is no room for both, nor to collect rows of dV.
  // With weights of ranks these are folded in registers.
  static constexpr int kTurned = C::kTokens * (C::kPairs + (C::kPairs % 32 ? 4 : 0)) * 4;
  static constexpr bool kTurnsApart = kTurned <= kPanel, kValuesByRows = !C::kWeighted && kTurnsApart;
  // Values and the output's adjoint also as they meet states, where there is room.
  static constexpr bool kScaled = C::kWeighted && C::kRank == 4;
  static constexpr int kTiles = kScaled ? 8 : kSlopes ? 7 : 6;
  // Tiles of an input, twice; slopes: of the output's gate, times the output's adjoint, without weights of ranks.
  static constexpr int kQ = 0, kK = 2 * kPanel, kV = 4 * kPanel, kAdjoint = 5 * kPanel, kSlope = 6 * kPanel,
                       kLeaving = 6 * kPanel, kEntering = 7 * kPanel, kInput = kTiles * kPanel;
  static constexpr int kState = 2 * kInput, kStateAdjoint = kState + 2 * kPanel, kM = kStateAdjoint + 2 * kPanel,
                       kAdjointM = kM + kPanel, kValueOut = kAdjointM + kPanel,
                       kTables = kValueOut + (kValuesByRows ? kPanel : 0);
  // Tables that go with an input, twice: turns of pairs, dy, z and v as they are, weights of ranks, of tokens, sums.
  static constexpr int kTurns = 0, kRaw = kTurns + C::kTokens * kTurnPitch * 4,
                       kWeights = kRaw + kKinds * C::kTokens * kWidePitch * 2,
                       kTokensAt = kWeights + (C::kWeighted ? 3 * C::kRank * kWidePitch * 4 : 0),
                       kSums = kTokensAt + 6 * C::kTokens * 4,
                       kTable = kSums + ((8 + 2 * kParts) * C::kTokens + 16) * 4;
  static constexpr int kPhases = kTables + 2 * kTable,
                       kBias = kPhases + (kTurnsApart ? 2 : 1) * kTurned,  // [side][warp][rank][two columns]
      kBarriers = kBias + 8 * C::kRank * kBiasPitch * 4, kBytes = kBarriers + 80;

  char* base;
  unsigned zero;  // see `tile_descriptor`
  // Barriers.
  __device__ unsigned full(int buffer) const { return at(kBarriers + 8 * buffer); }
  __device__ unsigned empty(int buffer) const { return at(kBarriers + 16 + 8 * buffer); }
  __device__ unsigned state_here() const { return at(kBarriers + 32); }
  __device__ unsigned adjoint_here() const { return at(kBarriers + 40); }
  __device__ unsigned products_here() const { return at(kBarriers + 48); }
  __device__ unsigned state_free() const { return at(kBarriers + 56); }
  __device__ unsigned adjoint_free() const { return at(kBarriers + 64); }
  __device__ unsigned products_free() const { return at(kBarriers + 72); }

  __device__ unsigned at(int offset) const { return shared_address(base) + offset; }
  template <typename T>
  __device__ T* table(int buffer, int offset) const {
    return reinterpret_cast<T*>(base + kTables + buffer * kTable + offset);
  }
  // Where the number of a column is in a row of weights: the first halves of all pieces of eight, then the second ones,
  // so that neither the pieces of a row nor neighbouring columns meet in the same banks.
  static __device__ __forceinline__ int weight_at(int column) {
    return column / 8 * 4 + column % 4 + column / 4 % 2 * kSecondHalves;
  }
  __device__ float* tokens(int buffer, int which) const { return table<float>(buffer, kTokensAt) + which * C::kTokens; }
  __device__ float* sums(int buffer, int which) const { return table<float>(buffer, kSums) + which * C::kTokens; }
  __device__ float* carried(int buffer) const { return sums(buffer, 8 + 2 * kParts); }  // <T, s> and dO . V, of 8 warps
};

enum Tokens { kDecay, kF, kGamma, kIn, kOut, kLeft };  // a; f; gamma; exp(a); f exp(a_last - a); exp(a_last - a)
// Sums of the rows of a token: strict dM QK along them, and dM QK / gamma in the token, each of two halves; strict
// dM QK / f down its columns, of four warps; dO . Q s, and then V . K T, of kParts warps each.
enum Sums { kAlong, kSame = 2, kDown = 4, kRead = 8 };

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

// A head's weights of tokens, by one warp: a lane has kEach neighbours.
template <class C>
struct TokenWeights {
  static constexpr int kEach = C::kTokens < 32 ? 1 : C::kTokens / 32;
  float total, a[kEach], f[kEach], gamma[kEach];

  static __device__ __forceinline__ int token(int i) { return threadIdx.x % 32 * kEach + i; }
  static __device__ __forceinline__ bool has_tokens() { return C::kTokens >= 32 || threadIdx.x % 32 < C::kTokens; }

  __device__ __forceinline__ void load(const ChunkArrays& in, const ChunkPlace<C>& place, int h) {
    const long long head = place.head_token(in, h);
    total = in.decay[head + place.last];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int c = token(i);
      const bool there = c <= place.last;
      a[i] = there ? in.decay[head + c] : total;
      f[i] = there ? in.f[head + c] : 0.0f;
      gamma[i] = there ? in.gamma[head + c] : 0.0f;
    }
  }
  __device__ __forceinline__ void store(const ChunkMemory<C>& memory, int buffer) const {
    if (!has_tokens()) return;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const float left = exp2_fast(total - a[i]);
      float* to = memory.tokens(buffer, 0) + token(i);
      to[kDecay * C::kTokens] = a[i], to[kF * C::kTokens] = f[i], to[kGamma * C::kTokens] = gamma[i];
      to[kIn * C::kTokens] = exp2_fast(a[i]), to[kOut * C::kTokens] = f[i] * left, to[kLeft * C::kTokens] = left;
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

// Eight numbers of 16 bits times that of both halves of `by`.
__device__ __forceinline__ uint4 scaled(uint4 x, unsigned by) {
  return make_uint4(Pairs16::product(x.x, by), Pairs16::product(x.y, by), Pairs16::product(x.z, by),
                    Pairs16::product(x.w, by));
}

// Rows of V, the values of every rank, and of dO, the adjoint of the output: dy, unfolded and ungated; of the i-th
// head, where ranks have weights. What is needed as it is, is copied to its place while the head before is under way.
template <class C>
struct ValueRows {
  using Memory = ChunkMemory<C>;
  static constexpr int kKind = C::kTokens * Memory::kWidePitch;  // numbers of a table of dy, z or v
  static constexpr int kUnits = C::kTokens * 8 / kTeam;
  int i, h, buffer;
  float decay, f, total;

  __device__ __forceinline__ ValueRows(const ChunkArrays& in, const ChunkPlace<C>& place, const ChunkMemory<C>& memory,
                                       int head, bool there_is = true)
      : i(head), h(place.head + head), buffer(head % 2) {
    if (!there_is) return;
    const int thread = thread_anew(), first = thread / 8, piece = thread % 8;
    if constexpr (Memory::kScaled) {
      static_assert(kUnits == 1, "a thread has one token");
      const long long of_head = place.head_token(in, h);
      decay = in.decay[of_head + min(first, place.last)], total = in.decay[of_head + place.last];
      f = first <= place.last ? in.f[of_head + first] : 0.0f;
    }
    const unsigned row = shared_address(memory.template table<bf16>(buffer, Memory::kRaw) + piece * 8);
#pragma unroll
    for (int j = 0; j < kUnits; ++j) {
      const int c = first + j * (kTeam / 8);
      const unsigned to = row + c * (Memory::kWidePitch * 2);
      const long long from = place.token_head(min(c, place.last), h, C::kP) + piece * 8;
      const bool there = c <= place.last;
      copy_piece(to, in.dy + from, there);
      if constexpr (C::kGate) copy_piece(to + 2 * kKind, in.z + from, there);
      copy_piece(to + 4 * kKind, in.v + from, there);
    }
    constexpr int kEach = C::kRank * C::kP / 4;
    const unsigned to = shared_address(memory.template table<float>(buffer, Memory::kWeights));
#pragma unroll
    for (int j = thread; j < (C::kGate ? 3 : 2) * kEach; j += kTeam) {
      const int which = j / kEach, r = j % kEach / (C::kP / 4), column = j % (C::kP / 4) * 4;
      const float* from = which == 0 ? in.mimo_v : which == 1 ? in.mimo_o : in.mimo_z;
      copy_piece(to + ((which * C::kRank + r) * Memory::kWidePitch + Memory::weight_at(column)) * 4,
                 from + (place.param(h) * C::kRank + r) * C::kP + column);
    }
    pieces_commit();
  }

  __device__ __forceinline__ void stage(const ChunkMemory<C>& memory) const {
    const int thread = thread_anew(), piece = thread % 8;
    char* values = memory.base + buffer * Memory::kInput + Memory::kV;
    const bf16* raw = memory.template table<bf16>(buffer, Memory::kRaw) + piece * 8;
    const float* weights = memory.template table<float>(buffer, Memory::kWeights) + piece * 4;
    pieces_wait<0>();
    named_barrier(4, kTeam);  // weights are copied by others
    barrier_wait(memory.empty(buffer), (i / 2 - 1) & 1);
    // What values and the output's adjoint are multiplied by where they meet a state.
    unsigned leaving, entering;
    if constexpr (Memory::kScaled) {
      const float out = f * exp2_fast(total - decay), in = exp2_fast(decay);
      leaving = Pairs16::of(out, out), entering = Pairs16::of(in, in);
    }
#pragma unroll 1
    for (int c = thread / 8; c < C::kTokens; c += kTeam / 8) {
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
          const float* from = weights + r * Memory::kWidePitch + e / 4 * Memory::kSecondHalves;
          weight_v = *reinterpret_cast<const float4*>(from);
          weight_o = *reinterpret_cast<const float4*>(from + C::kRank * Memory::kWidePitch);
          if constexpr (C::kGate) weight_z = *reinterpret_cast<const float4*>(from + 2 * C::kRank * Memory::kWidePitch);
          const float own_v[4] = {weight_v.x, weight_v.y, weight_v.z, weight_v.w},
                      own_o[4] = {weight_o.x, weight_o.y, weight_o.z, weight_o.w},
                      own_z[4] = {weight_z.x, weight_z.y, weight_z.z, weight_z.w};
#pragma unroll
          for (int n = 0; n < 4; ++n) {
            x[e + n] = value[e + n] * own_v[n];
            y[e + n] = up[e + n] * own_o[n];
            if constexpr (C::kGate) y[e + n] *= silu_of_half(0.5f * gate[e + n] * own_z[n]);
          }
        }
        const unsigned to = swizzled(C::Order::row(c, r), piece);
        const auto store = [&](int tile, uint4 words) {
          *reinterpret_cast<uint4*>(values + tile - Memory::kV + to) = words;
        };
        const uint4 v = pack8(x), adjoint = pack8(y);
        store(Memory::kV, v), store(Memory::kAdjoint, adjoint);
        if constexpr (Memory::kScaled) {
          store(Memory::kLeaving, scaled(v, leaving)), store(Memory::kEntering, scaled(adjoint, entering));
        }
      }
    }
    fence_async_proxy();
    __syncwarp();
    if (thread % 32 == 0) barrier_arrive(memory.full(buffer));
  }
};

// The same without weights: V are values as they are, dO is dy ungated. By the output's warpgroup, which would only
// wait for M otherwise.
template <class C>
__device__ __forceinline__ void stage_values(const ChunkArrays& in, const ChunkPlace<C>& place,
                                             const ChunkMemory<C>& memory, int i) {
  using Memory = ChunkMemory<C>;
  const int first = threadIdx.x % kTeam / 8, piece = threadIdx.x % 8, h = place.head + i, buffer = i % 2;
  char* values = memory.base + buffer * Memory::kInput + Memory::kV;
  constexpr int kUnits = C::kTokens * 8 / kTeam;
  const unsigned tile = shared_address(values), slopes = tile + Memory::kSlope - Memory::kV;
  const auto token = [&](int j) { return first + j * (kTeam / 8); };
  const auto place_of = [&](int j) { return place.token_head(min(token(j), place.last), h, C::kP) + piece * 8; };
  uint4 own[kUnits];
#pragma unroll
  for (int j = 0; j < kUnits; ++j) {
    const bool there = token(j) <= place.last;
    if constexpr (Memory::kSlopes) {  // this warpgroup's own; all else may still be in use
      copy_piece(slopes + swizzled(token(j), piece), in.z + place_of(j), there);
      own[j] = make_uint4(0, 0, 0, 0);
      if (there) own[j] = read_once(in.dy + place_of(j));
    }
  }
  pieces_commit();
  barrier_wait(memory.empty(buffer), (i / 2 - 1) & 1);
#pragma unroll
  for (int j = 0; j < kUnits; ++j) {
    const unsigned to = swizzled(token(j), piece);
    const bool there = token(j) <= place.last;
    copy_piece(tile + to, in.v + place_of(j), there);
    if constexpr (Memory::kSlopes) {
      *reinterpret_cast<uint4*>(values + Memory::kAdjoint - Memory::kV + to) = own[j];
    } else {
      copy_piece(tile + Memory::kAdjoint - Memory::kV + to, in.dy + place_of(j), there);
    }
  }
  pieces_commit();
  pieces_wait<Memory::kSlopes ? 1 : 0>();
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
    pieces_wait<0>();
  }
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
         swizzled(C::Order::row(first / C::kRank, first % C::kRank), unit % 8);
  }

  __device__ __forceinline__ void copy(const ChunkArrays& in, const ChunkPlace<C>& place) const {
    // Where pairs are half a row apart, a unit is four columns of each half, which a copy brings to every other eight
    // bytes of a row. Of odd rows the second halves are copied first, so that copies of two neighbouring rows have
    // different banks.
    const bool swapped = C::kHalf && first % 2 == 1;
    const long long at = place.q_at(0, first % C::kRank) + (C::kHalf ? 4 : 8) * unit + (swapped ? C::kN / 2 : 0);
    const int other = swapped ? -C::kN / 2 : C::kN / 2;
    const bf16 *q = in.q + at, *k = in.k + at;
    asm volatile("" : "+l"(q), "+l"(k));  // as they are: sums of the rest are not made anew for each row
    unsigned row = shared_address(to) + (swapped ? 8 : 0), next = row + second();
    int c = first / C::kRank;
#pragma unroll 1
    for (int i = 0; i < 8; ++i) {
      const int from = min(c, place.last) * (C::kRank * C::kGroups * C::kN);
      copy_unit(row, q + from, other);
      copy_unit(row + ChunkMemory<C>::kK - ChunkMemory<C>::kQ, k + from, other);
      const unsigned after = row + 2048;
      row = next, next = after, c += kNext;
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
    char *row = to, *other = to + second();
    const bool turned = C::kPairs % 32 == 0 || unit < C::kPairs / 4;
    uint4 turn = make_uint4(0x3c00, 0x3c00, 0x3c00, 0x3c00);  // cosine 1, sine 0
    const auto copied = [&](const char* from) { return *reinterpret_cast<const uint4*>(from); };
    uint4 q = copied(row), k = copied(row + Memory::kK - Memory::kQ);
    if (Turning && turned) turn = *reinterpret_cast<const uint4*>(turns);
#pragma unroll 1
    for (int i = 0; i < 8; ++i) {
      float x[8], y[8], cosine[4], sine[4];
      unpack_unit<C>(q, x), unpack_unit<C>(k, y);
      if constexpr (Turning) {
        const unsigned words[4] = {turn.x, turn.y, turn.z, turn.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) cosine[e] = Pair<__half>::low(words[e]), sine[e] = Pair<__half>::high(words[e]);
      }
      // The next row is on its way meanwhile, to the same registers; after the last it is that row again.
      char* next = i < 7 ? other : row;
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
      other = row + 2048, row = next;
    }
  }

 private:
  // From the first row to the second one. All others are 16 rows below one of these.
  __device__ __forceinline__ int second() const {
    if constexpr (C::kRank < 4) return 1024;
    return 512 + (unit & 4 ? -64 : 64);  // four rows below
  }
  // Eight columns, or four of each half, the others `other` numbers from the first.
  static __device__ __forceinline__ void copy_unit(unsigned to, const bf16* from, int other) {
    if constexpr (C::kHalf) {
      asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
      asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to ^ 8), "l"(from + other) : "memory");
    } else {
      copy_piece(to, from);
    }
  }
};

// Gradients of decays and weights of a head's tokens, by one warp, a lane of which has those of `TokenWeights`. What
// the rows gave is read before the next head but one takes their place, and decays are summed up once that head is
// prepared.
template <class C>
struct HeadSums {
  using Own = TokenWeights<C>;
  static constexpr int kEach = Own::kEach;
  float e[kEach], ends;

  __device__ __forceinline__ void load(const ChunkArrays& in, const ChunkPlace<C>& place, const ChunkMemory<C>& memory,
                                       int h, int buffer) {
    const int lane = threadIdx.x % 32;
    const long long head = place.head_token(in, h);
    ends = 0.0f;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int c = Own::token(i);
      e[i] = 0.0f;
      if (!Own::has_tokens()) continue;
      const float *own = memory.tokens(buffer, 0) + c, *sums = memory.sums(buffer, 0) + c;
      const auto sum_of = [&](int which) { return sums[which * C::kTokens]; };
      float below = 0.0f, read = 0.0f, out = 0.0f;
#pragma unroll
      for (int w = 0; w < 4; ++w) below += sum_of(kDown + w);
#pragma unroll
      for (int w = 0; w < ChunkMemory<C>::kParts; ++w) {
        read += sum_of(kRead + w), out += sum_of(kRead + ChunkMemory<C>::kParts + w);
      }
      const float leaving = own[kOut * C::kTokens] * out;
      e[i] =
          sum_of(kAlong) + sum_of(kAlong + 1) - own[kF * C::kTokens] * below + own[kIn * C::kTokens] * read - leaving;
      ends += leaving;
      if (c <= place.last) {
        in.d_f[head + c] = below + own[kLeft * C::kTokens] * out;
        in.d_gamma[head + c] = sum_of(kSame + c / (C::kTokens / 2));
      }
    }
    if (lane < 2) {
      const float4* others = reinterpret_cast<const float4*>(memory.carried(buffer)) + 2 * lane;
      const float sum = others[0].x + others[0].y + (others[0].z + others[0].w) + others[1].x + others[1].y +
                        (others[1].z + others[1].w);
      if (lane == 0) ends += exp2_fast(memory.tokens(buffer, kDecay)[C::kTokens - 1]) * sum;
      if (C::kSkip && lane == 1) place.record(in, h)[C::kSkipAt] = __float2bfloat16_rn(sum);
    }
  }

  __device__ __forceinline__ void store(const ChunkArrays& in, const ChunkPlace<C>& place, int h) const {
    const int lane = threadIdx.x % 32;
    const float all = warp_sum(ends);
    float suffix = e[0] + (kEach > 1 ? e[kEach - 1] : 0.0f);
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const float other = __shfl_down_sync(0xffffffff, suffix, offset);
      if (lane + offset < 32) suffix += other;
    }
    float* to = in.d_adt + place.head_token(in, h);
    if (Own::has_tokens() && Own::token(0) <= place.last) to[Own::token(0)] = suffix + all;
    if constexpr (kEach > 1) {
      const float after = __shfl_down_sync(0xffffffff, suffix, 1);
      if (Own::token(1) <= place.last) to[Own::token(1)] = e[1] + (lane == 31 ? 0.0f : after) + all;
    }
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
    TokenWeights<C> weights;
    KeyRows<C> rows(memory, buffer);
    unsigned* turns = memory.template table<unsigned>(buffer, Memory::kTurns);
    if (i < place.heads) {
      rows.load_biases(in, place, h);
      if (warp == 3) weights.load(in, place, h);
      turning.load(in, place, h);
    }
    barrier_wait(memory.empty(buffer), (i / 2 - 1) & 1);  // new barriers do not keep the first heads waiting
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

// The same of a table with rows of `pitch` bytes for tokens: words of 32 bits, two columns of which are 16 bytes. Where
// the rows of a lane are of one token, 32 columns of eight rows.
template <class C>
__device__ __forceinline__ unsigned table_fragment_at(unsigned table, int pitch, int step) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  if constexpr (C::Order::kLate == 1)
    return table + C::Order::token(warp * 16 + lane % 8) * pitch + (2 * step + lane / 8) * 16;
  return table + C::Order::token(warp * 16 + lane % 16) * pitch + (2 * step + lane / 16) * 16;
}

// tile: the turned rows; turn: what the phases get, [the row's token][8 columns], then shared among the ranks.
template <class C>
__device__ __forceinline__ void turn_back(const float (&d)[64], float (&group)[64],
                                          float (&turn)[C::Order::kLate * C::kPairs / 4], unsigned tile, unsigned turns,
                                          unsigned* bias) {
  using Memory = ChunkMemory<C>;
  using Order = typename C::Order;
  constexpr int kTurned = C::kPairs / 4;             // of the 16 columns of accumulators
  constexpr int kApart = Order::kLate == 1 ? 2 : 1;  // rows of a lane of different ranks
  constexpr int kSums = C::kRank == 1 ? 1 : 2;       // that a lane keeps of eight: other lanes have other tokens
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  unsigned* to =
      bias + (warp * C::kRank + Order::rank(lane / 4)) * Memory::kBiasPitch + lane % 4 + lane / (4 * kSums) * kSums * 4;
  unsigned words[4];
#pragma unroll
  for (int panel = 0; panel < 2; ++panel) {
    unsigned sums[kApart][8];
#pragma unroll
    for (int step = 4 * panel; step < 4 * panel + 4; ++step) {
      unsigned rows[4];  // [column][half of the rows]; so are words, or of four columns
      if (2 * step < kTurned) {
        load_tiles(rows, fragment_at(tile, step));
        if (Order::kLate > 1 || step % 2 == 0) {
          load_tiles(words, table_fragment_at<C>(turns, Memory::kTurnPitch * 4, step));
        }
      }
#pragma unroll
      for (int j = 2 * step; j < 2 * step + 2; ++j) {
        float own[4] = {d[4 * j], d[4 * j + 1], d[4 * j + 2], d[4 * j + 3]};
        if (j < kTurned) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const float x = own[2 * half], y = own[2 * half + 1];
            const float2 was = unpack2(rows[j % 2 * 2 + half]);
            const unsigned cs = words[Order::kLate > 1 ? j % 2 * 2 + half : j % 4];
            const float cosine = Pair<__half>::low(cs), sine = Pair<__half>::high(cs);
            float& sum = turn[Order::kLate > 1 ? half * kTurned + j : j];
            sum = Order::kLate > 1 || half == 0 ? y * was.x - x * was.y : sum + y * was.x - x * was.y;
            own[2 * half] = x * cosine + y * sine;
            own[2 * half + 1] = y * cosine - x * sine;
          }
        }
        if constexpr (kApart == 1) {
          sums[0][j % 8] = Pairs16::of(own[0] + own[2], own[1] + own[3]);
        } else {
          sums[0][j % 8] = Pairs16::of(own[0], own[1]), sums[kApart - 1][j % 8] = Pairs16::of(own[2], own[3]);
        }
#pragma unroll
        for (int e = 0; e < 4; ++e) group[4 * j + e] += own[e];
      }
    }
#pragma unroll
    for (int part = 0; part < kApart; ++part) {
      share_pairs<8, 16, 4 * kSums>(sums[part]);
#pragma unroll
      for (int i = 0; i < kSums; ++i) to[2 * part * Memory::kBiasPitch + 32 * panel + 4 * i] = sums[part][i];
    }
  }
  share_sums<Order::kLate * kTurned, C::kRank == 1 ? 2 : 4, 4>(turn);
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
  static constexpr int kTurned = C::kPairs / 4, kSums = C::Order::kLate * kTurned,
                       kOwn = C::kRank == 1 ? kSums : kSums / 2;
  int token, pair;

  __device__ __forceinline__ OwnTurns() {
    const int thread = thread_anew(), lane = thread % 32,
              second = C::kRank == 1 ? 0 : lane / 4 % 2;  // half of the sums
    token = C::Order::token(thread / 32 * 16 + lane / 4 + (C::Order::kLate > 1 ? 8 * second : 0));
    pair = lane % 4 + (C::Order::kLate > 1 ? 0 : second * kOwn * 4);
  }
  // To a table, or on top of what is there: see `turn_at`.
  template <bool More>
  __device__ __forceinline__ void store(const ChunkMemory<C>& memory, int table, const float (&turn)[kSums]) const {
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
    const int c = C::Order::token(row + 8 * half);
    if (c > place.last) continue;
    const long long at = place.q_at(c, C::Order::rank(row + 8 * half));
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

// Multiplies the rows of accumulators, each by its token's number.
template <class C, int Size>
__device__ __forceinline__ void scale_rows(float (&d)[Size], const float* tokens) {
  const int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
  const float low = tokens[C::Order::token(row)], high = C::Order::kLate > 1 ? tokens[C::Order::token(row + 8)] : low;
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

// A number of a token and, where tokens of a thread are neighbours, the next one's.
template <class C>
__device__ __forceinline__ float2 load_own(const float* from) {
  if constexpr (C::kRank > 1) return make_float2(*from, 0.0f);
  return *reinterpret_cast<const float2*>(from);
}

// M and dM from QK' and dO V' in half of the columns, and the sums of their elements. skip: what is on M's diagonal
// besides. A pair of tokens has one weight.
template <class C>
__device__ __forceinline__ void weigh(float (&qk)[16], float (&ov)[16], float skip, const ChunkMemory<C>& memory,
                                      int buffer, int part) {
  using Order = typename C::Order;
  constexpr int kLate = Order::kLate, kOwn = Order::kOwn / 2;  // tokens of a thread's rows, and of its columns
  constexpr int kPair = 2 / kLate * C::kRank;                  // a thread's elements of a pair of tokens
  const auto at_of = [](int i, int late, int n) {              // the n-th of them
    const int column = i * C::kRank + n % C::kRank;
    return column / 2 * 4 + 2 * (late + n / C::kRank) + column % 2;
  };
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4, row = warp * 16 + lane / 4;
  const float *decay = memory.tokens(buffer, kDecay) + part * (C::kTokens / 2), *f = decay + kF * C::kTokens;
  // The row's token, less what columns of all lanes have ahead; the same of rows.
  const int token = Order::token(row) - part * (C::kTokens / 2), beyond = row - lane % 4 * 2 - 32 * part;
  float2 early_a, early_f;
  float a[kLate], own[kLate], along[kLate] = {}, same[kLate] = {}, down[kOwn] = {};
#pragma unroll
  for (int late = 0; late < kLate; ++late) {
    const float* from = memory.tokens(buffer, kDecay) + Order::token(row + 8 * late);
    a[late] = from[0], own[late] = from[kGamma * C::kTokens];
  }
#pragma unroll
  for (int i = 0; i < kOwn; ++i) {
    const int early = Order::own_token(i);
    if (C::kRank > 1 || i % 2 == 0) {
      early_a = load_own<C>(decay + early), early_f = load_own<C>(f + early);
    }
    const float a_early = i % 2 == 0 || C::kRank > 1 ? early_a.x : early_a.y,
                f_early = i % 2 == 0 || C::kRank > 1 ? early_f.x : early_f.y;
#pragma unroll
    for (int late = 0; late < kLate; ++late) {
      // Else these eight rows have the diagonal in other columns.
      const bool meets = kLate == 1 || (late - i * C::kRank / 2) % 2 == 0;
      const int before = token + late * (8 / C::kRank) - early;
      const float decayed = exp2_fast(before > 0 ? a[late] - a_early : -1e30f);  // 0 for what is not earlier
      const float diagonal = before == 0 ? 1.0f : 0.0f;
      float w = decayed * f_early, sum = 0.0f;
#pragma unroll
      for (int at = 0; at < kPair; ++at) {
        const int x = at_of(i, late, at);
        sum += qk[x] * ov[x];
      }
      down[i] += sum * decayed, along[late] += sum * w;
      if (meets) same[late] += sum * diagonal, w += diagonal * own[late];
#pragma unroll
      for (int at = 0; at < kPair; ++at) {
        const int x = at_of(i, late, at), half = x / 2 % 2, column = x / 4 * 2 + x % 2;
        qk[x] *= w, ov[x] *= w;
        if (C::kSkip && (half - column / 2) % 2 == 0) {
          qk[x] += beyond - column / 4 * 16 == column % 2 ? skip : 0.0f;
        }
      }
    }
  }
  share_sums<kOwn, 16, kOwn == 2 ? 16 : kOwn == 4 ? 8 : 4>(down);
#pragma unroll
  for (int offset = kOwn == 2 ? 8 : 4; offset >= (kOwn == 8 ? 8 : 4); offset /= 2) {
    down[0] += __shfl_xor_sync(0xffffffff, down[0], offset);
  }
  float* sums = memory.sums(buffer, 0);
  if (C::kRank == 1 || lane % (8 * C::kRank / 2) < 4) {
    sums[(kDown + warp) * C::kTokens + part * (C::kTokens / 2) + Order::own_token(lane / (4 * (8 / kOwn)))] = down[0];
  }
  // Of these a lane keeps one.
  float all[2 * kLate];
#pragma unroll
  for (int late = 0; late < kLate; ++late) all[late] = along[late], all[kLate + late] = same[late];
  share_sums<2 * kLate, 2, kLate == 1 ? 2 : 1>(all);
  if constexpr (kLate == 1) all[0] += __shfl_xor_sync(0xffffffff, all[0], 1);
  if constexpr (C::kRank > 1) all[0] += __shfl_xor_sync(0xffffffff, all[0], 4);
  const int late = kLate == 1 ? 0 : lane % 2;
  if (C::kRank == 1 || (lane % 8 < 4 && (kLate > 1 || lane % 2 == 0))) {
    sums[(lane / 2 % 2 * (kSame - kAlong) + part) * C::kTokens + Order::token(row + 8 * late)] = all[0];
  }
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
  float qk[16], ov[16];
  wgmma_fence();
  multiply_tiles<32, 8, false, false>(qk, q, k + further, false, memory.zero);
  multiply_tiles<32, 4, false, false>(ov, adjoint, v + further, false, memory.zero);
  wgmma_commit();
  wgmma_wait<0>();
  pin(qk), pin(ov);
  weigh<C>(qk, ov, skip, memory, buffer, part);
  barrier_wait(memory.products_free(), (i - 1) & 1);
  store_half(m, qk, part);
  store_half(adjoint_m, ov, part);
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

// Products with columns of the head in rows and a chunk's rows in columns, as they are where ranks have weights: a
// thread has all ranks of kOwn tokens, in two of the head's columns, 8 apart, and folds them in registers.
template <class C>
struct Folded {
  using Memory = ChunkMemory<C>;
  using Order = typename C::Order;
  static constexpr int kRank = C::kRank, kOwn = Order::kOwn, kKind = C::kTokens * Memory::kWidePitch;
  static constexpr int kPitch = Memory::kWidePitch;

  // The accumulator of an own token and a rank.
  static __device__ constexpr int at(int half, int i, int r) {
    return (i * kRank + r) / 2 * 4 + 2 * half + (i * kRank + r) % 2;
  }
  // The first of the thread's columns.
  static __device__ __forceinline__ int column() {
    const int thread = thread_anew();
    return thread / 32 * 16 + thread % 32 / 4;
  }

  // Where `load_tiles_transposed` finds the warp's columns of 16 tokens of a table: eight columns, and the eight that
  // are `second` numbers later; the next tokens are 16 rows on.
  static __device__ __forceinline__ unsigned tokens_at(const bf16* table, int second) {
    const int thread = thread_anew(), lane = thread % 32, row = lane % 8;
    const int token = kRank == 1 ? row : row % 2 * 4 + row / 2;
    return shared_address(table + (token + lane / 8 % 2 * 8) * kPitch + thread / 32 * 16 + lane / 16 * second);
  }
  // Of what lies there, that of an own token, in the first or the second place.
  static __device__ __forceinline__ float of_token(const unsigned (&words)[kOwn], int second, int i) {
    const unsigned pair = words[i / 4 * 4 + 2 * second + i / 2 % 2];
    return i % 2 == 0 ? Pairs16::low(pair) : Pairs16::high(pair);
  }
  static __device__ __forceinline__ void load(unsigned (&words)[kOwn], unsigned at) {
#pragma unroll
    for (int i = 0; i < kOwn; i += 4) {
      unsigned four[4];
      load_tiles_transposed(four, at + i / 4 * (16 * kPitch * 2));
#pragma unroll
      for (int k = 0; k < 4; ++k) words[i + k] = four[k];
    }
  }
  // A warp's 16 columns of all tokens, rounded, to a table and from there to memory.
  static __device__ __forceinline__ void store(const float (&x)[2 * kOwn], bf16* table, bf16* to,
                                               const ChunkPlace<C>& place, int h) {
    const unsigned at = tokens_at(table, 8);
#pragma unroll
    for (int i = 0; i < kOwn; i += 4) {
      const unsigned words[4] = {Pairs16::of(x[i], x[i + 1]), Pairs16::of(x[i + 2], x[i + 3]),
                                 Pairs16::of(x[kOwn + i], x[kOwn + i + 1]),
                                 Pairs16::of(x[kOwn + i + 2], x[kOwn + i + 3])};
      store_tiles_transposed(at + i / 4 * (16 * kPitch * 2), words);
    }
    __syncwarp();
    // Eight lanes have tokens that are two apart, so that these do not meet in the same banks.
    const int thread = thread_anew(), first = thread % 8 / 2 * 2 + thread / 8 % 2 + thread % 32 / 16 * 8,
              column = thread / 32 * 16 + thread % 2 * 8;
#pragma unroll
    for (int c = first; c < C::kTokens; c += 16) {
      const uint4 piece = *reinterpret_cast<const uint4*>(table + c * kPitch + column);
      if (c <= place.last) *reinterpret_cast<uint4*>(to + place.token_head(c, h, C::kP) + column) = piece;
    }
  }

  static __device__ __forceinline__ void scale(float (&d)[32], const float* tokens) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const float by = tokens[Order::own_token(i)];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int r = 0; r < kRank; ++r) d[at(half, i, r)] *= by;
      }
    }
  }
  // Sums over the warp's columns, of own tokens.
  static __device__ __forceinline__ void store_sums(float (&x)[kOwn], float* to) {
    const int lane = thread_anew() % 32;
    share_sums<kOwn, 16, kOwn == 4 ? 8 : 4>(x);
    if constexpr (kOwn == 4) x[0] += __shfl_xor_sync(0xffffffff, x[0], 4);
    if (kOwn == 4 && lane % 8 >= 4) return;
    constexpr int kKept = kOwn == 16 ? 2 : 1;
#pragma unroll
    for (int i = 0; i < kKept; ++i) to[Order::own_token(lane / (kOwn == 4 ? 8 : 4) * kKept + i)] = x[i];
  }
  // Sums over the tokens, of two kinds or two columns, each with all ranks, to rows `apart` numbers apart.
  static __device__ __forceinline__ void store_ranks(float (&x)[2 * kRank], bf16* to, int apart) {
    const int lane = thread_anew() % 4;
    constexpr int kKept = kRank == 4 ? 2 : 1;
    share_sums<2 * kRank, 2, kRank == 1 ? 2 : 1>(x);
    if constexpr (kRank == 1) x[0] += __shfl_xor_sync(0xffffffff, x[0], 1);
    if (kRank == 1 && lane % 2 == 1) return;
    const int first = kRank == 1 ? lane / 2 : lane * kKept;
    to += first / kRank * apart + first % kRank * C::kP + column();
#pragma unroll
    for (int i = 0; i < kKept; ++i) to[i * C::kP] = __float2bfloat16_rn(x[i]);
  }
};

// dV of the i-th head, and what values and their weights get of it, where ranks have weights. o: queries times the
// state, under way when this returns.
template <class C>
__device__ __forceinline__ void make_folded_values(float (&o)[32], const ChunkArrays& in, const ChunkPlace<C>& place,
                                                   const ChunkMemory<C>& memory, int i) {
  using Memory = ChunkMemory<C>;
  using Own = Folded<C>;
  const int buffer = i % 2, h = place.head + i;
  const unsigned k = memory.at(buffer * Memory::kInput + Memory::kK), adjoint = k + Memory::kAdjoint - Memory::kK;
  bf16* table = memory.template table<bf16>(buffer, Memory::kRaw) + 2 * Own::kKind;
  const float* weights = memory.template table<float>(buffer, Memory::kWeights) + Memory::weight_at(Own::column());
  float dv[32];
  barrier_wait(memory.adjoint_here(), i & 1);
  wgmma_fence();
  multiply_tiles<64, 8, false, false>(dv, memory.at(Memory::kStateAdjoint), k, false, memory.zero);
  wgmma_commit();
  wgmma_wait<0>();
  pin(dv);
  if (threadIdx.x % 32 == 0) barrier_arrive(memory.adjoint_free());
  unsigned values[Own::kOwn];
  float spread[2][C::kRank], sums[2 * Own::kOwn];
  // Values and weights are read again after the next product: registers are short.
  const auto fold = [&] {
    Own::load(values, Own::tokens_at(table, 8));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int r = 0; r < C::kRank; ++r) spread[half][r] = weights[r * Own::kPitch + 4 * half];
#pragma unroll
      for (int token = 0; token < Own::kOwn; ++token) {
        float& sum = sums[half * Own::kOwn + token];
        sum = 0.0f;
#pragma unroll
        for (int r = 0; r < C::kRank; ++r) sum += dv[Own::at(half, token, r)] * spread[half][r];
      }
    }
  };
  fold();
  float written[Own::kOwn];
#pragma unroll
  for (int token = 0; token < Own::kOwn; ++token) {
    written[token] =
        Own::of_token(values, 0, token) * sums[token] + Own::of_token(values, 1, token) * sums[Own::kOwn + token];
  }
  Own::store_sums(written, memory.sums(buffer, kRead + Memory::kParts) + thread_anew() / 32 * C::kTokens);
  Own::scale(dv, memory.tokens(buffer, kOut));
  barrier_wait(memory.products_here(), i & 1);
  wgmma_fence();
  multiply_tiles<64, 4, true, true>(dv, adjoint, memory.at(Memory::kM), true, memory.zero);
  wgmma_commit();
  barrier_wait(memory.state_here(), i & 1);
  multiply_tiles<64, 8, false, false>(o, memory.at(Memory::kState), k + Memory::kQ - Memory::kK, false, memory.zero);
  wgmma_commit();
  wgmma_wait<1>();
  pin(dv);
  fold();
  float d_spread[2 * C::kRank] = {};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int token = 0; token < Own::kOwn; ++token) {
      const float value = Own::of_token(values, half, token);
      if (C::kFinal && place.t0 + C::Order::own_token(token) == in.seq - 1) {
        sums[half * Own::kOwn + token] +=
            in.d_final_v[((long long)place.b * C::kHeads + h) * C::kP + Own::column() + 8 * half];
      }
#pragma unroll
      for (int r = 0; r < C::kRank; ++r) d_spread[half * C::kRank + r] += dv[Own::at(half, token, r)] * value;
    }
  }
  Own::store_ranks(d_spread, place.record(in, h) + C::kMimoVAt, 8);
  Own::store(sums, table, in.d_v, place, h);
}

// The gradients of gates and of the weights of outputs and gates, from the output, columns of the head in rows.
template <class C>
__device__ __forceinline__ void output_gradients(float (&o)[32], const ChunkArrays& in, const ChunkPlace<C>& place,
                                                 const ChunkMemory<C>& memory, int h, int buffer) {
  using Memory = ChunkMemory<C>;
  using Own = Folded<C>;
  constexpr int kWeight = C::kRank * Own::kPitch;
  bf16* table = memory.template table<bf16>(buffer, Memory::kRaw);
  const float* weights =
      memory.template table<float>(buffer, Memory::kWeights) + kWeight + Memory::weight_at(Own::column());
  bf16* record = place.record(in, h) + C::kMimoOAt;
  float sums[2 * Own::kOwn];
  unsigned at = Own::tokens_at(table, Own::kKind);
  // The first half's program is the second one's as well, whose numbers take the place of the first one's.
#pragma unroll 1
  for (int half = 0; half < 2; ++half) {
    unsigned words[Own::kOwn];  // of dy and of z
    Own::load(words, at);
    at += 16;
    float fold[C::kRank], spread[C::kRank], d_ranks[2 * C::kRank] = {};
#pragma unroll
    for (int r = 0; r < C::kRank; ++r) {
      fold[r] = weights[r * Own::kPitch];
      spread[r] = C::kGate ? weights[kWeight + r * Own::kPitch] : 1.0f;
    }
    weights += 4;
#pragma unroll
    for (int token = 0; token < Own::kOwn; ++token) {
      const float dy = Own::of_token(words, 0, token), z = Own::of_token(words, 1, token);
      float sum = 0.0f;
#pragma unroll
      for (int r = 0; r < C::kRank; ++r) {
        const float up = dy * o[Own::at(0, token, r)];
        if constexpr (C::kGate) {
          const float half_gate = z * (0.5f * spread[r]), tanh_gate = tanh_fast(half_gate);
          const float on = 0.5f + 0.5f * tanh_gate, rest = half_gate - half_gate * tanh_gate;
          const float seen = up * on, dx = seen + seen * rest;  // of the gate, but for the fold
          d_ranks[r] += up * (half_gate + half_gate * tanh_gate);
          d_ranks[C::kRank + r] += dx * z;
          sum += dx * (fold[r] * spread[r]);
        } else {
          d_ranks[r] += up;
        }
        float next = o[Own::at(1, token, r)];
        asm volatile("" : "+f"(next));  // else registers of the product are shuffled about while it runs
        o[Own::at(0, token, r)] = next;
      }
      sums[token] = sums[Own::kOwn + token];
      sums[Own::kOwn + token] = sum;
    }
#pragma unroll
    for (int r = 0; r < C::kRank; ++r) d_ranks[C::kRank + r] *= fold[r];
    Own::store_ranks(d_ranks, record, C::kRank * C::kP);
    record += 8;
  }
  if constexpr (C::kGate) Own::store(sums, table + Own::kKind, in.d_z, place, h);
}

// The output of the i-th head, and what depends on it, where ranks have weights. o: see `make_folded_values`.
template <class C>
__device__ __forceinline__ void make_folded_output(float (&o)[32], const ChunkArrays& in, const ChunkPlace<C>& place,
                                                   const ChunkMemory<C>& memory, int i) {
  using Memory = ChunkMemory<C>;
  using Own = Folded<C>;
  const int buffer = i % 2, lane = thread_anew() % 32, warp = thread_anew() / 32;
  const unsigned q = memory.at(buffer * Memory::kInput + Memory::kQ), v = q + Memory::kV - Memory::kQ;
  wgmma_wait<0>();
  pin(o);
  if (lane == 0) barrier_arrive(memory.state_free());
  float read[Own::kOwn] = {};
  const unsigned adjoint =
      q + Memory::kAdjoint - Memory::kQ + swizzled(lane / 8 % 2 * 8 + lane % 8, 2 * warp + lane / 16);
#pragma unroll
  for (int j = 0; j < 8; j += 2) {
    unsigned words[4];
    load_tiles_transposed(words, adjoint + j * 1024);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float* x = o + 4 * (j + n % 2) + n / 2 * 2;
      const float2 dx = unpack2(words[n]);
      read[(2 * j + n % 2 * 2) / C::kRank] += x[0] * dx.x;
      read[(2 * j + n % 2 * 2 + 1) / C::kRank] += x[1] * dx.y;
    }
  }
  Own::store_sums(read, memory.sums(buffer, kRead) + warp * C::kTokens);
  Own::scale(o, memory.tokens(buffer, kIn));
  wgmma_fence();
  multiply_tiles<64, 4, true, false>(o, v, memory.at(Memory::kM), true, memory.zero);
  wgmma_commit();
  wgmma_wait<0>();
  pin(o);
  if (lane == 0) barrier_arrive(memory.products_free());
  output_gradients<C>(o, in, place, memory, place.head + i, buffer);
}

// dV of the i-th head.
template <class C>
__device__ __forceinline__ void make_values(const ChunkArrays& in, const ChunkPlace<C>& place,
                                            const ChunkMemory<C>& memory, int i) {
  using Memory = ChunkMemory<C>;
  const int buffer = i % 2;
  const unsigned k = memory.at(buffer * Memory::kInput + Memory::kK), v = k + Memory::kV - Memory::kK,
                 adjoint = k + Memory::kAdjoint - Memory::kK;
  float dv[32];
  barrier_wait(memory.adjoint_here(), i & 1);
  wgmma_fence();
  multiply_tiles<64, 8, false, false>(dv, k, memory.at(Memory::kStateAdjoint), false, memory.zero);
  wgmma_commit();
  wgmma_wait<0>();
  pin(dv);
  if (threadIdx.x % 32 == 0) barrier_arrive(memory.adjoint_free());
  store_dots(dv, v, memory.sums(buffer, kRead + Memory::kParts));
  scale_rows<C>(dv, memory.tokens(buffer, kOut));
  barrier_wait(memory.products_here(), i & 1);
  wgmma_fence();
  multiply_tiles<64, 4, true, true>(dv, memory.at(Memory::kM), adjoint, true, memory.zero);
  wgmma_commit();
  wgmma_wait<0>();
  pin(dv);
  value_gradients<C>(dv, in, place, memory, place.head + i);
}

// The output of the i-th head, and what depends on it.
template <class C>
__device__ __forceinline__ void make_output(const ChunkArrays& in, const ChunkPlace<C>& place,
                                            const ChunkMemory<C>& memory, int i) {
  using Memory = ChunkMemory<C>;
  const int buffer = i % 2, lane = threadIdx.x % 32;
  const unsigned q = memory.at(buffer * Memory::kInput + Memory::kQ), v = q + Memory::kV - Memory::kQ,
                 adjoint = q + Memory::kAdjoint - Memory::kQ;
  float o[32];
  barrier_wait(memory.state_here(), i & 1);
  wgmma_fence();
  multiply_tiles<64, 8, false, false>(o, q, memory.at(Memory::kState), false, memory.zero);
  wgmma_commit();
  wgmma_wait<0>();
  pin(o);
  if (lane == 0) barrier_arrive(memory.state_free());
  store_dots(o, adjoint, memory.sums(buffer, kRead));
  if constexpr (Memory::kSlopes) {
    scale_rows<C>(o, memory.tokens(buffer, kIn));
    wgmma_fence();
    multiply_tiles<64, 4, false, true>(o, memory.at(Memory::kM), v, true, memory.zero);
    wgmma_commit();
    wgmma_wait<0>();
    pin(o);
  }
  if (lane == 0) barrier_arrive(memory.products_free());
  if constexpr (Memory::kSlopes) gate_gradients<C>(o, in, place, memory, place.head + i, buffer);
}

// The values of the head after the i-th are staged while this one's products are under way.
template <class C>
__device__ __forceinline__ void output_side(const ChunkArrays& in, const ChunkPlace<C>& place,
                                            const ChunkMemory<C>& memory) {
  const int thread = threadIdx.x % kTeam;
  if constexpr (C::kWeighted) {
    if (place.heads > 0) ValueRows<C>(in, place, memory, 0).stage(memory);
  }
#pragma unroll 1
  for (int i = C::kWeighted ? 0 : -1; i < place.heads; ++i) {
    const int buffer = i % 2;
    const bool more = i + 1 < place.heads;
    if constexpr (C::kWeighted) {
      float o[32];
      const ValueRows<C> next(in, place, memory, i + 1, more);
      barrier_wait(memory.full(buffer), i / 2 & 1);
      make_folded_values<C>(o, in, place, memory, i);
      if (more) next.stage(memory);
      make_folded_output<C>(o, in, place, memory, i);
    } else {
      if (more) stage_values<C>(in, place, memory, i + 1);
      if (i < 0) continue;
      barrier_wait(memory.full(buffer), i / 2 & 1);
      make_values<C>(in, place, memory, i);
      make_output<C>(in, place, memory, i);
    }
    __syncwarp();
    if (thread % 32 == 0) barrier_arrive(memory.empty(buffer));
    named_barrier(4, kTeam);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// The query side and the key side.

// The gradient of the last token's keys as part of the final state.
template <class C>
__device__ __forceinline__ void add_final_key(float (&d)[64], const ChunkArrays& in, const ChunkPlace<C>& place,
                                              int h) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    if (place.t0 + C::Order::token(row + 8 * half) != in.seq - 1) continue;
    const long long key = (((long long)place.b * C::kHeads + h) * C::kRank + C::Order::rank(row + 8 * half)) * C::kN;
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
    const unsigned rows = Memory::kScaled ? q + (query ? Memory::kEntering : Memory::kLeaving) : query ? adjoint : v;
    multiply_tiles<128, 4, false, true>(d, rows, state, false, memory.zero);
    wgmma_commit();
    // <T, s> and dO . V in half of the columns.
    float dots[2] = {
        dots_of_tiles<4>(memory.at(Memory::kState) + part * kPanel, memory.at(Memory::kStateAdjoint) + part * kPanel, 0)
            .own(),
        C::kSkip ? dots_of_tiles<2>(adjoint, v, 2 * part).own() : 0.0f};
    share_sums<2, 16, 16>(dots);
#pragma unroll
    for (int offset = 8; offset > 0; offset /= 2) dots[0] += __shfl_xor_sync(0xffffffff, dots[0], offset);
    if (lane % 16 == 0) memory.carried(buffer)[lane / 2 + 4 * part + thread / 32] = dots[0];
    fence_async_proxy();  // what was read of the states, ahead of the copies that replace them
    __syncwarp();
    if constexpr (!Memory::kScaled) {
      wgmma_wait<0>();
      pin(d);
      if (lane == 0) barrier_arrive(memory.state_free()), barrier_arrive(memory.adjoint_free());
      scale_rows<C>(d, memory.tokens(buffer, query ? kIn : kOut));
    }
    barrier_wait(memory.products_here(), i & 1);
    if constexpr (!Memory::kScaled) wgmma_fence();
    if (query) {
      multiply_tiles<128, 4, false, true>(d, adjoint_m, k, true, memory.zero);
    } else {
      multiply_tiles<128, 4, true, true>(d, adjoint_m, q, true, memory.zero);
    }
    wgmma_commit();
    wgmma_wait<0>();
    pin(d);
    if (lane == 0) {
      if constexpr (Memory::kScaled) barrier_arrive(memory.state_free()), barrier_arrive(memory.adjoint_free());
      barrier_arrive(memory.products_free());
    }
    if constexpr (C::kFinal) {
      if (!query) add_final_key<C>(d, in, place, h);
    }
    float turn[OwnTurns<C>::kSums];
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
  const ChunkMemory<C> memory{shared, static_cast<unsigned>(seq) >> 31};
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
    fence_barrier_init();
  }
  let_next_kernel_start();
  wait_for_earlier_kernels();
  __syncthreads();
  const int team = uniform(threadIdx.x / kTeam);
  if (team < 2) {
    take_registers<C::kWeighted ? 160 : 176>();
    product_side<C>(in, ChunkPlace<C>(in), memory, team == 0);
  } else if (team == 2) {
    give_registers<C::kWeighted ? 112 : 80>();
    output_side<C>(in, ChunkPlace<C>(in), memory);
  } else {
    give_registers<80>();
    prepare_heads<C>(in, ChunkPlace<C>(in), memory);
  }
}

}  // namespace jax_ssd

// What threads of the Mamba-3 pipeline make of keys, queries and values, chunk after chunk, on their way from global to
// shared memory. H: the sizes of the pipeline.
#pragma once

#include "mamba3_rows.cuh"

namespace jax_ssd {

// What a thread stages of keys or queries: a unit (see `Unit`) and those 8 further, of two rows at a time: neighbours,
// which are two ranks of a token and share its rotations, or, of rank 1, rows that are kApart from each other. The next
// two are kApart further and have the same ranks, so that biases stay in registers. Eight lanes have a row. Rows are
// loaded a turn ahead, all of them or the first kAhead; then, as soon as two are staged, those two rounds further.
template <class H>
struct RowStage {
  using S = typename H::S;
  // To the ends of segments all stagers have keys; else half of them have queries.
  static constexpr int kThreads = H::kEnds ? H::kStagers : H::kStagers / 2;
  static constexpr int kRanks = S::kRank > 1 ? 2 : 1;  // of a token that a thread has
  static constexpr int kApart = kThreads / 8 * kRanks, kOwn = H::kRows / kApart * kRanks;
  static constexpr int kAhead = H::kAhead < kOwn ? H::kAhead : kOwn;
  static constexpr int kUnits = S::kState / 64, kRow = S::kGroups * S::kState;
  // A unit's columns: all are neighbours, or two halves are.
  static constexpr int kParts = S::kHalf ? 2 : 1, kWidth = 8 / kParts;
  Unit<S> bias[kRanks][kUnits];
  unsigned identity;
  unsigned raw[kAhead][kUnits][4];
  const __nv_bfloat16* from;  // the first row of the chunk that is loaded next
  // Where there are registers for them: the thread's first row among those that are given, its place in a matrix, and
  // those of its tokens' rotations in the table. Else they are computed anew in each turn.
  static constexpr bool kKept = kAhead == kOwn && !H::kEnds;
  int given;
  unsigned spot;
  int turns[kKept ? kOwn / kRanks : 1];

  // Where halves of a row are its pairs, eight lanes write half of a line and sixteen, 8 bytes each, at a time. So that
  // these have all banks, their two rows are four apart, which the swizzle takes to the other half.
  static __device__ __forceinline__ int first_row() {
    constexpr int kFour = 4 / kRanks;
    const int slot = thread_here() % kThreads / 8;
    return kRanks * (S::kHalf ? (slot & ~(1 | kFour)) | slot % 2 * kFour | slot / kFour % 2 : slot);
  }
  // Of the thread's row i.
  static __device__ __forceinline__ int rank(int i) { return RowOrder<S::kRank>::rank(first_row()) + i % kRanks; }
  static __device__ __forceinline__ int token(int i) {
    return RowOrder<S::kRank>::token(first_row()) + i / kRanks * (kApart / S::kRank);
  }
  static __device__ __forceinline__ int lane() { return thread_here() % 8; }
  // Of a part of a thread's unit i, counted from that of its unit 0, which is at kWidth times its lane.
  static __device__ constexpr int column(int i, int part) { return 8 * kWidth * i + part * (S::kState / 2); }

  // biases: [rank][state] of the head. rows: [token][rank][groups][state], at the first token and the head's group.
  __device__ __forceinline__ RowStage(const float* biases, const __nv_bfloat16* rows)
      : identity(identity_tile()), from(rows + lane() * kWidth), given(first_given()), spot(place_of_first()) {
    if constexpr (kKept) {
#pragma unroll
      for (int i = 0; i < kOwn / kRanks; ++i) turns[i] = H::Table::place(token(i * kRanks), 4 * lane());
    }
#pragma unroll
    for (int i = 0; i < kRanks * kUnits; ++i) {
      bias[i / kUnits][i % kUnits] = Unit<S>(biases + rank(i / kUnits) * S::kState, lane() + i % kUnits * 8);
    }
  }

  // The first rows of a chunk of `count` tokens, the next one that is stored.
  __device__ __forceinline__ void begin(int count) {
#pragma unroll
    for (int own = 0; own < kAhead; ++own) load(own, own, count);
  }

  // Rotates the rows of a chunk of `count` tokens to a matrix with panels of `panel` bytes, after which the next one
  // can begin. last_key: where the keys of token `last` are written in float32 too.
  __device__ __forceinline__ void store(unsigned to, int panel, const typename H::Table& table, int last,
                                        float* last_key, int count) {
    const unsigned base = to + (kKept ? spot : place_of_first());
#pragma unroll(kAhead == kOwn ? kOwn / 2 : 1)
    for (int round = 0; round < kOwn / 2; ++round) {
      const auto token_of = [&](int j) { return token(2 * round + j); };
      constexpr int kTokens = 2 / kRanks;
      float sine[kTokens][kUnits][4],
          cosine[kTokens][kUnits][4];  // before anything is stored, which would be waited for
#pragma unroll
      for (int j = 0; j < kTokens; ++j) {
#pragma unroll
        for (int i = 0; i < kUnits; ++i) {
          const int unit = lane() + 8 * i;
          if (4 * unit >= S::kPairs) continue;
          const int at =
              kKept ? turns[2 * round / kRanks + j] + 32 * i : H::Table::place(token_of(j * kRanks), 4 * unit);
          load_values(sine[j][i], table.sine + at);
          load_values(cosine[j][i], table.cosine + at);
        }
      }
      Unit<S> next;  // where there are registers for it, unpacked while the one before is rotated and stored
      if constexpr (kKept) unpack(next, 2 * round, 0);
#pragma unroll
      for (int step = 0; step < 2 * kUnits; ++step) {
        const int j = step / kUnits, i = step % kUnits, own = 2 * round + j, unit = lane() + 8 * i;
        if constexpr (!kKept) unpack(next, own, i);
        Unit<S> x = next;
        if (kKept && step + 1 < 2 * kUnits) unpack(next, 2 * round + (step + 1) / kUnits, (step + 1) % kUnits);
        if (4 * unit < S::kPairs) x.rotate_by(sine[j / kRanks][i], cosine[j / kRanks][i]);
        if (token_of(j) == last) x.write(last_key + rank(own) * S::kState, unit);
        unsigned words[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) words[e] = bfloat16_pair(x.v[2 * e], x.v[2 * e + 1]);
        // Of a neighbour below an even row the order of pieces differs in one bit.
        write((base + own / kRanks * kApart * 128 + own % kRanks * 128) ^ own % kRanks * 16, panel, i, words);
        if (kAhead < kOwn && i == kUnits - 1 && own + kAhead < kOwn) load(j, own + kAhead, count);
      }
    }
    from += (long long)count * (S::kRank * kRow);
  }

 private:
  static __device__ __forceinline__ int first_given() { return token(0) * S::kRank + rank(0); }
  static __device__ __forceinline__ unsigned place_of_first() {
    return swizzled(first_row(), lane() * kWidth / 8) + lane() * kWidth % 8 * 2;
  }
  __device__ __forceinline__ void unpack(Unit<S>& x, int own, int i) const {
#pragma unroll
    for (int e = 0; e < 8; e += 4) {
      add_pairs(x.v + e, raw[kAhead == kOwn ? own : own % 2][i] + e / 2, identity, bias[own % kRanks][i].v + e);
    }
  }
  // A row beyond the chunk is one of its last token instead: it counts for nothing, and is finite if that is.
  __device__ __forceinline__ void load(int to, int own, int count) {
    static_assert(kApart % S::kRank == 0, "rows that are kApart from each other are of one rank");
    const int first = kKept ? given : first_given(), mine = first + own / kRanks * kApart + own % kRanks;
    const __nv_bfloat16* row = from + min(mine, count * S::kRank - 1) * kRow;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      if constexpr (S::kHalf) {
        const uint2 low = *reinterpret_cast<const uint2*>(row + column(i, 0));
        const uint2 high = *reinterpret_cast<const uint2*>(row + column(i, 1));
        raw[to][i][0] = low.x, raw[to][i][1] = low.y, raw[to][i][2] = high.x, raw[to][i][3] = high.y;
      } else {
        const uint4 all = *reinterpret_cast<const uint4*>(row + column(i, 0));
        raw[to][i][0] = all.x, raw[to][i][1] = all.y, raw[to][i][2] = all.z, raw[to][i][3] = all.w;
      }
    }
  }
  // Unit i at the place of unit 0. The swizzle does not change between rows that are a multiple of eight apart.
  static __device__ __forceinline__ void write(unsigned base, int panel, int i, const unsigned (&words)[4]) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int from = column(i, part);
      const unsigned at = (base ^ from % 64 * 2) + from / 64 * panel;
      if constexpr (kParts == 1) {
        store_shared(at, words[0], words[1], words[2], words[3]);
      } else {
        store_shared(at, words[2 * part], words[2 * part + 1]);
      }
    }
  }
};

// What a thread stages of values: eight columns of rows that are kApart from each other, tokens' values expanded to the
// same rank. Of each 16 columns the even ones come first: so a thread's two rows of accumulators, 8 apart, are
// neighbours in the head.
template <class H>
struct ValueStage {
  using S = typename H::S;
  static constexpr bool kWeighted = H::O::kWeighted;
  static constexpr int kApart = H::kStagers / 8, kOwn = H::kRows / kApart;
  static_assert(kOwn % 2 == 0 && kApart % S::kRank == 0, "pairs of rows, of one rank");
  uint4 raw[kOwn];
  float weights[8] = {};
  const __nv_bfloat16* from;  // of the next chunk

  static __device__ __forceinline__ int first_row() { return threadIdx.x % H::kStagers / 8; }
  static __device__ __forceinline__ int rank() { return RowOrder<S::kRank>::rank(first_row()); }
  // Of the thread's row i.
  static __device__ __forceinline__ int token(int i) {
    return RowOrder<S::kRank>::token(first_row()) + i * (kApart / S::kRank);
  }
  static __device__ __forceinline__ int column() { return threadIdx.x % 8 * 8; }

  // v: at the first token and the head. mimo_v: [rank][head_dim] of the head.
  __device__ __forceinline__ ValueStage(const __nv_bfloat16* v, const float* mimo_v)
      : from(v + token(0) * (S::kHeads * S::kHeadDim) + column()) {
    if (kWeighted && column() < S::kHeadDim) load_values(weights, mimo_v + rank() * S::kHeadDim + column());
  }

  // Tokens beyond the next chunk are zero.
  __device__ __forceinline__ void load(int count) {
#pragma unroll
    for (int own = 0; own < kOwn; ++own) {
      raw[own] = make_uint4(0, 0, 0, 0);
      if (token(own) < count && column() < S::kHeadDim) {
        raw[own] = *reinterpret_cast<const uint4*>(from + own * (kApart / S::kRank * S::kHeads * S::kHeadDim));
      }
    }
    from += (long long)count * (S::kHeads * S::kHeadDim);
  }
  // Values, and what the state after the chunk keeps of them: `kept` of their tokens. Values that are not finite become
  // zero; then spoil(token) is called.
  template <class Spoil>
  __device__ __forceinline__ void store(const typename H::Values& values, const typename H::Values& kept_values,
                                        const float* kept, Spoil spoil) {
    const unsigned base = values.address(first_row(), column() / 16 * 16) + column() % 16;
    const unsigned apart = kept_values.base - values.base;
#pragma unroll 1
    for (int pair = 0; pair < kOwn / 2; ++pair, raw[0] = raw[kOwn - 2], raw[1] = raw[kOwn - 1]) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int own = 2 * pair + i;
        const float keep = kept[token(own)];
        const unsigned pairs[4] = {raw[i].x, raw[i].y, raw[i].z, raw[i].w};
        unsigned words[4], kept_words[4], probe = 0;
        float x[8];  // not by `add_pairs`: while a turn begins products have the tensor cores
#pragma unroll
        for (int e = 0; e < 4; ++e) x[2 * e] = low_of_pair(pairs[e]), x[2 * e + 1] = high_of_pair(pairs[e]);
#pragma unroll
        for (int e = 0; e < 8 && kWeighted; ++e) x[e] *= weights[e];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int first = e % 2 * 4 + e / 2;  // even columns, then odd ones
          words[e] = bfloat16_pair(x[first], x[first + 2]);
          kept_words[e] = bfloat16_pair(keep * x[first], keep * x[first + 2]);
          probe = plus_zero_times(probe, words[e]);
        }
        if ((probe & 0x7fff7fffu) != 0) {
#pragma unroll
          for (int e = 0; e < 4; ++e) words[e] = kept_words[e] = 0;
          spoil(token(own));
        }
        // The next piece's address differs in one bit.
        const unsigned at = base + own * kApart * 128, next = at ^ 16;
        if constexpr (!H::kEnds) store_shared(at, words[0], words[1]), store_shared(next, words[2], words[3]);
        store_shared(at + apart, kept_words[0], kept_words[1]);
        store_shared(next + apart, kept_words[2], kept_words[3]);
      }
    }
  }
};

}  // namespace jax_ssd

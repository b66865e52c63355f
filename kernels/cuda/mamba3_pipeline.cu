// The scan of Mamba-3 forward, in bfloat16, for the warpgroup products of sm_90. The mathematics is that of
// mamba3_forward.cu. A block of four warpgroups walks the chunks of a head. In a turn, all of its threads gate and fold
// the output of the chunk before, rotate keys and queries and expand values of the next chunk, and make the rotations
// of the chunk after that, while the tensor cores work on the present chunk for
//   warpgroups 0, 1   the state after it, half of the columns each: S = exp(a_last) S + (kept V)' K
//   warpgroup 2       its scores, which are then weighted and multiplied with the values
//   warpgroup 3       the part of its output that comes from the state
// All warps run the same code except for those products, as the instruction caches demand: four programs, one for each
// warpgroup, waited for instructions half of the time. Turns meet at one barrier. What lives from turn to turn lies in
// shared memory twice, schedules four times. To the ends of segments the same block walks without queries and output,
// and all of its warpgroups have a part of the state.

#include "async_copy.cuh"
#include "mamba3_output.cuh"
#include "mamba3_pairs.cuh"
#include "mamba3_state.cuh"
#include "wgmma.cuh"

namespace jax_ssd {

// Tokens in a row that are worked on at once, and the sequence they belong to. None: count is 0.
struct Chunk {
  int t, count;
  int sequence, first, end;

  __device__ bool begins() const { return count > 0 && t == first; }
  __device__ bool ends() const { return count > 0 && t + count == end; }
};

// The chunks of a block that are worked on in a turn, by age.
template <int Tokens, bool Packed>
struct Chunks {
  int seq, start, limit, turn;  // the block's tokens are those from start to limit

  __device__ Chunks(const int*, int, int seq, const Place&, int start, int limit)
      : seq(seq), start(start), limit(limit), turn(0) {}
  __device__ __forceinline__ Chunk of_turn(int turn) const {
    const int t = start + turn * Tokens;
    return {t, turn < 0 ? 0 : max(0, min(Tokens, limit - t)), 0, 0, seq};
  }
  __device__ __forceinline__ Chunk later() const { return of_turn(turn); }
  __device__ __forceinline__ Chunk after() const { return of_turn(turn - 1); }
  __device__ __forceinline__ Chunk next() const { return of_turn(turn - 2); }
  __device__ __forceinline__ Chunk now() const { return of_turn(turn - 3); }
  __device__ __forceinline__ Chunk before() const { return of_turn(turn - 4); }
  __device__ __forceinline__ bool any() const { return start + (turn - 4) * Tokens < limit; }
  __device__ __forceinline__ void pass() { ++turn; }
};

// Chunks end with sequences.
template <int Tokens>
struct Chunks<Tokens, true> {
  const int* bounds;
  int sequences, seq, limit, turn;
  Chunk all[5];
  Place place;

  __device__ Chunks(const int* bounds, int sequences, int seq, const Place& place, int start, int limit)
      : bounds(bounds), sequences(sequences), seq(seq), limit(limit), turn(0), place(place) {
#pragma unroll
    for (int i = 1; i < 5; ++i) all[i] = Chunk{0, 0, 0, 0, 0};
    all[0] = from(start);
  }
  __device__ __forceinline__ Chunk from(int t) {
    if (t < limit && (turn == 0 || t >= place.end)) place.find(bounds, sequences, t, seq);
    return {t, max(0, min(Tokens, min(limit, place.end) - t)), place.sequence, place.first, place.end};
  }
  __device__ __forceinline__ const Chunk& later() const { return all[0]; }
  __device__ __forceinline__ const Chunk& after() const { return all[1]; }
  __device__ __forceinline__ const Chunk& next() const { return all[2]; }
  __device__ __forceinline__ const Chunk& now() const { return all[3]; }
  __device__ __forceinline__ const Chunk& before() const { return all[4]; }
  __device__ __forceinline__ bool any() const {
    return (all[0].count | all[1].count | all[2].count | all[3].count | all[4].count) > 0;
  }
  __device__ __forceinline__ void pass() {
#pragma unroll
    for (int i = 4; i > 0; --i) all[i] = all[i - 1];
    ++turn;
    all[0] = from(all[1].t + all[1].count);
  }
};

// Sizes, and where things lie in shared memory; plan.py has the same figures.
template <class S_, int Tokens, class O_, bool Ends>
struct PipelineShape {
  using S = S_;
  using O = O_;
  static constexpr bool kEnds = Ends;
  static constexpr int kTokens = Tokens, kRows = 64, kColumns = 64, kThreads = 512;
  static constexpr int kHolders = Ends ? 4 : 2;  // warpgroups that walk the state
  static constexpr int kTiles = 4, kHeld = S::kState / kHolders, kSizeState = kHeld / 2;  // see `Part`
  using Rows = Matrix<__nv_bfloat16, kRows, S::kState>;
  using Values = Matrix<__nv_bfloat16, kRows, kColumns>;
  using States = Matrix<__nv_bfloat16, kColumns, S::kState>;
  using Table = Rotations<S, kTokens>;
  using Weights = Schedule<kTokens>;
  using Given = GivenSchedule<kTokens>;
  using Pairs = PairWeights<S, kRows, kTokens>;

  static constexpr int kOut = kRows * kColumns * 4, kTable = padded(Table::kBytes, 16),
                       kWeights = padded(sizeof(Weights), 16), kGiven = padded(sizeof(Given), 16);
  static constexpr int kKeysAt = 0, kKeptAt = kKeysAt + 2 * Rows::kBytes, kValuesAt = kKeptAt + 2 * Values::kBytes,
                       kQueriesAt = kValuesAt + (Ends ? 0 : 2 * Values::kBytes),
                       kStatesAt = kQueriesAt + (Ends ? 0 : 2 * Rows::kBytes),
                       kOutAt = kStatesAt + (Ends ? 0 : 2 * States::kBytes), kTableAt = kOutAt + (Ends ? 0 : 2 * kOut),
                       kPairsAt = kTableAt + 2 * kTable, kWeightsAt = kPairsAt + (Ends ? 0 : 2 * Pairs::kBytes),
                       kGivenAt = kWeightsAt + 4 * kWeights, kParametersAt = kGivenAt + 2 * kGiven,
                       kLostAt = kParametersAt + padded((Ends ? 1 : 3) * S::kRank * S::kHeadDim * 4 + 256, 16),
                       kBadAt = kLostAt + padded(S::kPairs * 4, 16), kBytes = kBadAt + 4 * padded(kTokens * 4, 16);
  static_assert(S::kState % 64 == 0 && S::kHeadDim <= kColumns && kTokens * S::kRank == kRows, "whole tiles");
};

// What a thread stages of keys or queries: a unit (see `Unit`) and those 8 and 16 further, of rows that are kApart from
// each other and have the same rank, so that biases stay in its registers. Eight lanes have a row.
template <class H>
struct RowStage {
  using S = typename H::S;
  using M = typename H::Rows;
  // To the ends of segments all threads have keys; else the second half of them has queries.
  static constexpr int kThreads = H::kEnds ? 512 : 256, kApart = kThreads / 8, kOwn = H::kRows / kApart;
  static constexpr int kUnits = S::kState / 64, kRow = S::kGroups * S::kState;
  // A unit's columns: all are neighbours, or two halves are.
  static constexpr int kParts = S::kHalf ? 2 : 1, kWidth = 8 / kParts;
  Unit<S> bias[kUnits];
  unsigned raw[kOwn][kUnits][4];

  static __device__ __forceinline__ int first_row(int thread) { return thread % kThreads / 8; }
  // Of a part of a thread's unit i, counted from that of its unit 0, which is at kWidth times its lane.
  static __device__ constexpr int column(int i, int part) { return 8 * kWidth * i + part * (S::kState / 2); }

  // from: [rank][state] of the head.
  __device__ __forceinline__ void load_bias(const float* from) {
#pragma unroll
    for (int i = 0; i < kUnits; ++i) {
      bias[i] = Unit<S>(from + first_row(threadIdx.x) % S::kRank * S::kState, threadIdx.x % 8 + 8 * i);
    }
  }
  // from: [token][rank][groups][state], at the chunk's first token and the head's group.
  __device__ __forceinline__ void load(const __nv_bfloat16* from, int count) {
    const int thread = thread_here(), row = first_row(thread);
    from += row * kRow + thread % 8 * kWidth;
#pragma unroll
    for (int own = 0; own < kOwn; ++own) {
      if (row + own * kApart >= count * S::kRank) continue;
#pragma unroll
      for (int i = 0; i < kUnits; ++i) {
        const __nv_bfloat16* at = from + own * (kApart * kRow) + column(i, 0);
        if constexpr (S::kHalf) {
          const uint2 low = *reinterpret_cast<const uint2*>(at);
          const uint2 high = *reinterpret_cast<const uint2*>(at + S::kState / 2);
          raw[own][i][0] = low.x, raw[own][i][1] = low.y, raw[own][i][2] = high.x, raw[own][i][3] = high.y;
        } else {
          const uint4 all = *reinterpret_cast<const uint4*>(at);
          raw[own][i][0] = all.x, raw[own][i][1] = all.y, raw[own][i][2] = all.z, raw[own][i][3] = all.w;
        }
      }
    }
  }
  // Rotates what was loaded. last_key: where the keys of token `last` are written in float32 too. If a key is not
  // finite the thread's keys of the token become zero, it is marked in `bad`, and the result is true.
  __device__ __forceinline__ bool store(const M& to, bool keys, const typename H::Table& table, int count, int* bad,
                                        int last, float* last_key) const {
    const int thread = thread_here(), row = first_row(thread), lane = thread % 8;
    const unsigned base = to.address(row, lane * kWidth);
    bool found = false;
#pragma unroll
    for (int own = 0; own < kOwn; ++own) {
      const int token = (row + own * kApart) / S::kRank;
      if (token >= count) continue;
      unsigned probe = 0;
#pragma unroll
      for (int i = 0; i < kUnits; ++i) {
        const int unit = lane + 8 * i;
        Unit<S> x = bias[i];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          x.v[2 * e] += low_of_pair(raw[own][i][e]);
          x.v[2 * e + 1] += high_of_pair(raw[own][i][e]);
        }
        if (4 * unit < S::kPairs) x.rotate_by(table, token, unit);
        if (token == last) x.write(last_key + row % S::kRank * S::kState, unit);
        unsigned words[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          words[e] = bfloat16_pair(x.v[2 * e], x.v[2 * e + 1]);
          probe = plus_zero_times(probe, words[e]);
        }
        write(base, own, i, words);
      }
      if (keys && (probe & 0x7fff7fffu) != 0) {
        const unsigned zeros[4] = {0, 0, 0, 0};
#pragma unroll
        for (int i = 0; i < kUnits; ++i) write(base, own, i, zeros);
        bad[token] = 1;
        found = true;
      }
    }
    return found;
  }

 private:
  // The swizzle does not change between rows that are a multiple of eight apart.
  static __device__ __forceinline__ void write(unsigned base, int own, int i, const unsigned (&words)[4]) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int from = column(i, part);
      const unsigned at = (base ^ from % 64 * 2) + own * kApart * 128 + from / 64 * M::kPanelBytes;
      if constexpr (kParts == 1) {
        store_shared(at, words[0], words[1], words[2], words[3]);
      } else {
        store_shared(at, words[2 * part], words[2 * part + 1]);
      }
    }
  }
};

// What a thread stages of values: eight columns of one row, a token's values expanded to a rank.
template <class H>
struct ValueStage {
  using S = typename H::S;
  static constexpr bool kWeighted = H::O::kWeighted;
  uint4 raw;

  // v: at the chunk's first token and the head. Tokens beyond the chunk are zero.
  __device__ __forceinline__ void load(const __nv_bfloat16* v, int count) {
    const int thread = thread_here(), token = thread / 8 / S::kRank, column = thread % 8 * 8;
    raw = make_uint4(0, 0, 0, 0);
    if (token < count && column < S::kHeadDim) {
      raw = *reinterpret_cast<const uint4*>(v + token * (S::kHeads * S::kHeadDim) + column);
    }
  }
  // Values, and what the state after the chunk keeps of them: `kept` of their tokens. mimo_v: [rank][head_dim]. Values
  // that are not finite become zero, and mark their token in `bad`; then the result is true.
  __device__ __forceinline__ bool store(const typename H::Values& values, const typename H::Values& kept_values,
                                        const float* mimo_v, const float* kept, int* bad) const {
    const int thread = thread_here(), row = thread / 8, token = row / S::kRank, column = thread % 8 * 8;
    const unsigned at = values.address(row, column), kept_at = at - values.base + kept_values.base;
    float weights[8];
    if constexpr (kWeighted) load_values(weights, mimo_v + row % S::kRank * S::kHeadDim + column);
    const float keep = kept[token];
    float x[8];
    load_values(x, reinterpret_cast<const __nv_bfloat16*>(&raw));
    unsigned words[4], kept_words[4], probe = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float low = kWeighted ? weights[2 * i] * x[2 * i] : x[2 * i];
      const float high = kWeighted ? weights[2 * i + 1] * x[2 * i + 1] : x[2 * i + 1];
      words[i] = bfloat16_pair(low, high);
      kept_words[i] = bfloat16_pair(keep * low, keep * high);
      probe = plus_zero_times(probe, words[i]);
    }
    const bool finite = (probe & 0x7fff7fffu) == 0;
    if (!finite) {
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = kept_words[i] = 0;
      bad[token] = 1;
    }
    if constexpr (!H::kEnds) store_shared(at, words[0], words[1], words[2], words[3]);
    store_shared(kept_at, kept_words[0], kept_words[1], kept_words[2], kept_words[3]);
    return !finite;
  }
};

// What a thread gates and folds of the output: two neighbouring columns of some tokens.
template <class H>
struct OutputStage {
  using S = typename H::S;
  using O = typename H::O;
  static constexpr int kPairs = S::kHeadDim / 2, kTogether = H::kThreads / kPairs;
  static constexpr int kTurns = (H::kTokens + kTogether - 1) / kTogether;
  static constexpr bool kKeeps = O::kWeighted && !O::kFolds;  // the ranks
  unsigned gates[kTurns];

  static __device__ __forceinline__ int column(int thread) { return thread % kPairs * 2; }
  static __device__ __forceinline__ int first_token(int thread) { return thread / kPairs; }

  // z: at the chunk's first token and the head.
  __device__ __forceinline__ void load(const __nv_bfloat16* z, int count) {
    const int thread = thread_here(), token = first_token(thread);
    z += token * (S::kHeads * S::kHeadDim) + column(thread);
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      if (token < kTogether && token + i * kTogether < count) {
        gates[i] = *reinterpret_cast<const unsigned*>(z + i * (kTogether * S::kHeads * S::kHeadDim));
      }
    }
  }

  // y: at the chunk's first token and the head, or its first rank. scale, opening: [rank][head_dim] by which outputs
  // and halves of gates are multiplied. out(row, column): an element of the output.
  template <class Out>
  __device__ __forceinline__ void store(__nv_bfloat16* y, int count, const float* scale, const float* opening,
                                        Out out) const {
    const int thread = thread_here(), first = first_token(thread), c = column(thread);
    if (first >= kTogether) return;
    y += first * ((kKeeps ? S::kRank : 1) * S::kHeads * S::kHeadDim) + c;
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      if (first + i * kTogether >= count) continue;
      __nv_bfloat16* to = y + i * (kTogether * (kKeeps ? S::kRank : 1) * S::kHeads * S::kHeadDim);
      float total[2] = {0.0f, 0.0f};
      const float gate[2] = {low_of_pair(gates[i]), high_of_pair(gates[i])};
#pragma unroll
      for (int rank = 0; rank < S::kRank; ++rank) {
        const float2 o = *reinterpret_cast<const float2*>(out((first + i * kTogether) * S::kRank + rank, c));
        const float2 by = *reinterpret_cast<const float2*>(scale + rank * S::kHeadDim + c);
        float x[2] = {o.x * by.x, o.y * by.y};
        if constexpr (O::kGate) {
          const float2 opened = *reinterpret_cast<const float2*>(opening + rank * S::kHeadDim + c);
          x[0] *= silu_of_double(gate[0] * opened.x);
          x[1] *= silu_of_double(gate[1] * opened.y);
        }
        if constexpr (kKeeps) {
          *reinterpret_cast<unsigned*>(to + rank * (S::kHeads * S::kHeadDim)) = bfloat16_pair(x[0], x[1]);
        }
        total[0] += x[0];
        total[1] += x[1];
      }
      if constexpr (!kKeeps) *reinterpret_cast<unsigned*>(to) = bfloat16_pair(total[0], total[1]);
    }
  }
};

// One block.
template <class H>
struct Pipeline {
  using S = typename H::S;
  using O = typename H::O;
  using Value = __nv_bfloat16;
  using Pairs = typename H::Pairs;
  static constexpr int kTokens = H::kTokens;

  const Arrays<S>& in;
  const FinalState& final_state;
  unsigned char* memory;
  int seq, sequences, limit;  // limit: the block's last token is before it
  Place place;

  template <class M>
  __device__ __forceinline__ M ring(int at, int turn) const {
    return M(memory + at + turn % 2 * M::kBytes);
  }
  __device__ __forceinline__ typename H::Rows keys(int turn) const { return ring<typename H::Rows>(H::kKeysAt, turn); }
  __device__ __forceinline__ typename H::Rows queries(int turn) const {
    return ring<typename H::Rows>(H::kQueriesAt, turn);
  }
  __device__ __forceinline__ typename H::Values values(int turn) const {
    return ring<typename H::Values>(H::kValuesAt, turn);
  }
  __device__ __forceinline__ typename H::Values kept_values(int turn) const {
    return ring<typename H::Values>(H::kKeptAt, turn);
  }
  __device__ __forceinline__ typename H::States states(int turn) const {
    return ring<typename H::States>(H::kStatesAt, turn);
  }
  __device__ __forceinline__ typename H::Table table(int turn) const {
    return typename H::Table(memory + H::kTableAt + turn % 2 * H::kTable);
  }
  __device__ __forceinline__ float* pairs(int turn) const {
    return reinterpret_cast<float*>(memory + H::kPairsAt + turn % 2 * Pairs::kBytes);
  }
  __device__ __forceinline__ typename H::Weights& weights(int turn) const {
    return *reinterpret_cast<typename H::Weights*>(memory + H::kWeightsAt + turn % 4 * H::kWeights);
  }
  __device__ __forceinline__ typename H::Given& given(int turn) const {
    return *reinterpret_cast<typename H::Given*>(memory + H::kGivenAt + turn % 2 * H::kGiven);
  }
  __device__ __forceinline__ int* bad(int turn) const {
    return reinterpret_cast<int*>(memory + H::kBadAt + turn % 4 * padded(kTokens * 4, 16));
  }
  __device__ __forceinline__ unsigned* lost() const { return reinterpret_cast<unsigned*>(memory + H::kLostAt); }
  // What values, outputs and halves of gates are multiplied by, [rank][head_dim] each.
  __device__ __forceinline__ float* mimo_v() const { return reinterpret_cast<float*>(memory + H::kParametersAt); }
  __device__ __forceinline__ float* scale() const { return mimo_v() + S::kRank * S::kHeadDim; }
  __device__ __forceinline__ float* opening() const { return scale() + S::kRank * S::kHeadDim; }
  // An element of the output in an order in which the accumulators of a warp do not meet in a bank.
  __device__ __forceinline__ float* out(int turn, int row, int column) const {
    return reinterpret_cast<float*>(memory + H::kOutAt + turn % 2 * H::kOut) + row * H::kColumns +
           (column ^ row % 4 * 8);
  }

  __device__ __forceinline__ long long head() const { return (long long)place.row * S::kHeads + place.head; }
  __device__ __forceinline__ long long parameter_row() const { return O::kSharedParams ? place.head : head(); }
  __device__ __forceinline__ long long token(int t) const { return (long long)place.row * seq + t; }
  __device__ __forceinline__ long long schedule(int t) const { return head() * seq + t; }
  __device__ __forceinline__ long long state(const Chunk& chunk) const {
    return ((long long)place.row * sequences + chunk.sequence) * S::kHeads + place.head;
  }
  __device__ __forceinline__ long long values_of(int t) const {
    return (token(t) * S::kHeads + place.head) * S::kHeadDim;
  }
  __device__ __forceinline__ const Value* rows_of(const Value* all, int t) const {
    const int group = place.head / (S::kHeads / S::kGroups);
    return all + (token(t) * (S::kRank * S::kGroups) + group) * S::kState;
  }
  __device__ __forceinline__ const float* angles_of(int t) const {
    return in.angles + (token(t) * S::kHeads + place.head) * S::kPairs;
  }

  // Ends a turn. found: a number was not finite, so the marked tokens' weights become NaN, and all of the state after
  // them.
  template <class Walk>
  __device__ __forceinline__ void pass(bool found, int turn, const Chunk& after, Walk& walk) const {
    if (__syncthreads_or(found)) {
      for (int which = turn + 1; which <= turn + 2; ++which) {
        const int c = threadIdx.x;
        if (c < kTokens && bad(which)[c]) {
          typename H::Weights& w = weights(which);
          w.gamma[c] = w.f[c] = w.kept[c] = w.from_start[kTokens - 1] = __int_as_float(0x7fffffff);
          bad(which)[c] = 0;
        }
      }
      if (after.count > 0) walk.lose(angles_of(after.t), in.dt + schedule(after.t), after.count, lost());
      __syncthreads();
      if constexpr (!H::kEnds) Pairs::template make<H::kThreads>(pairs(turn + 1), weights(turn + 1));
      __syncthreads();
    }
  }

  // The state before the block's first token, of the segments since its sequence began, by warpgroups 0 and 1, which
  // borrow a table for rotations of one token.
  __device__ __forceinline__ void sum_segments(float (&s)[H::kSizeState], const float* ends, const float* decays,
                                               const unsigned* phases, int segments, int segment_tokens) const {
    const typename H::Table turns = table(0);
    unsigned sum = 0;
    const int pair = threadIdx.x, from = place.first / segment_tokens;
    for (int j = from; j < place.segment; ++j) {
      const long long of = head() * (segments - 1) + j;
      if (pair < S::kPairs) {
        sincos_of_phase(sum, turns.sine[turns.place(0, pair)], turns.cosine[turns.place(0, pair)]);
        sum += phases[2 * of * S::kPairs + pair];
      }
      named_barrier(1, 256);
      add_turned<S, H>(s, j == from ? 0.0f : decays[of], ends + of * (S::kHeadDim * S::kState), turns);
      named_barrier(1, 256);
    }
  }

  __device__ __forceinline__ void store_state(const float (&s)[H::kSizeState], const typename H::States& to) const {
    const int thread = thread_here(), row = thread / 32 % 4 * 16 + thread % 16;
    const int column = thread / 128 * H::kHeld + thread % 32 / 16 * 8;
#pragma unroll
    for (int i = 0; i < H::kSizeState; i += 8) {
      unsigned words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) words[j] = bfloat16_pair(s[i + 2 * j], s[i + 2 * j + 1]);
      store_tiles(to.address(row, column + i * 2), words);
    }
  }

  // Divides rows by their root mean square.
  static __device__ __forceinline__ void normalize(float (&o)[32], float eps) {
    float up = 0.0f, low = 0.0f;
#pragma unroll
    for (int i = 0; i < 32; i += 4) {
      up += o[i] * o[i] + o[i + 1] * o[i + 1];
      low += o[i + 2] * o[i + 2] + o[i + 3] * o[i + 3];
    }
#pragma unroll
    for (int other = 1; other <= 2; other *= 2) {
      up += __shfl_xor_sync(~0u, up, other);
      low += __shfl_xor_sync(~0u, low, other);
    }
    up = 1.0f / sqrtf(up * (1.0f / S::kHeadDim) + eps);
    low = 1.0f / sqrtf(low * (1.0f / S::kHeadDim) + eps);
#pragma unroll
    for (int i = 0; i < 32; i += 4) o[i] *= up, o[i + 1] *= up, o[i + 2] *= low, o[i + 3] *= low;
  }

  // Output to shared memory, or back; function(element in registers, in memory).
  template <class Function>
  __device__ __forceinline__ void each_out(float (&o)[32], int turn, Function function) const {
    const int thread = thread_here(), row = thread / 32 % 4 * 16 + thread % 32 / 4;
#pragma unroll
    for (int i = 0; i < 32; i += 2) {
      function(o[i], o[i + 1], *reinterpret_cast<float2*>(out(turn, row + i / 2 % 2 * 8, i / 4 * 8 + thread % 4 * 2)));
    }
  }

  // Starts the products of a warpgroup with operands in shared memory: of the state, in the first accumulators, or of
  // scores or output. Products of no chunk change nothing: the schedules begin as those of chunks without tokens.
  __device__ __forceinline__ void start(float (&d)[32], int group, int turn) const {
    wgmma_fence();
    if (H::kEnds || group < H::kHolders) {
      float (&s)[H::kSizeState] = reinterpret_cast<float (&)[H::kSizeState]>(d);
      const auto v_columns = column_descriptor(kept_values(turn).base, 0);
      const int column = group * H::kHeld;
      const auto k_columns = column_descriptor(keys(turn).base + column / 64 * H::Rows::kPanelBytes + column % 64 * 2,
                                               H::Rows::kPanelBytes);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        Wgmma<Value, H::kHeld>::template shared<true, true>(s, advanced(v_columns, i * 2048),
                                                            advanced(k_columns, i * 2048), true);
      }
    } else if constexpr (!H::kEnds) {
      const auto q_rows = row_descriptor(queries(turn).base);
      const auto other = row_descriptor(group == 2 ? keys(turn).base : states(turn).base);
#pragma unroll
      for (int n = 0; n < S::kState; n += 16) {
        const unsigned at = n / 64 * H::Rows::kPanelBytes + n % 64 * 2;
        Wgmma<Value, 64>::shared(d, advanced(q_rows, at), advanced(other, at), n > 0);
      }
    }
    wgmma_commit();
  }

  // From the chunk's scores to its output, in shared memory. The part that comes from the state is there already.
  __device__ __forceinline__ void finish_output(float (&m)[32], int turn, float skip, float norm_eps) const {
    using Multiply = Product<Value, 1>;
    const int thread = thread_here(), row = thread / 32 % 4 * 16 + thread % 32 / 4;
    Pairs::weigh(m, pairs(turn), weights(turn), row);
    if constexpr (O::kSkip) Pairs::add_skip(m, skip, row);
    typename Multiply::A a[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = Multiply::of_accumulators(m, 8 * i);
    named_barrier(2, 256);
    float o[32];
    each_out(o, turn, [](float& a, float& b, const float2& in_memory) { a = in_memory.x, b = in_memory.y; });
    pin(o);
    const auto v_columns = column_descriptor(values(turn).base, 0);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      Wgmma<Value, 64>::template registers<true>(o, a[i].r, advanced(v_columns, i * 2048), true);
    }
    wgmma_commit();
    wgmma_wait<0>();
    pin(o);
    if constexpr (O::kNorm) normalize(o, norm_eps);
    each_out(o, turn, [](float a, float b, float2& in_memory) { in_memory = make_float2(a, b); });
  }

  __device__ __forceinline__ void run(int start_token, float* ends, float* decays, unsigned* phases, Value* y,
                                      float norm_eps, int segments, int segment_tokens) const {
    const long long parameters = parameter_row();
    const int thread = threadIdx.x, group = __shfl_sync(~0u, thread / 128, 0);
    const bool stages_keys = H::kEnds || group < 2;
    const float skip = O::kSkip && !H::kEnds ? in.D[parameters] : 0.0f;
    RowStage<H> rows;
    rows.load_bias((stages_keys ? in.k_bias : in.q_bias) + parameters * (S::kRank * S::kState));
    ValueStage<H> value_stage;
    OutputStage<H> output;
    PhaseWalk<S, kTokens, H::kThreads, 16> walk;
    walk.begin(nullptr, lost());
    float d[32];  // of the warpgroup's products: the state, scores, or output
    float (&s)[H::kSizeState] = reinterpret_cast<float (&)[H::kSizeState]>(d);
#pragma unroll
    for (int i = 0; i < 32; ++i) d[i] = 0.0f;
    if (!H::kEnds && start_token != place.first) {
      for (int j = place.first / segment_tokens; j < place.segment; ++j) {
        walk.skip(phases + 2 * (head() * (segments - 1) + j) * S::kPairs, lost());
      }
      if (group < H::kHolders) sum_segments(s, ends, decays, phases, segments, segment_tokens);
    }
    double decay = 0.0;
    __syncthreads();

    for (Chunks<kTokens, O::kPacked> chunks(in.cu_seqlens + (long long)place.row * (sequences + 1), sequences, seq,
                                            place, start_token, limit);
         chunks.any(); chunks.pass()) {
      const int turn = chunks.turn;
      const Chunk later = chunks.later(), after = chunks.after(), next = chunks.next(), now = chunks.now(),
                  before = chunks.before();
      bool found = false;
      if (later.count > 0) {
        const long long from = schedule(later.t);
        fetch_schedule(given(turn + 3), in.adt + from, in.dt + from, in.trap + from, seq - later.t, thread);
      }
      if (H::kEnds || group < H::kHolders) {
        const typename H::Weights& w = weights(turn);
        const float over = w.from_start[kTokens - 1];
#pragma unroll
        for (int i = 0; i < H::kSizeState; ++i) s[i] *= over;
        if constexpr (H::kEnds) {
          decay += static_cast<double>(w.sum[kTokens - 1]) + static_cast<double>(w.rest[kTokens - 1]);
        }
      }
      pin(d);
      start(d, group, turn);

      // Beside the products.
      if constexpr (!H::kEnds) {
        if (before.count > 0) {
          output.store(
              y + (OutputStage<H>::kKeeps ? values_of(before.t) * S::kRank - (S::kRank - 1ll) * place.head * S::kHeadDim
                                          : values_of(before.t)),
              before.count, scale(), opening(), [&](int row, int column) { return out(turn - 1, row, column); });
        }
        if (O::kGate && now.count > 0) output.load(in.z + values_of(now.t), now.count);
      }
      if (next.count > 0) {
        const bool ends = O::kFinalState && !H::kEnds && next.ends();
        found |= rows.store(stages_keys ? keys(turn + 1) : queries(turn + 1), stages_keys, table(turn + 1), next.count,
                            bad(turn + 1), ends && stages_keys ? next.count - 1 : -1,
                            O::kFinalState ? final_state.k + state(next) * (S::kRank * S::kState) : nullptr);
        found |=
            value_stage.store(values(turn + 1), kept_values(turn + 1), mimo_v(), weights(turn + 1).kept, bad(turn + 1));
        if constexpr (!H::kEnds) Pairs::template make<H::kThreads>(pairs(turn + 1), weights(turn + 1));
        if (ends) {
          __syncthreads();  // keys have been written
          walk.write(final_state.angle + state(next) * S::kPairs, final_state.k + state(next) * (S::kRank * S::kState),
                     lost());
          for (int p = thread; p < S::kHeadDim; p += H::kThreads) {
            final_state.v[state(next) * S::kHeadDim + p] = to_float(in.v[values_of(next.t + next.count - 1) + p]);
          }
        }
      }
      if (after.count > 0) {
        value_stage.load(in.v + values_of(after.t), after.count);
        if (after.begins() && !walk.begin(begin_angles<S, O>(in, state(after)), lost())) {
          bad(turn + 2)[0] = 1;
          found = true;
        }
        found |= walk.advance(angles_of(after.t), given(turn + 2).dt, after.count, table(turn + 2), bad(turn + 2));
        if (thread >= H::kThreads - 32) {
          const bool more = after.t + after.count < after.end;
          make_schedule<false>(weights(turn + 2), given(turn + 2), after.count, more);
        }
      }
      if (later.count > 0) walk.load(angles_of(later.t), later.count);

      wgmma_wait<0>();
      pin(d);
      if (H::kEnds || group < H::kHolders) {
        if (H::kEnds && now.count > 0 && now.t + now.count == limit) {
          const long long end = head() * (segments - 1) + place.segment;
          Part<S, H>().each([&](int i, int p, int n) { ends[(end * S::kHeadDim + p) * S::kState + n] = s[i]; });
          if (thread == 0) decays[end] = exp2_of<false>(static_cast<float>(decay));
        }
        if (O::kFinalState && !H::kEnds && now.ends()) {
          float* to = final_state.ssm + state(now) * (S::kHeadDim * S::kState);
          Part<S, H>().each([&](int i, int p, int n) { to[p * S::kState + n] = s[i]; });
        }
        if (next.begins()) {
          begin_state<S, H, O>(s, in, state(next), schedule(next.t), in.mimo_v + parameters * (S::kRank * S::kHeadDim));
        }
        if (!H::kEnds && next.count > 0) store_state(s, states(turn + 1));
      } else if constexpr (!H::kEnds) {
        if (group == 2) {
          finish_output(d, turn, skip, norm_eps);
        } else {
          const float* decays_of = weights(turn).from_start;
          const int row = thread % 128 / 32 * 16 + thread % 32 / 4;
          const float up = decays_of[Pairs::token_of(row)], low = decays_of[Pairs::token_of(row + 8)];
#pragma unroll
          for (int i = 0; i < 32; i += 4) d[i] *= up, d[i + 1] *= up, d[i + 2] *= low, d[i + 3] *= low;
          each_out(d, turn, [](float a, float b, float2& in_memory) { in_memory = make_float2(a, b); });
          named_barrier(2, 256);
        }
      }
      fence_async_proxy();
      if (after.count > 0) rows.load(rows_of(stages_keys ? in.k : in.q, after.t), after.count);
      wait_for_copies();
      pass(found, turn, after, walk);
    }
    if constexpr (H::kEnds)
      walk.write_phases(phases + 2 * (head() * (segments - 1) + place.segment) * S::kPairs, lost());
  }
};

// One block for each row, segment and head, heads fastest: those of a group read the same keys and queries. Ends: for
// each segment but the last, its state, decay and phases are written, from a zero state or from its sequence's if that
// begins in the segment.
template <class S, int Tokens, class O, bool Ends>
__global__ void __launch_bounds__(512, 1)
    mamba3_pipeline(const __nv_bfloat16* q, const __nv_bfloat16* k, const __nv_bfloat16* v, const float* q_bias,
                    const float* k_bias, const float* angles, const float* adt, const float* dt, const float* trap,
                    const float* mimo_v, const float* mimo_o, const __nv_bfloat16* z, const float* mimo_z,
                    const float* D, const float* norm_weight, const float* state_angle, const float* state_ssm,
                    const float* state_k, const float* state_v, const int* cu_seqlens, float* ends, float* decays,
                    unsigned* phases, __nv_bfloat16* y, float* final_angle, float* final_ssm, float* final_k,
                    float* final_v, int seq, int segments, int segment_tokens, int sequences, float norm_eps) {
  using H = PipelineShape<S, Tokens, O, Ends>;
  extern __shared__ __align__(1024) unsigned char memory[];
  const Arrays<S> in{q,           k,      v,   z,  q_bias, k_bias,      mimo_v,    mimo_o,  mimo_z,  D,
                     norm_weight, angles, adt, dt, trap,   state_angle, state_ssm, state_k, state_v, cu_seqlens};
  const FinalState final_state{final_angle, final_ssm, final_k, final_v};
  clear<H::kBytes>(memory, H::kThreads);
  fence_async_proxy();

  const int here = Ends ? segments - 1 : segments;
  Place at;
  at.head = blockIdx.x % S::kHeads;
  at.segment = blockIdx.x / S::kHeads % here;
  at.row = blockIdx.x / S::kHeads / here;
  at.sequence = 0, at.first = 0, at.end = seq;
  int t = at.segment * segment_tokens;
  const int limit = min(seq, t + segment_tokens);
  const int* bounds = cu_seqlens + (long long)at.row * (sequences + 1);
  if constexpr (O::kPacked) {
    at.find(bounds, sequences, Ends ? limit : t, seq);
    if constexpr (Ends) {
      if (at.first >= limit) return;  // what follows begins anew
      t = max(t, at.first);
    }
  }
  const Pipeline<H> block{in, final_state, memory, seq, sequences, limit, at};
  __syncthreads();

  const long long parameters = block.parameter_row();
  for (int i = threadIdx.x; i < S::kRank * S::kHeadDim; i += H::kThreads) {
    const long long ranked = parameters * (S::kRank * S::kHeadDim) + i;
    if constexpr (O::kWeighted) block.mimo_v()[i] = mimo_v[ranked];
    if constexpr (!Ends) {
      const float norm = O::kNorm ? norm_weight[parameters * S::kHeadDim + i % S::kHeadDim] : 1.0f;
      block.scale()[i] = O::kFolds ? norm * mimo_o[ranked] : norm;
      block.opening()[i] = O::kWeighted && O::kGate ? 0.5f * mimo_z[ranked] : 0.5f;
    }
  }
  if constexpr (O::kPacked && O::kFinalState && !Ends) {
    if (at.segment == 0) pass_empty_sequences<S, O>(final_state, in, at, bounds, sequences, seq);
  }
  for (int i = 0; i < 2; ++i) block.table(i).template fill<H::kThreads>();
  if (threadIdx.x < 3) block.weights(threadIdx.x).from_start[Tokens - 1] = 1.0f;  // before the first chunk
  block.run(t, ends, decays, phases, y, norm_eps, segments, segment_tokens);
}

}  // namespace jax_ssd

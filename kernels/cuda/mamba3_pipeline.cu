// The scan of Mamba-3 forward, in bfloat16, for the warpgroup products of sm_90. The mathematics is that of
// mamba3_forward.cu. A block of four or five warpgroups walks the chunks of a head and works on neighbouring chunks at
// the same time:
//   warpgroup 0      multiplies queries with keys and weighs these scores
//   warpgroup 1      walks the state over the chunk, S = exp(a_last) S + (kept V)' K
//   warpgroups 2, 3  expand values and rotate keys and queries of the next chunk; make the schedule of the second next
//                    chunk
// The output is queries multiplied with the state, then values with weighted scores, transposed: rows are columns of
// the head; it is gated and folded. Of four warpgroups 1 makes it, for it has the state in registers, and 0 makes
// rotations of the second next chunk. Of five 0 makes it, from a copy of the state, and 1 and 4 make rotations.
// All meet once per chunk, at a barrier; who makes the output waits for scores as well. What one hands to another in
// the next turn lies in shared memory twice, schedules four times. Shared memory is busiest. Loops stay rolled where
// they can: a program for each warpgroup, all unrolled, waited for instructions half of the time. To the ends of
// segments the same block walks without queries and output.
//
// Keys and queries are not looked at whether they are finite: weights that are zero for later tokens' keys are zeros
// whatever the scores are, so that a NaN reaches its own token and, through the state, those after it.

#include "async_copy.cuh"
#include "mamba3_chunks.cuh"
#include "mamba3_output.cuh"
#include "mamba3_rows.cuh"
#include "mamba3_stages.cuh"
#include "mamba3_state.cuh"
#include "wgmma.cuh"

namespace jax_ssd {

// `advanced` without a carry to the upper half, which has none in shared memory: half of the instructions.
__device__ __forceinline__ unsigned long long moved(unsigned long long descriptor, unsigned bytes) {
  const unsigned low = static_cast<unsigned>(descriptor) + (bytes >> 4);
  return (descriptor & 0xffffffff00000000ull) | low;
}

// Sizes, and where things lie in shared memory; plan.py has the same figures.
template <class S_, int Tokens, int Groups, class O_, bool Ends>
struct PipelineShape {
  using S = S_;
  using O = O_;
  static constexpr bool kEnds = Ends;
  static constexpr int kTokens = Tokens, kRows = 64, kColumns = 64;
  static constexpr int kThreads = 128 * Groups, kStagers = 256;
  static_assert(Groups == 4 || (Groups == 5 && !Ends), "warpgroups");
  // Does warpgroup 1 make the output, from the state in its registers?
  static constexpr bool kHeldState = Groups == 4;
  // Which warpgroups make rotations. Together their threads have all numbers modulo kRotators.
  static constexpr int kRotators = Groups == 5 || Ends ? 256 : 128;
  static __device__ constexpr bool rotates(int group) {
    return group == 4 || (group == 0 && kHeldState) || (group == 1 && (!kHeldState || Ends));
  }
  static constexpr int kSpans = Tokens < 64 ? Tokens / 4 : 16,
                       kLeastParts = kSpans > kRotators / 32 ? kSpans : kRotators / 32;
  static constexpr int kParts = kLeastParts < Tokens ? kLeastParts : Tokens;                   // see `PhaseWalk`
  static constexpr int kAhead = Groups == 5 ? 2 : 4;                                           // see `RowStage`
  static constexpr int kHolders = 128, kTiles = 4, kHeld = S::kState, kSizeState = kHeld / 2;  // see `Part`
  static constexpr bool kPairedRows = true;
  using Queries = Matrix<__nv_bfloat16, kRows, S::kState>;
  using Values = Matrix<__nv_bfloat16, kRows, kColumns>;
  using Scores = Matrix<__nv_bfloat16, kRows, kRows>;
  // Keys, and below them the state that goes with them.
  using Keys = Matrix<__nv_bfloat16, kRows + (Ends || kHeldState ? 0 : kColumns), S::kState>;
  using Table = Rotations<S, kTokens>;
  using Weights = Schedule<kTokens>;
  using Given = GivenSchedule<kTokens>;

  static constexpr int kTable = padded(Table::kBytes, 16), kWeights = padded(sizeof(Weights), 16),
                       kGiven = padded(sizeof(Given), 16), kNorms = O::kNorm && !Ends ? 4 * kRows * 4 : 0;
  static constexpr int kKeysAt = 0, kKeptAt = kKeysAt + 2 * Keys::kBytes, kValuesAt = kKeptAt + 2 * Values::kBytes,
                       kQueriesAt = kValuesAt + (Ends ? 0 : 2 * Values::kBytes),
                       kScoresAt = kQueriesAt + (Ends ? 0 : 2 * Queries::kBytes),
                       kTableAt = kScoresAt + (Ends ? 0 : Scores::kBytes), kNormsAt = kTableAt + 2 * kTable,
                       kWeightsAt = kNormsAt + kNorms, kGivenAt = kWeightsAt + 4 * kWeights,
                       kValueWeightsAt = kGivenAt + 2 * kGiven,
                       kLostAt = kValueWeightsAt + padded(S::kRank * S::kHeadDim * 4 + 256, 16),
                       kBadAt = kLostAt + padded(S::kPairs * 4, 16), kBad = padded(4 * (kTokens + 1), 16),
                       kScoresHereAt = kBadAt + 4 * kBad, kBytes = kScoresHereAt + 16;
  static_assert(S::kState % 64 == 0 && S::kHeadDim <= kColumns && kTokens * S::kRank == kRows, "whole tiles");
};

// One block.
template <class H>
struct Pipeline {
  using S = typename H::S;
  using O = typename H::O;
  using Value = __nv_bfloat16;
  static constexpr int kTokens = H::kTokens;

  const Arrays<S>& in;
  const FinalState& final_state;
  float *ends, *decays;  // of pieces: the state at the end, by what a state decays, the phases
  unsigned* phases;
  unsigned char* memory;
  int seq, sequences, pieces, piece_tokens;
  int start, limit;  // the block's tokens are those from start to limit
  Place place;

  template <class M>
  __device__ __forceinline__ M ring(int at, int turn) const {
    return M(memory + at + turn % 2 * M::kBytes);
  }
  __device__ __forceinline__ typename H::Keys keys(int turn) const { return ring<typename H::Keys>(H::kKeysAt, turn); }
  __device__ __forceinline__ typename H::Queries queries(int turn) const {
    return ring<typename H::Queries>(H::kQueriesAt, turn);
  }
  __device__ __forceinline__ typename H::Values values(int turn) const {
    return ring<typename H::Values>(H::kValuesAt, turn);
  }
  __device__ __forceinline__ typename H::Values kept_values(int turn) const {
    return ring<typename H::Values>(H::kKeptAt, turn);
  }
  // Weighted.
  __device__ __forceinline__ typename H::Scores scores() const { return typename H::Scores(memory + H::kScoresAt); }
  __device__ __forceinline__ typename H::Table table(int turn) const {
    return typename H::Table(memory + H::kTableAt + turn % 2 * H::kTable);
  }
  __device__ __forceinline__ typename H::Weights& weights(int turn) const {
    return *reinterpret_cast<typename H::Weights*>(memory + H::kWeightsAt + turn % 4 * H::kWeights);
  }
  __device__ __forceinline__ typename H::Given& given(int turn) const {
    return *reinterpret_cast<typename H::Given*>(memory + H::kGivenAt + turn % 2 * H::kGiven);
  }
  // Which tokens of a chunk have rotations that are not finite, and whether any has.
  __device__ __forceinline__ int* bad(int turn) const {
    return reinterpret_cast<int*>(memory + H::kBadAt + turn % 4 * H::kBad);
  }
  __device__ __forceinline__ unsigned* lost() const { return reinterpret_cast<unsigned*>(memory + H::kLostAt); }
  // What values are multiplied by, [rank][head_dim].
  __device__ __forceinline__ float* mimo_v() const { return reinterpret_cast<float*>(memory + H::kValueWeightsAt); }
  // The barrier at which scores of a turn are there, a warp's at a time.
  __device__ __forceinline__ unsigned scores_here() const { return shared_address(memory + H::kScoresHereAt); }
  // Parts of sums of squares, [warp][row].
  __device__ __forceinline__ float* norms() const { return reinterpret_cast<float*>(memory + H::kNormsAt); }

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

  // The chunks of the block.
  __device__ __forceinline__ Chunks<kTokens, O::kPacked> chunks() const {
    return {in.cu_seqlens + (long long)place.row * (sequences + 1), sequences, seq, place, start, limit};
  }

  // A descriptor in registers that the warp has in common, where products want it: what is added to it stays there,
  // while one of a thread's own registers is moved there word by word for each product, and so are constants: hence the
  // sign of a length, which is zero.
  __device__ __forceinline__ unsigned long long common(unsigned long long descriptor) const {
    const unsigned high = static_cast<unsigned>(descriptor >> 32) + (static_cast<unsigned>(seq) >> 31);
    return static_cast<unsigned long long>(high) << 32 | __reduce_or_sync(~0u, static_cast<unsigned>(descriptor));
  }

  // A token with a number that is not finite: its weights become NaN, and all of the state after it.
  __device__ __forceinline__ void spoil(typename H::Weights& w, int c) const {
    w.gamma[c] = w.f[c] = w.from_start[kTokens - 1] = __int_as_float(0x7fffffff);
  }

  // ---- rotations, by the warpgroups that PipelineShape says ----

  using Walk = PhaseWalk<S, kTokens, H::kRotators, H::kParts>;

  __device__ __forceinline__ void begin(Walk& walk) const {
    walk.begin(nullptr, lost());
    if (!H::kEnds && start != place.first) {
      for (int j = place.first / piece_tokens; j < start / piece_tokens; ++j) {
        walk.skip(phases + 2 * (head() * pieces + j) * S::kPairs, lost());
      }
    }
  }

  // Makes rotations of the second next chunk and loads angles of the one after. Where the walk has reached the end of a
  // sequence, first writes its final angles.
  template <class All>
  __device__ __forceinline__ void make_rotations(Walk& walk, const All& all) const {
    const int turn = all.turn;
    const Chunk later = all.later(), after = all.after(), next = all.next(), now = all.now();
    bool found = false;
    if constexpr (O::kFinalState && !H::kEnds) {
      if (next.ends()) walk.write_angles(final_state.angle + state(next) * S::kPairs, lost());
      if (now.ends()) {  // keys have been written
        walk.spoil_keys(final_state.angle + state(now) * S::kPairs,
                        final_state.k + state(now) * (S::kRank * S::kState));
      }
    }
    if (after.count > 0) {
      if (after.begins() && !walk.begin(begin_angles<S, O>(in, state(after)), lost())) {
        bad(turn + 2)[0] = 1;
        found = true;
      }
      found |= walk.advance(given(turn + 2).dt, after.count, later.count, table(turn + 2), bad(turn + 2));
    } else if (later.count > 0) {
      walk.load(later.count);
    }
    if (__any_sync(~0u, found)) {
      bad(turn + 2)[kTokens] = 1;
      walk.lose(angles_of(after.t), in.dt + schedule(after.t), after.count, lost());
    }
  }

  __device__ __forceinline__ void write_end(const Walk& walk) const {
    walk.write_phases(phases + 2 * (head() * pieces + place.segment) * S::kPairs, lost());
  }

  // The schedule of the second next chunk, by a warp.
  template <class All>
  __device__ __forceinline__ void make_weights(const All& all) const {
    const Chunk after = all.after();
    if (after.count > 0) {
      const bool more = after.t + after.count < after.end;
      make_schedule<false>(weights(all.turn + 2), given(all.turn + 2), after.count, more);
    }
  }

  // ---- scores and the output ----

  // Divides columns, outputs of a token and rank, by their root mean square. Four threads have two columns each, of the
  // other rows of 16 their neighbours and of the others other warps.
  __device__ __forceinline__ void normalize(float (&o)[32], float eps) const {
    const int thread = threadIdx.x % 128, warp = thread / 32, column = thread % 4 * 2;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      float sums[2];
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        sums[b] = o[4 * j + b] * o[4 * j + b] + o[4 * j + 2 + b] * o[4 * j + 2 + b];
#pragma unroll
        for (int other = 4; other <= 16; other *= 2) sums[b] += __shfl_xor_sync(~0u, sums[b], other);
      }
      float2* to = reinterpret_cast<float2*>(norms() + warp * H::kRows + 8 * j + column);
      if (thread % 32 < 4) *to = make_float2(sums[0], sums[1]);
    }
    named_barrier(2, 128);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      float sums[2] = {0.0f, 0.0f};
#pragma unroll
      for (int part = 0; part < 4; ++part) {
        const float2 pair = *reinterpret_cast<const float2*>(norms() + part * H::kRows + 8 * j + column);
        sums[0] += pair.x, sums[1] += pair.y;
      }
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const float by = 1.0f / sqrtf(sums[b] * (1.0f / S::kHeadDim) + eps);
        o[4 * j + b] *= by, o[4 * j + 2 + b] *= by;
      }
    }
  }

  // Scores, queries in rows.
  __device__ __forceinline__ void start_scores(float (&m)[32], int turn) const {
    const auto q_rows = common(row_descriptor(queries(turn).base)), k_rows = common(row_descriptor(keys(turn).base));
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < S::kState; n += 16) {
      Wgmma<Value, 64>::shared(m, moved(q_rows, n / 64 * H::Queries::kPanelBytes + n % 64 * 2),
                               moved(k_rows, n / 64 * H::Keys::kPanelBytes + n % 64 * 2), n > 0);
    }
    wgmma_commit();
  }

  // Transposed, the part of the output that comes from the state, which lies below the keys.
  __device__ __forceinline__ void start_output(float (&o)[32], int turn) const {
    const auto q_rows = common(row_descriptor(queries(turn).base)), k_rows = common(row_descriptor(keys(turn).base));
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < S::kState; n += 16) {
      Wgmma<Value, 64>::shared(o, moved(k_rows, n / 64 * H::Keys::kPanelBytes + n % 64 * 2 + H::kRows * 128),
                               moved(q_rows, n / 64 * H::Queries::kPanelBytes + n % 64 * 2), n > 0);
    }
    wgmma_commit();
  }
  // The same from the state in accumulators, rounded to an operand.
  __device__ __forceinline__ void start_output(float (&o)[32], const unsigned (&words)[H::kSizeState / 8][4],
                                               int turn) const {
    const auto q_rows = common(row_descriptor(queries(turn).base));
#pragma unroll
    for (int n = 0; n < S::kState; n += 16) {
      Wgmma<Value, 64>::registers(o, words[n / 16], moved(q_rows, n / 64 * H::Queries::kPanelBytes + n % 64 * 2),
                                  n > 0);
    }
    wgmma_commit();
  }

  // Scores weighted, to shared memory. Pending: products after them.
  template <int Pending>
  __device__ __forceinline__ void finish_scores(float (&m)[32], int turn, float skip) const {
    const int thread = threadIdx.x % 128;
    const unsigned base = scores().address(thread / 32 * 16 + thread % 16, thread % 32 / 16 * 8);
    unsigned words[16];
    wgmma_wait<Pending>();
    pin(m);
    weigh_scores<S::kRank>(words, m, weights(turn), O::kSkip ? skip : 0.0f);
#pragma unroll
    for (int i = 0; i < 16; i += 4) {
      const unsigned tiles[4] = {words[i], words[i + 1], words[i + 2], words[i + 3]};
      store_tiles(base ^ i * 8, tiles);
    }
    fence_async_proxy();
  }

  __device__ __forceinline__ OutputStage<H> output_stage(Value* y, const float* mimo_o, const float* mimo_z,
                                                         const float* norm_weight) const {
    const long long row = parameter_row(), ranked = row * (S::kRank * S::kHeadDim);
    const long long ranks = OutputStage<H>::kKeeps ? S::kRank : 1;
    return {in.z + values_of(start), y + (token(start) * ranks * S::kHeads + place.head) * S::kHeadDim, mimo_o + ranked,
            mimo_z + ranked, norm_weight + row * S::kHeadDim};
  }

  // The state's part decayed, and values with weighted scores; the output. All products have ended then.
  __device__ __forceinline__ void finish_output(OutputStage<H>& output, float (&o)[32], const Chunk& now,
                                                const Chunk& next, int turn, float norm_eps) const {
    using Order = RowOrder<S::kRank>;
    float decays_of[Order::kOwn], by[32], following = 0.0f;
#pragma unroll
    for (int i = 0; i < Order::kOwn; ++i) decays_of[i] = Order::load_own(i, weights(turn).from_start, following);
    wgmma_wait<H::kHeldState ? 1 : 0>();
    pin(o);
#pragma unroll
    for (int i = 0; i < 32; ++i) o[i] *= decays_of[(i / 4 * 2 + i % 2) / Order::kTogether];
    pin(o);
    const auto v_columns = common(column_descriptor(values(turn).base, 0)),
               m_rows = common(row_descriptor(scores().base));
    if constexpr (H::kHeldState) barrier_wait(scores_here(), turn % 2);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      Wgmma<Value, 64>::template shared<true, false>(o, moved(v_columns, i * 2048), moved(m_rows, i * 32), true);
    }
    wgmma_commit();
    output.make_gates(by);  // while the last product runs
    if (next.count > 0) output.load(next.count);
    wgmma_wait<0>();
    pin(o);
    if constexpr (O::kNorm) normalize(o, norm_eps);
    if (now.count > 0) output.store(now.count, o, by);
  }

  // ---- warpgroup 0 ----

  __device__ __forceinline__ void make_scores(Value* y, const float* mimo_o, const float* mimo_z,
                                              const float* norm_weight, float skip, float norm_eps) const {
    OutputStage<H> output = output_stage(y, mimo_o, mimo_z, norm_weight);
    Walk walk(angles_of(start));
    if constexpr (H::rotates(0)) begin(walk);
    __syncthreads();
    for (auto all = chunks(); all.any(); all.pass()) {
      const int turn = all.turn;
      if constexpr (!H::kEnds) {
        float m[32], o[32];
        start_scores(m, turn);  // products of no chunk are harmless
        if constexpr (!H::kHeldState) start_output(o, turn);
        finish_scores<H::kHeldState ? 0 : 1>(m, turn, skip);
        if constexpr (H::kHeldState) {
          __syncwarp();
          if (threadIdx.x % 32 == 0) barrier_arrive(scores_here());
          bring(all.later());
        } else {
          named_barrier(2, 128);
          finish_output(output, o, all.now(), all.next(), turn, norm_eps);
        }
      }
      if constexpr (H::rotates(0)) make_rotations(walk, all);
      __syncthreads();
    }
    if constexpr (H::kEnds && H::rotates(0)) write_end(walk);
  }

  // ---- warpgroup 1 ----

  // The state before the block's first token, of the pieces since its sequence began. Rotations, of one token, are
  // lent to this warpgroup for the time.
  __device__ __forceinline__ void sum_segments(float (&s)[H::kSizeState]) const {
    const typename H::Table turns = table(0);
    unsigned sum = 0;
    const int pair = threadIdx.x % 128, from = place.first / piece_tokens;
    for (int j = from; j < start / piece_tokens; ++j) {
      const long long of = head() * pieces + j;
      if (pair < S::kPairs) {
        sincos_of_phase(sum, turns.sine[turns.place(0, pair)], turns.cosine[turns.place(0, pair)]);
        sum += phases[2 * of * S::kPairs + pair];
      }
      named_barrier(1, 128);
      add_turned<S, H>(s, j == from ? 0.0f : decays[of], ends + of * (S::kHeadDim * S::kState), turns);
      named_barrier(1, 128);
    }
  }

  // Brings keys, queries and values of a chunk, whose rows are loaded at the end of the next turn, to the L2 cache:
  // those who stage wait for them as soon as a turn begins.
  __device__ __forceinline__ void bring(const Chunk& chunk) const {
    constexpr int kRow = S::kState * 2 / 128, kRank = S::kGroups * S::kState, kValue = S::kHeads * S::kHeadDim;
    const int thread = threadIdx.x % 128, row = thread / kRow;
    if (row < chunk.count * S::kRank) {
      const int at = row * kRank + thread % kRow * 64;
      prefetch(rows_of(in.k, chunk.t) + at);
      if constexpr (!H::kEnds) prefetch(rows_of(in.q, chunk.t) + at);
    }
    if (thread < chunk.count) prefetch(in.v + values_of(chunk.t) + thread * kValue);
  }

  __device__ __forceinline__ void store_state(const float (&s)[H::kSizeState], const typename H::Keys& to) const {
    const unsigned base =
        to.address(H::kRows + threadIdx.x % 128 / 32 * 16 + threadIdx.x % 16, threadIdx.x % 32 / 16 * 8);
#pragma unroll
    for (int i = 0; i < H::kSizeState; i += 8) {
      unsigned words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) words[j] = bfloat16_pair(s[i + 2 * j], s[i + 2 * j + 1]);
      store_tiles((base ^ i * 2 % 64 * 2) + i * 2 / 64 * H::Keys::kPanelBytes, words);
    }
    fence_async_proxy();
  }

  __device__ __forceinline__ void walk_state(Value* y, const float* mimo_o, const float* mimo_z,
                                             const float* norm_weight, float norm_eps) const {
    constexpr bool kOutput = H::kHeldState && !H::kEnds;
    float s[H::kSizeState];
#pragma unroll
    for (int i = 0; i < H::kSizeState; ++i) s[i] = 0.0f;
    if constexpr (!H::kEnds) {
      if (start != place.first) sum_segments(s);
    }
    OutputStage<H> output = output_stage(y, mimo_o, mimo_z, norm_weight);
    Walk walk(angles_of(start));
    if constexpr (H::rotates(1)) begin(walk);
    double decay = 0.0;
    __syncthreads();
    for (auto all = chunks(); all.any(); all.pass()) {
      const int turn = all.turn;
      const Chunk next = all.next(), now = all.now();
      if constexpr (!kOutput) bring(all.later());
      float o[32];
      unsigned words[H::kSizeState / 8][4];
      if constexpr (kOutput) {
#pragma unroll
        for (int i = 0; i < H::kSizeState; i += 2) words[i / 8][i / 2 % 4] = bfloat16_pair(s[i], s[i + 1]);
        pin(words);
      }
      // Products of no chunk change nothing: the schedules begin as those of chunks without tokens.
      const typename H::Weights& w = weights(turn);
      const float over = w.from_start[kTokens - 1];
#pragma unroll
      for (int i = 0; i < H::kSizeState; ++i) s[i] *= over;
      if constexpr (H::kEnds) {
        decay += static_cast<double>(w.sum[kTokens - 1]) + static_cast<double>(w.rest[kTokens - 1]);
      }
      const auto v_columns = common(column_descriptor(kept_values(turn).base, 0));
      const auto k_columns = common(column_descriptor(keys(turn).base, H::Keys::kPanelBytes));
      pin(s);
      wgmma_fence();
      if constexpr (kOutput) start_output(o, words, turn);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        Wgmma<Value, H::kHeld>::template shared<true, true>(s, moved(v_columns, i * 2048), moved(k_columns, i * 2048),
                                                            true);
      }
      wgmma_commit();
      if constexpr (H::rotates(1)) make_rotations(walk, all);
      if constexpr (kOutput) finish_output(output, o, now, next, turn, norm_eps);
      wgmma_wait<0>();
      pin(s);
      if constexpr (kOutput) pin(words);
      if constexpr (H::kEnds) {
        if (now.count > 0 && now.t + now.count == limit) {
          const long long end = head() * pieces + place.segment;
          Part<S, H>().each([&](int i, int p, int n) { ends[(end * S::kHeadDim + p) * S::kState + n] = s[i]; });
          if (threadIdx.x % 128 == 0) decays[end] = exp2_of<false>(static_cast<float>(decay));
        }
      } else if constexpr (O::kFinalState) {
        if (now.ends()) {
          float* to = final_state.ssm + state(now) * (S::kHeadDim * S::kState);
          Part<S, H>().each([&](int i, int p, int n) { to[p * S::kState + n] = s[i]; });
        }
      }
      if ((O::kPacked || O::kInitialState) && next.begins()) {
        begin_state<S, H, O>(s, in, state(next), schedule(next.t), mimo_v());
      }
      if (!H::kEnds && !H::kHeldState && next.count > 0) store_state(s, keys(turn + 1));
      __syncthreads();
    }
    if constexpr (H::kEnds && H::rotates(1)) write_end(walk);
  }

  // ---- warpgroups 2 and 3 ----

  // Of the next chunk, and of the final state.
  __device__ __forceinline__ void store_values(ValueStage<H>& stage, const Chunk& next, int turn) const {
    if constexpr (O::kFinalState && !H::kEnds) {
      if (next.ends()) {
        for (int p = threadIdx.x % H::kStagers; p < S::kHeadDim; p += H::kStagers) {
          final_state.v[state(next) * S::kHeadDim + p] = to_float(in.v[values_of(next.t + next.count - 1) + p]);
        }
      }
    }
    typename H::Weights& w = weights(turn + 1);
    stage.store(values(turn + 1), kept_values(turn + 1), w.kept, [&](int c) { spoil(w, c); });
  }

  // Of tokens whose rotations are not finite, by a warp.
  __device__ __forceinline__ void spoil_marked(int turn) const {
    int* marks = bad(turn);
    if (marks[kTokens] == 0) return;
    for (int c = threadIdx.x % 32; c < kTokens; c += 32) {
      if (marks[c]) spoil(weights(turn), c);
      marks[c] = 0;
    }
    __syncwarp();
    marks[kTokens] = 0;
  }

  __device__ __forceinline__ void stage() const {
    const bool second = __shfl_sync(~0u, threadIdx.x / 128, 0) == 3, stages_keys = H::kEnds || !second;
    const int thread = threadIdx.x % 128;
    RowStage<H> rows((stages_keys ? in.k_bias : in.q_bias) + parameter_row() * (S::kRank * S::kState),
                     rows_of(stages_keys ? in.k : in.q, start));
    ValueStage<H> value_stage(in.v + values_of(start), in.mimo_v + parameter_row() * (S::kRank * S::kHeadDim));
    __syncthreads();
    for (auto all = chunks(); all.any(); all.pass()) {
      const int turn = all.turn;
      const Chunk later = all.later(), after = all.after(), next = all.next();
      if (second && later.count > 0) {
        const long long from = schedule(later.t);
        fetch_schedule(given(turn + 3), in.adt + from, in.dt + from, in.trap + from, seq - later.t, thread);
      }
      if (next.count > 0) store_values(value_stage, next, turn);
      if (second && thread < 32) spoil_marked(turn + 1);
      if (next.count > 0) {
        const bool ends = O::kFinalState && !H::kEnds && next.ends();
        rows.store(stages_keys ? keys(turn + 1).base : queries(turn + 1).base,
                   stages_keys ? H::Keys::kPanelBytes : H::Queries::kPanelBytes, table(turn + 1),
                   ends && stages_keys ? next.count - 1 : -1,
                   O::kFinalState ? final_state.k + state(next) * (S::kRank * S::kState) : nullptr, next.count);
      }
      if (!second && thread < 32) make_weights(all);
      if (second) wait_for_copies();
      fence_async_proxy();
      if (after.count > 0) {  // what is loaded here delays neither those waits nor others for what was loaded before
        value_stage.load(after.count);
        rows.begin(after.count);
      }
      __syncthreads();
    }
  }

  // ---- warpgroup 4 ----

  __device__ __forceinline__ void rotate() const {
    Walk walk(angles_of(start));
    begin(walk);
    __syncthreads();
    for (auto all = chunks(); all.any(); all.pass()) {
      make_rotations(walk, all);
      __syncthreads();
    }
  }
};

// One block for each row, segment and head, heads fastest: those of a group read the same keys and queries. Ends: one
// for each piece of a segment but the last one's; its state, decay and phases are written, from a zero state or from
// its sequence's if that begins in the piece. There are `pieces` of a row, as many of each segment.
template <class S, int Tokens, int Groups, class O, bool Ends>
__global__ void __launch_bounds__(128 * Groups, 1)
    mamba3_pipeline(const __nv_bfloat16* q, const __nv_bfloat16* k, const __nv_bfloat16* v, const float* q_bias,
                    const float* k_bias, const float* angles, const float* adt, const float* dt, const float* trap,
                    const float* mimo_v, const float* mimo_o, const __nv_bfloat16* z, const float* mimo_z,
                    const float* D, const float* norm_weight, const float* state_angle, const float* state_ssm,
                    const float* state_k, const float* state_v, const int* cu_seqlens, float* ends, float* decays,
                    unsigned* phases, __nv_bfloat16* y, float* final_angle, float* final_ssm, float* final_k,
                    float* final_v, int seq, int segments, int segment_tokens, int pieces, int piece_tokens,
                    int sequences, float norm_eps) {
  using H = PipelineShape<S, Tokens, Groups, O, Ends>;
  extern __shared__ __align__(1024) unsigned char memory[];
  const Arrays<S> in{q,           k,      v,   z,  q_bias, k_bias,      mimo_v,    mimo_o,  mimo_z,  D,
                     norm_weight, angles, adt, dt, trap,   state_angle, state_ssm, state_k, state_v, cu_seqlens};
  const FinalState final_state{final_angle, final_ssm, final_k, final_v};
  clear<H::kBytes>(memory, H::kThreads);
  fence_async_proxy();

  const int here = Ends ? pieces : segments, tokens = Ends ? piece_tokens : segment_tokens;
  Place at;
  at.head = blockIdx.x % S::kHeads;
  at.segment = blockIdx.x / S::kHeads % here;
  at.row = blockIdx.x / S::kHeads / here;
  at.sequence = 0, at.first = 0, at.end = seq;
  int t = at.segment * tokens;
  const int limit = min(seq, t + tokens);
  const int* bounds = cu_seqlens + (long long)at.row * (sequences + 1);
  if constexpr (O::kPacked) {
    at.find(bounds, sequences, Ends ? limit : t, seq);
    if constexpr (Ends) {
      if (at.first >= limit) return;  // what follows begins anew
      t = max(t, at.first);
    }
  }
  const Pipeline<H> block{in,        final_state, ends,         decays, phases, memory, seq,
                          sequences, pieces,      piece_tokens, t,      limit,  at};
  __syncthreads();

  if constexpr (O::kWeighted) {
    constexpr int kSize = S::kRank * S::kHeadDim;
    for (int i = threadIdx.x; i < kSize; i += H::kThreads)
      block.mimo_v()[i] = mimo_v[block.parameter_row() * kSize + i];
  }
  if constexpr (O::kPacked && O::kFinalState && !Ends) {
    if (at.segment == 0) pass_empty_sequences<S, O>(final_state, in, at, bounds, sequences, seq);
  }
  if (threadIdx.x == 0) {
    barrier_init(block.scores_here(), 4);
    fence_barrier_init();
  }
  for (int i = 0; i < 2; ++i) block.table(i).template fill<H::kThreads>();
  if (threadIdx.x < 3) block.weights(threadIdx.x).from_start[Tokens - 1] = 1.0f;  // before the first chunk

  // Those with accumulators take some of the others' registers. The sum must not grow, of four warpgroups with 128 a
  // thread or five with 96, or the block would wait for more forever.
  const int role = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (role == 0) {
    if constexpr (Groups == 5) take_registers<128>();
    if constexpr (Groups == 4 && !Ends) give_registers<96>();
    const float skip = O::kSkip && !Ends ? D[block.parameter_row()] : 0.0f;
    block.make_scores(y, mimo_o, mimo_z, norm_weight, skip, norm_eps);
  } else if (role == 1) {
    if constexpr (Groups == 5) take_registers<112>();
    if constexpr (Groups == 4 && !Ends) take_registers<176>();
    block.walk_state(y, mimo_o, mimo_z, norm_weight, norm_eps);
  } else if (role < 4) {
    if constexpr (Groups == 5) give_registers<88>();
    if constexpr (Groups == 4 && !Ends) give_registers<120>();
    block.stage();
  } else {
    if constexpr (Groups == 5) {
      give_registers<64>();
      block.rotate();
    }
  }
}

}  // namespace jax_ssd

// What the walks of mamba3_pipeline.cu and mamba3_tf32.cu have in common. A block walks the chunks of a head, or of a
// segment of it, and its warpgroups, each in its role, work on neighbouring chunks at the same time. They meet once per
// turn, at a barrier. What one hands to another in the next turn lies in shared memory twice, schedules four times.
//
// Here are the block's place and arrays; schedules and rotations, what is done about numbers that are not finite, and
// where these lie in shared memory; the state's decay, its start from those of earlier segments and its way to memory;
// norms. The kernels' own are the matrices, all products with them, how they are staged, how outputs are gated and
// folded, and which warpgroup has which role.
//
// Keys and queries are not looked at whether they are finite: weights that are zero for later tokens' keys are zeros
// whatever the scores are, so that a NaN reaches its own token and, through the state, those after it.
#pragma once

#include "async_copy.cuh"
#include "mamba3_chunks.cuh"
#include "mamba3_rows.cuh"
#include "mamba3_state.cuh"
#include "wgmma.cuh"

namespace jax_ssd {

// `advanced` without a carry to the upper half, which has none in shared memory: half of the instructions.
__device__ __forceinline__ unsigned long long moved(unsigned long long descriptor, unsigned bytes) {
  const unsigned low = static_cast<unsigned>(descriptor) + (bytes >> 4);
  return (descriptor & 0xffffffff00000000ull) | low;
}

// Sizes that all walks have. A kernel's shape H adds its own, among them kThreads; kRotators and kParts, see
// `PhaseWalk`; kBarriers, see `WalkBlock`; Layout, a `WalkLayout`. Ends: of a walk to the end of a piece, without
// output.
template <class S_, class O_, int Tokens, bool Ends>
struct WalkSizes {
  using S = S_;
  using O = O_;
  using Table = Rotations<S, Tokens>;
  using Weights = Schedule<Tokens>;
  using Given = GivenSchedule<Tokens>;
  static constexpr bool kEnds = Ends;
  static constexpr int kTokens = Tokens, kRows = 64, kColumns = 64, kStagers = 256;
  static constexpr int kSizeState = S::kState / 2;  // see `Part`
  static_assert(kTokens * S::kRank == kRows && S::kHeadDim <= kColumns, "whole tiles");
};

// Where things lie in shared memory that all walks have, from At on, behind the matrices; plan.py has the same figures.
// Own: bytes of the kernel's own among them. Parameters: bytes for what values are multiplied by.
template <class Sizes, int At, int Own, int Parameters>
struct WalkLayout {
  static constexpr int kTokens = Sizes::kTokens;
  static constexpr int kTable = padded(Sizes::Table::kBytes, 16),
                       kWeights = padded(sizeof(typename Sizes::Weights), 16),
                       kGiven = padded(sizeof(typename Sizes::Given), 16), kBad = padded(4 * (kTokens + 1), 16),
                       kNorms = Sizes::O::kNorm && !Sizes::kEnds ? 4 * Sizes::kRows * 4 : 0;
  static constexpr int kTableAt = At, kNormsAt = kTableAt + 2 * kTable, kOwnAt = kNormsAt + kNorms,
                       kWeightsAt = kOwnAt + Own, kGivenAt = kWeightsAt + 4 * kWeights,
                       kParametersAt = kGivenAt + 2 * kGiven, kLostAt = kParametersAt + padded(Parameters, 16),
                       kBadAt = kLostAt + padded(Sizes::S::kPairs * 4, 16), kBarriersAt = kBadAt + 4 * kBad,
                       kBytes = kBarriersAt + 16;
};

// One block.
template <class H>
struct WalkBlock {
  using S = typename H::S;
  using O = typename H::O;
  using Value = typename S::Value;
  using Layout = typename H::Layout;
  static constexpr int kTokens = H::kTokens;

  const Arrays<S>& in;
  const FinalState& final_state;
  float *ends, *decays;  // of pieces: the state at the end, by what a state decays, the phases
  unsigned* phases;
  unsigned char* memory;
  int seq, sequences, pieces, piece_tokens;
  int start, limit;  // the block's tokens are those from start to limit
  Place place;

  // Blocks are one for each row, segment and head, heads fastest: those of a group read the same keys and queries. To
  // ends: one for each piece of a segment but the last one's; its state, decay and phases are written, from a zero
  // state or from its sequence's if that begins in the piece. There are `pieces` of a row, as many of each segment.
  __device__ __forceinline__ WalkBlock(const Arrays<S>& in, const FinalState& final_state, float* ends, float* decays,
                                       unsigned* phases, unsigned char* memory, int seq, int segments,
                                       int segment_tokens, int pieces, int piece_tokens, int sequences)
      : in(in),
        final_state(final_state),
        ends(ends),
        decays(decays),
        phases(phases),
        memory(memory),
        seq(seq),
        sequences(sequences),
        pieces(pieces),
        piece_tokens(piece_tokens) {
    const int here = H::kEnds ? pieces : segments, tokens = H::kEnds ? piece_tokens : segment_tokens;
    place.head = blockIdx.x % S::kHeads;
    place.segment = blockIdx.x / S::kHeads % here;
    place.row = blockIdx.x / S::kHeads / here;
    place.sequence = 0, place.first = 0, place.end = seq;
    start = place.segment * tokens;
    limit = min(seq, start + tokens);
    if constexpr (O::kPacked) {
      place.find(bounds(), sequences, H::kEnds ? limit : start, seq);
      if constexpr (H::kEnds) start = max(start, place.first);
    }
  }
  // Is the state at the end of the piece of no use, since what follows begins anew?
  __device__ __forceinline__ bool is_idle() const { return O::kPacked && H::kEnds && place.first >= limit; }

  // ---- where things are in shared memory, of a turn ----

  __device__ __forceinline__ typename H::Table table(int turn) const {
    return typename H::Table(memory + Layout::kTableAt + turn % 2 * Layout::kTable);
  }
  __device__ __forceinline__ typename H::Weights& weights(int turn) const {
    return *reinterpret_cast<typename H::Weights*>(memory + Layout::kWeightsAt + turn % 4 * Layout::kWeights);
  }
  __device__ __forceinline__ typename H::Given& given(int turn) const {
    return *reinterpret_cast<typename H::Given*>(memory + Layout::kGivenAt + turn % 2 * Layout::kGiven);
  }
  // Which tokens of a chunk have rotations that are not finite, and whether any has.
  __device__ __forceinline__ int* bad(int turn) const {
    return reinterpret_cast<int*>(memory + Layout::kBadAt + turn % 4 * Layout::kBad);
  }
  __device__ __forceinline__ unsigned* lost() const { return reinterpret_cast<unsigned*>(memory + Layout::kLostAt); }
  // What values are multiplied by, [rank][head_dim].
  __device__ __forceinline__ float* mimo_v() const { return reinterpret_cast<float*>(memory + Layout::kParametersAt); }
  // Parts of sums of squares, [warp][row].
  __device__ __forceinline__ float* norms() const { return reinterpret_cast<float*>(memory + Layout::kNormsAt); }
  // A memory barrier that four warps arrive at, each at its time.
  __device__ __forceinline__ unsigned barrier(int i) const {
    return shared_address(memory + Layout::kBarriersAt + 8 * i);
  }
  // That at which scores of a turn are there.
  __device__ __forceinline__ unsigned scores_here() const { return barrier(0); }

  // ---- where things are in the arrays ----

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
  // At the first rank if ranks are kept.
  __device__ __forceinline__ long long outputs_of(int t) const {
    constexpr int kRanks = O::kWeighted && !O::kFolds ? S::kRank : 1;
    return (token(t) * kRanks * S::kHeads + place.head) * S::kHeadDim;
  }
  __device__ __forceinline__ const Value* rows_of(const Value* all, int t) const {
    const int group = place.head / (S::kHeads / S::kGroups);
    return all + (token(t) * (S::kRank * S::kGroups) + group) * S::kState;
  }
  __device__ __forceinline__ const float* angles_of(int t) const {
    return in.angles + (token(t) * S::kHeads + place.head) * S::kPairs;
  }
  __device__ __forceinline__ const int* bounds() const {
    return in.cu_seqlens + (long long)place.row * (sequences + 1);
  }

  // The chunks of the block.
  __device__ __forceinline__ Chunks<kTokens, O::kPacked> chunks() const {
    return {bounds(), sequences, seq, place, start, limit};
  }

  // A descriptor in registers that the warp has in common, where products want it: what is added to it stays there,
  // while one of a thread's own registers is moved there word by word for each product, and so are constants: hence the
  // sign of a length, which is zero.
  __device__ __forceinline__ unsigned long long common(unsigned long long descriptor) const {
    const unsigned high = static_cast<unsigned>(descriptor >> 32) + (static_cast<unsigned>(seq) >> 31);
    return static_cast<unsigned long long>(high) << 32 | __reduce_or_sync(~0u, static_cast<unsigned>(descriptor));
  }

  // ---- before the first turn, by all threads ----

  // What values are multiplied by. weights: mimo_v of the call.
  __device__ __forceinline__ void load_parameters(const float* weights) const {
    if constexpr (O::kWeighted) {
      constexpr int kSize = S::kRank * S::kHeadDim;
      for (int i = threadIdx.x; i < kSize; i += H::kThreads) mimo_v()[i] = weights[parameter_row() * kSize + i];
    }
  }

  __device__ __forceinline__ void prepare() const {
    if constexpr (O::kPacked && O::kFinalState && !H::kEnds) {
      if (place.segment == 0) pass_empty_sequences<S, O>(final_state, in, place, bounds(), sequences, seq);
    }
    if (threadIdx.x == 0) {
      for (int i = 0; i < H::kBarriers; ++i) barrier_init(barrier(i), 4);
      fence_barrier_init();
    }
    for (int i = 0; i < 2; ++i) table(i).template fill<H::kThreads>();
    if (threadIdx.x < 3) weights(threadIdx.x).from_start[kTokens - 1] = 1.0f;  // before the first chunk
  }

  // ---- schedules ----

  // Of the third next chunk, as it is given; it is on its way until `wait_for_copies`. By a warpgroup.
  __device__ __forceinline__ void fetch_given(const Chunk& later, int turn) const {
    const long long from = schedule(later.t);
    fetch_schedule(given(turn + 3), in.adt + from, in.dt + from, in.trap + from, seq - later.t, threadIdx.x % 128);
  }

  // Of the second next chunk, by a warp.
  template <class All>
  __device__ __forceinline__ void make_weights(const All& all) const {
    const Chunk after = all.after();
    if (after.count > 0) {
      const bool more = after.t + after.count < after.end;
      make_schedule<S::kExact>(weights(all.turn + 2), given(all.turn + 2), after.count, more);
    }
  }

  // A token with a number that is not finite: its weights become NaN, and all of the state after it.
  __device__ __forceinline__ void spoil(typename H::Weights& w, int c) const {
    w.gamma[c] = w.f[c] = w.from_start[kTokens - 1] = __int_as_float(0x7fffffff);
  }

  // Tokens whose rotations are not finite, by a warp.
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

  // ---- rotations, by kRotators threads ----

  using Phases = PhaseWalk<S, kTokens, H::kRotators, H::kParts>;

  __device__ __forceinline__ void begin(Phases& walk) const {
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
  __device__ __forceinline__ void make_rotations(Phases& walk, const All& all) const {
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

  __device__ __forceinline__ void write_end(const Phases& walk) const {
    walk.write_phases(phases + 2 * (head() * pieces + place.segment) * S::kPairs, lost());
  }

  // ---- keys, queries and values ----

  // Brings those of a chunk, whose rows are loaded at the end of the next turn, to the L2 cache: those who stage wait
  // for them as soon as a turn begins.
  __device__ __forceinline__ void bring(const Chunk& chunk) const {
    constexpr int kLine = 128 / sizeof(Value), kLines = S::kState / kLine, kValueLines = H::kColumns / kLine;
    const int thread = threadIdx.x % 128;
#pragma unroll
    for (int round = 0; round < H::kRows * kLines; round += 128) {
      const int i = round + thread, row = i / kLines, at = row * (S::kGroups * S::kState) + i % kLines * kLine;
      if (row >= chunk.count * S::kRank) continue;
      prefetch(rows_of(in.k, chunk.t) + at);
      if constexpr (!H::kEnds) prefetch(rows_of(in.q, chunk.t) + at);
    }
    if (thread / kValueLines < chunk.count && thread % kValueLines * kLine < S::kHeadDim) {
      prefetch(in.v + values_of(chunk.t) + thread / kValueLines * (S::kHeads * S::kHeadDim) +
               thread % kValueLines * kLine);
    }
  }

  // ---- the state, in accumulators of a warpgroup ----

  // That before the block's first token.
  __device__ __forceinline__ void start_state(float (&s)[H::kSizeState]) const {
#pragma unroll
    for (int i = 0; i < H::kSizeState; ++i) s[i] = 0.0f;
    if constexpr (!H::kEnds) {
      if (start != place.first) sum_segments(s);
    }
  }
  // Adds that of the pieces since the sequence began. Rotations, of one token, are lent to this warpgroup for the time.
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

  // Over a chunk; `decay` sums up logarithms of what it decays by. A turn without a chunk leaves the state
  // as it is: the schedules begin as those of chunks without tokens.
  __device__ __forceinline__ void decay_state(float (&s)[H::kSizeState], double& decay,
                                              const typename H::Weights& w) const {
    const float over = w.from_start[kTokens - 1];
#pragma unroll
    for (int i = 0; i < H::kSizeState; ++i) s[i] *= over;
    if constexpr (H::kEnds) {
      decay += static_cast<double>(w.sum[kTokens - 1]) + static_cast<double>(w.rest[kTokens - 1]);
    }
  }

  // After a turn: written at the end of the piece, or of a sequence; the next sequence begins with its own.
  __device__ __forceinline__ void pass_state(float (&s)[H::kSizeState], double decay, const Chunk& now,
                                             const Chunk& next) const {
    if constexpr (H::kEnds) {
      if (now.count > 0 && now.t + now.count == limit) {
        const long long end = head() * pieces + place.segment;
        Part<S, H>().each([&](int i, int p, int n) { ends[(end * S::kHeadDim + p) * S::kState + n] = s[i]; });
        if (threadIdx.x % 128 == 0) decays[end] = exp2_of<S::kExact>(static_cast<float>(decay));
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
  }

  // ---- the output, columns of the head in rows of a warpgroup's accumulators ----

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

  // While the last product runs gates are opened, and the next ones loaded; then outputs are stored. Output: an
  // `OutputStage` or the like. by: for what outputs are multiplied by.
  template <class Output>
  __device__ __forceinline__ void store_output(Output& output, float (&o)[32], float (&by)[32], const Chunk& now,
                                               const Chunk& next, float norm_eps) const {
    output.make_gates(by);
    if (next.count > 0) output.load(next.count);
    wgmma_wait<0>();
    pin(o);
    if constexpr (O::kNorm) normalize(o, norm_eps);
    if (now.count > 0) output.store(now.count, o, by);
  }
};

}  // namespace jax_ssd

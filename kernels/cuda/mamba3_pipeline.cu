// The scan of Mamba-3 forward, in bfloat16, for the warpgroup products of sm_90. The mathematics is that of
// mamba3_forward.cu. A block of four or five warpgroups walks the chunks of a head and works on neighbouring chunks at
// the same time:
//   warpgroup 0      multiplies queries with keys and weighs these scores
//   warpgroup 1      walks the state over the chunk, S = exp(a_last) S + (kept V)' K
//   warpgroups 2, 3  expand values and rotate keys and queries of the next chunk
// The output is queries multiplied with the state, then values with weighted scores, transposed: rows are columns of
// the head; it is gated and folded. Of four warpgroups 1 makes it, for it has the state in registers, and the schedule
// of the second next chunk; 0 makes rotations of that. Of five 0 makes the output, from a copy of the state, 1 and 4
// make rotations and 2 the schedule.
// What one hands to another at the barrier between turns is told in mamba3_walk.cuh; who makes the output waits for
// scores as well. Shared memory is busiest. Loops stay rolled where they can: a program for each warpgroup, all
// unrolled, waited for instructions half of the time. To the ends of segments the same block walks without queries and
// output; there 0 and 1 make rotations, 2 and 3 stage keys and 2 makes the schedule.

#include "mamba3_output.cuh"
#include "mamba3_stages.cuh"
#include "mamba3_walk.cuh"

namespace jax_ssd {

// Shared memory by an address that the warp has in a common register. Without it each access makes the address anew, of
// the block's number in its cluster, and waits for that.
__device__ __forceinline__ unsigned char* in_common(unsigned char* memory) {
  const unsigned address = __reduce_or_sync(~0u, shared_address(memory));
  return static_cast<unsigned char*>(__cvta_shared_to_generic(address));
}

// Sizes, and where matrices lie in shared memory; plan.py has the same figures.
template <class S, int Tokens, int Groups, class O, bool Ends>
struct PipelineShape : WalkSizes<S, O, Tokens, Ends> {
  using Base = WalkSizes<S, O, Tokens, Ends>;
  using Base::kRows, Base::kColumns;
  static constexpr int kThreads = 128 * Groups, kBarriers = 1;
  static_assert(Groups == 4 || (Groups == 5 && !Ends), "warpgroups");
  static_assert(S::kState % 64 == 0, "whole tiles");
  // Does warpgroup 1 make the output, from the state in its registers?
  static constexpr bool kHeldState = Groups == 4;
  // Which makes the schedules, by one of its warps: a sixth of a turn, which that role has to spare.
  static constexpr int kScheduler = kHeldState && !Ends ? 1 : 2;
  // See `in_common`: where the registers of a thread suffice for one more.
  static constexpr bool kCommonBase = kHeldState && !Ends;
  // Which warpgroups make rotations. Together their threads have all numbers modulo kRotators.
  static constexpr int kRotators = Groups == 5 || Ends ? 256 : 128;
  static __device__ constexpr bool rotates(int group) {
    return group == 4 || (group == 0 && kHeldState) || (group == 1 && (!kHeldState || Ends));
  }
  static constexpr int kSpans = Tokens < 64 ? Tokens / 4 : 16,
                       kLeastParts = kSpans > kRotators / 32 ? kSpans : kRotators / 32;
  static constexpr int kParts = kLeastParts < Tokens ? kLeastParts : Tokens;  // see `PhaseWalk`
  static constexpr int kAhead = Groups == 5 ? 2 : 4;                          // see `RowStage`
  static constexpr int kHolders = 128, kTiles = 4, kHeld = S::kState;         // see `Part`
  static constexpr bool kPairedRows = true;
  using Queries = Matrix<__nv_bfloat16, kRows, S::kState>;
  using Values = Matrix<__nv_bfloat16, kRows, kColumns>;
  using Scores = Matrix<__nv_bfloat16, kRows, kRows>;
  // Keys, and below them the state that goes with them.
  using Keys = Matrix<__nv_bfloat16, kRows + (Ends || kHeldState ? 0 : kColumns), S::kState>;
  static constexpr int kKeysAt = 0, kKeptAt = kKeysAt + 2 * Keys::kBytes, kValuesAt = kKeptAt + 2 * Values::kBytes,
                       kQueriesAt = kValuesAt + (Ends ? 0 : 2 * Values::kBytes),
                       kScoresAt = kQueriesAt + (Ends ? 0 : 2 * Queries::kBytes),
                       kMatricesEnd = kScoresAt + (Ends ? 0 : Scores::kBytes);
  using Layout = WalkLayout<Base, kMatricesEnd, 0, S::kRank * S::kHeadDim * 4 + 256>;
};

// One block.
template <class H>
struct Pipeline : WalkBlock<H> {
  using S = typename H::S;
  using O = typename H::O;
  using Value = __nv_bfloat16;
  using Block = WalkBlock<H>;
  using Phases = typename Block::Phases;
  using Block::angles_of, Block::begin, Block::bring, Block::chunks, Block::common, Block::decay_state,
      Block::fetch_given, Block::final_state, Block::in, Block::make_rotations, Block::make_weights, Block::memory,
      Block::outputs_of, Block::parameter_row, Block::pass_state, Block::rows_of, Block::scores_here, Block::spoil,
      Block::spoil_marked, Block::start, Block::start_state, Block::state, Block::store_output, Block::table,
      Block::values_of, Block::weights, Block::write_end;
  using Block::Block;

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

  // ---- scores and the output ----

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
    return {in.z + values_of(start), y + outputs_of(start), mimo_o + ranked, mimo_z + ranked,
            norm_weight + row * S::kHeadDim};
  }

  // The state's part decayed, and values with weighted scores; the output. All products have ended then.
  __device__ __forceinline__ void finish_output(OutputStage<H>& output, float (&o)[32], const Chunk& now,
                                                const Chunk& next, int turn, float norm_eps) const {
    using Order = RowOrder<S::kRank>;
    float decays_of[Order::kOwn], following = 0.0f;
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
    float by[32];
    store_output(output, o, by, now, next, norm_eps);
  }

  // ---- warpgroup 0 ----

  __device__ __forceinline__ void make_scores(Value* y, const float* mimo_o, const float* mimo_z,
                                              const float* norm_weight, float skip, float norm_eps) const {
    OutputStage<H> output = output_stage(y, mimo_o, mimo_z, norm_weight);
    Phases walk(angles_of(start));
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
    start_state(s);
    OutputStage<H> output = output_stage(y, mimo_o, mimo_z, norm_weight);
    Phases walk(angles_of(start));
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
      decay_state(s, decay, weights(turn));  // nor do products, in a turn without a chunk, change it
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
      if (H::kScheduler == 1 && threadIdx.x % 128 < 32) make_weights(all);  // while products run
      if constexpr (kOutput) finish_output(output, o, now, next, turn, norm_eps);
      wgmma_wait<0>();
      pin(s);
      if constexpr (kOutput) pin(words);
      pass_state(s, decay, now, next);
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
      if (second && later.count > 0) fetch_given(later, turn);
      if (next.count > 0) store_values(value_stage, next, turn);
      if (second && thread < 32) spoil_marked(turn + 1);
      if (next.count > 0) {
        const bool ends = O::kFinalState && !H::kEnds && next.ends();
        rows.store(stages_keys ? keys(turn + 1).base : queries(turn + 1).base,
                   stages_keys ? H::Keys::kPanelBytes : H::Queries::kPanelBytes, table(turn + 1),
                   ends && stages_keys ? next.count - 1 : -1,
                   O::kFinalState ? final_state.k + state(next) * (S::kRank * S::kState) : nullptr, next.count);
      }
      if (H::kScheduler == 2 && !second && thread < 32) make_weights(all);
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
    Phases walk(angles_of(start));
    begin(walk);
    __syncthreads();
    for (auto all = chunks(); all.any(); all.pass()) {
      make_rotations(walk, all);
      __syncthreads();
    }
  }
};

// One block for each row, segment or piece, and head, see `WalkBlock`.
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
  clear<H::Layout::kBytes>(memory, H::kThreads);
  fence_async_proxy();
  const Pipeline<H> block(in, final_state, ends, decays, phases, H::kCommonBase ? in_common(memory) : memory, seq,
                          segments, segment_tokens, pieces, piece_tokens, sequences);
  if (block.is_idle()) return;
  __syncthreads();
  block.load_parameters(mimo_v);
  block.prepare();

  // Those with accumulators take some of the others' registers. The sum must not grow, of four warpgroups with 128 a
  // thread or five with 96, or the block would wait for more forever.
  const int role = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (role == 0) {
    if constexpr (Groups == 5) take_registers<128>();
    if constexpr (Groups == 4 && !Ends) give_registers<88>();
    const float skip = O::kSkip && !Ends ? D[block.parameter_row()] : 0.0f;
    block.make_scores(y, mimo_o, mimo_z, norm_weight, skip, norm_eps);
  } else if (role == 1) {
    if constexpr (Groups == 5) take_registers<112>();
    if constexpr (Groups == 4 && !Ends) take_registers<168>();
    block.walk_state(y, mimo_o, mimo_z, norm_weight, norm_eps);
  } else if (role < 4) {
    if constexpr (Groups == 5) give_registers<88>();
    block.stage();
  } else {
    if constexpr (Groups == 5) {
      give_registers<64>();
      block.rotate();
    }
  }
}

}  // namespace jax_ssd

// The scan of Mamba-3 forward, in bfloat16, for the warpgroup products of sm_90. The mathematics is that of
// mamba3_forward.cu. A block walks the chunks of a head; four warpgroups work on neighbouring chunks at the same time
// and meet once per chunk, at a barrier:
//   state    walks the state over the chunk; gates and folds the output of the chunk before
//   scores   multiplies the chunk's queries with keys and state, weighted scores with values
//   queries  rotates queries and expands values of the next chunk; makes the schedule of the chunk after that
//   keys     rotates keys of the next chunk; makes the rotations of the chunk after that
// What one hands to another lies in shared memory twice (schedules four times), turn by turn. To the ends of segments
// the same block walks without queries and scores.

#include "async_copy.cuh"
#include "mamba3_output.cuh"
#include "mamba3_state.cuh"
#include "wgmma.cuh"

namespace jax_ssd {

// Tokens in a row that are worked on at once, and the sequence they belong to. None: count is 0.
struct Chunk {
  int t, count;
  Place at;

  __device__ bool begins() const { return count > 0 && t == at.first; }
  __device__ bool ends() const { return count > 0 && t + count == at.end; }
};

// Keys or queries of a chunk, staged by a warpgroup. Eight lanes have a row: a unit (see `Unit`) each and those 8 and
// 16 further, of which First to First + Count - 1 are staged here. A thread has four neighbouring rows, so that biases
// stay in its registers and a token's sines and cosines are read once for all ranks.
template <class S, int Tokens, int First, int Count, bool Keys, class M>
struct RowStage {
  static constexpr int kOwn = 4, kRanks = S::kRank < kOwn ? S::kRank : kOwn;  // rows, and ranks of one token in them
  static constexpr int kRow = S::kGroups * S::kState;                         // from row to row in memory
  // A unit's columns: all are neighbours, or two halves are.
  static constexpr int kParts = S::kHalf ? 2 : 1, kWidth = 8 / kParts;
  Unit<S> bias[kRanks][Count];
  unsigned raw[kOwn][Count][4];

  static __device__ __forceinline__ int first_row(int thread) { return thread % 128 / 8 * kOwn; }
  // Of a part of unit i, counted from those of unit 0, which are at kWidth columns per lane.
  static __device__ constexpr int column(int i, int part) { return 8 * kWidth * (First + i) + part * (S::kState / 2); }

  // from: [rank][state] of the head.
  __device__ __forceinline__ void load_bias(const float* from) {
#pragma unroll
    for (int r = 0; r < kRanks; ++r) {
#pragma unroll
      for (int i = 0; i < Count; ++i) {
        const int rank = (first_row(threadIdx.x) + r) % S::kRank;
        bias[r][i] = Unit<S>(from + rank * S::kState, threadIdx.x % 8 + 8 * (First + i));
      }
    }
  }
  // from: [token][rank][groups][state], at the chunk's first token and the head's group.
  __device__ __forceinline__ void load(const __nv_bfloat16* from, int count) {
    const int thread = thread_here(), row = first_row(thread);
    from += row * kRow + thread % 8 * kWidth;
#pragma unroll
    for (int r = 0; r < kOwn; ++r) {
      if ((row + r) / S::kRank >= count) continue;
#pragma unroll
      for (int i = 0; i < Count; ++i) {
        const __nv_bfloat16* at = from + r * kRow + column(i, 0);
        if constexpr (S::kHalf) {
          const uint2 low = *reinterpret_cast<const uint2*>(at);
          const uint2 high = *reinterpret_cast<const uint2*>(at + S::kState / 2);
          raw[r][i][0] = low.x, raw[r][i][1] = low.y, raw[r][i][2] = high.x, raw[r][i][3] = high.y;
        } else {
          const uint4 all = *reinterpret_cast<const uint4*>(at);
          raw[r][i][0] = all.x, raw[r][i][1] = all.y, raw[r][i][2] = all.z, raw[r][i][3] = all.w;
        }
      }
    }
  }
  // Rotates what was loaded. last_key: where the keys of token `last` are written in float32 too. If a key is not
  // finite the thread's keys of the token become zero, it is marked in `bad`, and the result is true.
  __device__ __forceinline__ bool store(const M& to, const Rotations<S, Tokens>& table, int count, int* bad, int last,
                                        float* last_key) const {
    const int thread = thread_here(), row = first_row(thread), lane = thread % 8;
    const unsigned base = to.address(row, lane * kWidth);
    bool found = false;
#pragma unroll
    for (int own = 0; own < kOwn; own += kRanks) {
      const int token = (row + own) / S::kRank;
      if (token >= count) continue;
      unsigned probe = 0;
#pragma unroll
      for (int i = 0; i < Count; ++i) {
        const int unit = lane + 8 * (First + i);
        const bool rotated = 4 * unit < S::kPairs;
        float sine[4], cosine[4];
        if (rotated) {
          const int at = Rotations<S, Tokens>::place(token, 4 * unit);
          load_values(sine, table.sine + at);
          load_values(cosine, table.cosine + at);
        }
#pragma unroll
        for (int r = 0; r < kRanks; ++r) {
          Unit<S> x = bias[r][i];
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            x.v[2 * e] += low_of_pair(raw[own + r][i][e]);
            x.v[2 * e + 1] += high_of_pair(raw[own + r][i][e]);
          }
          if (rotated) x.rotate_by(sine, cosine);
          if (Keys && token == last) x.write(last_key + (row + own + r) % S::kRank * S::kState, unit);
          unsigned words[4];
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            words[e] = bfloat16_pair(x.v[2 * e], x.v[2 * e + 1]);
            if constexpr (Keys) probe = plus_zero_times(probe, words[e]);
          }
          write(base, own + r, i, words);
        }
      }
      if (Keys && (probe & 0x7fff7fffu) != 0) {
        const unsigned zeros[4] = {0, 0, 0, 0};
#pragma unroll
        for (int r = 0; r < kRanks; ++r) {
#pragma unroll
          for (int i = 0; i < Count; ++i) write(base, own + r, i, zeros);
        }
        bad[token] = 1;
        found = true;
      }
    }
    return found;
  }

 private:
  // Unit i of the thread's row r. Its rows begin at a multiple of four, so that bits are what the swizzle changes.
  static __device__ __forceinline__ void write(unsigned base, int r, int i, const unsigned (&words)[4]) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const int from = column(i, part);
      const unsigned at = (base ^ (r * 16 | from % 64 * 2)) + r * 128 + from / 64 * M::kPanelBytes;
      if constexpr (kParts == 1) {
        store_shared(at, words[0], words[1], words[2], words[3]);
      } else {
        store_shared(at, words[2 * part], words[2 * part + 1]);
      }
    }
  }
};

// No units at all.
template <class S, int Tokens, int First, bool Keys, class M>
struct RowStage<S, Tokens, First, 0, Keys, M> {
  __device__ void load_bias(const float*) {}
  __device__ void load(const __nv_bfloat16*, int) {}
  __device__ bool store(const M&, const Rotations<S, Tokens>&, int, int*, int, float*) const { return false; }
};

// Sizes, and where things lie in shared memory; plan.py has the same figures.
template <class S_, int Tokens, class O_, bool Ends>
struct PipelineShape {
  using S = S_;
  using O = O_;
  static constexpr bool kEnds = Ends;
  static constexpr int kTokens = Tokens, kRows = 64, kColumns = 64, kThreads = 512;
  static constexpr int kTiles = 4, kHeld = S::kState, kSizeState = kHeld / 2, kUnits = S::kState / 64;
  using Rows = Matrix<__nv_bfloat16, kRows, S::kState>;
  using Values = Matrix<__nv_bfloat16, kRows, kColumns>;
  using States = Matrix<__nv_bfloat16, kColumns, S::kState>;
  using Table = Rotations<S, kTokens>;
  using Weights = Schedule<kTokens>;
  using Given = GivenSchedule<kTokens>;

  static constexpr int kOut = kRows * kColumns * 4, kTable = padded(Table::kBytes, 16),
                       kWeights = padded(sizeof(Weights), 16), kGiven = padded(sizeof(Given), 16);
  static constexpr int kKeysAt = 0, kValuesAt = kKeysAt + 2 * Rows::kBytes, kQueriesAt = kValuesAt + 2 * Values::kBytes,
                       kStatesAt = kQueriesAt + (Ends ? 0 : 2 * Rows::kBytes),
                       kOutAt = kStatesAt + (Ends ? 0 : 2 * States::kBytes), kTableAt = kOutAt + (Ends ? 0 : 2 * kOut),
                       kWeightsAt = kTableAt + 2 * kTable, kGivenAt = kWeightsAt + 4 * kWeights,
                       kParametersAt = kGivenAt + 2 * kGiven,
                       kLostAt = kParametersAt + padded((Ends ? 1 : 3) * S::kRank * S::kHeadDim * 4, 16),
                       kBadAt = kLostAt + padded(S::kPairs * 4, 16), kBytes = kBadAt + 4 * padded(kTokens * 4, 16);
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
  const float* decays;  // of segments that have ended, beside their states and phases
  const float* ends;
  const unsigned* phases;
  unsigned char* memory;
  int seq, sequences, segments, segment_tokens, limit;  // limit: the block's last token is before it
  Place place;
  int turn;
  // By age; all warpgroups turn them alike.
  Chunk before, now, next, after, later;

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
  __device__ __forceinline__ typename H::States states(int turn) const {
    return ring<typename H::States>(H::kStatesAt, turn);
  }
  __device__ __forceinline__ typename H::Table table(int turn) const {
    return typename H::Table(memory + H::kTableAt + turn % 2 * H::kTable);
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
  // mimo_v, mimo_o, mimo_z of the head, [rank][head_dim] each.
  __device__ __forceinline__ float* parameters(int which) const {
    return reinterpret_cast<float*>(memory + H::kParametersAt) + which * (S::kRank * S::kHeadDim);
  }
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
    return ((long long)place.row * sequences + chunk.at.sequence) * S::kHeads + place.head;
  }
  __device__ __forceinline__ const Value* rows_of(const Value* all, int t) const {
    const int group = place.head / (S::kHeads / S::kGroups);
    return all + (token(t) * (S::kRank * S::kGroups) + group) * S::kState;
  }
  __device__ __forceinline__ const float* angles_of(int t) const {
    return in.angles + (token(t) * S::kHeads + place.head) * S::kPairs;
  }

  // The chunk from token t of a sequence on.
  __device__ __forceinline__ Chunk chunk_from(int t, Place at) const {
    if constexpr (O::kPacked) {
      if (t >= at.end && t < limit) at.find(bounds(), sequences, t, seq);
    }
    return {t, max(0, min(kTokens, min(limit, at.end) - t)), at};
  }
  __device__ __forceinline__ const int* bounds() const {
    return in.cu_seqlens + (long long)place.row * (sequences + 1);
  }

  __device__ __forceinline__ bool works() const {
    return (before.count | now.count | next.count | after.count | later.count) > 0;
  }

  // Ends a turn. found: a number was not finite, so the marked tokens' weights become NaN. `lose`: what else then is to
  // be done.
  template <class Lose>
  __device__ __forceinline__ void pass(bool found, Lose lose) {
    if (__syncthreads_or(found)) {
      for (int which = turn + 1; which <= turn + 2; ++which) {
        const int c = threadIdx.x;
        if (c < kTokens) {
          typename H::Weights& w = weights(which);
          if (bad(which)[c]) w.gamma[c] = w.f[c] = w.kept[c] = __int_as_float(0x7fffffff);
          bad(which)[c] = 0;
        }
      }
      lose();
      __syncthreads();
    }
    before = now, now = next, next = after, after = later;
    later = chunk_from(later.t + later.count, later.at);
    ++turn;
  }
  __device__ __forceinline__ void pass() {
    pass(false, [] {});
  }

  __device__ __forceinline__ static int token_of(int row) { return row / S::kRank; }
  // Of an array over tokens, the elements of two neighbouring rows, the first one even.
  __device__ __forceinline__ static float2 pair_of_rows(const float* of_tokens, int row) {
    if constexpr (S::kRank == 1) return *reinterpret_cast<const float2*>(of_tokens + row);
    const float both = of_tokens[token_of(row)];
    return make_float2(both, both);
  }

  // ---- state: warpgroup 0 ----

  struct Gates {
    static constexpr int kPairs = S::kHeadDim / 2, kTogether = 128 / kPairs;
    static constexpr int kTurns = (kTokens + kTogether - 1) / kTogether;
    unsigned pairs[kTurns];

    static __device__ __forceinline__ int column() { return thread_here() % 128 % kPairs * 2; }
    static __device__ __forceinline__ int token(int turn) { return thread_here() % 128 / kPairs + turn * kTogether; }
    // Of columns two at a time, which neighbouring threads have. z: at the chunk's first token and the head.
    __device__ __forceinline__ void load(const Value* z, int count) {
      const int own = token(0);
      z += own * (S::kHeads * S::kHeadDim) + column();
#pragma unroll
      for (int i = 0; i < kTurns; ++i) {
        if (own + i * kTogether >= count) continue;
        pairs[i] = *reinterpret_cast<const unsigned*>(z + i * (kTogether * S::kHeads * S::kHeadDim));
      }
    }
  };

  // Gates and folds the output of the chunk before this one.
  __device__ __forceinline__ void write_output(Value* y, const Gates& gates, const float (&norm)[2]) const {
    const int column = Gates::column(), own = Gates::token(0);
    if (own >= Gates::kTogether) return;
    float scale[S::kRank][2], opening[S::kRank][2];
#pragma unroll
    for (int rank = 0; rank < S::kRank; ++rank) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        scale[rank][e] = norm[e];
        if constexpr (O::kFolds) scale[rank][e] *= parameters(1)[rank * S::kHeadDim + column + e];
        opening[rank][e] = O::kGate && O::kWeighted ? parameters(2)[rank * S::kHeadDim + column + e] : 1.0f;
      }
    }
    constexpr bool kKeeps = O::kWeighted && !O::kFolds;  // the ranks
    y += ((token(before.t) + own) * (kKeeps ? S::kRank : 1) * S::kHeads + place.head) * S::kHeadDim + column;
#pragma unroll
    for (int i = 0; i < Gates::kTurns; ++i) {
      if (own + i * Gates::kTogether >= before.count) continue;
      Value* to = y + (long long)i * (Gates::kTogether * (kKeeps ? S::kRank : 1) * S::kHeads * S::kHeadDim);
      float total[2] = {0.0f, 0.0f};
      const float gate[2] = {0.5f * low_of_pair(gates.pairs[i]), 0.5f * high_of_pair(gates.pairs[i])};
#pragma unroll
      for (int rank = 0; rank < S::kRank; ++rank) {
        const int row = (own + i * Gates::kTogether) * S::kRank + rank;
        const float2 pair = *reinterpret_cast<const float2*>(out(turn - 1, row, column));
        float x[2] = {pair.x * scale[rank][0], pair.y * scale[rank][1]};
        if constexpr (O::kGate) {
#pragma unroll
          for (int e = 0; e < 2; ++e) x[e] *= silu_of_double(gate[e] * opening[rank][e]);
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

  __device__ __forceinline__ void store_state(const float (&s)[H::kSizeState]) const {
    const typename H::States to = states(turn + 1);
    const int thread = thread_here(), row = thread / 32 * 16 + thread % 16, column = thread % 32 / 16 * 8;
#pragma unroll
    for (int i = 0; i < H::kSizeState; i += 8) {
      unsigned words[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) words[j] = bfloat16_pair(s[i + 2 * j], s[i + 2 * j + 1]);
      store_tiles(to.address(row, column + i * 2), words);
    }
    fence_async_proxy();
  }

  // The state before the block's first token, of the segments since its sequence began. Rotations, of one token, are
  // lent to this warpgroup for the time.
  __device__ __forceinline__ void sum_segments(float (&s)[H::kSizeState]) const {
    const typename H::Table turns = table(0);
    unsigned sum = 0;
    const int pair = threadIdx.x, from = place.first / segment_tokens;
    for (int j = from; j < place.segment; ++j) {
      const long long of = head() * (segments - 1) + j;
      if (pair < S::kPairs) {
        sincos_of_phase(sum, turns.sine[turns.place(0, pair)], turns.cosine[turns.place(0, pair)]);
        sum += phases[2 * of * S::kPairs + pair];
      }
      named_barrier(1, 128);
      add_turned<S, H>(s, j == from ? 0.0f : decays[of], ends + of * (S::kHeadDim * S::kState), turns);
      named_barrier(1, 128);
    }
  }

  __device__ __forceinline__ void walk_state(Value* y, float* end_state, float* end_decay) {
    using Multiply = Product<Value, 1>;
    float s[H::kSizeState];
#pragma unroll
    for (int i = 0; i < H::kSizeState; ++i) s[i] = 0.0f;
    if constexpr (!H::kEnds) {
      if (later.t != place.first) sum_segments(s);
    }
    Gates gates;
    float norm[2] = {1.0f, 1.0f};
    if constexpr (O::kNorm && !H::kEnds) {
      const float* from = in.norm_weight + parameter_row() * S::kHeadDim + Gates::column();
      norm[0] = from[0], norm[1] = from[1];
    }
    double decay = 0.0;
    __syncthreads();  // rotations are given back
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
    while (works()) {
      // Products of no chunk change nothing: the schedules begin as those of chunks without tokens.
      const typename H::Weights& w = weights(turn);
      const typename H::Values v = values(turn);
      typename Multiply::A a[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        a[i] = Multiply::a_transposed(v, 16 * i, warp * 16);
        Multiply::scale(a[i], [&](int j) { return pair_of_rows(w.kept, 16 * i + j); });
      }
      const float over = w.from_start[kTokens - 1];
#pragma unroll
      for (int i = 0; i < H::kSizeState; ++i) s[i] *= over;
      if constexpr (H::kEnds) {
        decay += static_cast<double>(w.sum[kTokens - 1]) + static_cast<double>(w.rest[kTokens - 1]);
      }
      const auto k_columns = column_descriptor(keys(turn).base, H::Rows::kPanelBytes);
      pin(s);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        Wgmma<Value, H::kHeld>::template registers<true>(s, a[i].r, advanced(k_columns, i * 2048), true);
      }
      wgmma_commit();
      if constexpr (!H::kEnds) {
        if (before.count > 0) write_output(y, gates, norm);
        if constexpr (O::kGate) {
          if (now.count > 0) gates.load(in.z + (token(now.t) * S::kHeads + place.head) * S::kHeadDim, now.count);
        }
      }
      wgmma_wait<0>();
      pin(s);
      if constexpr (H::kEnds) {
        if (now.count > 0 && now.t + now.count == limit) {
          Part<S, H>().each([&](int i, int p, int n) { end_state[p * S::kState + n] = s[i]; });
          if (threadIdx.x == 0) *end_decay = exp2_of<false>(static_cast<float>(decay));
        }
      }
      if constexpr (O::kFinalState && !H::kEnds) {
        if (now.ends()) {
          float* to = final_state.ssm + state(now) * (S::kHeadDim * S::kState);
          Part<S, H>().each([&](int i, int p, int n) { to[p * S::kState + n] = s[i]; });
        }
      }
      if (next.begins()) begin_state<S, H, O>(s, in, next.at, sequences, schedule(next.t), parameters(0));
      if constexpr (!H::kEnds) {
        if (next.count > 0) store_state(s);
      }
      pass();
    }
  }

  // ---- scores: warpgroup 1 ----

  __device__ __forceinline__ void make_output(float skip, float norm_eps) {
    using Multiply = Product<Value, 1>;
    __syncthreads();
    const int warp = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0), lane = threadIdx.x % 32;
    const int row = warp * 16 + lane / 4, early = token_of(row), late = token_of(row + 8);
    while (works()) {
      if (now.count > 0) {
        const typename H::Weights& w = weights(turn);
        const auto q_rows = row_descriptor(queries(turn).base), k_rows = row_descriptor(keys(turn).base);
        const auto s_rows = row_descriptor(states(turn).base);
        const auto v_columns = column_descriptor(values(turn).base, 0);
        float m[32], o[32];
        wgmma_fence();
#pragma unroll
        for (int n = 0; n < S::kState; n += 16) {
          const unsigned at = n / 64 * H::Rows::kPanelBytes + n % 64 * 2;
          Wgmma<Value, 64>::shared(m, advanced(q_rows, at), advanced(k_rows, at), n > 0);
        }
        wgmma_commit();
#pragma unroll
        for (int n = 0; n < S::kState; n += 16) {
          const unsigned at = n / 64 * H::Rows::kPanelBytes + n % 64 * 2;
          Wgmma<Value, 64>::shared(o, advanced(q_rows, at), advanced(s_rows, at), n > 0);
        }
        wgmma_commit();
        // Weights of scores: rows of earlier tokens have none, a token's own have gamma.
        const float sum_early = w.sum[early], sum_late = w.sum[late];
        const float own_early = w.gamma[early], own_late = w.gamma[late];
        const auto weight = [](int of, float sum, float own, int c, float sum_c, float f_c) {
          const float decayed = exp2_fast(of > c ? sum - sum_c : 0.0f) * f_c;
          return of > c ? decayed : of == c ? own : 0.0f;
        };
        float up[8][2], low[8][2];
#pragma unroll
        for (int block = 0; block < 8; ++block) {
          const int column = 8 * block + lane % 4 * 2;
          const float2 sum = pair_of_rows(w.sum, column), f = pair_of_rows(w.f, column);
          const int c = token_of(column);
          up[block][0] = weight(early, sum_early, own_early, c, sum.x, f.x);
          low[block][0] = weight(late, sum_late, own_late, c, sum.x, f.x);
          up[block][1] = S::kRank > 1 ? up[block][0] : weight(early, sum_early, own_early, c + 1, sum.y, f.y);
          low[block][1] = S::kRank > 1 ? low[block][0] : weight(late, sum_late, own_late, c + 1, sum.y, f.y);
        }
        wgmma_wait<1>();
        pin(m);
#pragma unroll
        for (int block = 0; block < 8; ++block) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            m[4 * block + e] *= up[block][e];
            m[4 * block + 2 + e] *= low[block][e];
          }
        }
        if constexpr (O::kSkip) {
          const float even = lane / 4 == lane % 4 * 2 ? skip : 0.0f, odd = lane / 4 == lane % 4 * 2 + 1 ? skip : 0.0f;
#pragma unroll
          for (int i = 0; i < 32; i += 8) {
            if (i / 8 == warp) m[i] += even, m[i + 1] += odd, m[i + 6] += even, m[i + 7] += odd;
          }
        }
        typename Multiply::A a[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) a[i] = Multiply::of_accumulators(m, 8 * i);
        const float decay_early = w.from_start[early], decay_late = w.from_start[late];
        wgmma_wait<0>();
        pin(o);
#pragma unroll
        for (int i = 0; i < 32; i += 4) {
          o[i] *= decay_early, o[i + 1] *= decay_early, o[i + 2] *= decay_late, o[i + 3] *= decay_late;
        }
        pin(o);
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          Wgmma<Value, 64>::template registers<true>(o, a[i].r, advanced(v_columns, i * 2048), true);
        }
        wgmma_commit();
        wgmma_wait<0>();
        pin(o);
        if constexpr (O::kNorm) normalize(o, norm_eps);
#pragma unroll
        for (int i = 0; i < 32; i += 4) {
          const int column = i * 2 + lane % 4 * 2;
          *reinterpret_cast<float2*>(out(turn, row, column)) = make_float2(o[i], o[i + 1]);
          *reinterpret_cast<float2*>(out(turn, row + 8, column)) = make_float2(o[i + 2], o[i + 3]);
        }
      }
      pass();
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

  // ---- queries: warpgroup 2 ----

  __device__ __forceinline__ void stage_queries() {
    // To the ends of segments it has units of keys instead: all but those that `stage_keys` has.
    constexpr int kFirst = H::kEnds ? 1 : 0;
    RowStage<S, kTokens, kFirst, H::kUnits - kFirst, H::kEnds, typename H::Rows> rows;
    ValuesAhead<S, kTokens, 128, O::kWeighted> values_ahead;
    rows.load_bias((H::kEnds ? in.k_bias : in.q_bias) + parameter_row() * (S::kRank * S::kState));
    const int thread = threadIdx.x % 128;
    __syncthreads();
    while (works()) {
      bool found = false;
      if (later.count > 0) {
        const long long from = schedule(later.t);
        fetch_schedule(given(turn + 3), in.adt + from, in.dt + from, in.trap + from, seq - later.t, thread);
      }
      if (next.count > 0) {
        found |= rows.store(H::kEnds ? keys(turn + 1) : queries(turn + 1), table(turn + 1), next.count, bad(turn + 1),
                            -1, nullptr);
        found |= values_ahead.store(parameters(0), next.count, values(turn + 1), bad(turn + 1));
        fence_async_proxy();
        if constexpr (O::kFinalState && !H::kEnds) {
          if (next.ends()) {
            const long long from = (token(next.t + next.count - 1) * S::kHeads + place.head) * S::kHeadDim;
            for (int p = thread; p < S::kHeadDim; p += 128) {
              final_state.v[state(next) * S::kHeadDim + p] = to_float(in.v[from + p]);
            }
          }
        }
      }
      if (after.count > 0) {
        rows.load(rows_of(H::kEnds ? in.k : in.q, after.t), after.count);
        values_ahead.load(in.v + (token(after.t) * S::kHeads + place.head) * S::kHeadDim, after.count);
        if (thread >= 96) make_schedule<false>(weights(turn + 2), given(turn + 2), after.count, has_next(after));
      }
      wait_for_copies();
      pass(found, [] {});
    }
  }
  // Whether a token of the same sequence follows a chunk.
  static __device__ __forceinline__ bool has_next(const Chunk& chunk) { return chunk.t + chunk.count < chunk.at.end; }

  // ---- keys: warpgroup 3 ----

  __device__ __forceinline__ void stage_keys(unsigned* end_phases) {
    RowStage<S, kTokens, 0, H::kEnds ? 1 : H::kUnits, true, typename H::Rows> rows;
    PhaseWalk<S, kTokens, 128> walk;
    rows.load_bias(in.k_bias + parameter_row() * (S::kRank * S::kState));
    walk.begin(nullptr, lost());
    if constexpr (!H::kEnds) {
      for (int j = place.first / segment_tokens; later.t != place.first && j < place.segment; ++j) {
        const unsigned* from = phases + 2 * (head() * (segments - 1) + j) * S::kPairs;
        walk.skip(from, from + S::kPairs, lost());
      }
    }
    __syncthreads();
    while (works()) {
      bool found = false;
      if (next.count > 0) {
        const bool ends = O::kFinalState && !H::kEnds && next.ends();
        found |= rows.store(keys(turn + 1), table(turn + 1), next.count, bad(turn + 1), ends ? next.count - 1 : -1,
                            O::kFinalState ? final_state.k + state(next) * (S::kRank * S::kState) : nullptr);
        fence_async_proxy();
        if (ends) {
          named_barrier(2, 128);
          walk.write(final_state.angle + state(next) * S::kPairs, final_state.k + state(next) * (S::kRank * S::kState),
                     lost());
        }
      }
      if (after.count > 0) {
        rows.load(rows_of(in.k, after.t), after.count);
        if (after.begins() && !walk.begin(begin_angles<S, O>(in, after.at, sequences), lost())) {
          bad(turn + 2)[0] = 1;
          found = true;
        }
        found |= walk.advance(angles_of(after.t), given(turn + 2).dt, after.count, table(turn + 2), bad(turn + 2));
      }
      if (later.count > 0) walk.load(angles_of(later.t), later.count);
      pass(found, [&] {
        if (after.count > 0) walk.lose(angles_of(after.t), in.dt + schedule(after.t), after.count, lost());
      });
    }
    if constexpr (H::kEnds) {
      if (threadIdx.x % 32 < 8) {
#pragma unroll
        for (int set = 0; set < walk.kSets; ++set) {
          const int pair = walk.pair(set);
          if (pair >= S::kPairs) continue;
          end_phases[pair] = walk.phase[set];
          end_phases[S::kPairs + pair] = lost()[pair];
        }
      }
    }
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
  Pipeline<H> block{in, final_state, decays, ends, phases, memory, seq, sequences, segments, segment_tokens, limit, at};
  block.turn = 0;
  block.before = block.now = block.next = block.after = Chunk{0, 0, at};
  block.later = block.chunk_from(t, at);
  __syncthreads();

  const long long parameters = block.parameter_row();
  const auto copy = [&](int which, const float* from) {
    for (int i = threadIdx.x; i < S::kRank * S::kHeadDim; i += H::kThreads) {
      block.parameters(which)[i] = from[parameters * (S::kRank * S::kHeadDim) + i];
    }
  };
  if constexpr (O::kWeighted) copy(0, mimo_v);
  if constexpr (O::kFolds && !Ends) copy(1, mimo_o);
  if constexpr (O::kWeighted && O::kGate && !Ends) copy(2, mimo_z);
  if constexpr (O::kPacked && O::kFinalState && !Ends) {
    if (at.segment == 0) pass_empty_sequences<S, O>(final_state, in, at, bounds, sequences, seq);
  }
  for (int i = 0; i < 2; ++i) block.table(i).template fill<H::kThreads>();
  if (threadIdx.x < 3) block.weights(threadIdx.x).from_start[Tokens - 1] = 1.0f;  // before the first chunk

  const int role = __shfl_sync(~0u, threadIdx.x / 128, 0);
  const long long end = block.head() * (segments - 1) + at.segment;
  // Registers go from scores to those who hold biases.
  if (role == 0) {
    block.walk_state(y, ends + end * (S::kHeadDim * S::kState), decays + end);
  } else if (role == 1) {
    give_registers<112>();
    if constexpr (Ends) {
      __syncthreads();
      while (block.works()) block.pass();
    } else {
      block.make_output(O::kSkip ? D[parameters] : 0.0f, norm_eps);
    }
  } else if (role == 2) {
    take_registers<136>();
    block.stage_queries();
  } else {
    take_registers<136>();
    block.stage_keys(phases + 2 * end * S::kPairs);
  }
}

}  // namespace jax_ssd

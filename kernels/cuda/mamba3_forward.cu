// The scan of Mamba-3, SISO or MIMO, forward: chunk by chunk, the state in registers, tokens times ranks as rows.
//
// With a the running sum of adt in a chunk, f_t = gamma_t + delta_{t+1}, S the transposed state [head_dim][state]:
//   M = (Q K') w,  w_ij = exp(a_i - a_j) f_j for a later token i, gamma_i within a token, else 0; the skip on the
//   diagonal O = M V + diag(exp(a)) Q S'        S = exp(a_last) S + V' diag(f exp(a_last - a)) K
// then norm, gate and the fold of the ranks.
//
// A long row is cut into segments so that there are blocks enough. `mamba3_segment_ends` walks a segment from a zero
// state and a zero phase; `mamba3_forward` sums the earlier segments itself, each decayed, and turned by the phase that
// it began with: a rotation of all keys is one of the state. A key that is not finite is kept out of the products,
// where a masked zero would spread it to earlier tokens, and its token's weights become NaN instead.

#include "mamba3_output.cuh"
#include "mamba3_pairs.cuh"
#include "mamba3_state.cuh"

namespace jax_ssd {

// Rows: of a chunk's matrices. Tokens: of a chunk, at most. Blocks: per multiprocessor, to bound the registers. Passes:
// of float32 products. Teams: of four warps in a block.
template <int Rows, int Tokens, int Blocks, int Passes, int Teams>
struct Tiling {
  static constexpr int kRows = Rows, kTokens = Tokens, kBlocks = Blocks, kPasses = Passes, kTeams = Teams;
};

__device__ constexpr int larger(int a, int b) { return a > b ? a : b; }

// How a block divides its work; plan.py has the same figures. Every team makes all scores, and of the output the
// columns that it owns.
template <class S, class T>
struct Shape {
  static constexpr int kTeams = T::kTeams, kThreads = kTeams * 128;
  static constexpr int kColumns = S::kHeadDim > 64 ? 128 : S::kHeadDim > 32 ? 64 : S::kHeadDim > 16 ? 32 : 16;
  static constexpr int kWidth = kColumns / kTeams;
  static constexpr int kState = padded(S::kState, 16);
  // A warp holds 16 rows of the state, and all of its columns or, if there are fewer row tiles than warps, a part.
  static constexpr int kHolders = kThreads;
  static constexpr bool kPairedRows = false;
  static constexpr int kTiles = kColumns / 16, kParts = 4 * kTeams / kTiles;
  static constexpr int kHeld = (kState / 16 + kParts - 1) / kParts * 16;
  static constexpr int kSizeState = kHeld / 2, kSizeScores = T::kRows / 2, kSizeOut = kWidth / 2;  // accumulators
  static_assert(kWidth % 16 == 0 && kParts > 0, "so many teams have not the right work");

  using Rows = Matrix<typename S::Value, T::kRows, kState>;      // queries, keys
  using Values = Matrix<typename S::Value, T::kRows, kColumns>;  // values
  using States = Matrix<typename S::Value, kColumns, kState>;    // the state, as an operand
  using Table = Rotations<S, T::kTokens>;
  using Weights = Schedule<T::kTokens>;
  using Given = GivenSchedule<T::kTokens>;
};

template <class S, class T, class O>
struct Walk {
  using H = Shape<S, T>;
  using Value = typename S::Value;
  static constexpr int kThreads = H::kThreads;

  // S = decay S + V' diag(kept) K, by the tensor cores of every GPU.
  static __device__ __forceinline__ void update_state(float (&s)[H::kSizeState], const typename H::Values& values,
                                                      const typename H::Rows& keys,
                                                      const typename H::Weights& weights) {
    using Multiply = Product<Value, T::kPasses>;
    using Pairs = PairWeights<S, T::kRows, T::kTokens>;
    const int warp = threadIdx.x / 32;
    const int row = warp % H::kTiles * 16, column = warp / H::kTiles * H::kHeld;
    const float decay = weights.from_start[T::kTokens - 1];
#pragma unroll
    for (int i = 0; i < H::kSizeState; ++i) s[i] *= decay;
#pragma unroll
    for (int depth = 0; depth < T::kRows; depth += Multiply::kDepth) {
      typename Multiply::A a = Multiply::a_transposed(values, depth, row);
      Multiply::scale(a, [&](int i) { return Pairs::pair_of_rows(weights.kept, depth + i); });
#pragma unroll
      for (int n = 0; n < H::kHeld; n += 16) {
        if (H::kHeld * H::kParts != H::kState && column + n >= H::kState) continue;
        typename Multiply::B b[2];
        Multiply::b_transposed(b, keys, depth, column + n);
        Multiply::add(s, n / 2, a, b[0]);
        Multiply::add(s, n / 2 + 4, a, b[1]);
      }
    }
  }

  // The state as an operand.
  static __device__ __forceinline__ void store_state(const typename H::States& states,
                                                     const float (&s)[H::kSizeState]) {
    const Part<S, H> part;
#pragma unroll
    for (int i = 0; i < H::kSizeState; i += 2) {
      const int p = part.row + i / 2 % 2 * 8, n = part.column + i / 4 * 8;
      if (H::kHeld * H::kParts != H::kState && n >= H::kState) continue;
      const float pair[2] = {s[i], s[i + 1]};
      H::States::template store<false>(states.address(p, n), pair);
    }
  }

  // Whether the columns of a block of 16 are all of later tokens than the rows of another.
  static __device__ __forceinline__ bool is_later(int columns, int rows) {
    return columns > rows + (16 % S::kRank != 0 ? 1 : 0);  // a token's ranks can lie in two neighbouring blocks
  }

  // A marked token's weights become NaN.
  static __device__ void poison(typename H::Weights& weights, int* bad) {
    for (int c = threadIdx.x; c < T::kTokens; c += kThreads) {
      if (bad[c]) weights.gamma[c] = weights.f[c] = weights.kept[c] = __int_as_float(0x7fffffff);
      bad[c] = 0;
    }
    __syncthreads();
  }
};

// Shared memory of `mamba3_segment_ends`.
template <class S, class T>
struct EndsMemory {
  using H = Shape<S, T>;
  static constexpr int kValues = padded(H::Rows::kBytes, 1024), kTable = kValues + padded(H::Values::kBytes, 1024),
                       kWeights = kTable + padded(H::Table::kBytes, 16),
                       kGiven = kWeights + padded(sizeof(typename H::Weights), 16),
                       kParameters = kGiven + padded(sizeof(typename H::Given), 16),
                       kPhases = kParameters + padded(S::kRank * S::kHeadDim * 4, 16),
                       kBad = kPhases + padded(S::kPairs * 4, 16), kBytes = kBad + padded(T::kTokens * 4, 16);
};

// One block for each row, head and segment but the last: the state at the segment's end, [head_dim][state], its decay,
// and its phases, and which of them are lost. They start from zero, or from the sequence's state if it begins in the
// segment.
template <class S, class T, class O>
__global__ void __launch_bounds__(Shape<S, T>::kThreads, T::kBlocks)
    mamba3_segment_ends(const typename S::Value* k, const typename S::Value* v, const float* k_bias,
                        const float* mimo_v, const float* angles, const float* adt, const float* dt, const float* trap,
                        const float* state_angle, const float* state_ssm, const float* state_k, const float* state_v,
                        const int* cu_seqlens, float* ends, float* decays, unsigned* phases, int seq, int segments,
                        int segment_tokens, int sequences) {
  using H = Shape<S, T>;
  using W = Walk<S, T, O>;
  using Memory = EndsMemory<S, T>;
  extern __shared__ __align__(1024) unsigned char memory[];
  clear<Memory::kBytes>(memory, H::kThreads);
  __syncthreads();

  Place at;
  at.head = blockIdx.x % S::kHeads;
  at.segment = blockIdx.x / S::kHeads % (segments - 1);
  at.row = blockIdx.x / S::kHeads / (segments - 1);
  at.sequence = 0, at.first = 0, at.end = seq;
  const int end = (at.segment + 1) * segment_tokens;
  int t = at.segment * segment_tokens;
  if constexpr (O::kPacked) {
    at.find(cu_seqlens + (long long)at.row * (sequences + 1), sequences, end, seq);
    if (at.first >= end) return;  // what follows begins anew
    t = max(t, at.first);
  }
  Arrays<S> in{};
  in.trap = trap, in.dt = dt;
  in.state_angle = state_angle, in.state_ssm = state_ssm, in.state_k = state_k, in.state_v = state_v;
  const long long parameters = O::kSharedParams ? at.head : (long long)at.row * S::kHeads + at.head;
  const long long schedule = ((long long)at.row * S::kHeads + at.head) * seq;

  typename H::Rows keys(memory);
  typename H::Values values(memory + Memory::kValues);
  const typename H::Table table(memory + Memory::kTable);
  typename H::Weights& weights = *reinterpret_cast<typename H::Weights*>(memory + Memory::kWeights);
  typename H::Given& given = *reinterpret_cast<typename H::Given*>(memory + Memory::kGiven);
  float* weights_v = reinterpret_cast<float*>(memory + Memory::kParameters);
  unsigned* lost = reinterpret_cast<unsigned*>(memory + Memory::kPhases);
  int* bad = reinterpret_cast<int*>(memory + Memory::kBad);
  if constexpr (O::kWeighted) {
    for (int i = threadIdx.x; i < S::kRank * S::kHeadDim; i += H::kThreads) {
      weights_v[i] = mimo_v[parameters * (S::kRank * S::kHeadDim) + i];
    }
  }
  __syncthreads();
  table.template fill<H::kThreads>();

  float s[H::kSizeState];
  const float* begin = nullptr;
  if (t == at.first) {
    begin = begin_angles<S, O>(in, at.state(sequences, S::kHeads));
    begin_state<S, H, O>(s, in, at.state(sequences, S::kHeads), schedule + t, weights_v);
  } else {
#pragma unroll
    for (int i = 0; i < H::kSizeState; ++i) s[i] = 0.0f;
  }
  const auto angles_at = [&](int t) {
    return angles + (((long long)at.row * seq + t) * S::kHeads + at.head) * S::kPairs;
  };
  PhaseWalk<S, T::kTokens, H::kThreads> walk(angles_at(t));
  bool found = !walk.begin(begin, lost);
  if (found) bad[0] = 1;
  __syncthreads();
  using Keys = KeyStage<S, T::kTokens, H::kThreads, false, typename H::Rows>;
  ValuesAhead<S, T::kTokens, H::kThreads, O::kWeighted> values_ahead;
  const long long group = at.head / (S::kHeads / S::kGroups);
  const auto load_next = [&](int t, int count) {
    walk.load(count);
    values_ahead.load(v + (((long long)at.row * seq + t) * S::kHeads + at.head) * S::kHeadDim, count);
  };
  const auto fetch_keys = [&](int t, int count) {
    const long long row = ((long long)at.row * seq + t) * (S::kRank * S::kGroups) + group;
    Keys::fetch(KeySource<S>{nullptr, k + row * S::kState}, count, keys, keys);
  };
  const auto fetch_next_schedule = [&](int t) {
    fetch_schedule(given, adt + schedule + t, dt + schedule + t, trap + schedule + t, seq - t, threadIdx.x);
  };
  int count = min(T::kTokens, end - t);
  fetch_keys(t, count);
  load_next(t, count);
  fetch_next_schedule(t);
  wait_for_copies();
  __syncthreads();
  double decay = 0.0;
  while (true) {
    if (threadIdx.x >= H::kThreads - 32) make_schedule<S::kExact>(weights, given, count, t + count < at.end);
    found |= walk.advance(given.dt, count, 0, table, bad);
    found |= values_ahead.store(weights_v, count, values, bad);
    __syncthreads();
    wait_for_copies();
    found |=
        Keys::rotate(table, nullptr, k_bias + parameters * (S::kRank * S::kState), count, keys, keys, bad, -1, nullptr);
    if (__syncthreads_or(found)) {
      W::poison(weights, bad);
      walk.lose(angles_at(t), dt + schedule + t, count, lost);
    }
    found = false;
    decay += static_cast<double>(weights.sum[T::kTokens - 1]) + static_cast<double>(weights.rest[T::kTokens - 1]);
    t += count;
    count = min(T::kTokens, end - t);
    if (count <= 0) {
      W::update_state(s, values, keys, weights);
      break;
    }
    load_next(t, count);
    fetch_next_schedule(t);
    W::update_state(s, values, keys, weights);
    wait_for_copies();
    __syncthreads();
    fetch_keys(t, count);
  }

  const long long to = ((long long)at.row * S::kHeads + at.head) * (segments - 1) + at.segment;
  Part<S, H>().each([&](int i, int p, int n) { ends[(to * S::kHeadDim + p) * S::kState + n] = s[i]; });
  if (threadIdx.x == 0) decays[to] = exp2_of<S::kExact>(static_cast<float>(decay));
  walk.write_phases(phases + 2 * to * S::kPairs, lost);
}

// Shared memory of `mamba3_forward`. What the tokens give lies where the state was.
template <class S, class T>
struct ForwardMemory {
  using H = Shape<S, T>;
  static constexpr int kOutBytes = T::kRows * H::kColumns * 4;
  static constexpr int kKeys = padded(H::Rows::kBytes, 1024), kValues = kKeys + padded(H::Rows::kBytes, 1024),
                       kStates = kValues + padded(H::Values::kBytes, 1024),
                       kTable = kStates + padded(larger(H::States::kBytes, kOutBytes), 1024),
                       kWeights = kTable + padded(H::Table::kBytes, 16),
                       kGiven = kWeights + padded(sizeof(typename H::Weights), 16),
                       kParameters = kGiven + padded(sizeof(typename H::Given), 16),
                       kPhases = kParameters + padded((3 * S::kRank + 1) * S::kHeadDim * 4, 16),
                       kBad = kPhases + padded(S::kPairs * 4, 16), kSquares = kBad + padded(T::kTokens * 4, 16),
                       kPairs = kSquares + 2 * T::kRows * 4,
                       kBytes = kPairs + PairWeights<S, T::kRows, T::kTokens>::kBytes;
};

// One block for each row, segment and head, heads fastest: those of a group read the same keys and queries.
template <class S, class T, class O>
__global__ void __launch_bounds__(Shape<S, T>::kThreads, T::kBlocks)
    mamba3_forward(const typename S::Value* q, const typename S::Value* k, const typename S::Value* v,
                   const float* q_bias, const float* k_bias, const float* angles, const float* adt, const float* dt,
                   const float* trap, const float* mimo_v, const float* mimo_o, const typename S::Value* z,
                   const float* mimo_z, const float* D, const float* norm_weight, const float* state_angle,
                   const float* state_ssm, const float* state_k, const float* state_v, const int* cu_seqlens,
                   const float* ends, const float* decays, const unsigned* phases, typename S::Value* y,
                   float* final_angle, float* final_ssm, float* final_k, float* final_v, int seq, int segments,
                   int segment_tokens, int sequences, float norm_eps) {
  using Value = typename S::Value;
  using H = Shape<S, T>;
  using W = Walk<S, T, O>;
  using Memory = ForwardMemory<S, T>;
  using Multiply = Product<Value, T::kPasses>;
  using Pairs = PairWeights<S, T::kRows, T::kTokens>;
  using Pair = decltype(pair_type(Value()));
  constexpr int kThreads = H::kThreads;
  extern __shared__ __align__(1024) unsigned char memory[];
  clear<Memory::kBytes>(memory, kThreads);
  __syncthreads();

  Place at;
  at.head = blockIdx.x % S::kHeads;
  at.segment = blockIdx.x / S::kHeads % segments;
  at.row = blockIdx.x / S::kHeads / segments;
  at.sequence = 0, at.first = 0, at.end = seq;
  int t = at.segment * segment_tokens;
  const int end = min(seq, t + segment_tokens);
  const int* bounds = cu_seqlens + (long long)at.row * (sequences + 1);
  if constexpr (O::kPacked) at.find(bounds, sequences, t, seq);

  Arrays<S> in{};
  in.trap = trap, in.dt = dt;
  in.state_angle = state_angle, in.state_ssm = state_ssm, in.state_k = state_k, in.state_v = state_v;
  const long long parameters = O::kSharedParams ? at.head : (long long)at.row * S::kHeads + at.head;
  const long long head = (long long)at.row * S::kHeads + at.head;
  const long long schedule = head * seq;
  const long long group = at.head / (S::kHeads / S::kGroups);

  typename H::Rows queries(memory), keys(memory + Memory::kKeys);
  typename H::Values values(memory + Memory::kValues);
  typename H::States states(memory + Memory::kStates);
  const typename H::Table table(memory + Memory::kTable);
  typename H::Weights& weights = *reinterpret_cast<typename H::Weights*>(memory + Memory::kWeights);
  typename H::Given& given = *reinterpret_cast<typename H::Given*>(memory + Memory::kGiven);
  constexpr int kRanked = S::kRank * S::kHeadDim;
  float* weights_v = reinterpret_cast<float*>(memory + Memory::kParameters);
  float *weights_o = weights_v + kRanked, *weights_z = weights_o + kRanked, *weights_norm = weights_z + kRanked;
  unsigned* lost = reinterpret_cast<unsigned*>(memory + Memory::kPhases);
  int* bad = reinterpret_cast<int*>(memory + Memory::kBad);
  float* squares = reinterpret_cast<float*>(memory + Memory::kSquares);
  float* pairs = reinterpret_cast<float*>(memory + Memory::kPairs);
  float* out = reinterpret_cast<float*>(memory + Memory::kStates);
  // A row's columns in an order in which the accumulators of a warp do not meet in a bank.
  const auto out_at = [&](int row, int column) {
    return out + row * H::kColumns + (H::kColumns % 32 == 0 ? column ^ row % 4 * 8 : column);
  };
  for (int i = threadIdx.x; i < kRanked; i += kThreads) {
    if constexpr (O::kWeighted) weights_v[i] = mimo_v[parameters * kRanked + i];
    if constexpr (O::kFolds) weights_o[i] = mimo_o[parameters * kRanked + i];
    if constexpr (O::kGate && O::kWeighted) weights_z[i] = mimo_z[parameters * kRanked + i];
  }
  if constexpr (O::kNorm) {
    for (int i = threadIdx.x; i < S::kHeadDim; i += kThreads) {
      weights_norm[i] = norm_weight[parameters * S::kHeadDim + i];
    }
  }
  float skip = 0.0f;
  if constexpr (O::kSkip) skip = D[parameters];

  const FinalState final_state{final_angle, final_ssm, final_k, final_v};
  if constexpr (O::kPacked && O::kFinalState) {
    if (at.segment == 0) pass_empty_sequences<S, O>(final_state, in, at, bounds, sequences, seq);
  }
  __syncthreads();
  table.template fill<kThreads>();

  float s[H::kSizeState];
  const auto angles_at = [&](int t) {
    return angles + (((long long)at.row * seq + t) * S::kHeads + at.head) * S::kPairs;
  };
  PhaseWalk<S, T::kTokens, kThreads> walk(angles_at(t));
  if (t != at.first) {  // the sequence began in an earlier segment: sum those up
    const int from = at.first / segment_tokens;
#pragma unroll
    for (int i = 0; i < H::kSizeState; ++i) s[i] = 0.0f;
    for (int pair = threadIdx.x; pair < S::kPairs; pair += kThreads) lost[pair] = 0;  // their phases for now
    for (int j = from; j < at.segment; ++j) {
      const long long of = head * (segments - 1) + j;
      for (int pair = threadIdx.x; pair < S::kPairs; pair += kThreads) {
        const int to = table.place(0, pair);
        sincos_of_phase(lost[pair], table.sine[to], table.cosine[to]);
        lost[pair] += phases[2 * of * S::kPairs + pair];
      }
      __syncthreads();
      const float decay = j == from ? 0.0f : decays[of];
      const float* ssm = ends + of * (S::kHeadDim * S::kState);
      add_turned<S, H>(s, decay, ssm, table);
      __syncthreads();
    }
    walk.begin(lost);
    if (__syncthreads_or(s[0] != s[0])) {
      for (int pair = threadIdx.x; pair < S::kPairs; pair += kThreads) {
        for (int j = from; j < at.segment; ++j)
          lost[pair] |= phases[(2 * (head * (segments - 1) + j) + 1) * S::kPairs + pair];
      }
      __syncthreads();
    }
  }

  using Keys = KeyStage<S, T::kTokens, kThreads, true, typename H::Rows>;
  ValuesAhead<S, T::kTokens, kThreads, O::kWeighted> values_ahead;
  const auto load_next = [&](int t, int count) {
    walk.load(count);
    values_ahead.load(v + (((long long)at.row * seq + t) * S::kHeads + at.head) * S::kHeadDim, count);
  };
  const auto fetch_keys = [&](int t, int count) {
    const long long row = ((long long)at.row * seq + t) * (S::kRank * S::kGroups) + group;
    Keys::fetch(KeySource<S>{q + row * S::kState, k + row * S::kState}, count, queries, keys);
  };
  const auto fetch_next_schedule = [&](int t) {
    fetch_schedule(given, adt + schedule + t, dt + schedule + t, trap + schedule + t, seq - t, threadIdx.x);
  };
  int count = min(T::kTokens, min(end, at.end) - t);
  fetch_keys(t, count);
  load_next(t, count);
  fetch_next_schedule(t);
  wait_for_copies();
  __syncthreads();
  while (true) {
    bool found = false;
    if (t == at.first) {
      begin_state<S, H, O>(s, in, at.state(sequences, S::kHeads), schedule + t, weights_v);
      found = !walk.begin(begin_angles<S, O>(in, at.state(sequences, S::kHeads)), lost);
      if (found) bad[0] = 1;
    }
    const bool last = t + count == at.end;
    const long long token = (long long)at.row * seq + t;
    const long long state = at.state(sequences, S::kHeads);

    // What the products need.
    if (threadIdx.x >= kThreads - 32) make_schedule<S::kExact>(weights, given, count, !last);
    found |= walk.advance(given.dt, count, 0, table, bad);
    found |= values_ahead.store(weights_v, count, values, bad);
    __syncthreads();
    W::store_state(states, s);
    Pairs::template make<kThreads>(pairs, weights, thread_here());
    wait_for_copies();
    found |=
        Keys::rotate(table, q_bias + parameters * (S::kRank * S::kState), k_bias + parameters * (S::kRank * S::kState),
                     count, queries, keys, bad, O::kFinalState && last ? count - 1 : -1,
                     O::kFinalState ? final_k + state * (S::kRank * S::kState) : nullptr);
    if (__syncthreads_or(found)) {
      W::poison(weights, bad);
      walk.lose(angles_at(t), dt + schedule + t, count, lost);
      Pairs::template make<kThreads>(pairs, weights, thread_here());
      __syncthreads();
    }

    // The next chunk, whose inputs are on their way from here on.
    Place next_at = at;
    const int next = t + count;
    if constexpr (O::kPacked) {
      if (last && next < end) next_at.find(bounds, sequences, next, seq);
    }
    const int next_count = min(T::kTokens, min(end, next_at.end) - next);  // 0 or less at the end
    if (next_count > 0) fetch_next_schedule(next);

    // Rows of the scores and of the output that this thread holds.
    const int thread = thread_here(), warp = thread / 32 % 4, lane = thread % 32, team = thread / 128;
    const int row = warp * 16 + lane / 4;
    const int early = Pairs::token_of(row), late = Pairs::token_of(row + 8);
    float m[H::kSizeScores], o[H::kSizeOut];
    const auto decay_rows = [&]() {
      const float up = weights.from_start[early], low = weights.from_start[late];
#pragma unroll
      for (int i = 0; i < H::kSizeOut; i += 4) {
        o[i] *= up, o[i + 1] *= up, o[i + 2] *= low, o[i + 3] *= low;
      }
    };
    const bool works = warp * 16 < T::kRows;  // fewer rows than four warps have
#pragma unroll
    for (int i = 0; i < H::kSizeScores; ++i) m[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < H::kSizeOut; ++i) o[i] = 0.0f;
    if (works) {
#pragma unroll
      for (int n = 0; n < H::kState; n += Multiply::kDepth) {
        const typename Multiply::A a = Multiply::a(queries, warp * 16, n);
        typename Multiply::B b[2];
#pragma unroll
        for (int j = 0; j < T::kRows; j += 16) {
          if (W::is_later(j / 16, warp)) continue;
          Multiply::b(b, keys, j, n);
          Multiply::add(m, j / 2, a, b[0]);
          Multiply::add(m, j / 2 + 4, a, b[1]);
        }
#pragma unroll
        for (int p = 0; p < H::kWidth; p += 16) {
          Multiply::b(b, states, team * H::kWidth + p, n);
          Multiply::add(o, p / 2, a, b[0]);
          Multiply::add(o, p / 2 + 4, a, b[1]);
        }
      }
      Pairs::weigh(m, pairs, weights, row);
      if constexpr (O::kSkip) Pairs::add_skip(m, skip, row);
      decay_rows();
#pragma unroll
      for (int j = 0; j < T::kRows; j += Multiply::kDepth) {
        if (W::is_later(j / 16, warp)) continue;
        const typename Multiply::A a = Multiply::of_accumulators(m, j / 2);
        typename Multiply::B b[2];
#pragma unroll
        for (int p = 0; p < H::kWidth; p += 16) {
          Multiply::b_transposed(b, values, j, team * H::kWidth + p);
          Multiply::add(o, p / 2, a, b[0]);
          Multiply::add(o, p / 2 + 4, a, b[1]);
        }
      }
    }
    W::update_state(s, values, keys, weights);

    if constexpr (O::kNorm) {
      float up = 0.0f, low = 0.0f;
#pragma unroll
      for (int i = 0; i < H::kSizeOut; i += 4) {
        up += o[i] * o[i] + o[i + 1] * o[i + 1];
        low += o[i + 2] * o[i + 2] + o[i + 3] * o[i + 3];
      }
#pragma unroll
      for (int other = 1; other <= 2; other *= 2) {
        up += __shfl_xor_sync(~0u, up, other);
        low += __shfl_xor_sync(~0u, low, other);
      }
      if constexpr (H::kTeams > 1) {
        if (lane % 4 == 0 && warp * 16 < T::kRows) {
          squares[team * T::kRows + row] = up;
          squares[team * T::kRows + row + 8] = low;
        }
        __syncthreads();
        up = low = 0.0f;
        if (warp * 16 < T::kRows) {
#pragma unroll
          for (int i = 0; i < H::kTeams; ++i) {
            up += squares[i * T::kRows + row];
            low += squares[i * T::kRows + row + 8];
          }
        }
      }
      up = 1.0f / sqrtf(up * (1.0f / S::kHeadDim) + norm_eps);
      low = 1.0f / sqrtf(low * (1.0f / S::kHeadDim) + norm_eps);
#pragma unroll
      for (int i = 0; i < H::kSizeOut; i += 4) {
        o[i] *= up, o[i + 1] *= up, o[i + 2] *= low, o[i + 3] *= low;
      }
    }
    // The gates of two columns at a time, which neighbouring threads load and write side by side.
    constexpr int kTogether = kThreads / (S::kHeadDim / 2), kTurns = (T::kTokens + kTogether - 1) / kTogether;
    constexpr int kAhead = kTurns < 4 ? kTurns : 4;  // gates on their way
    const int here = thread_here(), own = here / (S::kHeadDim / 2), column = here % (S::kHeadDim / 2) * 2;
    const auto place_of = [&](int c) { return ((token + c) * S::kHeads + at.head) * S::kHeadDim + column; };
    Pair gates[kAhead];
    const auto load_gates = [&](int turn) {
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int c = own + (turn + i) * kTogether;
        if (O::kGate && own < kTogether && c < count) gates[i] = *reinterpret_cast<const Pair*>(z + place_of(c));
      }
    };
    if constexpr (kTurns == kAhead) load_gates(0);  // where there are registers left for them
    wait_for_copies();
    __syncthreads();  // the matrices have been read
    if (next_count > 0) {
      fetch_keys(next, next_count);
      load_next(next, next_count);
      if constexpr (O::kGate) {
        const int c = threadIdx.x;
        if (c < next_count) prefetch(z + ((token + count + c) * S::kHeads + at.head) * S::kHeadDim);
      }
    }
    if (warp * 16 < T::kRows) {
#pragma unroll
      for (int i = 0; i < H::kSizeOut; i += 4) {
        const int column = team * H::kWidth + i * 2 + lane % 4 * 2;
        *reinterpret_cast<float2*>(out_at(row, column)) = make_float2(o[i], o[i + 1]);
        *reinterpret_cast<float2*>(out_at(row + 8, column)) = make_float2(o[i + 2], o[i + 3]);
      }
    }
    __syncthreads();

    float scale[S::kRank][2], opening[S::kRank][2];
#pragma unroll
    for (int rank = 0; rank < S::kRank; ++rank) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        scale[rank][e] = O::kNorm ? weights_norm[column + e] : 1.0f;
        if constexpr (O::kFolds) scale[rank][e] *= weights_o[rank * S::kHeadDim + column + e];
        opening[rank][e] = O::kGate && O::kWeighted ? weights_z[rank * S::kHeadDim + column + e] : 1.0f;
      }
    }
#pragma unroll 1
    for (int turn = 0; turn < kTurns; turn += kAhead) {
      if (kTurns != kAhead) load_gates(turn);
#pragma unroll
      for (int i = 0; i < kAhead; ++i) {
        const int c = own + (turn + i) * kTogether;
        if (own >= kTogether || c >= count) continue;
        float total[2] = {0.0f, 0.0f};
#pragma unroll
        for (int rank = 0; rank < S::kRank; ++rank) {
          const float2 pair = *reinterpret_cast<const float2*>(out_at(c * S::kRank + rank, column));
          float x[2] = {pair.x * scale[rank][0], pair.y * scale[rank][1]};
          if constexpr (O::kGate) {
            const float2 gate = floats_of(gates[i]);
            x[0] *= silu<S::kExact>(gate.x * opening[rank][0]);
            x[1] *= silu<S::kExact>(gate.y * opening[rank][1]);
          }
          if constexpr (O::kWeighted && !O::kFolds) {
            const long long to = (((token + c) * S::kRank + rank) * S::kHeads + at.head) * S::kHeadDim + column;
            *reinterpret_cast<Pair*>(y + to) = pair_of(x[0], x[1], Pair{});
          }
          total[0] += x[0];
          total[1] += x[1];
        }
        if constexpr (!O::kWeighted || O::kFolds) {
          *reinterpret_cast<Pair*>(y + place_of(c)) = pair_of(total[0], total[1], Pair{});
        }
      }
    }

    if constexpr (O::kFinalState) {
      if (last) {
        Part<S, H>().each([&](int i, int p, int n) { final_ssm[(state * S::kHeadDim + p) * S::kState + n] = s[i]; });
        walk.write_angles(final_angle + state * S::kPairs, lost);
        walk.spoil_keys(final_angle + state * S::kPairs, final_k + state * (S::kRank * S::kState));
        const long long of = (token + count - 1) * S::kHeads + at.head;
        for (int p = threadIdx.x; p < S::kHeadDim; p += kThreads) {
          final_v[state * S::kHeadDim + p] = to_float(v[of * S::kHeadDim + p]);
        }
      }
    }
    if (next_count <= 0) break;
    t = next;
    count = next_count;
    at = next_at;
  }
}

}  // namespace jax_ssd

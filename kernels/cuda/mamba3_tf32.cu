// The scan of Mamba-3 forward at rank 4 in float32, products in TF32, for the warpgroup products of sm_90. The
// mathematics is that of mamba3_forward.cu, the walk that of mamba3_walk.cuh. A block of four warpgroups walks the
// chunks, 16 tokens each, of a head and works on neighbouring chunks at the same time:
//   warpgroup 0   multiplies queries with keys and weighs these scores; makes rotations of the second next chunk
//   warpgroup 1   has the state in accumulators, columns of the head in rows: multiplies it with queries, walks it over
//                 the chunk, adds values with weighted scores, gates and folds the output
//   warpgroup 2   biases and rotates keys of the next chunk
//   warpgroup 3   the same with queries; makes the schedule of the second next chunk
// Keys as scores read them lie in shared memory once: they are overwritten when the scores are there. To the ends of
// segments the same block walks without queries, scores and output, and two warpgroups have the keys.
//
// TF32 is summed along the rows of both operands. So keys lie in shared memory as they are, for the scores, and
// transposed, for the state, by what it keeps of them. Values expanded to ranks are made where they are multiplied: A
// operands in registers, of both products.

#include "mamba3_output.cuh"
#include "mamba3_walk.cuh"
#include "wgmma_tf32.cuh"

namespace jax_ssd {

// Four neighbouring coordinates of a key or query in two pairs, of all that are: a unit. If pairs are (i, i + State /
// 2), a unit's are in both halves; matrices have them side by side.
template <class S>
struct Four {
  static constexpr int kUnits = S::kState / 4;

  // Of element e of a unit.
  static __device__ __forceinline__ int coordinate(int unit, int e) {
    return S::kHalf ? 2 * unit + e % 2 + e / 2 * (S::kState / 2) : 4 * unit + e;
  }
  static __device__ __forceinline__ void load(float (&v)[4], const float* row, int unit) {
    if constexpr (S::kHalf) {
      const float2 low = *reinterpret_cast<const float2*>(row + 2 * unit);
      const float2 high = *reinterpret_cast<const float2*>(row + 2 * unit + S::kState / 2);
      v[0] = low.x, v[1] = low.y, v[2] = high.x, v[3] = high.y;
    } else {
      load_values(v, row + 4 * unit);
    }
  }
  static __device__ __forceinline__ void rotate_by(float (&v)[4], float2 sine, float2 cosine) {
    rotate(v[0], v[S::kHalf ? 2 : 1], sine.x, cosine.x);
    rotate(v[S::kHalf ? 1 : 2], v[3], sine.y, cosine.y);
  }
};

// 64 rows whose numbers lie in panels of 32 columns, swizzled by 128 bytes.
template <int Columns>
struct RowMatrix {
  static constexpr int kPanelBytes = 64 * 128, kBytes = Columns / 32 * kPanelBytes;
  // From a descriptor of the matrix to that at a column, a multiple of 8.
  static __device__ constexpr unsigned to_column(int column) { return column / 32 * kPanelBytes + column % 32 * 4; }
  // Of four columns, from the start of the matrix.
  static __device__ __forceinline__ unsigned piece(int row, int four) {
    return four / 8 * kPanelBytes + swizzled(row, four % 8);
  }
};

// Keys transposed, [coordinate][token][rank], see `piece_descriptor`. A row of eights begins 32 bytes further in the
// banks than the one before: threads that write four ranks of neighbouring units do not meet. Rows are in such an order
// that accumulators of the state are A operands of a product with queries: unit u has the rows 8 (u / 2) + 2 e + u % 2.
template <class S, int Tokens>
struct AcrossMatrix {
  static constexpr int kEights = Tokens * 128 + 32, kBytes = S::kState / 8 * kEights;

  static __device__ __forceinline__ unsigned at(int unit, int e, int token) {
    return unit / 2 * kEights + token * 128 + (2 * e + unit % 2) * 16;
  }
};

// Sizes, and where matrices and values lie in shared memory; plan.py has the same figures.
template <class S, class O, bool Ends>
struct Tf32Shape : WalkSizes<S, O, 16, Ends> {
  using Base = WalkSizes<S, O, 16, Ends>;
  using Base::kTokens, Base::kRows, Base::kColumns;
  static constexpr int kThreads = 512, kRotators = 128, kParts = 8, kBarriers = 2;
  static_assert(S::kRank == 4 && S::kState == 128 && O::kWeighted, "these sizes only");
  using Rows = RowMatrix<S::kState>;
  using Scores = RowMatrix<kRows>;
  using Across = AcrossMatrix<S, kTokens>;
  static constexpr int kValues = kTokens * kColumns * 4, kFactors = Ends ? 0 : 2 * S::kRank * kColumns * 4;
  static constexpr int kKeysAt = 0, kQueriesAt = kKeysAt + (Ends ? 0 : Rows::kBytes),
                       kScoresAt = kQueriesAt + (Ends ? 0 : 2 * Rows::kBytes),
                       kAcrossAt = kScoresAt + (Ends ? 0 : Scores::kBytes), kValuesAt = kAcrossAt + 2 * Across::kBytes,
                       kMatricesEnd = kValuesAt + 2 * kValues;
  using Layout = WalkLayout<Base, kMatricesEnd, kFactors, S::kRank * S::kHeadDim * 4>;
};

// The thread's accumulators of the state: two neighbouring columns of the head in rows, of each eight coordinates two.
template <class S, class O, bool Ends>
struct Part<S, Tf32Shape<S, O, Ends>> {
  static constexpr int kSize = Tf32Shape<S, O, Ends>::kSizeState;

  // function(accumulator, row of the head, coordinate) for the real ones.
  template <class Function>
  __device__ __forceinline__ void each(Function function) const {
    const int thread = thread_here() % 128, row = thread / 4 * 2;
#pragma unroll
    for (int i = 0; i < kSize; ++i) {
      const int p = row + i / 2 % 2;
      if (p < S::kHeadDim) function(i, p, Four<S>::coordinate(i / 4 * 2 + i % 2, thread % 4));
    }
  }
};

// What a thread stages of keys or queries: a unit of all ranks of several tokens. A warp has a token, its tokens are
// kWarps apart. The first one's rows are loaded a turn ahead, the others' when the one before is on its way. The loop
// over tokens stays rolled, and keys and queries take the same program: instructions would be waited for.
template <class H>
struct RankStage {
  using S = typename H::S;
  using Unit = Four<S>;
  // To the ends of segments all stagers have keys; else half of them have queries.
  static constexpr int kThreads = H::kEnds ? H::kStagers : H::kStagers / 2, kWarps = kThreads / 32;
  static constexpr int kRow = S::kGroups * S::kState;
  static_assert(Unit::kUnits == 32 && kWarps % 4 == 0, "a unit for each lane");
  float bias[S::kRank][4];
  float raw[S::kRank][4];
  const float* from;  // the first row of the chunk that is loaded next

  static __device__ __forceinline__ int unit() { return threadIdx.x % 32; }
  static __device__ __forceinline__ int first_token() { return threadIdx.x % kThreads / 32; }

  // biases: [rank][state] of the head. rows: [token][rank][groups][state], at the first token and the head's group.
  __device__ __forceinline__ RankStage(const float* biases, const float* rows) : from(rows) {
#pragma unroll
    for (int rank = 0; rank < S::kRank; ++rank) Unit::load(bias[rank], biases + rank * S::kState, unit());
  }

  // The first rows of a chunk of `count` tokens, the next one that is stored.
  __device__ __forceinline__ void begin(int count) { load(first_token(), count); }

  // Rotates the rows of a chunk of `count` tokens, after which the next one can begin. rows: where they go as they are,
  // across: where keys go transposed, multiplied by `kept` of their tokens. last_key: where the keys of token `last`
  // are written in float32 too.
  __device__ __forceinline__ void store(bool keys, unsigned rows, unsigned across, const float* kept,
                                        const typename H::Table& table, int last, float* last_key, int count) {
    const int first = first_token();
    // Four tokens further a row is 16 further.
    unsigned row = rows + H::Rows::piece(first / 4 * 16 + first % 4 * 2, unit());
    unsigned column = across + H::Across::at(unit(), 0, first);
#pragma unroll 1
    for (int token = first; token < H::kTokens; token += kWarps) {
      float x[S::kRank][4];
#pragma unroll
      for (int rank = 0; rank < S::kRank; ++rank) {
#pragma unroll
        for (int e = 0; e < 4; ++e) x[rank][e] = raw[rank][e] + bias[rank][e];
      }
      if (token + kWarps < H::kTokens) load(token + kWarps, count);
      float2 sine = make_float2(0.0f, 0.0f), cosine = make_float2(1.0f, 1.0f);  // of coordinates in no pair
      if (2 * unit() < S::kPairs) {
        const int at = H::Table::place(token, 2 * unit());
        sine = *reinterpret_cast<const float2*>(table.sine + at);
        cosine = *reinterpret_cast<const float2*>(table.cosine + at);
      }
#pragma unroll
      for (int rank = 0; rank < S::kRank; ++rank) {
        Unit::rotate_by(x[rank], sine, cosine);
        if constexpr (!H::kEnds) {
          // Of a neighbour below an even row the order of pieces differs in one bit.
          const unsigned at = (row + rank % 2 * 128 + rank / 2 * 1024) ^ rank % 2 * 16;
          store_shared(at, tf32(x[rank][0]), tf32(x[rank][1]), tf32(x[rank][2]), tf32(x[rank][3]));
        }
      }
      if (keys) {
        const float keep = kept[token];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          store_shared(column + e * 32, tf32(keep * x[0][e]), tf32(keep * x[1][e]), tf32(keep * x[2][e]),
                       tf32(keep * x[3][e]));
        }
        if (token == last) {
#pragma unroll
          for (int i = 0; i < 4 * S::kRank; ++i) {
            last_key[i / 4 * S::kState + Unit::coordinate(unit(), i % 4)] = x[i / 4][i % 4];
          }
        }
      }
      row += kWarps / 4 * 2048, column += kWarps * 128;
    }
    from += (long long)count * (S::kRank * kRow);
  }

 private:
  // A token beyond the chunk is its last one instead: it counts for nothing, and is finite if that is.
  __device__ __forceinline__ void load(int token, int count) {
    const float* rows = from + min(token, count - 1) * (S::kRank * kRow);
#pragma unroll
    for (int rank = 0; rank < S::kRank; ++rank) Unit::load(raw[rank], rows + rank * kRow, unit());
  }
};

// What a stager looks at of values: four columns of a token.
template <class H>
struct ValueCheck {
  using S = typename H::S;
  static_assert(H::kStagers == H::kTokens * H::kColumns / 4, "all values");
  float4 raw;
  float most[4] = {};  // of the weights by which values are multiplied, and a little more for the rounding
  const float* from;   // of the next chunk

  static __device__ __forceinline__ int token() { return threadIdx.x % H::kStagers / 16; }
  static __device__ __forceinline__ int column() { return threadIdx.x % 16 * 4; }

  // v: at the first token and the head. mimo_v: [rank][head_dim] of the head.
  __device__ __forceinline__ ValueCheck(const float* v, const float* mimo_v) : from(v + column()) {
    if (column() >= S::kHeadDim) return;
#pragma unroll
    for (int rank = 0; rank < S::kRank; ++rank) {
      float weights[4];
      load_values(weights, mimo_v + rank * S::kHeadDim + column());
#pragma unroll
      for (int e = 0; e < 4; ++e) most[e] = fmaxf(most[e], fabsf(1.001f * weights[e]));
    }
  }

  // Tokens beyond the next chunk are zero.
  __device__ __forceinline__ void load(int count) {
    raw = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (token() < count && column() < S::kHeadDim) {
      raw = *reinterpret_cast<const float4*>(from + token() * (S::kHeads * S::kHeadDim));
    }
    from += (long long)count * (S::kHeads * S::kHeadDim);
  }

  // Values of which a rank's is not finite become zero; then spoil(token) is called.
  template <class Spoil>
  __device__ __forceinline__ void store(float* values, Spoil spoil) const {
    const float x[4] = {raw.x, raw.y, raw.z, raw.w};
    float probe = 0.0f;
#pragma unroll
    for (int e = 0; e < 4; ++e) probe = fmaf(x[e] * most[e], 0.0f, probe);
    const bool finite = probe == 0.0f;
    if (!finite) spoil(token());
    *reinterpret_cast<float4*>(values + token() * H::kColumns + column()) =
        finite ? raw : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
};

// What a thread gates and folds of the output, columns of the head in rows: two neighbouring ones, of its own tokens
// and all their ranks (see `RowOrder`).
template <class H>
struct FoldStage {
  using S = typename H::S;
  using O = typename H::O;
  using Order = RowOrder<S::kRank>;
  static constexpr bool kKeeps = !O::kFolds;  // the ranks
  static constexpr int kLine = S::kHeads * S::kHeadDim, kToken = (kKeeps ? S::kRank : 1) * kLine;
  // By what outputs and gates are multiplied, [scale, exponent][rank][column], in shared memory: registers are few.
  // With gates y = sum of o z scale / (1 + exp2(z exponent)).
  const float* factors;  // at the thread's column
  float2 gates[Order::kOwn];
  const float* z;  // of the next chunk to load, and to store
  float* y;

  static __device__ __forceinline__ int column() { return threadIdx.x % 128 / 4 * 2; }
  static __device__ __forceinline__ bool is_there() { return column() < S::kHeadDim; }
  // Which accumulator is that of an own token's rank and a column.
  static __device__ constexpr int place(int own, int rank, int e) { return 8 * own + rank / 2 * 4 + 2 * e + rank % 2; }

  // By all threads of the block. mimo_o, mimo_z: [rank][head_dim] of the head.
  static __device__ __forceinline__ void make_factors(float* factors, const float* mimo_o, const float* mimo_z,
                                                      const float* norm_weight) {
    for (int i = threadIdx.x; i < S::kRank * H::kColumns; i += H::kThreads) {
      const int p = i % H::kColumns, ranked = i / H::kColumns * S::kHeadDim + p;
      if (p >= S::kHeadDim) continue;  // zero
      const float norm = O::kNorm ? norm_weight[p] : 1.0f;
      const float scale = O::kFolds ? norm * mimo_o[ranked] : norm;
      factors[i] = O::kGate ? scale * mimo_z[ranked] : scale;
      if constexpr (O::kGate) factors[S::kRank * H::kColumns + i] = -LOG2E * mimo_z[ranked];
    }
  }

  // At the first token and the head, of its first rank if ranks are kept.
  __device__ __forceinline__ FoldStage(const float* factors, const float* z, float* y)
      : factors(factors + column()), z(z + column()), y(y + column()) {}

  __device__ __forceinline__ void load(int count) {
    if constexpr (O::kGate) {
#pragma unroll
      for (int i = 0; i < Order::kOwn; ++i) {
        const int token = Order::own_token(i);
        if (token < count && is_there()) gates[i] = *reinterpret_cast<const float2*>(z + token * kLine);
      }
      z += (long long)count * kLine;
    }
  }

  // What the outputs are multiplied by. Gates are opened by the hardware's exponential and reciprocal, within a few
  // roundings.
  __device__ __forceinline__ void make_gates(float (&by)[32]) const {
#pragma unroll
    for (int rank = 0; rank < S::kRank; ++rank) {
      const float2 scale = *reinterpret_cast<const float2*>(factors + rank * H::kColumns);
      const float2 exponent = *reinterpret_cast<const float2*>(factors + (S::kRank + rank) * H::kColumns);
#pragma unroll
      for (int i = 0; i < Order::kOwn; ++i) {
        float2 gate = make_float2(1.0f, 1.0f);
        if constexpr (O::kGate) {
          gate.x = gates[i].x * rcp_fast(1.0f + exp2_fast(gates[i].x * exponent.x));
          gate.y = gates[i].y * rcp_fast(1.0f + exp2_fast(gates[i].y * exponent.y));
        }
        by[place(i, rank, 0)] = scale.x * gate.x;
        by[place(i, rank, 1)] = scale.y * gate.y;
      }
    }
  }

  __device__ __forceinline__ void store(int count, const float (&o)[32], const float (&by)[32]) {
#pragma unroll
    for (int i = 0; i < Order::kOwn; ++i) {
      const int token = Order::own_token(i);
      const bool stores = token < count && is_there();
      float2 total = make_float2(0.0f, 0.0f);
#pragma unroll
      for (int rank = 0; rank < S::kRank; ++rank) {
        const int first = place(i, rank, 0), second = place(i, rank, 1);
        const float2 x = make_float2(o[first] * by[first], o[second] * by[second]);
        if (kKeeps && stores) *reinterpret_cast<float2*>(y + token * kToken + rank * kLine) = x;
        total.x += x.x, total.y += x.y;
      }
      if (!kKeeps && stores) *reinterpret_cast<float2*>(y + token * kToken) = total;
    }
    y += (long long)count * kToken;
  }
};

// One block.
template <class H>
struct Tf32Walk : WalkBlock<H> {
  using S = typename H::S;
  using O = typename H::O;
  using Block = WalkBlock<H>;
  using Phases = typename Block::Phases;
  using Block::angles_of, Block::barrier, Block::begin, Block::bring, Block::chunks, Block::common, Block::decay_state,
      Block::fetch_given, Block::final_state, Block::in, Block::make_rotations, Block::make_weights, Block::memory,
      Block::outputs_of, Block::parameter_row, Block::pass_state, Block::rows_of, Block::scores_here, Block::spoil,
      Block::spoil_marked, Block::start, Block::start_state, Block::state, Block::store_output, Block::table,
      Block::values_of, Block::weights, Block::write_end;
  using Block::Block;
  static constexpr int kTokens = H::kTokens;

  __device__ __forceinline__ unsigned keys() const { return shared_address(memory + H::kKeysAt); }
  __device__ __forceinline__ unsigned queries(int turn) const {
    return shared_address(memory + H::kQueriesAt + turn % 2 * H::Rows::kBytes);
  }
  __device__ __forceinline__ unsigned across(int turn) const {
    return shared_address(memory + H::kAcrossAt + turn % 2 * H::Across::kBytes);
  }
  // Weighted, [query][token of the key][rank].
  __device__ __forceinline__ unsigned scores() const { return shared_address(memory + H::kScoresAt); }
  // Not expanded, [token][column of the head].
  __device__ __forceinline__ float* values(int turn) const {
    return reinterpret_cast<float*>(memory + H::kValuesAt + turn % 2 * H::kValues);
  }
  // That at which keys have been read for scores.
  __device__ __forceinline__ unsigned keys_read() const { return barrier(1); }
  // See `FoldStage`.
  __device__ __forceinline__ float* factors() const { return reinterpret_cast<float*>(memory + H::Layout::kOwnAt); }

  // ---- warpgroup 0 ----

  // Scores, queries in rows.
  __device__ __forceinline__ void multiply_keys(float (&m)[32], int turn) const {
    const auto q_rows = common(row_descriptor(queries(turn))), k_rows = common(row_descriptor(keys()));
    wgmma_fence();
#pragma unroll
    for (int n = 0; n < S::kState; n += 8) {
      WgmmaTf32<64>::shared(m, moved(q_rows, H::Rows::to_column(n)), moved(k_rows, H::Rows::to_column(n)), n > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    pin(m);
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(keys_read());
  }

  // Scores to what keys' values count for outputs, zero for later tokens whatever the scores are; to shared memory.
  // skip: is added on the diagonal.
  __device__ __forceinline__ void weigh(float (&m)[32], const typename H::Weights& w, float skip) const {
    using Order = RowOrder<S::kRank>;
    const int thread = threadIdx.x % 128, warp = thread / 32, row = warp * 16 + thread % 32 / 4, lane = thread % 4;
    const int late = Order::token(row);  // of both rows
    const float sum = w.sum[late], rest = w.rest[late], gamma = w.gamma[late];
    const float skips[2] = {row % 8 == 2 * lane ? skip : 0.0f, row % 8 == 2 * lane + 1 ? skip : 0.0f};
#pragma unroll
    for (int i = 0; i < Order::kOwn; ++i) {
      const int early = Order::own_token(i);
      float by = exp2f(sum - w.sum[early] + (rest - w.rest[early])) * w.f[early];
      if (early == late) by = gamma;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        unsigned words[4];
#pragma unroll
        for (int rank = 0; rank < 4; ++rank) {
          const int j = 2 * i + rank / 2, b = rank % 2;
          float x = m[4 * j + 2 * half + b] * by;
          if (O::kSkip && rank / 2 == half) x += warp == i ? skips[b] : 0.0f;
          words[rank] = early <= late ? tf32(x) : 0u;
        }
        store_shared(scores() + H::Scores::piece(row + 8 * half, early), words[0], words[1], words[2], words[3]);
      }
    }
    fence_async_proxy();
    __syncwarp();
    if (thread % 32 == 0) barrier_arrive(scores_here());
  }

  __device__ __forceinline__ void make_scores(float skip) const {
    Phases walk(angles_of(start));
    begin(walk);
    __syncthreads();
    for (auto all = chunks(); all.any(); all.pass()) {
      if constexpr (!H::kEnds) {
        float m[32];
        multiply_keys(m, all.turn);  // products of no chunk are harmless
        weigh(m, weights(all.turn), skip);
      }
      bring(all.later());
      make_rotations(walk, all);
      __syncthreads();
    }
    if constexpr (H::kEnds) write_end(walk);
  }

  // ---- warpgroup 1 ----

  // Values of two neighbouring columns, expanded to the thread's rank: an A operand whose summed dimension is tokens
  // and ranks.
  __device__ __forceinline__ void expand(unsigned (&a)[kTokens / 2][4], int turn, float2 ranked) const {
    const float* v = values(turn) + threadIdx.x % 128 / 4 * 2;
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      const float2 x = *reinterpret_cast<const float2*>(v + t * H::kColumns);
      a[t / 2][t % 2 * 2] = tf32(x.x * ranked.x);
      a[t / 2][t % 2 * 2 + 1] = tf32(x.y * ranked.y);
    }
  }

  // A half of the state, rounded to A operands.
  template <int Half>
  __device__ __forceinline__ void round_state(unsigned (&words)[H::kSizeState / 8][4],
                                              const float (&s)[H::kSizeState]) const {
#pragma unroll
    for (int i = 0; i < H::kSizeState / 2; i += 4) {
      const float* from = s + Half * (H::kSizeState / 2) + i;
      words[i / 4][0] = tf32(from[0]), words[i / 4][1] = tf32(from[2]);
      words[i / 4][2] = tf32(from[1]), words[i / 4][3] = tf32(from[3]);
    }
    pin(words);
  }

  // Multiplies it with queries: a part of the output.
  template <int Half>
  __device__ __forceinline__ void multiply_queries(float (&o)[32], const unsigned (&words)[H::kSizeState / 8][4],
                                                   unsigned long long q_rows) const {
#pragma unroll
    for (int i = 0; i < S::kState / 2; i += 8) {
      const int n = Half * (S::kState / 2) + i;
      WgmmaTf32<64>::registers(o, words[i / 8], moved(q_rows, H::Rows::to_column(n)), n > 0);
    }
    wgmma_commit();
  }

  // The state's part decayed, and values with weighted scores; gated and folded. All products have ended then.
  __device__ __forceinline__ void finish_output(FoldStage<H>& output, float (&o)[32],
                                                const unsigned (&v)[kTokens / 2][4], const Chunk& now,
                                                const Chunk& next, int turn, float norm_eps) const {
    using Order = RowOrder<S::kRank>;
#pragma unroll
    for (int i = 0; i < Order::kOwn; ++i) {
      const float decay = weights(turn).from_start[Order::own_token(i)];
#pragma unroll
      for (int e = 0; e < 8; ++e) o[8 * i + e] *= decay;
    }
    pin(o);
    const auto m_rows = common(row_descriptor(scores()));
    barrier_wait(scores_here(), turn % 2);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < H::kRows; i += 8) {
      WgmmaTf32<64>::registers(o, v[i / 8], moved(m_rows, H::Scores::to_column(i)), true);
    }
    wgmma_commit();
    float by[32];
    store_output(output, o, by, now, next, norm_eps);
  }

  __device__ __forceinline__ void walk_state(float* y, float norm_eps) const {
    float s[H::kSizeState];
    start_state(s);
    FoldStage<H> output(factors(), in.z + values_of(start), y + outputs_of(start));
    float2 ranked = make_float2(0.0f, 0.0f);
    if (output.is_there()) {
      const long long of = parameter_row() * S::kRank + threadIdx.x % 4;
      ranked = *reinterpret_cast<const float2*>(in.mimo_v + of * S::kHeadDim + output.column());
    }
    double decay = 0.0;
    __syncthreads();
    for (auto all = chunks(); all.any(); all.pass()) {
      const int turn = all.turn;
      const Chunk next = all.next(), now = all.now();
      const typename H::Weights& w = weights(turn);
      float o[32];
      unsigned halves[2][H::kSizeState / 8][4], v[kTokens / 2][4];
      if constexpr (!H::kEnds) {
        pin(s);  // else it is moved to other registers and back
        const auto q_rows = common(row_descriptor(queries(turn)));
        round_state<0>(halves[0], s);
        round_state<1>(halves[1], s);
        wgmma_fence();
        multiply_queries<0>(o, halves[0], q_rows);
        multiply_queries<1>(o, halves[1], q_rows);
        wgmma_wait<1>();  // values take the registers of the first half
        pin(halves[0]);
      }
      expand(v, turn, ranked);
      pin(v);
      decay_state(s, decay, w);  // nor do products, in a turn without a chunk, change it
      const auto k_columns = common(piece_descriptor(across(turn), 128, H::Across::kEights));
      pin(s);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < H::kRows; i += 8) {
        WgmmaTf32<S::kState>::registers(s, v[i / 8], moved(k_columns, i / 4 * 128), true);
      }
      wgmma_commit();
      if constexpr (!H::kEnds) {
        wgmma_wait<1>();
        pin(o);
        pin(halves[1]);
        finish_output(output, o, v, now, next, turn, norm_eps);
      }
      wgmma_wait<0>();
      pin(s);
      pin(v);
      pass_state(s, decay, now, next);
      __syncthreads();
    }
  }

  // ---- warpgroups 2 and 3 ----

  __device__ __forceinline__ void stage() const {
    const bool second = __shfl_sync(~0u, threadIdx.x / 128, 0) == 3, keys_here = H::kEnds || !second;
    const int thread = threadIdx.x % 128;
    const long long row = parameter_row() * S::kRank;
    RankStage<H> rows((keys_here ? in.k_bias : in.q_bias) + row * S::kState, rows_of(keys_here ? in.k : in.q, start));
    ValueCheck<H> check(in.v + values_of(start), in.mimo_v + row * S::kHeadDim);
    __syncthreads();
    for (auto all = chunks(); all.any(); all.pass()) {
      const int turn = all.turn;
      const Chunk later = all.later(), after = all.after(), next = all.next();
      if (second && later.count > 0) fetch_given(later, turn);
      if (next.count > 0) {
        typename H::Weights& w = weights(turn + 1);
        check.store(values(turn + 1), [&](int c) { spoil(w, c); });
        if constexpr (O::kFinalState && !H::kEnds) {
          if (second && next.ends() && thread < S::kHeadDim) {
            final_state.v[state(next) * S::kHeadDim + thread] = in.v[values_of(next.t + next.count - 1) + thread];
          }
        }
      }
      if (second && thread < 32) spoil_marked(turn + 1);
      if (!H::kEnds && !second) barrier_wait(keys_read(), turn % 2);
      if (next.count > 0) {
        rows.store(keys_here, keys_here ? keys() : queries(turn + 1), across(turn + 1), weights(turn + 1).kept,
                   table(turn + 1), O::kFinalState && !H::kEnds && next.ends() ? next.count - 1 : -1,
                   O::kFinalState ? final_state.k + state(next) * (S::kRank * S::kState) : nullptr, next.count);
      }
      if (second && thread >= 96) make_weights(all);
      if (second) wait_for_copies();
      fence_async_proxy();
      if (after.count > 0) {  // what is loaded here delays neither those waits nor others for what was loaded before
        check.load(after.count);
        rows.begin(after.count);
      }
      __syncthreads();
    }
  }
};

// One block for each row, segment or piece, and head, see `WalkBlock`.
template <class S, class O, bool Ends>
__global__ void __launch_bounds__(512, 1)
    mamba3_tf32(const float* q, const float* k, const float* v, const float* q_bias, const float* k_bias,
                const float* angles, const float* adt, const float* dt, const float* trap, const float* mimo_v,
                const float* mimo_o, const float* z, const float* mimo_z, const float* D, const float* norm_weight,
                const float* state_angle, const float* state_ssm, const float* state_k, const float* state_v,
                const int* cu_seqlens, float* ends, float* decays, unsigned* phases, float* y, float* final_angle,
                float* final_ssm, float* final_k, float* final_v, int seq, int segments, int segment_tokens, int pieces,
                int piece_tokens, int sequences, float norm_eps) {
  using H = Tf32Shape<S, O, Ends>;
  extern __shared__ __align__(1024) unsigned char memory[];
  const Arrays<S> in{q,           k,      v,   z,  q_bias, k_bias,      mimo_v,    mimo_o,  mimo_z,  D,
                     norm_weight, angles, adt, dt, trap,   state_angle, state_ssm, state_k, state_v, cu_seqlens};
  const FinalState final_state{final_angle, final_ssm, final_k, final_v};
  clear<H::Layout::kBytes>(memory, H::kThreads);
  fence_async_proxy();
  const Tf32Walk<H> block(in, final_state, ends, decays, phases, memory, seq, segments, segment_tokens, pieces,
                          piece_tokens, sequences);
  if (block.is_idle()) return;
  __syncthreads();
  block.load_parameters(mimo_v);
  if constexpr (!Ends) {
    constexpr int kRanked = S::kRank * S::kHeadDim;
    const long long row = block.parameter_row();
    FoldStage<H>::make_factors(block.factors(), mimo_o + row * kRanked, mimo_z + row * kRanked,
                               norm_weight + row * S::kHeadDim);
  }
  block.prepare();

  // The warpgroup with the state takes some of the others' registers. The sum must not grow, or the block would wait
  // for more forever.
  const int role = __shfl_sync(~0u, threadIdx.x / 128, 0);
  if (role == 0) {
    if constexpr (!Ends) give_registers<96>();
    block.make_scores(O::kSkip && !Ends ? D[block.parameter_row()] : 0.0f);
  } else if (role == 1) {
    if constexpr (!Ends) take_registers<224>();
    block.walk_state(y, norm_eps);
  } else {
    if constexpr (!Ends) give_registers<96>();
    block.stage();
  }
}

}  // namespace jax_ssd

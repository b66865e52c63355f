// The scan of Mamba-3 forward at rank 4 in float32, products in TF32, for the warpgroup products of sm_90. The
// mathematics is that of mamba3_forward.cu, the turns and chunks are those of mamba3_pipeline.cu. A block of four
// warpgroups walks the chunks, 16 tokens each, of a head and works on neighbouring chunks at the same time:
//   warpgroup 0   multiplies queries with keys and weighs these scores; makes rotations of the second next chunk
//   warpgroup 1   has the state in accumulators, columns of the head in rows: multiplies it with queries, walks it over
//                 the chunk, adds values with weighted scores, gates and folds the output
//   warpgroup 2   biases and rotates keys of the next chunk
//   warpgroup 3   the same with queries; makes the schedule of the second next chunk
// All meet once per chunk, at a barrier. What one hands to another in the next turn lies in shared memory twice; keys
// as scores read them once: they are overwritten when the scores are there. To the ends of segments the same block
// walks without queries, scores and output, and two warpgroups have the keys.
//
// TF32 is summed along the rows of both operands. So keys lie in shared memory as they are, for the scores, and
// transposed, for the state, by what it keeps of them. Values expanded to ranks are made where they are multiplied: A
// operands in registers, of both products. Keys and queries are not looked at whether they are finite, see
// mamba3_pipeline.cu.

#include "async_copy.cuh"
#include "mamba3_chunks.cuh"
#include "mamba3_output.cuh"
#include "mamba3_rows.cuh"
#include "mamba3_state.cuh"
#include "wgmma.cuh"
#include "wgmma_tf32.cuh"

namespace jax_ssd {

// `advanced` without a carry to the upper half, which has none in shared memory: half of the instructions.
__device__ __forceinline__ unsigned long long moved(unsigned long long descriptor, unsigned bytes) {
  const unsigned low = static_cast<unsigned>(descriptor) + (bytes >> 4);
  return (descriptor & 0xffffffff00000000ull) | low;
}

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

// Sizes, and where things lie in shared memory; plan.py has the same figures.
template <class S_, class O_, bool Ends>
struct Tf32Shape {
  using S = S_;
  using O = O_;
  static constexpr bool kEnds = Ends;
  static constexpr int kTokens = 16, kRows = 64, kColumns = 64, kThreads = 512, kStagers = 256;
  static constexpr int kSizeState = S::kState / 2;  // see `Part`
  using Rows = RowMatrix<S::kState>;
  using Scores = RowMatrix<kRows>;
  using Across = AcrossMatrix<S, kTokens>;
  using Table = Rotations<S, kTokens>;
  using Weights = Schedule<kTokens>;
  using Given = GivenSchedule<kTokens>;
  static constexpr int kValues = kTokens * kColumns * 4, kTable = padded(Table::kBytes, 16),
                       kWeights = padded(sizeof(Weights), 16), kGiven = padded(sizeof(Given), 16),
                       kNorms = O::kNorm && !Ends ? 4 * kRows * 4 : 0,
                       kFactors = Ends ? 0 : 2 * S::kRank * kColumns * 4, kBad = padded(4 * (kTokens + 1), 16);
  static constexpr int kKeysAt = 0, kQueriesAt = kKeysAt + (Ends ? 0 : Rows::kBytes),
                       kScoresAt = kQueriesAt + (Ends ? 0 : 2 * Rows::kBytes),
                       kAcrossAt = kScoresAt + (Ends ? 0 : Scores::kBytes), kValuesAt = kAcrossAt + 2 * Across::kBytes,
                       kTableAt = kValuesAt + 2 * kValues, kNormsAt = kTableAt + 2 * kTable,
                       kFactorsAt = kNormsAt + kNorms, kWeightsAt = kFactorsAt + kFactors,
                       kGivenAt = kWeightsAt + 4 * kWeights, kValueWeightsAt = kGivenAt + 2 * kGiven,
                       kLostAt = kValueWeightsAt + padded(S::kRank * S::kHeadDim * 4, 16),
                       kBadAt = kLostAt + padded(S::kPairs * 4, 16), kBarriersAt = kBadAt + 4 * kBad,
                       kBytes = kBarriersAt + 16;
  static_assert(S::kRank == 4 && S::kState == 128 && S::kHeadDim <= kColumns && O::kWeighted, "these sizes only");
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
struct Tf32Walk {
  using S = typename H::S;
  using O = typename H::O;
  static constexpr int kTokens = H::kTokens;

  const Arrays<S>& in;
  const FinalState& final_state;
  float *ends, *decays;  // of pieces: the state at the end, by what a state decays, the phases
  unsigned* phases;
  unsigned char* memory;
  int seq, sequences, pieces, piece_tokens;
  int start, limit;  // the block's tokens are those from start to limit
  Place place;

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
  // The barriers at which scores of a turn are there, and at which keys have been read for them, a warp's at a time.
  __device__ __forceinline__ unsigned scores_here() const { return shared_address(memory + H::kBarriersAt); }
  __device__ __forceinline__ unsigned keys_read() const { return shared_address(memory + H::kBarriersAt + 8); }
  // See `FoldStage`.
  __device__ __forceinline__ float* factors() const { return reinterpret_cast<float*>(memory + H::kFactorsAt); }
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
  __device__ __forceinline__ const float* rows_of(const float* all, int t) const {
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

  // ---- warpgroup 0 ----

  using Walk = PhaseWalk<S, kTokens, 128, 8>;

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

  // Brings keys, queries and values of a chunk, whose rows are loaded at the end of the next turn, to the L2 cache.
  __device__ __forceinline__ void bring(const Chunk& chunk) const {
    constexpr int kLines = S::kState / 32, kStride = S::kGroups * S::kState;
    const int thread = threadIdx.x % 128;
#pragma unroll
    for (int i = thread; i < H::kRows * kLines; i += 128) {
      const int row = i / kLines, at = row * kStride + i % kLines * 32;
      if (row >= chunk.count * S::kRank) continue;
      prefetch(rows_of(in.k, chunk.t) + at);
      if constexpr (!H::kEnds) prefetch(rows_of(in.q, chunk.t) + at);
    }
    if (thread / 2 < chunk.count && thread % 2 * 32 < S::kHeadDim) {
      prefetch(in.v + values_of(chunk.t) + thread / 2 * (S::kHeads * S::kHeadDim) + thread % 2 * 32);
    }
  }

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
    Walk walk(angles_of(start));
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
    output.make_gates(by);  // while the last product runs
    if (next.count > 0) output.load(next.count);
    wgmma_wait<0>();
    pin(o);
    if constexpr (O::kNorm) normalize(o, norm_eps);
    if (now.count > 0) output.store(now.count, o, by);
  }

  __device__ __forceinline__ void walk_state(float* y, float norm_eps) const {
    float s[H::kSizeState];
#pragma unroll
    for (int i = 0; i < H::kSizeState; ++i) s[i] = 0.0f;
    if constexpr (!H::kEnds) {
      if (start != place.first) sum_segments(s);
    }
    FoldStage<H> output(factors(), in.z + values_of(start),
                        y + (token(start) * (O::kFolds ? 1 : S::kRank) * S::kHeads + place.head) * S::kHeadDim);
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
      // Products of no chunk change nothing: the schedules begin as those of chunks without tokens.
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
      const float over = w.from_start[kTokens - 1];
#pragma unroll
      for (int i = 0; i < H::kSizeState; ++i) s[i] *= over;
      if constexpr (H::kEnds) {
        decay += static_cast<double>(w.sum[kTokens - 1]) + static_cast<double>(w.rest[kTokens - 1]);
      }
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
      if constexpr (H::kEnds) {
        if (now.count > 0 && now.t + now.count == limit) {
          const long long end = head() * pieces + place.segment;
          Part<S, H>().each([&](int i, int p, int n) { ends[(end * S::kHeadDim + p) * S::kState + n] = s[i]; });
          if (threadIdx.x % 128 == 0) decays[end] = exp2f(static_cast<float>(decay));
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
      __syncthreads();
    }
  }

  // ---- warpgroups 2 and 3 ----

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

  // Of the second next chunk, by a warp.
  template <class All>
  __device__ __forceinline__ void make_weights(const All& all) const {
    const Chunk after = all.after();
    if (after.count > 0) {
      const bool more = after.t + after.count < after.end;
      make_schedule<true>(weights(all.turn + 2), given(all.turn + 2), after.count, more);
    }
  }

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
      if (second && later.count > 0) {
        const long long from = schedule(later.t);
        fetch_schedule(given(turn + 3), in.adt + from, in.dt + from, in.trap + from, seq - later.t, thread);
      }
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

// One block for each row, segment and head, heads fastest: those of a group read the same keys and queries. Ends: one
// for each piece of a segment but the last one's; its state, decay and phases are written, from a zero state or from
// its sequence's if that begins in the piece. There are `pieces` of a row, as many of each segment.
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
  const Tf32Walk<H> block{in,        final_state, ends,         decays, phases, memory, seq,
                          sequences, pieces,      piece_tokens, t,      limit,  at};
  __syncthreads();

  constexpr int kRanked = S::kRank * S::kHeadDim;
  for (int i = threadIdx.x; i < kRanked; i += H::kThreads) {
    block.mimo_v()[i] = mimo_v[block.parameter_row() * kRanked + i];
  }
  if constexpr (!Ends) {
    const long long row = block.parameter_row();
    FoldStage<H>::make_factors(block.factors(), mimo_o + row * kRanked, mimo_z + row * kRanked,
                               norm_weight + row * S::kHeadDim);
  }
  if constexpr (O::kPacked && O::kFinalState && !Ends) {
    if (at.segment == 0) pass_empty_sequences<S, O>(final_state, in, at, bounds, sequences, seq);
  }
  if (threadIdx.x == 0) {
    barrier_init(block.scores_here(), 4);
    barrier_init(block.keys_read(), 4);
    fence_barrier_init();
  }
  for (int i = 0; i < 2; ++i) block.table(i).template fill<H::kThreads>();
  if (threadIdx.x < 3) block.weights(threadIdx.x).from_start[H::kTokens - 1] = 1.0f;  // before the first chunk

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

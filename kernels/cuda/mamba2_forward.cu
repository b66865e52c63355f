// The forward scan of Mamba-2 for sm_90: chunks of 64 tokens, states in registers, products by warpgroups.
//
// A *block* is 64 channels of one head: its state is h [64, N]. A thread block walks several blocks of one group, which
// share the tiles of B and C. One warpgroup brings in tiles by TMA and computes steps and decays; each of the others
// keeps the states of `Blocks` blocks as accumulators and computes for every chunk, per block,
//
//   Y^T = exp2(g_i) h C^T + X^T S^T + D X^T,    S_ij = (C B^T)_ij exp2(g_i - g_j) dt_j for i >= j, else 0
//   h   = exp2(g_last) h + (X o dt exp2(g_last - g))^T B
//
// with g the running log2 decay within the chunk. In this orientation h and X^T are operands in registers, C B^T is
// computed once for all blocks of a warpgroup, and only S passes through shared memory. A state of more than 256 is
// kept by two warpgroups, a *part* of it each; what the second part adds to y passes through shared memory. Rows
// without states that fit a chunk share one: then y is X^T S^T + D X^T.
//
// A *row* is one batch row of the blocks that a thread block walks together. How rows are divided among thread blocks:
// - Segments > 1: every row into as many segments; `forward` with StateOnly finds each segment's end state from zero,
//   `carry_states` turns them into start states. Or, if LeadPercent > 0, each thread block first walks the chunks
//   before its segment, its *lead*, for their state alone: more work, but one kernel, and no state has to wait in
//   memory. The later a segment, the shorter, so that all thread blocks are done at about the same time.
// - Segments == 1: all rows, one after the other, are one line of chunks that is cut into equal ranges. A row that is
//   cut passes its state from one thread block to the next; who passes on does so before it waits for anything itself.
// A state that one thread block finds for another, at the start of a piece of a row, waits in y, in place of the
// piece's first tokens, which nobody else writes and which are written after it is read.

#include "async_copy.cuh"
#include "decay.cuh"
#include "numbers16.cuh"
#include "shared_memory.cuh"
#include "values.cuh"
#include "wgmma.cuh"

using namespace jax_ssd;

namespace {

constexpr int CHUNK = 64;
constexpr unsigned TILE = 64 * 128;  // bytes of 64 rows of 64 numbers
constexpr int WARPGROUP = 128;
constexpr int PARTS_BARRIER = 1, FIRST_BARRIER = 2;              // and one for each warpgroup that computes
constexpr int PROVIDER_REGISTERS = 24, COMPUTE_REGISTERS = 240;  // of a thread

// Together: batch rows that share a chunk, each at a multiple of 64 / Together tokens; more than one only if they are
// that short.
template <long long Batch, long long Seq, int Heads, int Groups, int HeadDim, int State, int Together>
struct Sizes {
  static constexpr long long BATCH = Batch, SEQ = Seq, BATCHES = (Batch + Together - 1) / Together;
  static constexpr int TOGETHER = Together, ROOM = CHUNK / Together;
  static constexpr int HEADS = Heads, STATE = State;
  static constexpr int HEAD_BLOCKS = HeadDim / 64;                   // blocks per head
  static constexpr int GROUP_BLOCKS = Heads / Groups * HEAD_BLOCKS;  // blocks per group
  static constexpr int ALL_BLOCKS = Heads * HEAD_BLOCKS;
  static constexpr int CHUNKS = int((Seq + CHUNK - 1) / CHUNK);
};

// Warpgroups that compute, blocks of each, parts of a state, segments of a row, chunks of the first; how many tiles of
// B and C (for all of the state) and chunks of x are in shared memory at a time; by how many hundredths of its lead a
// segment is shorter than the first, 0 where thread blocks are given the states at their segments' starts.
template <int Warpgroups, int Blocks, int Parts, int Segments, int ChunksPerSegment, int Slots, int Stages,
          int LeadPercent>
struct Split {
  static constexpr int WARPGROUPS = Warpgroups, BLOCKS = Blocks, PARTS = Parts, SEGMENTS = Segments;
  static constexpr int CHUNKS_PER_SEGMENT = ChunksPerSegment, SLOTS = Slots, STAGES = Stages;
  static constexpr int BLOCKS_HERE = Warpgroups / Parts * Blocks, LEAD_PERCENT = LeadPercent;
  static constexpr bool OWN_STARTS = LeadPercent > 0;
};

// Stateless: rows start from nothing, end in their first chunk, and nobody asks for their state.
template <bool StateOnly, bool Stateless, bool SharedParams, bool Softplus, bool HasBias, bool HasD, bool HasZ,
          bool HasInitial, bool HasFinal>
struct Options {
  static constexpr bool STATE_ONLY = StateOnly, STATELESS = Stateless, SHARED_PARAMS = SharedParams,
                        SOFTPLUS = Softplus, HAS_BIAS = HasBias;
  static constexpr bool HAS_D = HasD, HAS_Z = HasZ, HAS_INITIAL = HasInitial, HAS_FINAL = HasFinal;
};

// The state that a warpgroup keeps of a block: columns are padded with zeros to whole tiles.
template <class Z, class S>
constexpr int PART = (Z::STATE + 64 * S::PARTS - 1) / (64 * S::PARTS) * 64;

// The first lane's value, which the compiler then knows to be the same in all lanes.
__device__ __forceinline__ int same_in_warp(int v) { return __shfl_sync(~0u, v, 0); }

// What the decays of one block make of a chunk. Where only end states are wanted, these count to the segment's end and
// the others are not there.
struct StateScalars {
  float carried[CHUNK];  // exp2(g): of the state before the chunk, what is left at a token
  float leaving[CHUNK];  // exp2(g_last - source): of a token's x B, what is left at the chunk's end
};
struct PairScalars : StateScalars {
  float decay[CHUNK];   // g
  float source[CHUNK];  // g - log2(step): exp2(g_i - source_j) is exp2(g_i - g_j) step_j
  float until[96];      // exp2(g_f - source) for f = 16, 32, 48, of the tokens before f, at `until_place(f / 16)`
};
template <bool StateOnly>
struct ScalarsOf {
  using Type = PairScalars;
};
template <>
struct ScalarsOf<true> {
  using Type = StateScalars;
};
template <class O>
using Scalars = typename ScalarsOf<O::STATE_ONLY>::Type;

__device__ constexpr int until_place(int tile) { return 8 * tile * (tile - 1); }

// A stretch of chunks of one row, walked from a known start state.
struct Piece {
  int row, first, end;  // chunks
};

// The pieces of this thread block, those first that others wait for. A chunk of a row is at least 8 KB of x, so an int
// counts them all.
template <class Z, class S>
class Pieces {
 public:
  __device__ Pieces() {
    constexpr int ROWS = int(Z::BATCHES * (Z::ALL_BLOCKS / S::BLOCKS_HERE));
    if constexpr (S::OWN_STARTS) {
      const int start = int(blockIdx.x / S::SEGMENTS) * Z::CHUNKS;
      int first = 0, end = S::CHUNKS_PER_SEGMENT;
      for (int i = blockIdx.x % S::SEGMENTS; i > 0; --i) {
        first = end;
        end += max(1, S::CHUNKS_PER_SEGMENT - first * S::LEAD_PERCENT / 100);
      }
      low_ = start + first;
      high_ = start + min(end, Z::CHUNKS);
    } else if constexpr (S::SEGMENTS > 1) {
      const int segments = gridDim.x / ROWS;  // one fewer where only end states are wanted
      const int row = blockIdx.x / segments;
      low_ = row * Z::CHUNKS + int(blockIdx.x % segments) * S::CHUNKS_PER_SEGMENT;
      high_ = min(low_ + S::CHUNKS_PER_SEGMENT, (row + 1) * Z::CHUNKS);
    } else {
      low_ = cut(blockIdx.x);
      high_ = cut(blockIdx.x + 1);
    }
  }
  __device__ bool next(Piece& piece) {
    if (high_ <= low_) return false;
    piece.row = (high_ - 1) / Z::CHUNKS;
    const int start = piece.row * Z::CHUNKS;
    piece.end = high_ - start;
    high_ = max(start, low_);
    piece.first = high_ - start;
    return true;
  }

 private:
  // Where the line of chunks is cut before a thread block: at the end of a row if what is left of it is too short to
  // hold a state.
  static __device__ int cut(unsigned block) {
    constexpr long long ALL = Z::BATCHES * (Z::ALL_BLOCKS / S::BLOCKS_HERE) * Z::CHUNKS;
    const int at = int(ALL * block / gridDim.x), row = at / Z::CHUNKS, chunk = at % Z::CHUNKS;
    const bool fits = Z::SEQ - (long long)chunk * CHUNK >= 2 * S::PARTS * PART<Z, S>;
    return chunk == 0 || fits ? at : (row + 1) * Z::CHUNKS;
  }
  int low_, high_;
};

// Chunks of the lead of a piece.
template <class S>
__device__ __forceinline__ int lead_of(const Piece& piece) {
  return S::OWN_STARTS ? piece.first : 0;
}

// What of a ring of `Places` places the use-th use takes, and the parity of the phases of its barriers then.
template <int Places>
struct Turn {
  unsigned place, parity;
  __device__ explicit Turn(unsigned use) : place(use % Places), parity(use / Places % 2) {}
};

// Shared memory, as byte offsets. Tiles first: they start at multiples of 1024 bytes. A slot holds B or C of a chunk, a
// stage x.
template <class Z, class S, class O>
struct Layout {
  static constexpr unsigned PART_TILES = PART<Z, S> / 64, GROUP_TILES = S::PARTS * PART_TILES;
  static constexpr unsigned SLOT = GROUP_TILES * TILE, STAGE = S::BLOCKS_HERE * TILE;
  static constexpr unsigned X = S::SLOTS * SLOT;
  static constexpr unsigned PAIRS = X + S::STAGES * STAGE;
  static constexpr unsigned Y = PAIRS + (O::STATE_ONLY ? 0 : S::BLOCKS_HERE * TILE);
  static constexpr unsigned SCALARS = Y + (O::STATE_ONLY ? 0 : S::BLOCKS_HERE * TILE);
  static constexpr unsigned BARRIERS = SCALARS + S::STAGES * S::BLOCKS_HERE * sizeof(Scalars<O>);
  // Each pair of barriers: what was asked for is there, and it is used up.
  static constexpr unsigned FULL = BARRIERS, EMPTY = FULL + 8 * S::SLOTS;
  static constexpr unsigned X_FULL = EMPTY + 8 * S::SLOTS, X_EMPTY = X_FULL + 8 * S::STAGES;
  static constexpr unsigned OTHER_FULL = X_EMPTY + 8 * S::STAGES, OTHER_EMPTY = OTHER_FULL + 8;
  static constexpr unsigned GATE = OTHER_EMPTY + 8;
  static constexpr unsigned END = GATE + 8 * S::BLOCKS_HERE;
};

template <class Z, class S>
struct Place {
  int batch_row, block, group;  // the first batch row and block of a row
  __device__ explicit Place(int row) {
    constexpr int PER_BATCH_ROW = Z::ALL_BLOCKS / S::BLOCKS_HERE;
    batch_row = row / PER_BATCH_ROW * Z::TOGETHER;
    block = row % PER_BATCH_ROW * S::BLOCKS_HERE;
    group = block / Z::GROUP_BLOCKS;
  }
};

// One thread: asks for B or C of a chunk.
template <class Z, class S, class O>
__device__ __forceinline__ void bring_group(unsigned shared, const Turn<S::SLOTS>& slot, const TensorMap& map,
                                            const Place<Z, S>& place, int chunk) {
  using L = Layout<Z, S, O>;
  const unsigned full = shared + L::FULL + 8 * slot.place, to = shared + slot.place * L::SLOT;
  barrier_wait(shared + L::EMPTY + 8 * slot.place, slot.parity ^ 1);
  barrier_expect(full, L::SLOT);
#pragma unroll
  for (int i = 0; i < L::GROUP_TILES; ++i) {
    copy_in(to + i * TILE, map, 64 * i, place.group, chunk * CHUNK, place.batch_row, full, KEEP_LAST);
  }
}

// One thread: asks for x of a chunk.
template <class Z, class S, class O>
__device__ __forceinline__ void bring_x(unsigned shared, const Turn<S::STAGES>& stage, const TensorMap& x,
                                        const Place<Z, S>& place, int chunk) {
  using L = Layout<Z, S, O>;
  const unsigned full = shared + L::X_FULL + 8 * stage.place, to = shared + L::X + stage.place * L::STAGE;
  barrier_expect(full, L::STAGE);
#pragma unroll
  for (int i = 0; i < S::BLOCKS_HERE; ++i) {
    copy_in(to + i * TILE, x, 0, place.block + i, chunk * CHUNK, place.batch_row, full,
            O::STATE_ONLY || S::OWN_STARTS ? KEEP : KEEP_FIRST);
  }
}

// The scalars of a chunk of one block, by a warp; each lane has two neighbouring tokens and their raw steps. `later`:
// log2 decay of the chunks that follow in the walk, where only its end state is wanted; this one's is added.
template <bool StateOnly, class Z, class O>
__device__ __forceinline__ void compute_scalars(Scalars<O>& to, const float (&raw)[2], int inside, float rate,
                                                float bias, float low, float high, float& later) {
  constexpr int LANES = 32 / Z::TOGETHER;  // of a batch row
  const int lane = threadIdx.x % 32, place = lane % LANES;
  float step[2], log[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    step[i] = i < inside ? step_size<O::SOFTPLUS>(raw[i] + bias, low, high) : 0.0f;
    log[i] = i < inside ? log2_decay(step[i], rate) : 0.0f;
  }
  float before = log[0] + log[1];
#pragma unroll
  for (int distance = 1; distance < LANES; distance *= 2) {
    const float other = __shfl_up_sync(~0u, before, distance, LANES);
    if (place >= distance) before += other;
  }
  before = __shfl_up_sync(~0u, before, 1, LANES);
  const float g0 = (place ? before : 0.0f) + log[0], g1 = g0 + log[1];
  float last = __shfl_sync(~0u, g1, LANES - 1, LANES);
  const float source0 = g0 - log2_fast(step[0]), source1 = g1 - log2_fast(step[1]);
  float carried0 = g0, carried1 = g1;
  if constexpr (StateOnly) {
    later += last;
    last = carried0 = carried1 = later;
  } else {
    reinterpret_cast<float2*>(to.decay)[lane] = make_float2(g0, g1);
    reinterpret_cast<float2*>(to.source)[lane] = make_float2(source0, source1);
  }
  reinterpret_cast<float2*>(to.carried)[lane] = make_float2(exp2_fast(carried0), exp2_fast(carried1));
  reinterpret_cast<float2*>(to.leaving)[lane] = make_float2(exp2_fast(last - source0), exp2_fast(last - source1));
  if constexpr (!StateOnly) {
    __syncwarp();
#pragma unroll
    for (int at = 0; at < 96; at += 32) {
      const int i = at + lane, tile = i < 16 ? 1 : i < 48 ? 2 : 3;
      to.until[i] = exp2_fast(to.decay[16 * tile] - to.source[i - until_place(tile)]);
    }
  }
}

// The rows of S that a warp has, 16-bit, of each block from C B^T (s) to shared memory. Tiles of 16 x 16 above the
// diagonal stay as they are: zero. Below it, a pair's decay is that until the warp's first row times that from there.
template <int Warp, typename T, class Z, class S>
__device__ __forceinline__ void store_rows(const float (&s)[32], const PairScalars* blocks, unsigned tiles, int lane) {
  const int row = lane / 4, column = 2 * (lane % 4);
#pragma unroll
  for (int b = 0; b < S::BLOCKS; ++b) {
    const PairScalars& scalars = blocks[b];
    const float g0 = scalars.decay[16 * Warp + row], g1 = scalars.decay[16 * Warp + row + 8];
    const float first = scalars.decay[16 * Warp];
    const float from0 = exp2_fast(g0 - first), from1 = exp2_fast(g1 - first);
    const unsigned to = tiles + b * TILE + swizzled(16 * Warp + lane % 16, lane / 16);
#pragma unroll
    for (int j = 0; j <= Warp; ++j) {
      if (Z::TOGETHER > 1 && (j ^ Warp) * 16 >= Z::ROOM) continue;  // of another batch row
      unsigned r[4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = 16 * j + 8 * half + column;
        const float* from = s + 8 * j + 4 * half;
        float v[4];
        if (j < Warp) {
          const float2 until = *reinterpret_cast<const float2*>(scalars.until + until_place(Warp) + at);
          v[0] = from[0] * (from0 * until.x), v[1] = from[1] * (from0 * until.y);
          v[2] = from[2] * (from1 * until.x), v[3] = from[3] * (from1 * until.y);
        } else {
          const float2 source = *reinterpret_cast<const float2*>(scalars.source + at);
          v[0] = half ? 0.0f : from[0] * exp2_fast(g0 - source.x);
          v[1] = half ? 0.0f : from[1] * exp2_fast(g0 - source.y);
          v[2] = from[2] * exp2_fast(g1 - source.x), v[3] = from[3] * exp2_fast(g1 - source.y);
          // Selected last, so that what a pair that does not count gives, even a NaN, is dropped.
          if (row < column) v[2 * half] = 0.0f;
          if (row <= column) v[2 * half + 1] = 0.0f;
        }
        r[2 * half] = Pair<T>::of(v[0], v[1]);
        r[2 * half + 1] = Pair<T>::of(v[2], v[3]);
      }
      store_tiles(to ^ (j << 5), r);
    }
  }
}

// S of the blocks of a warpgroup. Each warp has a program of its own, without branches between its tiles.
template <typename T, class Z, class S>
__device__ __forceinline__ void store_pairs(const float (&s)[32], const PairScalars* blocks, unsigned tiles, int warp,
                                            int lane) {
  if (warp == 0) {
    store_rows<0, T, Z, S>(s, blocks, tiles, lane);
  } else if (warp == 1) {
    store_rows<1, T, Z, S>(s, blocks, tiles, lane);
  } else if (warp == 2) {
    store_rows<2, T, Z, S>(s, blocks, tiles, lane);
  } else {
    store_rows<3, T, Z, S>(s, blocks, tiles, lane);
  }
}

// How many of two tokens of a chunk, the first the `at`-th of its batch row, are not past the row's end.
template <class Z>
__device__ __forceinline__ int tokens_inside(int chunk, int at) {
  if constexpr (Z::SEQ % CHUNK == 0 && Z::TOGETHER == 1) return 2;
  return chunk + 1 < Z::CHUNKS ? 2 : int(Z::SEQ - (Z::CHUNKS - 1LL) * CHUNK) - at;
}

// The warpgroup that provides, for the chunks of a row: one thread asks for tiles, and each warp computes the scalars
// of one block.
template <typename D, class Z, class S, class O>
struct Provider {
  using L = Layout<Z, S, O>;
  char* memory;
  const TensorMap &x, &B, &C;
  float low, high;
  const Place<Z, S>& place;
  const D* dt;  // of this batch row and head
  float rate, bias;
  int warp, lane, at;
  bool there;

  // Chunks from `chunk` on, up to `stop`, or down where only their state is wanted. `done`: chunks of this thread block
  // so far, the first `lead` of them for their state alone. Returns the log2 decay of a walk for the state.
  template <bool StateOnly>
  __device__ __forceinline__ float walk(int chunk, int stop, unsigned& done, int lead) const {
    constexpr int STEP = StateOnly ? -1 : 1;
    const unsigned shared = shared_address(memory);
    const D* from = dt + ((long long)chunk * CHUNK + at) * Z::HEADS;
    float raw[2] = {0.0f, 0.0f}, later = 0.0f;
    const auto read_steps = [&] {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (there && i < tokens_inside<Z>(chunk, at)) raw[i] = to_float(from[i * Z::HEADS]);
      }
    };
    read_steps();
#pragma unroll 1
    while (chunk != stop) {
      const Turn<S::STAGES> stage(done);
      const Turn<S::SLOTS> c_slot(2 * done - lead), b_slot(StateOnly ? done : 2 * done + 1 - lead);
      if (warp == 0 && lane == 0) {
        if constexpr (!StateOnly) bring_group<Z, S, O>(shared, c_slot, C, place, chunk);
        if constexpr (S::SLOTS > 3 || StateOnly) bring_group<Z, S, O>(shared, b_slot, B, place, chunk);
      }
      barrier_wait(shared + L::X_EMPTY + 8 * stage.place, stage.parity ^ 1);
      if (warp == 0 && lane == 0) bring_x<Z, S, O>(shared, stage, x, place, chunk);
      __syncwarp();
      compute_scalars<StateOnly, Z, O>(
          reinterpret_cast<Scalars<O>*>(memory + L::SCALARS)[stage.place * S::BLOCKS_HERE + warp], raw,
          there ? tokens_inside<Z>(chunk, at) : 0, rate, bias, low, high, later);
      __syncwarp();
      if (lane == 0) barrier_arrive(shared + L::X_FULL + 8 * stage.place);
      // With so few slots there is room only once C of the chunk before is used up, which x must not wait for.
      if (S::SLOTS <= 3 && !StateOnly && warp == 0 && lane == 0) bring_group<Z, S, O>(shared, b_slot, B, place, chunk);
      ++done;
      chunk += STEP;
      from += STEP * CHUNK * Z::HEADS;
      if (chunk != stop) read_steps();
    }
    return later;
  }
};

template <typename D, class Z, class S, class O>
__device__ void provide(char* memory, const TensorMap& x, const TensorMap& B, const TensorMap& C, const D* dt,
                        const float* dt_bias, const float* A, float* totals, float low, float high) {
  static_assert(S::BLOCKS_HERE <= 4, "each warp computes the scalars of one block");
  const int warp = same_in_warp(threadIdx.x / 32), lane = threadIdx.x % 32;
  if (warp >= S::BLOCKS_HERE) return;
  unsigned done = 0;  // chunks
  Pieces<Z, S> pieces;
  for (Piece piece; pieces.next(piece);) {
    const Place<Z, S> place(piece.row);
    const int head = (place.block + warp) / Z::HEAD_BLOCKS;
    const long long parameter = (O::SHARED_PARAMS ? 0 : place.batch_row) * Z::HEADS + head;
    const float rate = A[parameter], bias = O::HAS_BIAS ? dt_bias[parameter] : 0.0f;
    const int batch_row = place.batch_row + 2 * lane / Z::ROOM, at = 2 * lane % Z::ROOM;
    const bool there = Z::TOGETHER == 1 || batch_row < Z::BATCH;
    const Provider<D, Z, S, O> provider{
        memory, x,    B,    C,    low, high, place, dt + batch_row * Z::SEQ * Z::HEADS + head,
        rate,   bias, warp, lane, at,  there};
    if constexpr (O::STATE_ONLY) {
      // A segment's last chunk comes first: the next kernel, which starts with its first one, still finds that in the
      // L2 cache.
      const float later = provider.template walk<true>(piece.end - 1, piece.first - 1, done, 0);
      const int slots = S::SEGMENTS - 1;
      const long long segment = piece.row * slots + piece.first / S::CHUNKS_PER_SEGMENT;
      if (lane == 0) totals[segment * S::BLOCKS_HERE + warp] = later;
    } else {
      const int lead = lead_of<S>(piece);
      if (lead > 0) provider.template walk<true>(lead - 1, -1, done, 0);
      provider.template walk<false>(piece.first, piece.end, done, lead);
      if (S::OWN_STARTS) break;  // it has one piece
    }
  }
}

// Where the state of a block at the start of a piece waits: in the block's channels of y, from the piece's first token
// on; 16 bytes of each thread side by side. `first`: the piece's first chunk.
template <class Z, class S>
class Waiting {
 public:
  static constexpr int PER_TOKEN = 8 * Z::ALL_BLOCKS;  // 16 bytes each
  __device__ Waiting(void* y, const Place<Z, S>& place, int first)
      : y_(static_cast<float4*>(y) + (place.batch_row * Z::SEQ + (long long)first * CHUNK) * PER_TOKEN +
           place.block * 8) {}
  // The `index`-th 16 bytes of a block's state.
  __device__ __forceinline__ float4* at(int block, int index) const {
    return y_ + (long long)(index / 8) * PER_TOKEN + block * 8 + index % 8;
  }
  // The i-th 16 bytes of a thread of the warpgroup that keeps a part of a block's state.
  __device__ __forceinline__ float4* at(int block, int part, int i, int thread) const {
    return at(block, part * (PART<Z, S> / 8) * WARPGROUP + thread) + i * (long long)(WARPGROUP / 8 * PER_TOKEN);
  }

 private:
  float4* y_;
};

template <class Z, class S>
__device__ __forceinline__ void save_state(const Waiting<Z, S>& to, int block, int part,
                                           const float (&h)[PART<Z, S> / 2], int thread) {
#pragma unroll
  for (int i = 0; i < PART<Z, S> / 8; ++i) {
    __stcg(to.at(block, part, i, thread), make_float4(h[4 * i], h[4 * i + 1], h[4 * i + 2], h[4 * i + 3]));
  }
}

template <class Z, class S>
__device__ __forceinline__ void restore_state(const Waiting<Z, S>& from, int block, int part,
                                              float (&h)[PART<Z, S> / 2], int thread) {
#pragma unroll
  for (int i = 0; i < PART<Z, S> / 8; ++i) {
    const float4 v = __ldcg(from.at(block, part, i, thread));
    h[4 * i] = v.x, h[4 * i + 1] = v.y, h[4 * i + 2] = v.z, h[4 * i + 3] = v.w;
  }
}
template <typename T>
__device__ __forceinline__ float element(unsigned address) {
  unsigned short bits;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(bits) : "r"(address));
  return Pair<T>::low(bits);
}

template <typename T>
__device__ __forceinline__ void set_element(unsigned address, float v) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(static_cast<unsigned short>(Pair<T>::of(v, 0.0f))));
}

// Adds to a warp's 16 channels of y what tokens of x that are not finite give: the products were made without them,
// since a zero of S times an infinity or NaN would reach earlier tokens. With a gate the sum is NaN, without an
// infinity's sign.
template <typename T, bool Gated, int Room>
__device__ __forceinline__ void add_not_finite(unsigned x, unsigned pairs, unsigned y, int warp, int lane) {
  __syncwarp();
#pragma unroll 1
  for (int i = lane; i < 16 * CHUNK; i += 32) {
    const int token = i / 16, channel = 16 * warp + i % 16;
    const unsigned to = y + swizzled(token, channel / 8) + channel % 8 * 2;
    float sum = element<T>(to);
#pragma unroll 1
    for (int j = token / Room * Room; j <= token; ++j) {
      const float v = element<T>(x + swizzled(j, channel / 8) + channel % 8 * 2);
      if (!isfinite(v)) sum += (Gated ? v - v : v) * element<T>(pairs + swizzled(token, j / 8) + j % 8 * 2);
    }
    set_element<T>(to, sum);
  }
}

// x of 16 tokens as an A operand (x[p][k]), times what of each token is left at the chunk's end.
template <typename T>
__device__ __forceinline__ void weigh(unsigned (&weighed)[4], const unsigned (&x)[4], const float* leaving) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float2 w = *reinterpret_cast<const float2*>(leaving + 8 * half);
#pragma unroll
    for (int i = 2 * half; i < 2 * half + 2; ++i) {
      weighed[i] = Pair<T>::of(Pair<T>::low(x[i]) * w.x, Pair<T>::high(x[i]) * w.y);
    }
  }
}

template <int Size>
__device__ __forceinline__ void scale(float (&h)[Size], float factor) {
#pragma unroll
  for (int i = 0; i < Size; ++i) h[i] *= factor;
}

// Who a thread of a warpgroup that computes is.
template <class S>
struct Member {
  int warpgroup, part, first_block, thread, warp, lane;
  int row, column;        // of the thread's first element of an accumulator
  unsigned channel_tile;  // where its lane finds, or puts, 8 x 8 tiles of x and y: 16 channels of 16 tokens at a time
  __device__ Member()
      : warpgroup(same_in_warp(threadIdx.x / WARPGROUP) - 1),
        part(warpgroup % S::PARTS),
        first_block(warpgroup / S::PARTS * S::BLOCKS),
        thread(threadIdx.x % WARPGROUP),
        warp(same_in_warp(thread / 32)),
        lane(thread % 32),
        row(16 * warp + lane / 4),
        column(2 * (lane % 4)),
        channel_tile(swizzled(lane % 8 + lane / 16 * 8, 2 * warp + lane / 8 % 2)) {}
};

// Where a thread's first element of the state of the `b`-th block of its warpgroup is in [batch, blocks, 64, N].
template <class Z, class S>
__device__ __forceinline__ long long state_place(const Place<Z, S>& place, int b, const Member<S>& me) {
  const long long block = (long long)place.batch_row * Z::ALL_BLOCKS + place.block + me.first_block + b;
  return (block * 64 + me.row) * Z::STATE + me.part * PART<Z, S> + me.column;
}

// Eight columns of a thread's part, from the `j`-th on, are those of a state, not zeros that fill its last tile.
template <class Z, class S>
__device__ __forceinline__ bool has_columns(int j, const Member<S>& me) {
  return S::PARTS * PART<Z, S> == Z::STATE || me.part * PART<Z, S> + j < Z::STATE;
}

template <class Z, class S>
__device__ __forceinline__ void load_state(const float* from, const Place<Z, S>& place, int b,
                                           float (&h)[PART<Z, S> / 2], const Member<S>& me) {
  from += state_place<Z, S>(place, b, me);
#pragma unroll
  for (int j = 0; j < PART<Z, S> / 8; ++j) {
    const bool there = has_columns<Z, S>(8 * j, me);
    const float2 v0 = there ? *reinterpret_cast<const float2*>(from + 8 * j) : make_float2(0.0f, 0.0f);
    const float2 v1 = there ? *reinterpret_cast<const float2*>(from + 8 * Z::STATE + 8 * j) : make_float2(0.0f, 0.0f);
    h[4 * j] = v0.x, h[4 * j + 1] = v0.y, h[4 * j + 2] = v1.x, h[4 * j + 3] = v1.y;
  }
}

template <class Z, class S>
__device__ __forceinline__ void store_state(float* to, const Place<Z, S>& place, int b,
                                            const float (&h)[PART<Z, S> / 2], const Member<S>& me) {
  to += state_place<Z, S>(place, b, me);
#pragma unroll
  for (int j = 0; j < PART<Z, S> / 8; ++j) {
    if (!has_columns<Z, S>(8 * j, me)) continue;
    *reinterpret_cast<float2*>(to + 8 * j) = make_float2(h[4 * j], h[4 * j + 1]);
    *reinterpret_cast<float2*>(to + 8 * Z::STATE + 8 * j) = make_float2(h[4 * j + 2], h[4 * j + 3]);
  }
}

// Walks chunks for the state at their end alone, the last of them first. `from_start`: they begin where the row does.
template <typename T, class Z, class S, class O>
__device__ __forceinline__ void walk_states(float (&h)[S::BLOCKS][PART<Z, S> / 2], char* memory, int chunks,
                                            bool from_start, const float* initial, const Place<Z, S>& place,
                                            const Member<S>& me) {
  using L = Layout<Z, S, O>;
  constexpr int N = PART<Z, S>, BLOCKS = S::BLOCKS;
  const unsigned shared = shared_address(memory);
  float left[BLOCKS];
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b) {
#pragma unroll
    for (int i = 0; i < N / 2; ++i) h[b][i] = 0.0f;
  }
  unsigned used = 0;  // barrier of the slot that the products under way read
#pragma unroll 1
  for (int count = 0; count < chunks; ++count) {
    const Turn<S::STAGES> stage(count);
    const Turn<S::SLOTS> slot(count);
    const unsigned x_tiles = shared + L::X + stage.place * L::STAGE + me.first_block * TILE;
    const unsigned b_tiles = shared + slot.place * L::SLOT + me.part * L::PART_TILES * TILE;
    const Scalars<O>* scalars =
        reinterpret_cast<const Scalars<O>*>(memory + L::SCALARS) + stage.place * S::BLOCKS_HERE + me.first_block;
    barrier_wait(shared + L::X_FULL + 8 * stage.place, stage.parity);
    wgmma_wait<0>();  // until then the products of the chunk before read the registers of x
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) pin(h[b]);
    if (used && me.lane == 0) barrier_arrive(used);
    used = shared + L::EMPTY + 8 * slot.place;
    unsigned x[BLOCKS][4][4];
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
      left[b] = scalars[b].carried[0];
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        load_tiles_transposed(x[b][k], x_tiles + b * TILE + me.channel_tile + k * 2048);
        weigh<T>(x[b][k], x[b][k], scalars[b].leaving + 16 * k + me.column);
      }
    }
    __syncwarp();
    if (me.lane == 0) barrier_arrive(shared + L::X_EMPTY + 8 * stage.place);
    barrier_wait(shared + L::FULL + 8 * slot.place, slot.parity);
    wgmma_fence();
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        Wgmma<T, N>::template registers<true>(h[b], x[b][k], advanced(column_descriptor(b_tiles, TILE), k * 2048),
                                              true);
      }
    }
    wgmma_commit();
  }
  wgmma_wait<0>();
  if (!O::STATE_ONLY && me.lane == 0) barrier_arrive(used);
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b) {
    pin(h[b]);
    if (O::HAS_INITIAL && from_start) {
      float start[N / 2];
      load_state<Z, S>(initial, place, b, start, me);
#pragma unroll
      for (int i = 0; i < N / 2; ++i) h[b][i] += left[b] * start[i];
    }
  }
}

// One warpgroup, only the states: the end state of its segment for each of its blocks.
template <typename T, class Z, class S, class O>
__device__ void compute_states(char* memory, const float* initial, void* y) {
  const Member<S> me;
  float h[S::BLOCKS][PART<Z, S> / 2];
  Piece piece;
  Pieces<Z, S>().next(piece);
  const Place<Z, S> place(piece.row);
  walk_states<T, Z, S, O>(h, memory, piece.end - piece.first, piece.first == 0, initial, place, me);
  const Waiting<Z, S> to(y, place, piece.first + S::CHUNKS_PER_SEGMENT);
#pragma unroll
  for (int b = 0; b < S::BLOCKS; ++b) save_state<Z, S>(to, me.first_block + b, me.part, h[b], me.thread);
}

// The state in which a piece starts, of the `b`-th block of this warpgroup.
template <class Z, class S, class O>
__device__ __forceinline__ void start_state(float (&h)[PART<Z, S> / 2], const Piece& piece, const Place<Z, S>& place,
                                            int b, const float* initial, void* y, const Member<S>& me) {
  if (!S::OWN_STARTS && piece.first > 0) {
    restore_state<Z, S>(Waiting<Z, S>(y, place, piece.first), me.first_block + b, me.part, h, me.thread);
  } else if (O::HAS_INITIAL) {
    load_state<Z, S>(initial, place, b, h, me);
  } else {
#pragma unroll
    for (int i = 0; i < PART<Z, S> / 2; ++i) h[i] = 0.0f;
  }
}

__device__ __forceinline__ void wait_for_flag(const int* flag) {
  int ready;
  do {
    asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(ready) : "l"(flag) : "memory");
  } while (!ready);
}

__device__ __forceinline__ void raise_flag(int* flag) {
  asm volatile("st.release.gpu.global.b32 [%0], 1;" ::"l"(flag) : "memory");
}

// Half of a y of the second part of a state to the warpgroup of the first, through the tile that will hold y: 16
// numbers of a thread. `half` is the parity of the barriers' phases too, since there are two in a chunk.
template <class L>
__device__ __forceinline__ void send_half(char* memory, const float* y, int half, int thread) {
  const unsigned shared = shared_address(memory);
  barrier_wait(shared + L::OTHER_EMPTY, half);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    reinterpret_cast<float4*>(memory + L::Y)[i * WARPGROUP + thread] =
        make_float4(y[4 * i], y[4 * i + 1], y[4 * i + 2], y[4 * i + 3]);
  }
  __syncwarp();
  if (thread % 32 == 0) barrier_arrive(shared + L::OTHER_FULL);
}

template <class L>
__device__ __forceinline__ void add_half(char* memory, float* y, int half, int thread) {
  barrier_wait(shared_address(memory) + L::OTHER_FULL, half);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float4 v = reinterpret_cast<const float4*>(memory + L::Y)[i * WARPGROUP + thread];
    y[4 * i] += v.x, y[4 * i + 1] += v.y, y[4 * i + 2] += v.z, y[4 * i + 3] += v.w;
  }
  __syncwarp();
}

// Rounds y of 16 tokens and 16 channels, times silu(z), which is in its place, if there is one.
template <typename T, bool Gated>
__device__ __forceinline__ void finish(unsigned (&rounded)[4], float* y, unsigned tile) {
  if constexpr (Gated) {
    load_tiles_transposed(rounded, tile);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float z0 = Pair<T>::low(rounded[i]), z1 = Pair<T>::high(rounded[i]);
      y[2 * i] *= __fdividef(z0, 1.0f + exp2_fast(-LOG2E * z0));
      y[2 * i + 1] *= __fdividef(z1, 1.0f + exp2_fast(-LOG2E * z1));
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) rounded[i] = Pair<T>::of(y[2 * i], y[2 * i + 1]);
}

// Starts C B^T of a chunk, over all parts of the state.
template <typename T, class Z, class S, class O>
__device__ __forceinline__ void source_products(float (&s)[32], unsigned c_slot, unsigned b_slot) {
  wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4 * int(Layout<Z, S, O>::GROUP_TILES); ++k) {
    const unsigned at = k / 4 * TILE + k % 4 * 32;
    Wgmma<T, CHUNK>::template shared<>(s, advanced(row_descriptor(c_slot), at), advanced(row_descriptor(b_slot), at),
                                       k > 0);
  }
  wgmma_commit();
}

// S above its diagonal, of the blocks of this warpgroup.
template <class S>
__device__ __forceinline__ void clear_pairs(char* pairs, int thread) {
  for (int i = thread; i < S::BLOCKS * int(TILE) / 16; i += WARPGROUP) {
    reinterpret_cast<uint4*>(pairs)[i] = make_uint4(0, 0, 0, 0);
  }
}

// One warpgroup of those that compute y. The one of a state's second part leaves all of y but h C^T to the first's.
template <bool Second, typename T, class Z, class S, class O>
__device__ void compute(char* memory, const TensorMap& z, const TensorMap& y_map, const float* D, const float* initial,
                        void* y_memory, int* flags, float* final) {
  using L = Layout<Z, S, O>;
  static_assert(S::STAGES == 2);
  constexpr int N = PART<Z, S>, BLOCKS = S::BLOCKS;
  using Product = Wgmma<T, CHUNK>;
  const unsigned shared = shared_address(memory);
  const Member<S> me;
  const int barrier = FIRST_BARRIER + me.warpgroup;
  const unsigned pair_tiles = shared + L::PAIRS + me.first_block * TILE,
                 y_tiles = shared + L::Y + me.first_block * TILE;
  if constexpr (!Second) {
    clear_pairs<S>(memory + L::PAIRS + me.first_block * TILE, me.thread);
    named_barrier(barrier, WARPGROUP);
  }

  float h[BLOCKS][N / 2], skip[BLOCKS][2];
  unsigned weighed[4][4] = {};  // x of a block as an operand of the products that make h
  unsigned count = 0;           // chunks done, for stages and parities
  unsigned used = 0;            // barrier of the slot that the products under way read
  const auto states_done = [&] {
    wgmma_wait<0>();
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) pin(h[b]);
    pin(weighed);
    if (used && me.lane == 0) barrier_arrive(used);
    used = 0;
  };
  const auto store_y = [&](const Place<Z, S>& place, int block, int chunk) {
    if (me.thread > 0) return;
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
      copy_out(y_map, 0, block + b, chunk * CHUNK, place.batch_row, y_tiles + b * TILE, KEEP_FIRST);
    }
    copies_commit();
  };
  Pieces<Z, S> pieces;
  for (Piece piece; pieces.next(piece);) {
    const Place<Z, S> place(piece.row);
    const int block = place.block + me.first_block;
    if (S::SEGMENTS == 1 && piece.first > 0) {
      if (me.thread == 0) wait_for_flag(flags + (blockIdx.x - 1) * S::WARPGROUPS + me.warpgroup);
      named_barrier(barrier, WARPGROUP);
    }
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
#pragma unroll
      for (int i = 0; i < N / 2; ++i) h[b][i] = 0.0f;
      if constexpr (O::HAS_D && !Second) {
        const float* from = D + ((O::SHARED_PARAMS ? 0 : place.batch_row) * (long long)Z::ALL_BLOCKS + block + b) * 64;
        skip[b][0] = from[me.row];
        skip[b][1] = from[me.row + 8];
      }
    }
    const int lead = lead_of<S>(piece);
    if (lead > 0) {
      walk_states<T, Z, S, O>(h, memory, lead, true, initial, place, me);
      count = lead;
    }
#pragma unroll 1
    for (int chunk = piece.first; chunk < piece.end; ++chunk, ++count) {
      const unsigned stage = count % 2, x_tiles = shared + L::X + stage * L::STAGE + me.first_block * TILE;
      const Scalars<O>* scalars =
          reinterpret_cast<const Scalars<O>*>(memory + L::SCALARS) + stage * S::BLOCKS_HERE + me.first_block;
      const Turn<S::SLOTS> C(2 * count - lead), B(2 * count + 1 - lead);
      const unsigned c_slot = shared + C.place * L::SLOT, c_empty = shared + L::EMPTY + 8 * C.place;
      const unsigned c_tiles = c_slot + me.part * L::PART_TILES * TILE;
      barrier_wait(shared + L::FULL + 8 * C.place, C.parity);
      const unsigned b_slot = shared + B.place * L::SLOT, b_empty = shared + L::EMPTY + 8 * B.place;
      const unsigned b_tiles = b_slot + me.part * L::PART_TILES * TILE;
      barrier_wait(shared + L::FULL + 8 * B.place, B.parity);
      barrier_wait(shared + L::X_FULL + 8 * stage, count / 2 % 2);
      float s[32];
      if constexpr (!Second) {
        source_products<T, Z, S, O>(s, c_slot, b_slot);
        if (chunk > piece.first) store_y(place, block, chunk - 1);  // while the others wait
      }
      states_done();  // those of the chunk before
      used = b_empty;
      if (chunk == piece.first && lead == 0) {
        Piece here = piece;
        asm volatile("" : "+r"(here.first));  // or 64 addresses would be kept for all of the loop
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b) start_state<Z, S, O>(h[b], here, place, b, initial, y_memory, me);
        if constexpr (S::PARTS > 1 && !S::OWN_STARTS) {  // the states have been read, y may be written
          named_barrier(PARTS_BARRIER, S::WARPGROUPS * WARPGROUP);
        }
      }
      if constexpr (!Second) {
        pin(s);
        store_pairs<T, Z, S>(s, scalars, pair_tiles, me.warp, me.lane);
        fence_async_proxy();
        if (me.thread == 0) copies_wait_read<0>();  // y of the chunk before has left its tiles
        named_barrier(barrier, WARPGROUP);
        if (S::PARTS > 1 && me.lane == 0) barrier_arrive(shared + L::OTHER_EMPTY);
        if (O::HAS_Z && S::PARTS == 1 && me.thread == 0) {
#pragma unroll
          for (int b = 0; b < BLOCKS; ++b) {
            const unsigned gate = shared + L::GATE + 8 * (me.first_block + b);
            barrier_expect(gate, TILE);
            copy_in(y_tiles + b * TILE, z, 0, block + b, chunk * CHUNK, place.batch_row, gate, KEEP_FIRST);
          }
        }
      }

#pragma unroll
      for (int b = 0; b < BLOCKS; ++b) {
        const unsigned x_tile = x_tiles + b * TILE, pairs = pair_tiles + b * TILE, y_tile = y_tiles + b * TILE;
        float y[32];
        // The state as an operand, at most 32 registers of it at a time, in two groups of products: behind the first
        // the state decays, behind the second x is weighed.
        constexpr int STEPS = N / 16, DEPTH = STEPS < 8 ? STEPS : 8;
#pragma unroll
        for (int first = 0; first < STEPS; first += DEPTH) {
          if (first > 0) {
            wgmma_wait<0>();
            pin(y);
          }
          const int count = first + DEPTH < STEPS ? DEPTH : STEPS - first;
          unsigned a[DEPTH][4];
#pragma unroll
          for (int k = 0; k < DEPTH; ++k) {
            if (k >= count) break;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const float* pair = h[b] + 8 * (first + k) + 2 * i;
              a[k][i] = Pair<T>::of(pair[0], pair[1]);
            }
          }
          wgmma_fence();
#pragma unroll
          for (int k = 0; k < DEPTH; ++k) {
            if (k >= count) break;
            const unsigned at = (first + k) / 4 * TILE + k % 4 * 32;
            Product::template registers<>(y, a[k], advanced(row_descriptor(c_tiles), at), first + k > 0);
            if (k == count / 2 - 1) wgmma_commit();
          }
          wgmma_commit();
        }
        scale(h[b], scalars[b].carried[CHUNK - 1]);
        pin(h[b]);
        wgmma_wait<1>();  // the products of the block before have read `weighed` as well
        unsigned x[4][4], finite = 0;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          load_tiles_transposed(x[k], x_tile + me.channel_tile + k * 2048);
          weigh<T>(weighed[k], x[k], scalars[b].leaving + 16 * k + me.column);
          if constexpr (!Second) {
#pragma unroll
            for (int i = 0; i < 4; ++i) finite = Pair<T>::plus_zero_times(finite, x[k][i]);
          }
        }
        pin(weighed);
        wgmma_wait<0>();
        pin(y);
        if (b == BLOCKS - 1 && me.lane == 0) barrier_arrive(c_empty);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const float2 carried = *reinterpret_cast<const float2*>(scalars[b].carried + 16 * k + 8 * half + me.column);
#pragma unroll
            for (int i = 2 * half; i < 2 * half + 2; ++i) {
              float& y0 = y[8 * k + 2 * i];
              float& y1 = y[8 * k + 2 * i + 1];
              y0 *= carried.x, y1 *= carried.y;
              if constexpr (O::HAS_D && !Second) {
                y0 += skip[b][i % 2] * Pair<T>::low(x[k][i]), y1 += skip[b][i % 2] * Pair<T>::high(x[k][i]);
              }
            }
          }
        }
        const bool poisoned = !Second && __any_sync(~0u, (finite & 0x7FFF7FFFu) != 0);
        if (poisoned) {
#pragma unroll
          for (int k = 0; k < 4; ++k) {
#pragma unroll
            for (int i = 0; i < 4; ++i) x[k][i] = Pair<T>::only_finite(x[k][i]);
          }
        }
        wgmma_fence();
        if constexpr (!Second) {
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            Product::template registers<>(y, x[k], advanced(row_descriptor(pairs), k * 32), true);
          }
          wgmma_commit();
        }
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          Wgmma<T, N>::template registers<true>(h[b], weighed[k], advanced(column_descriptor(b_tiles, TILE), k * 2048),
                                                true);
        }
        wgmma_commit();
        if constexpr (Second) {
#pragma unroll
          for (int half = 0; half < 2; ++half) send_half<L>(memory, y + 16 * half, half, me.thread);
        } else {
          wgmma_wait<1>();
          pin(y);
          const unsigned gate = shared + L::GATE + 8 * (me.first_block + b);
          if constexpr (S::PARTS > 1) {
            add_half<L>(memory, y, 0, me.thread);
            if (me.lane == 0) barrier_arrive(shared + L::OTHER_EMPTY);
            add_half<L>(memory, y + 16, 1, me.thread);
            named_barrier(barrier, WARPGROUP);
            if (O::HAS_Z && me.thread == 0) {
              barrier_expect(gate, TILE);
              copy_in(y_tile, z, 0, block + b, chunk * CHUNK, place.batch_row, gate, KEEP_FIRST);
            }
          }
          if constexpr (O::HAS_Z) barrier_wait(gate, (count - lead) % 2);
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            unsigned rounded[4];
            finish<T, O::HAS_Z>(rounded, y + 8 * k, y_tile + me.channel_tile + k * 2048);
            store_tiles_transposed(y_tile + me.channel_tile + k * 2048, rounded);
          }
          if (poisoned) add_not_finite<T, O::HAS_Z, Z::ROOM>(x_tile, pairs, y_tile, me.warp, me.lane);
        }
      }
      if constexpr (!Second) fence_async_proxy();
      if constexpr (S::SLOTS == 3) states_done();  // C of the chunk after next waits for the slot that they read
      __syncwarp();
      if (me.lane == 0) barrier_arrive(shared + L::X_EMPTY + 8 * stage);
      if constexpr (!Second) {
        named_barrier(barrier, WARPGROUP);
      }
    }

    if constexpr (!Second) store_y(place, block, piece.end - 1);
    states_done();
    if (S::SEGMENTS == 1 && piece.end < Z::CHUNKS) {
      const Waiting<Z, S> to(y_memory, place, piece.end);
#pragma unroll
      for (int b = 0; b < BLOCKS; ++b) save_state<Z, S>(to, me.first_block + b, me.part, h[b], me.thread);
      __threadfence();
      named_barrier(barrier, WARPGROUP);
      if (me.thread == 0) raise_flag(flags + blockIdx.x * S::WARPGROUPS + me.warpgroup);
    }
    if (O::HAS_FINAL && piece.end == Z::CHUNKS) {
#pragma unroll
      for (int b = 0; b < BLOCKS; ++b) store_state<Z, S>(final, place, b, h[b], me);
    }
    if (S::OWN_STARTS) break;  // it has one piece
  }
  if (me.thread == 0) copies_wait<0>();
}

// One warpgroup of those that compute y of rows without states.
template <typename T, class Z, class S, class O>
__device__ void compute_stateless(char* memory, const TensorMap& z, const TensorMap& y_map, const float* D) {
  using L = Layout<Z, S, O>;
  static_assert(S::PARTS == 1 && S::STAGES == 2);
  const unsigned shared = shared_address(memory);
  const Member<S> me;
  const int barrier = FIRST_BARRIER + me.warpgroup;
  const unsigned pair_tiles = shared + L::PAIRS + me.first_block * TILE,
                 y_tiles = shared + L::Y + me.first_block * TILE;
  clear_pairs<S>(memory + L::PAIRS + me.first_block * TILE, me.thread);
  named_barrier(barrier, WARPGROUP);
  unsigned count = 0;  // chunks done, for stages and parities
  Pieces<Z, S> pieces;
#pragma unroll 1
  for (Piece piece; pieces.next(piece); ++count) {
    const Place<Z, S> place(piece.row);
    const int block = place.block + me.first_block;
    const unsigned stage = count % 2, x_tiles = shared + L::X + stage * L::STAGE + me.first_block * TILE;
    const Scalars<O>* scalars =
        reinterpret_cast<const Scalars<O>*>(memory + L::SCALARS) + stage * S::BLOCKS_HERE + me.first_block;
    const Turn<S::SLOTS> C(2 * count), B(2 * count + 1);
    const unsigned c_slot = shared + C.place * L::SLOT, c_empty = shared + L::EMPTY + 8 * C.place;
    barrier_wait(shared + L::FULL + 8 * C.place, C.parity);
    const unsigned b_slot = shared + B.place * L::SLOT, b_empty = shared + L::EMPTY + 8 * B.place;
    barrier_wait(shared + L::FULL + 8 * B.place, B.parity);
    barrier_wait(shared + L::X_FULL + 8 * stage, count / 2 % 2);
    float s[32];
    source_products<T, Z, S, O>(s, c_slot, b_slot);
    wgmma_wait<0>();
    pin(s);
    if (me.lane == 0) {
      barrier_arrive(c_empty);
      barrier_arrive(b_empty);
    }
    store_pairs<T, Z, S>(s, scalars, pair_tiles, me.warp, me.lane);
    fence_async_proxy();
    if (me.thread == 0) copies_wait_read<0>();  // y of the chunk before has left its tiles
    named_barrier(barrier, WARPGROUP);
#pragma unroll 1
    for (int b = 0; b < S::BLOCKS; ++b) {
      const unsigned x_tile = x_tiles + b * TILE, pairs = pair_tiles + b * TILE, y_tile = y_tiles + b * TILE;
      const unsigned gate = shared + L::GATE + 8 * (me.first_block + b);
      if (O::HAS_Z && me.thread == 0) {
        barrier_expect(gate, TILE);
        copy_in(y_tile, z, 0, block + b, 0, place.batch_row, gate, KEEP_FIRST);
      }
      float skip[2] = {0.0f, 0.0f};
      if constexpr (O::HAS_D) {
        const float* from = D + ((long long)block + b) * 64;
        skip[0] = from[me.row], skip[1] = from[me.row + 8];
      }
      float y[32];
      unsigned x[4][4], finite = 0;
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        load_tiles_transposed(x[k], x_tile + me.channel_tile + k * 2048);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          y[8 * k + 2 * i] = skip[i % 2] * Pair<T>::low(x[k][i]);
          y[8 * k + 2 * i + 1] = skip[i % 2] * Pair<T>::high(x[k][i]);
          finite = Pair<T>::plus_zero_times(finite, x[k][i]);
        }
      }
      const bool poisoned = __any_sync(~0u, (finite & 0x7FFF7FFFu) != 0);
      if (poisoned) {
#pragma unroll
        for (int k = 0; k < 4; ++k) {
#pragma unroll
          for (int i = 0; i < 4; ++i) x[k][i] = Pair<T>::only_finite(x[k][i]);
        }
      }
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        Wgmma<T, CHUNK>::template registers<>(y, x[k], advanced(row_descriptor(pairs), k * 32), O::HAS_D || k > 0);
      }
      wgmma_commit();
      wgmma_wait<0>();
      pin(y);
      if constexpr (O::HAS_Z) barrier_wait(gate, count % 2);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        unsigned rounded[4];
        finish<T, O::HAS_Z>(rounded, y + 8 * k, y_tile + me.channel_tile + k * 2048);
        store_tiles_transposed(y_tile + me.channel_tile + k * 2048, rounded);
      }
      if (poisoned) add_not_finite<T, O::HAS_Z, Z::ROOM>(x_tile, pairs, y_tile, me.warp, me.lane);
    }
    fence_async_proxy();
    __syncwarp();
    if (me.lane == 0) barrier_arrive(shared + L::X_EMPTY + 8 * stage);
    named_barrier(barrier, WARPGROUP);
    if (me.thread == 0) {
#pragma unroll 1
      for (int b = 0; b < S::BLOCKS; ++b)
        copy_out(y_map, 0, block + b, 0, place.batch_row, y_tiles + b * TILE, KEEP_FIRST);
      copies_commit();
    }
  }
  if (me.thread == 0) copies_wait<0>();
}

}  // namespace

// x, z, y: maps of [batch, seq, blocks, 64], B, C: of [batch, seq, groups, N], boxes of 64 tokens. dt [batch, seq,
// heads], dt_bias, A [1 or batch, heads], D [1 or batch, heads, head_dim], initial, final [batch, heads, head_dim, N].
// y_memory: the y of the map. totals: log2 decay of each segment but the last and its blocks. flags: zero; one for each
// thread block and warpgroup. What an option leaves out is not touched, nor are flags where no row is cut.
template <typename T, typename D, class Z, class S, class O>
__global__ void __launch_bounds__(WARPGROUP * (1 + S::WARPGROUPS), 1)
    forward(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap B,
            const __grid_constant__ TensorMap C, const __grid_constant__ TensorMap z,
            const __grid_constant__ TensorMap y, const D* dt, const float* dt_bias, const float* A, const float* skip,
            const float* initial, T* y_memory, float* totals, int* flags, float* final, float low, float high) {
  using L = Layout<Z, S, O>;
  extern __shared__ __align__(1024) char memory[];
  const unsigned shared = shared_address(memory);
  if (threadIdx.x == 0) {
    constexpr int WARPS = 4 * S::WARPGROUPS;
    const auto init = [&](unsigned full, unsigned empty, int count, int suppliers, int users) {
      for (int i = 0; i < count; ++i) {
        barrier_init(shared + full + 8 * i, suppliers);
        barrier_init(shared + empty + 8 * i, users);
      }
    };
    init(L::FULL, L::EMPTY, S::SLOTS, 1, WARPS);
    init(L::X_FULL, L::X_EMPTY, S::STAGES, 1 + S::BLOCKS_HERE, WARPS);
    init(L::OTHER_FULL, L::OTHER_EMPTY, 1, 4, 4);
    for (int i = 0; i < S::BLOCKS_HERE; ++i) barrier_init(shared + L::GATE + 8 * i, 1);
    fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x < WARPGROUP) {
    if constexpr (S::WARPGROUPS > 1) give_registers<PROVIDER_REGISTERS>();
    // Waits for no earlier kernel: none of this plan writes what it reads, and the first one starts after all others.
    provide<D, Z, S, O>(memory, x, B, C, dt, dt_bias, A, totals, low, high);
  } else {
    if constexpr (S::WARPGROUPS > 1) take_registers<COMPUTE_REGISTERS>();
    wait_for_earlier_kernels();
    if constexpr (O::STATE_ONLY) {
      compute_states<T, Z, S, O>(memory, initial, y_memory);
    } else if constexpr (O::STATELESS) {
      compute_stateless<T, Z, S, O>(memory, z, y, skip);
    } else if (S::PARTS == 1 || threadIdx.x < 2 * WARPGROUP) {
      compute<false, T, Z, S, O>(memory, z, y, skip, initial, y_memory, flags, final);
    } else {
      if constexpr (S::PARTS > 1) compute<true, T, Z, S, O>(memory, z, y, skip, initial, y_memory, flags, final);
    }
  }
}

// End states of segments to start states of the segments that follow, in place. totals [rows, segments but the last,
// blocks]. One thread per 16 bytes of a row's states.
template <class Z, class S>
__global__ void carry_states(void* y, const float* totals) {
  let_next_kernel_start();
  wait_for_earlier_kernels();
  constexpr int PER_BLOCK = 16 * S::PARTS * PART<Z, S>, PER_ROW = S::BLOCKS_HERE * PER_BLOCK;
  constexpr int SLOTS = S::SEGMENTS - 1;
  const long long index = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  const int row = int(index / PER_ROW), at = int(index % PER_ROW);
  const Place<Z, S> place(row);
  totals += (long long)row * SLOTS * S::BLOCKS_HERE + at / PER_BLOCK;
  float4* to = Waiting<Z, S>(y, place, S::CHUNKS_PER_SEGMENT).at(at / PER_BLOCK, at % PER_BLOCK);
  constexpr long long STEP = (long long)S::CHUNKS_PER_SEGMENT * CHUNK * Waiting<Z, S>::PER_TOKEN;
  float4 h = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  constexpr int AHEAD = 16;
  for (int first = 0; first < SLOTS; first += AHEAD) {
    float4 end[AHEAD];
    float left[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      if (first + i >= SLOTS) break;
      end[i] = to[(first + i) * STEP];
      left[i] = exp2_fast(totals[(first + i) * S::BLOCKS_HERE]);
    }
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      if (first + i >= SLOTS) break;
      if (first + i > 0) {
        h.x = left[i] * h.x + end[i].x, h.y = left[i] * h.y + end[i].y;
        h.z = left[i] * h.z + end[i].z, h.w = left[i] * h.w + end[i].w;
        to[(first + i) * STEP] = h;
      } else {
        h = end[i];
      }
    }
  }
}

// flags = 0.
__global__ void clear_flags(int* flags, int count) {
  let_next_kernel_start();
  wait_for_earlier_kernels();
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < count) flags[i] = 0;
}

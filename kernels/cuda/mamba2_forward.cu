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
// computed once for all blocks of a warpgroup, and only S passes through shared memory.
//
// A *row* is one batch row of the blocks that a thread block walks together. How rows are divided among thread blocks:
// - Segments > 1: every row into as many segments; `forward` with StateOnly finds each segment's end state from zero,
//   `carry_states` turns them into start states.
// - Segments == 1: all rows, one after the other, are one line of chunks that is cut into equal ranges. A row that is
// cut
//   passes its state from one thread block to the next; who passes on does so before it waits for anything itself.

#include "async_copy.cuh"
#include "decay.cuh"
#include "numbers16.cuh"
#include "shared_memory.cuh"
#include "wgmma.cuh"

using namespace jax_ssd;

namespace {

constexpr int CHUNK = 64;
constexpr unsigned TILE = 64 * 128;  // bytes of 64 rows of 64 numbers
constexpr int WARPGROUP = 128;

template <long long Batch, long long Seq, int Heads, int Groups, int HeadDim, int State>
struct Sizes {
  static constexpr long long BATCH = Batch, SEQ = Seq;
  static constexpr int HEADS = Heads, STATE = State;
  static constexpr int HEAD_BLOCKS = HeadDim / 64;                   // blocks per head
  static constexpr int GROUP_BLOCKS = Heads / Groups * HEAD_BLOCKS;  // blocks per group
  static constexpr int ALL_BLOCKS = Heads * HEAD_BLOCKS;
  static constexpr int CHUNKS = int((Seq + CHUNK - 1) / CHUNK);
};

// Warpgroups that compute, blocks of each, segments of a row.
template <int Warpgroups, int Blocks, int Segments, int ChunksPerSegment, int Stages>
struct Split {
  static constexpr int WARPGROUPS = Warpgroups, BLOCKS = Blocks, SEGMENTS = Segments, STAGES = Stages;
  static constexpr int CHUNKS_PER_SEGMENT = ChunksPerSegment, BLOCKS_HERE = Warpgroups * Blocks;
};

template <bool StateOnly, bool SharedParams, bool Softplus, bool HasBias, bool HasD, bool HasZ, bool HasInitial,
          bool HasFinal>
struct Options {
  static constexpr bool STATE_ONLY = StateOnly, SHARED_PARAMS = SharedParams, SOFTPLUS = Softplus, HAS_BIAS = HasBias;
  static constexpr bool HAS_D = HasD, HAS_Z = HasZ, HAS_INITIAL = HasInitial, HAS_FINAL = HasFinal;
};

__device__ __forceinline__ float to_float(float v) { return v; }
__device__ __forceinline__ float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }
__device__ __forceinline__ float to_float(__half v) { return __half2float(v); }

// What the decays of one block make of a chunk.
struct Scalars {
  float decay[CHUNK];    // g
  float source[CHUNK];   // g - log2(step): exp2(g_i - source_j) is exp2(g_i - g_j) step_j
  float carried[CHUNK];  // exp2(g): of the state before the chunk, what is left at a token
  float leaving[CHUNK];  // exp2(g_last - source): of a token's x B, what is left at the chunk's end
};

// A stretch of chunks of one row, walked from a known start state.
struct Piece {
  long long row;
  int first, end;  // chunks
};

// The pieces of this thread block, those first that others wait for.
template <class Z, class S>
class Pieces {
 public:
  __device__ Pieces() {
    const long long block = blockIdx.x;
    if constexpr (S::SEGMENTS > 1) {
      const long long per_batch_row = Z::ALL_BLOCKS / S::BLOCKS_HERE;
      const int segments = gridDim.x / int(Z::BATCH * per_batch_row);  // one fewer where only end states are wanted
      const long long segment = block / per_batch_row % segments;
      low_ = block / (per_batch_row * segments) * per_batch_row + block % per_batch_row;
      low_ = low_ * Z::CHUNKS + segment * S::CHUNKS_PER_SEGMENT;
      high_ = low_ + S::CHUNKS_PER_SEGMENT;
      const long long row_end = (low_ / Z::CHUNKS + 1) * Z::CHUNKS;
      high_ = high_ < row_end ? high_ : row_end;
    } else {
      const long long all = Z::BATCH * (Z::ALL_BLOCKS / S::BLOCKS_HERE) * Z::CHUNKS;
      low_ = all * block / gridDim.x;
      high_ = all * (block + 1) / gridDim.x;
    }
  }
  __device__ bool next(Piece& piece) {
    if (high_ <= low_) return false;
    piece.row = (high_ - 1) / Z::CHUNKS;
    const long long start = piece.row * Z::CHUNKS;
    piece.end = int(high_ - start);
    high_ = start > low_ ? start : low_;
    piece.first = int(high_ - start);
    return true;
  }

 private:
  long long low_, high_;
};

// Position in a ring of `Stages` stages.
template <int Stages>
struct Ring {
  int stage = 0;
  unsigned parity = 0;
  __device__ void advance() {
    if (++stage == Stages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

// Shared memory, as byte offsets. Tiles first: they start at multiples of 1024 bytes.
template <class Z, class S, class O>
struct Layout {
  static constexpr unsigned GROUP_TILES = Z::STATE / 64;
  static constexpr unsigned B = 0;
  static constexpr unsigned C = B + GROUP_TILES * TILE;
  static constexpr unsigned X = C + (O::STATE_ONLY ? 0 : GROUP_TILES * TILE);
  static constexpr unsigned STAGE = X + S::BLOCKS_HERE * TILE;
  static constexpr unsigned PAIRS = S::STAGES * STAGE;
  static constexpr unsigned Y = PAIRS + (O::STATE_ONLY ? 0 : S::BLOCKS_HERE * TILE);
  static constexpr unsigned SCALARS = Y + (O::STATE_ONLY ? 0 : S::BLOCKS_HERE * TILE);
  static constexpr unsigned FULL = SCALARS + S::STAGES * S::BLOCKS_HERE * sizeof(Scalars);
  static constexpr unsigned EMPTY = FULL + 8 * S::STAGES;
  static constexpr unsigned GATE = EMPTY + 8 * S::STAGES;
};

template <class Z, class S>
struct Place {
  long long batch_row;
  int block, group;  // the first of the blocks of a row
  __device__ explicit Place(long long row) {
    constexpr int PER_BATCH_ROW = Z::ALL_BLOCKS / S::BLOCKS_HERE;
    batch_row = row / PER_BATCH_ROW;
    block = int(row % PER_BATCH_ROW) * S::BLOCKS_HERE;
    group = block / Z::GROUP_BLOCKS;
  }
};

// One thread: asks for the tiles of a chunk.
template <class Z, class S, class O>
__device__ __forceinline__ void bring_tiles(unsigned stage, unsigned full, const TensorMap& x, const TensorMap& B,
                                            const TensorMap& C, const Place<Z, S>& place, int token) {
  using L = Layout<Z, S, O>;
  const int row = int(place.batch_row);
  barrier_expect(full, L::STAGE);
#pragma unroll
  for (int i = 0; i < L::GROUP_TILES; ++i) {
    if constexpr (!O::STATE_ONLY) copy_in(stage + L::C + i * TILE, C, 64 * i, place.group, token, row, full, KEEP_LAST);
    copy_in(stage + L::B + i * TILE, B, 64 * i, place.group, token, row, full, KEEP_LAST);
  }
#pragma unroll
  for (int i = 0; i < S::BLOCKS_HERE; ++i) {
    copy_in(stage + L::X + i * TILE, x, 0, place.block + i, token, row, full, KEEP_FIRST);
  }
}

// The scalars of a chunk of one block, by a warp; each lane has two neighbouring tokens and their raw steps.
template <class O>
__device__ __forceinline__ void compute_scalars(Scalars& to, const float (&raw)[2], int inside, float rate, float bias,
                                                float low, float high) {
  const int lane = threadIdx.x % 32;
  float step[2], log[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    step[i] = i < inside ? step_size<O::SOFTPLUS>(raw[i] + bias, low, high) : 0.0f;
    log[i] = i < inside ? log2_decay(step[i], rate) : 0.0f;
  }
  float before = log[0] + log[1];
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const float other = __shfl_up_sync(~0u, before, distance);
    if (lane >= distance) before += other;
  }
  before = __shfl_up_sync(~0u, before, 1);
  const float g0 = (lane ? before : 0.0f) + log[0], g1 = g0 + log[1];
  const float last = __shfl_sync(~0u, g1, 31);
  const float source0 = g0 - log2_fast(step[0]), source1 = g1 - log2_fast(step[1]);
  reinterpret_cast<float2*>(to.decay)[lane] = make_float2(g0, g1);
  reinterpret_cast<float2*>(to.source)[lane] = make_float2(source0, source1);
  reinterpret_cast<float2*>(to.carried)[lane] = make_float2(exp2_fast(g0), exp2_fast(g1));
  reinterpret_cast<float2*>(to.leaving)[lane] = make_float2(exp2_fast(last - source0), exp2_fast(last - source1));
}

// The warpgroup that provides: warp 0 brings tiles, and each warp computes the scalars of one block.
template <typename D, class Z, class S, class O>
__device__ void provide(char* memory, const TensorMap& x, const TensorMap& B, const TensorMap& C, const D* dt,
                        const float* dt_bias, const float* A, float low, float high) {
  using L = Layout<Z, S, O>;
  static_assert(S::BLOCKS_HERE <= 4, "each warp computes the scalars of one block");
  const unsigned shared = shared_address(memory);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (warp >= S::BLOCKS_HERE) return;
  Ring<S::STAGES> ring;
  Pieces<Z, S> pieces;
  for (Piece piece; pieces.next(piece);) {
    const Place<Z, S> place(piece.row);
    const int head = (place.block + warp) / Z::HEAD_BLOCKS;
    const long long parameter = (O::SHARED_PARAMS ? 0 : place.batch_row) * Z::HEADS + head;
    const float rate = A[parameter], bias = O::HAS_BIAS ? dt_bias[parameter] : 0.0f;
    float raw[2];
    long long left = Z::SEQ - (long long)piece.first * CHUNK - 2 * lane;  // tokens from this lane's first to the end
    const D* from = dt + (place.batch_row * Z::SEQ + (long long)piece.first * CHUNK + 2 * lane) * Z::HEADS + head;
#pragma unroll
    for (int i = 0; i < 2; ++i) raw[i] = i < left ? to_float(from[i * Z::HEADS]) : 0.0f;
#pragma unroll 1
    for (int chunk = piece.first; chunk < piece.end; ++chunk, ring.advance()) {
      const unsigned full = shared + L::FULL + 8 * ring.stage;
      barrier_wait(shared + L::EMPTY + 8 * ring.stage, ring.parity ^ 1);
      if (warp == 0 && lane == 0) {
        bring_tiles<Z, S, O>(shared + ring.stage * L::STAGE, full, x, B, C, place, chunk * CHUNK);
      }
      __syncwarp();
      compute_scalars<O>(reinterpret_cast<Scalars*>(memory + L::SCALARS)[ring.stage * S::BLOCKS_HERE + warp], raw,
                         left < 2 ? int(left) : 2, rate, bias, low, high);
      __syncwarp();
      if (lane == 0) barrier_arrive(full);
      left -= CHUNK;
      from += CHUNK * Z::HEADS;
#pragma unroll
      for (int i = 0; i < 2; ++i) raw[i] = i < left && chunk + 1 < piece.end ? to_float(from[i * Z::HEADS]) : 0.0f;
    }
  }
}

// The state of a block as its threads hold it, in scratch memory: 16 bytes of each thread side by side.
template <int Size>
__device__ __forceinline__ void save_state(float* to, const float (&h)[Size], int thread) {
#pragma unroll
  for (int i = 0; i < Size / 4; ++i) {
    __stcg(reinterpret_cast<float4*>(to) + i * WARPGROUP + thread,
           make_float4(h[4 * i], h[4 * i + 1], h[4 * i + 2], h[4 * i + 3]));
  }
}

template <int Size>
__device__ __forceinline__ void restore_state(const float* from, float (&h)[Size], int thread) {
#pragma unroll
  for (int i = 0; i < Size / 4; ++i) {
    const float4 v = __ldcg(reinterpret_cast<const float4*>(from) + i * WARPGROUP + thread);
    h[4 * i] = v.x, h[4 * i + 1] = v.y, h[4 * i + 2] = v.z, h[4 * i + 3] = v.w;
  }
}

// S of one block, 16-bit, from C B^T (s) to shared memory. Tiles of 16 x 16 above the diagonal stay as they are: zero.
template <typename T>
__device__ __forceinline__ void store_pairs(const float (&s)[32], const Scalars& scalars, unsigned tile, int warp,
                                            int lane) {
  const int row = lane / 4, column = 2 * (lane % 4);
  const float g0 = scalars.decay[16 * warp + row], g1 = scalars.decay[16 * warp + row + 8];
  float2 source[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) source[i] = *reinterpret_cast<const float2*>(scalars.source + 8 * i + column);
  const unsigned to = tile + swizzled(16 * warp + lane % 16, lane / 16);
  const int most = 16 * warp + row - column;  // a pair counts if its column, less this thread's first, is at most this
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (j > warp) break;
    unsigned r[4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int i = 2 * j + half;
      // Selected last, so that what a pair that does not count gives, even a NaN, is dropped.
      const float v0 = 8 * i <= most ? s[4 * i] * exp2_fast(g0 - source[i].x) : 0.0f;
      const float v1 = 8 * i + 1 <= most ? s[4 * i + 1] * exp2_fast(g0 - source[i].y) : 0.0f;
      const float v2 = 8 * i - 8 <= most ? s[4 * i + 2] * exp2_fast(g1 - source[i].x) : 0.0f;
      const float v3 = 8 * i - 7 <= most ? s[4 * i + 3] * exp2_fast(g1 - source[i].y) : 0.0f;
      r[2 * half] = Pair<T>::of(v0, v1);
      r[2 * half + 1] = Pair<T>::of(v2, v3);
    }
    store_tiles(to ^ (j << 5), r);
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
template <typename T, bool Gated>
__device__ __forceinline__ void add_not_finite(unsigned x, unsigned pairs, unsigned y, int warp, int lane) {
  __syncwarp();
#pragma unroll 1
  for (int i = lane; i < 16 * CHUNK; i += 32) {
    const int token = i / 16, channel = 16 * warp + i % 16;
    const unsigned to = y + swizzled(token, channel / 8) + channel % 8 * 2;
    float sum = element<T>(to);
#pragma unroll 1
    for (int j = 0; j <= token; ++j) {
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
struct Member {
  int warpgroup, thread, warp, lane, row, column;  // row, column: of the thread's first element of an accumulator
  unsigned channel_tile;  // where its lane finds, or puts, 8 x 8 tiles of x and y: 16 channels of 16 tokens at a time
  __device__ Member()
      : warpgroup(threadIdx.x / WARPGROUP - 1),
        thread(threadIdx.x % WARPGROUP),
        warp(thread / 32),
        lane(thread % 32),
        row(16 * warp + lane / 4),
        column(2 * (lane % 4)),
        channel_tile(swizzled(lane % 8 + lane / 16 * 8, 2 * warp + lane / 8 % 2)) {}
};

// A state in memory as [64, N].
template <int N>
__device__ __forceinline__ void load_state(const float* from, float (&h)[N / 2], const Member& me) {
  from += me.row * N + me.column;
#pragma unroll
  for (int j = 0; j < N / 8; ++j) {
    const float2 v0 = *reinterpret_cast<const float2*>(from + 8 * j);
    const float2 v1 = *reinterpret_cast<const float2*>(from + 8 * N + 8 * j);
    h[4 * j] = v0.x, h[4 * j + 1] = v0.y, h[4 * j + 2] = v1.x, h[4 * j + 3] = v1.y;
  }
}

template <int N>
__device__ __forceinline__ void store_state(float* to, const float (&h)[N / 2], const Member& me) {
  to += me.row * N + me.column;
#pragma unroll
  for (int j = 0; j < N / 8; ++j) {
    *reinterpret_cast<float2*>(to + 8 * j) = make_float2(h[4 * j], h[4 * j + 1]);
    *reinterpret_cast<float2*>(to + 8 * N + 8 * j) = make_float2(h[4 * j + 2], h[4 * j + 3]);
  }
}

// One warpgroup, only the states: the end state of its segment for each of its blocks.
template <typename T, class Z, class S, class O>
__device__ void compute_states(char* memory, const float* initial, float* states, float* totals) {
  using L = Layout<Z, S, O>;
  constexpr int N = Z::STATE, BLOCKS = S::BLOCKS;
  const unsigned shared = shared_address(memory);
  const Member me;
  const int first_block = me.warpgroup * BLOCKS;
  float h[BLOCKS][N / 2], total[BLOCKS];
  Piece piece;
  Pieces<Z, S>().next(piece);
  const Place<Z, S> place(piece.row);
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b) {
    total[b] = 0.0f;
    if (piece.first == 0 && O::HAS_INITIAL) {
      load_state<N>(initial + (place.batch_row * Z::ALL_BLOCKS + place.block + first_block + b) * (64 * N), h[b], me);
    } else {
#pragma unroll
      for (int i = 0; i < N / 2; ++i) h[b][i] = 0.0f;
    }
  }
  Ring<S::STAGES> ring;
  unsigned used = 0;  // barrier of the stage that the products under way read
  for (int chunk = piece.first; chunk < piece.end; ++chunk, ring.advance()) {
    const unsigned stage = shared + ring.stage * L::STAGE;
    const Scalars* scalars =
        reinterpret_cast<const Scalars*>(memory + L::SCALARS) + ring.stage * S::BLOCKS_HERE + first_block;
    barrier_wait(shared + L::FULL + 8 * ring.stage, ring.parity);
    unsigned x[BLOCKS][4][4];
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        load_tiles_transposed(x[b][k], stage + L::X + (first_block + b) * TILE + me.channel_tile + k * 2048);
        weigh<T>(x[b][k], x[b][k], scalars[b].leaving + 16 * k + me.column);
      }
    }
    wgmma_wait<0>();
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
      pin(h[b]);
      scale(h[b], scalars[b].carried[CHUNK - 1]);
      total[b] += scalars[b].decay[CHUNK - 1];
    }
    if (used && me.lane == 0) barrier_arrive(used);
    used = shared + L::EMPTY + 8 * ring.stage;
    wgmma_fence();
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        Wgmma<T, N>::template registers<true>(h[b], x[b][k], advanced(column_descriptor(stage + L::B, TILE), k * 2048),
                                              true);
      }
    }
    wgmma_commit();
  }
  wgmma_wait<0>();
  const long long slot = piece.row * (S::SEGMENTS - 1) + piece.first / S::CHUNKS_PER_SEGMENT;
#pragma unroll
  for (int b = 0; b < BLOCKS; ++b) {
    pin(h[b]);
    const long long at = slot * S::BLOCKS_HERE + first_block + b;
    save_state(states + at * (64 * N), h[b], me.thread);
    if (me.thread == 0) totals[at] = total[b];
  }
}

// The state in which a piece starts, of a block that is the `block`-th of the thread block's.
template <class Z, class S, class O>
__device__ __forceinline__ void start_state(float (&h)[Z::STATE / 2], const Piece& piece, const Place<Z, S>& place,
                                            int block, const float* initial, const float* states, const Member& me) {
  constexpr long long SIZE = 64 * Z::STATE;
  if (piece.first > 0) {
    const long long slot = S::SEGMENTS > 1 ? piece.row * (S::SEGMENTS - 1) + piece.first / S::CHUNKS_PER_SEGMENT - 1
                                           : (long long)blockIdx.x - 1;
    restore_state(states + (slot * S::BLOCKS_HERE + block) * SIZE, h, me.thread);
  } else if (O::HAS_INITIAL) {
    load_state<Z::STATE>(initial + (place.batch_row * Z::ALL_BLOCKS + place.block + block) * SIZE, h, me);
  } else {
#pragma unroll
    for (int i = 0; i < Z::STATE / 2; ++i) h[i] = 0.0f;
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

// One warpgroup of those that compute y.
template <typename T, class Z, class S, class O>
__device__ void compute(char* memory, const TensorMap& z, const TensorMap& y_map, const float* D, const float* initial,
                        float* states, int* flags, float* final) {
  using L = Layout<Z, S, O>;
  constexpr int N = Z::STATE, BLOCKS = S::BLOCKS;
  constexpr long long STATE_SIZE = 64 * N;
  using Product = Wgmma<T, CHUNK>;
  const unsigned shared = shared_address(memory);
  const Member me;
  const int first_block = me.warpgroup * BLOCKS, barrier = 1 + me.warpgroup;
  const unsigned pair_tiles = shared + L::PAIRS + first_block * TILE, y_tiles = shared + L::Y + first_block * TILE;
  for (int i = me.thread; i < BLOCKS * int(TILE) / 16; i += WARPGROUP) {
    reinterpret_cast<uint4*>(memory + L::PAIRS + first_block * TILE)[i] = make_uint4(0, 0, 0, 0);
  }
  named_barrier(barrier, WARPGROUP);

  float h[BLOCKS][N / 2], skip[BLOCKS][2];
  Ring<S::STAGES> ring;
  unsigned gate_parity = 0;
  Pieces<Z, S> pieces;
  for (Piece piece; pieces.next(piece);) {
    const Place<Z, S> place(piece.row);
    const int block = place.block + first_block;
    if (S::SEGMENTS == 1 && piece.first > 0) {
      if (me.thread == 0) wait_for_flag(flags + (blockIdx.x - 1) * S::WARPGROUPS + me.warpgroup);
      named_barrier(barrier, WARPGROUP);
    }
#pragma unroll
    for (int b = 0; b < BLOCKS; ++b) {
      start_state<Z, S, O>(h[b], piece, place, first_block + b, initial, states, me);
      if constexpr (O::HAS_D) {
        const float* from = D + (O::SHARED_PARAMS ? 0 : place.batch_row) * Z::ALL_BLOCKS * 64 + (block + b) * 64;
        skip[b][0] = from[me.row];
        skip[b][1] = from[me.row + 8];
      }
    }
    for (int chunk = piece.first; chunk < piece.end; ++chunk, ring.advance()) {
      const unsigned stage = shared + ring.stage * L::STAGE;
      const Scalars* scalars =
          reinterpret_cast<const Scalars*>(memory + L::SCALARS) + ring.stage * S::BLOCKS_HERE + first_block;
      barrier_wait(shared + L::FULL + 8 * ring.stage, ring.parity);
      {
        float s[32];
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < N / 16; ++k) {
          const unsigned at = k / 4 * TILE + k % 4 * 32;
          Product::template shared<>(s, advanced(row_descriptor(stage + L::C), at),
                                     advanced(row_descriptor(stage + L::B), at), k > 0);
        }
        wgmma_commit();
        wgmma_wait<0>();
        pin(s);
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b) store_pairs<T>(s, scalars[b], pair_tiles + b * TILE, me.warp, me.lane);
      }
      fence_async_proxy();
      if (me.thread == 0) copies_wait_read<0>();  // y of the chunk before has left its tiles
      named_barrier(barrier, WARPGROUP);
      if constexpr (O::HAS_Z) {
        if (me.thread == 0) {
#pragma unroll
          for (int b = 0; b < BLOCKS; ++b) {
            const unsigned gate = shared + L::GATE + 8 * (first_block + b);
            barrier_expect(gate, TILE);
            copy_in(y_tiles + b * TILE, z, 0, block + b, chunk * CHUNK, int(place.batch_row), gate, KEEP_FIRST);
          }
        }
      }

#pragma unroll
      for (int b = 0; b < BLOCKS; ++b) {
        const unsigned x_tile = stage + L::X + (first_block + b) * TILE;
        const unsigned pairs = pair_tiles + b * TILE, y_tile = y_tiles + b * TILE;
        float y[32];
        // The state as an operand, at most 32 registers of it at a time.
#pragma unroll
        for (int part = 0; part < N / 16; part += 8) {
          constexpr int DEPTH = N / 16 < 8 ? N / 16 : 8;
          if (part > 0) {
            wgmma_wait<0>();
            pin(y);
          }
          unsigned a[DEPTH][4];
#pragma unroll
          for (int k = 0; k < DEPTH; ++k) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const float* pair = h[b] + 8 * (part + k) + 2 * i;
              a[k][i] = Pair<T>::of(pair[0], pair[1]);
            }
          }
          wgmma_fence();
#pragma unroll
          for (int k = 0; k < DEPTH; ++k) {
            const unsigned at = (part + k) / 4 * TILE + k % 4 * 32;
            Product::template registers<>(y, a[k], advanced(row_descriptor(stage + L::C), at), part + k > 0);
          }
          wgmma_commit();
        }
        scale(h[b], scalars[b].carried[CHUNK - 1]);
        wgmma_wait<0>();
        pin(y);
        unsigned x[4][4], weighed[4][4], finite = 0;
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          load_tiles_transposed(x[k], x_tile + me.channel_tile + k * 2048);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int token = 16 * k + 8 * half + me.column;
            const float2 carried = *reinterpret_cast<const float2*>(scalars[b].carried + token);
            const float2 leaving = *reinterpret_cast<const float2*>(scalars[b].leaving + token);
#pragma unroll
            for (int i = 2 * half; i < 2 * half + 2; ++i) {
              const float x0 = Pair<T>::low(x[k][i]), x1 = Pair<T>::high(x[k][i]);
              float& y0 = y[8 * k + 2 * i];
              float& y1 = y[8 * k + 2 * i + 1];
              y0 *= carried.x, y1 *= carried.y;
              if constexpr (O::HAS_D) y0 += skip[b][i % 2] * x0, y1 += skip[b][i % 2] * x1;
              weighed[k][i] = Pair<T>::of(x0 * leaving.x, x1 * leaving.y);
              finite = Pair<T>::plus_zero_times(finite, x[k][i]);
            }
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
          Product::template registers<>(y, x[k], advanced(row_descriptor(pairs), k * 32), true);
        }
        wgmma_commit();
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          Wgmma<T, N>::template registers<true>(h[b], weighed[k],
                                                advanced(column_descriptor(stage + L::B, TILE), k * 2048), true);
        }
        wgmma_commit();
        wgmma_wait<1>();
        pin(y);
        if constexpr (O::HAS_Z) barrier_wait(shared + L::GATE + 8 * (first_block + b), gate_parity);
#pragma unroll
        for (int k = 0; k < 4; ++k) {
          unsigned r[4];
          if constexpr (O::HAS_Z) {
            load_tiles_transposed(r, y_tile + me.channel_tile + k * 2048);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const float z0 = Pair<T>::low(r[i]), z1 = Pair<T>::high(r[i]);
              y[8 * k + 2 * i] *= __fdividef(z0, 1.0f + exp2_fast(-LOG2E * z0));
              y[8 * k + 2 * i + 1] *= __fdividef(z1, 1.0f + exp2_fast(-LOG2E * z1));
            }
          }
#pragma unroll
          for (int i = 0; i < 4; ++i) r[i] = Pair<T>::of(y[8 * k + 2 * i], y[8 * k + 2 * i + 1]);
          store_tiles_transposed(y_tile + me.channel_tile + k * 2048, r);
        }
        if (poisoned) add_not_finite<T, O::HAS_Z>(x_tile, pairs, y_tile, me.warp, me.lane);
      }
      fence_async_proxy();
      wgmma_wait<0>();
#pragma unroll
      for (int b = 0; b < BLOCKS; ++b) pin(h[b]);
      if (me.lane == 0) barrier_arrive(shared + L::EMPTY + 8 * ring.stage);
      named_barrier(barrier, WARPGROUP);
      if (me.thread == 0) {
#pragma unroll
        for (int b = 0; b < BLOCKS; ++b) {
          copy_out(y_map, 0, block + b, chunk * CHUNK, int(place.batch_row), y_tiles + b * TILE, KEEP_FIRST);
        }
        copies_commit();
      }
      gate_parity ^= 1;
    }

    if (S::SEGMENTS == 1 && piece.end < Z::CHUNKS) {
#pragma unroll
      for (int b = 0; b < BLOCKS; ++b) {
        const long long at = (long long)blockIdx.x * S::BLOCKS_HERE + first_block + b;
        save_state(states + at * STATE_SIZE, h[b], me.thread);
      }
      __threadfence();
      named_barrier(barrier, WARPGROUP);
      if (me.thread == 0) raise_flag(flags + blockIdx.x * S::WARPGROUPS + me.warpgroup);
    }
    if (O::HAS_FINAL && piece.end == Z::CHUNKS) {
#pragma unroll
      for (int b = 0; b < BLOCKS; ++b) {
        store_state<N>(final + (place.batch_row * Z::ALL_BLOCKS + block + b) * STATE_SIZE, h[b], me);
      }
    }
  }
  if (me.thread == 0) copies_wait<0>();
}

}  // namespace

// x, z, y: maps of [batch, seq, blocks, 64], B, C: of [batch, seq, groups, N], boxes of 64 tokens. dt [batch, seq,
// heads], dt_bias, A [1 or batch, heads], D [1 or batch, heads, head_dim], initial, final [batch, heads, head_dim, N].
// states: a slot for each segment but the last of each row, or for each thread block; totals: log2 decay of each of
// these segments and its blocks. flags: zero; one for each thread block and warpgroup. What an option leaves out is not
// touched.
template <typename T, typename D, class Z, class S, class O>
__global__ void __launch_bounds__(WARPGROUP * (1 + S::WARPGROUPS), 1)
    forward(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap B,
            const __grid_constant__ TensorMap C, const __grid_constant__ TensorMap z,
            const __grid_constant__ TensorMap y, const D* dt, const float* dt_bias, const float* A, const float* skip,
            const float* initial, float* states, float* totals, int* flags, float* final, float low, float high) {
  using L = Layout<Z, S, O>;
  extern __shared__ __align__(1024) char memory[];
  const unsigned shared = shared_address(memory);
  if (threadIdx.x == 0) {
    for (int i = 0; i < S::STAGES; ++i) {
      barrier_init(shared + L::FULL + 8 * i, 1 + S::BLOCKS_HERE);
      barrier_init(shared + L::EMPTY + 8 * i, 4 * S::WARPGROUPS);  // every warp
    }
    for (int i = 0; i < S::BLOCKS_HERE; ++i) barrier_init(shared + L::GATE + 8 * i, 1);
    fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x < WARPGROUP) {
    give_registers<24>();
    // Waits for no earlier kernel: none of this plan writes what it reads, and the first one starts after all others.
    provide<D, Z, S, O>(memory, x, B, C, dt, dt_bias, A, low, high);
  } else {
    take_registers<240>();
    wait_for_earlier_kernels();
    if constexpr (O::STATE_ONLY) {
      compute_states<T, Z, S, O>(memory, initial, states, totals);
    } else {
      compute<T, Z, S, O>(memory, z, y, skip, initial, states, flags, final);
    }
  }
}

// End states of segments to start states of the segments that follow, in place: states [rows, Slots, blocks, Size],
// totals [rows, Slots, blocks]. One thread per four numbers.
template <int Slots, int Blocks, int Size>
__global__ void carry_states(float* states, const float* totals) {
  let_next_kernel_start();
  wait_for_earlier_kernels();
  constexpr int PER_BLOCK = Size / 4, PER_SLOT = Blocks * PER_BLOCK;
  const long long index = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  const long long row = index / PER_SLOT;
  const int at = int(index % PER_SLOT), block = at / PER_BLOCK;
  float4* to = reinterpret_cast<float4*>(states) + row * Slots * PER_SLOT + at;
  totals += row * Slots * Blocks + block;
  float4 h = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  constexpr int AHEAD = 8;
  for (int first = 0; first < Slots; first += AHEAD) {
    float4 end[AHEAD];
    float left[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      if (first + i >= Slots) break;
      end[i] = to[(long long)(first + i) * PER_SLOT];
      left[i] = exp2_fast(totals[(first + i) * Blocks]);
    }
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      if (first + i >= Slots) break;
      if (first + i > 0) {
        h.x = left[i] * h.x + end[i].x, h.y = left[i] * h.y + end[i].y;
        h.z = left[i] * h.z + end[i].z, h.w = left[i] * h.w + end[i].w;
        to[(long long)(first + i) * PER_SLOT] = h;
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

// The gradients of a Mamba-2 scan in 16-bit types, chunk by chunk of 128 tokens.
//
// Notation of a chunk of one head: g the inclusive running sum of log2 decays, w_ij = exp2(g_i - g_j) for i >= j, else
// 0, s the step sizes, e_j = exp2(g_last - g_j), S the state at the chunk's start, T the adjoint of the state at its
// end, both [head_dim, state]. With G = C B', E = dY X' and M = G w:
//
//   dx_j = s_j (sum_i M_ij dy_i + e_j T B_j) + D dy_j        dG = sum over heads of E w s
//   dB_j = sum_i dG_ij C_i + sum over heads of s_j e_j T' x_j
//   dC_i = sum_j dG_ij B_j + sum over heads of exp2(g_i) S' dy_i
//   ds_j = sum_i E_ij M_ij + e_j <x_j, T B_j>, and the gradients of g follow from the same products.
//
// Kernels, in order: step_sizes; walk, which stores S and T of every chunk, both directions in one launch (with several
// segments of a row first without storing, to find what every segment gives alone, which join turns into the states
// between them); chunk_gradients, one block per chunk and block of heads of one group, which goes through its heads in
// order and keeps dB and dC in registers; [sum_parts;] step_gradients and parameter_gradients.
//
// A head of more than 64 channels is several pieces of 64 that share their decays: the kernels count pieces. Rows count
// from `first_row`: a launch may cover some rows only, then states and starts hold just those.

#include "async_copy.cuh"
#include "decay.cuh"
#include "fragments.cuh"
#include "shared_memory.cuh"
#include "values.cuh"
#include "wgmma.cuh"

using namespace jax_ssd;

namespace {

constexpr int TOKENS = 128;             // of a chunk
constexpr int HALF = 64;                // tokens of a copy
constexpr int WIDTH = 64;               // channels of a piece
constexpr float MASKED = -1e30f;        // an exponent whose exp2 is exactly zero
constexpr int TILE = HALF * WIDTH * 2;  // bytes of a copied tile, [64][64] of 16 bits

// What all kernels need to know of the sizes.
struct Sizes {
  int seq, heads, groups, pieces, chunks;  // pieces: of one head
  __device__ int units() const { return heads * pieces; }
  __device__ int group_units() const { return heads / groups * pieces; }
  __device__ size_t padded() const { return size_t(chunks) * TOKENS; }
};

__device__ __forceinline__ void copy_line_in(unsigned to, const void* from, unsigned bytes, unsigned barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

// A block's tile of heads in the kernels that cross between [seq, heads] and [heads, seq].
constexpr int HEADS = 32;

struct HeadTile {
  int chunk, first_head, row;
};

__device__ __forceinline__ HeadTile head_tile(int chunks, int heads) {
  const int tiles = (heads + HEADS - 1) / HEADS, block = blockIdx.x / chunks;
  return {int(blockIdx.x % chunks), block % tiles * HEADS, block / tiles};
}

}  // namespace

// dt [batch, seq, heads] -> step, decay [batch, heads, chunks * 128]: step sizes, 0 past the end, and the inclusive
// running log2 decay of the chunk. Grid chunks * head tiles of 32 * batch, 256 threads.
template <typename D, bool SharedParams, bool HasBias, bool Softplus>
__global__ void __launch_bounds__(256) step_sizes(const D* dt, const float* bias, const float* A, float* step,
                                                  float* decay, int seq, int heads, int chunks, float low, float high) {
  __shared__ float tile[HEADS][TOKENS + 1];
  const auto [chunk, first_head, row] = head_tile(chunks, heads);
  const int count = min(HEADS, heads - first_head);
  for (int i = threadIdx.x; i < TOKENS * count; i += 256) {
    const int token = chunk * TOKENS + i / count, head = first_head + i % count;
    float value = 0;
    if (token < seq) {
      value = to_float(dt[(size_t(row) * seq + token) * heads + head]);
      if (HasBias) value += bias[(SharedParams ? 0 : row * heads) + head];
      value = step_size<Softplus>(value, low, high);
    }
    tile[i % count][i / count] = value;
  }
  __syncthreads();
  const int lane = threadIdx.x % 32;
  for (int h = threadIdx.x / 32; h < count; h += 8) {
    const int head = first_head + h;
    const float rate = A[(SharedParams ? 0 : row * heads) + head];
    const size_t at = ((size_t(row) * heads + head) * chunks + chunk) * TOKENS;
    float before = 0;
    for (int k = 0; k < TOKENS; k += 32) {
      const float size = tile[h][k + lane];
      float sum = chunk * TOKENS + k + lane < seq ? log2_decay(size, rate) : 0.0f;
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        const float left = __shfl_up_sync(~0u, sum, offset);
        if (lane >= offset) sum += left;
      }
      sum += before;
      before = __shfl_sync(~0u, sum, 31);
      step[at + k + lane] = size;
      decay[at + k + lane] = sum;
    }
  }
}

namespace {

constexpr int STAGES = 3;

// Shared memory of a walk.
template <int N, int Heads>
struct WalkMemory {
  static constexpr int Tiles = N / 64;
  static constexpr int Stage = (Heads + Tiles) * TILE;
  static constexpr int Weights = STAGES * Stage;  // [2][Heads][128] float32
  static constexpr int Barriers = Weights + 2 * Heads * TOKENS * 4;
  static constexpr int Bytes = Barriers + STAGES * 8 + 1024;  // 1024: what aligning the tiles may cost
};

// Accumulators [64][N] of a warpgroup from or to float32 [64][N] in memory.
template <int N>
__device__ __forceinline__ void load_state(float (&state)[N / 2], const float* from) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4;
#pragma unroll
  for (int j = 0; j < N / 8; ++j) {
    const float2 a = *reinterpret_cast<const float2*>(from + row * N + 8 * j + 2 * (lane % 4));
    const float2 b = *reinterpret_cast<const float2*>(from + (row + 8) * N + 8 * j + 2 * (lane % 4));
    state[4 * j] = a.x, state[4 * j + 1] = a.y, state[4 * j + 2] = b.x, state[4 * j + 3] = b.y;
  }
}

template <int N>
__device__ __forceinline__ void store_state(const float (&state)[N / 2], float* to) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4;
#pragma unroll
  for (int j = 0; j < N / 8; ++j) {
    *reinterpret_cast<float2*>(to + row * N + 8 * j + 2 * (lane % 4)) = {state[4 * j], state[4 * j + 1]};
    *reinterpret_cast<float2*>(to + (row + 8) * N + 8 * j + 2 * (lane % 4)) = {state[4 * j + 2], state[4 * j + 3]};
  }
}

// Rows `row` and `row + 8` (of this lane) of accumulators of Columns columns, rounded to T, to rows in memory.
template <typename T, int Columns>
__device__ __forceinline__ void store_rows(const float (&d)[Columns / 2], T* upper, T* lower, bool has_upper,
                                           bool has_lower) {
  const int quad = threadIdx.x % 4;
#pragma unroll
  for (int m = 0; m < Columns / 32; ++m) {
    unsigned a[4], b[4];
#pragma unroll
    for (int q = 0; q < 4; ++q) {
      const int j = 4 * (4 * m + q);
      a[q] = Pair<T>::of(d[j], d[j + 1]);
      b[q] = Pair<T>::of(d[j + 2], d[j + 3]);
    }
    transpose_quad(a);
    transpose_quad(b);
    if (has_upper) *reinterpret_cast<uint4*>(upper + 32 * m + 8 * quad) = {a[0], a[1], a[2], a[3]};
    if (has_lower) *reinterpret_cast<uint4*>(lower + 32 * m + 8 * quad) = {b[0], b[1], b[2], b[3]};
  }
}

}  // namespace

// Walks the chunks of a segment, forwards with (x, B) from the state at its start, or backwards with (dy, C) from the
// adjoint of the state at its end; one warpgroup per piece of a head, Heads of them in a block share B or C.
//
// Stores: the state at every chunk's start and the adjoint at every chunk's end to states and adjoints [rows, units,
// chunks, 64, N] of T, and the first chunk's adjoint of its start to dinitial [batch, units, 64, N] (if not null).
// starts, stops [rows, units, segments, 64, N] float32, null for zero. Otherwise: what a segment gives alone, from
// zero, to starts of the segment after it, or stops of the one before.
// Grid 2 * (units / Heads) * segments (if not Stores, less one) * rows, the direction varies fastest.
template <typename T, int N, int Heads, bool Stores>
__global__ void __launch_bounds__(Heads * 128, 4 / Heads)
    walk(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap dy, const __grid_constant__ TensorMap B,
         const __grid_constant__ TensorMap C, const float* step, const float* decay, float* starts, float* stops,
         T* states, T* adjoints, float* dinitial, int seq, int heads, int groups, int pieces, int chunks, int segments,
         int segment_chunks, int first_row) {
  using Memory = WalkMemory<N, Heads>;
  extern __shared__ char raw[];
  const unsigned base = (shared_address(raw) + 1023) & ~1023u;
  float* weights = reinterpret_cast<float*>(raw + (base - shared_address(raw)) + Memory::Weights);
  const unsigned full = base + Memory::Barriers;
  const Sizes sizes{seq, heads, groups, pieces, chunks};

  const int walked = Stores ? segments : segments - 1;
  int block = blockIdx.x;
  const bool backwards = block % 2;
  block /= 2;
  const int first_unit = block % (sizes.units() / Heads) * Heads;
  block /= sizes.units() / Heads;
  const int segment = block % walked + (!Stores && backwards), local_row = block / walked;
  const int row = first_row + local_row, group = first_unit / sizes.group_units();
  const int first = segment * segment_chunks, count = min(segment_chunks, chunks - first);
  const bool last_matters = !Stores || (backwards && segment == 0 && dinitial != nullptr);
  const int stages = 2 * (last_matters ? count : count - 1);

  const int piece = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const int unit = first_unit + piece;
  const size_t of_unit = size_t(local_row) * sizes.units() + unit;
  const float* g = decay + (size_t(row) * heads + unit / pieces) * sizes.padded();
  const float* s = step + (size_t(row) * heads + unit / pieces) * sizes.padded();
  auto chunk_at = [&](int k) { return backwards ? first + count - 1 - k : first + k; };

  auto load = [&](int k) {  // half a chunk
    const unsigned barrier = full + k % STAGES * 8, to = base + k % STAGES * Memory::Stage;
    const int token = chunk_at(k / 2) * TOKENS + k % 2 * HALF;
    barrier_expect(barrier, Memory::Stage);
    for (int i = 0; i < Heads; ++i) {
      if (backwards) {
        copy_in(to + i * TILE, dy, 0, first_unit + i, token, row, barrier, KEEP_LAST);
      } else {
        copy_in(to + i * TILE, x, 0, first_unit + i, token, row, barrier, KEEP_LAST);
      }
    }
    for (int i = 0; i < Memory::Tiles; ++i) {
      if (backwards) {
        copy_in(to + (Heads + i) * TILE, C, i * 64, group, token, row, barrier, KEEP_LAST);
      } else {
        copy_in(to + (Heads + i) * TILE, B, i * 64, group, token, row, barrier, KEEP_LAST);
      }
    }
  };

  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) barrier_init(full + i * 8, 1);
    fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int k = 0; k < min(STAGES, stages); ++k) load(k);
  }

  float state[N / 2];
#pragma unroll
  for (int i = 0; i < N / 2; ++i) state[i] = 0;
  const float* entered = backwards ? stops : starts;
  if (Stores && entered != nullptr) load_state<N>(state, entered + (of_unit * segments + segment) * (WIDTH * N));

  int stage = 0;
  for (int k = 0; k < count; ++k) {
    const int chunk = chunk_at(k);
    const float last = g[chunk * TOKENS + TOKENS - 1];
    if (stage < stages) {
      // A chunk's weights are read until the barrier that ends its second half, so two buffers suffice.
      const int token = threadIdx.x % 128;
      const float own = g[chunk * TOKENS + token];
      weights[(k % 2 * Heads + piece) * TOKENS + token] =
          backwards ? exp2_fast(own) : s[chunk * TOKENS + token] * exp2_fast(last - own);
      named_barrier(1 + piece, 128);
    }
    if (Stores) {
      const int p = warp * 16 + lane / 4;
      T* to = (backwards ? adjoints : states) + (of_unit * chunks + chunk) * (WIDTH * N);
      store_rows<T, N>(state, to + p * N, to + (p + 8) * N, true, true);
    }
    if (stage == stages) break;
    const float carried = exp2_fast(last);
#pragma unroll
    for (int i = 0; i < N / 2; ++i) state[i] *= carried;
    for (int half = 0; half < 2; ++half, ++stage) {
      const unsigned tiles = base + stage % STAGES * Memory::Stage;
      const float* weight = weights + (k % 2 * Heads + piece) * TOKENS + half * HALF;
      barrier_wait(full + stage % STAGES * 8, stage / STAGES % 2);
      unsigned a[4][4];
#pragma unroll
      for (int d = 0; d < 4; ++d) {  // [64 channels][16 tokens], the tile's transpose
        const int token = d * 16 + lane % 8 + lane / 16 * 8;
        load_tiles_transposed(a[d], tiles + piece * TILE + swizzled(token, warp * 2 + lane / 8 % 2));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 w = *reinterpret_cast<const float2*>(weight + d * 16 + i / 2 * 8 + 2 * (lane % 4));
          const float2 v = both_of<T>(a[d][i]);
          a[d][i] = Pair<T>::of(v.x * w.x, v.y * w.y);
        }
      }
      wgmma_fence();
      const unsigned long long other = column_descriptor(tiles + Heads * TILE, TILE);
#pragma unroll
      for (int d = 0; d < 4; ++d) {
        Wgmma<T, N>::template registers<true>(state, a[d], advanced(other, d * 2048), true);
      }
      wgmma_commit();
      wgmma_wait<0>();
      pin(state);
      __syncthreads();
      if (threadIdx.x == 0 && stage + STAGES < stages) load(stage + STAGES);
    }
  }
  if (!Stores) {
    float* alone = backwards ? stops : starts;
    store_state<N>(state, alone + (of_unit * segments + (backwards ? segment - 1 : segment + 1)) * (WIDTH * N));
  } else if (last_matters) {
    store_state<N>(state, dinitial + (size_t(row) * sizes.units() + unit) * (WIDTH * N));
  }
}

// From what the segments give alone to the state at every segment's start and its adjoint at every segment's end, in
// place. initial, dfinal [rows, units, 64 * N] float32, null for zero. Grid 2 * (64 * N / 1024) * units * rows, 256
// threads, four elements each.
template <int N>
__global__ void __launch_bounds__(256)
    join(const float* decay, const float* initial, const float* dfinal, float* starts, float* stops, int heads,
         int pieces, int chunks, int segments, int segment_chunks, int first_row) {
  __shared__ float factor[64];  // of a segment
  constexpr size_t elements = WIDTH * N;
  const bool backwards = blockIdx.x % 2;
  const size_t of_unit = blockIdx.x / (2 * elements / 1024),
               at = blockIdx.x / 2 % (elements / 1024) * 1024 + threadIdx.x * 4;
  const float* g = decay + (size_t(first_row) * heads + of_unit / pieces) * chunks * TOKENS;
  if (threadIdx.x < segments) {
    float total = 0;
    const int first = threadIdx.x * segment_chunks, end = min(first + segment_chunks, chunks);
    for (int chunk = first; chunk < end; ++chunk) total += g[size_t(chunk) * TOKENS + TOKENS - 1];
    factor[threadIdx.x] = exp2_fast(total);
  }
  __syncthreads();
  const float* entering = backwards ? dfinal : initial;
  float* array = (backwards ? stops : starts) + of_unit * segments * elements + at;
  float4 state{0, 0, 0, 0};
  if (entering != nullptr) state = *reinterpret_cast<const float4*>(entering + of_unit * elements + at);
  auto slot = [&](int k) { return reinterpret_cast<float4*>(array + (backwards ? segments - 1 - k : k) * elements); };
  float4 next = *slot(1);
  for (int k = 0; k < segments; ++k) {
    *slot(k) = state;
    if (k + 1 == segments) break;
    const float4 alone = next;
    if (k + 2 < segments) next = *slot(k + 2);
    const float f = factor[backwards ? segments - 1 - k : k];
    state = {f * state.x + alone.x, f * state.y + alone.y, f * state.z + alone.z, f * state.w + alone.w};
  }
}

namespace {

constexpr int STRIPS = TOKENS / 16;
constexpr int PAIR_TILES = STRIPS * (STRIPS + 1) / 2;  // 16 x 16 tiles that hold a pair of a token and a later one

// Shared memory of chunk_gradients.
template <int N>
struct ChunkMemory {
  static constexpr int Tiles = N / 64;
  static constexpr int Rows = 2 * TILE;              // a chunk's x or dy of one piece, or 64 columns of B
  static constexpr int B = 0, C = B + Tiles * Rows;  // [Tiles][128][64]
  static constexpr int S = C + Tiles * Rows, Adjoint = S + Tiles * TILE;  // [Tiles][64 channels][64]
  static constexpr int X = Adjoint + Tiles * TILE, DY = X + 2 * Rows;     // of this head and the next
  static constexpr int PairGradient = DY + 2 * Rows;                      // dG, float32 tiles as lanes hold them
  static constexpr int Pairs = PairGradient + PAIR_TILES * 1024;          // G, rounded to T
  static constexpr int Decay = Pairs + PAIR_TILES * 512;                  // [2][128] float32
  static constexpr int Step = Decay + 2 * TOKENS * 4;                     // [2][128]
  static constexpr int Skip = Step + 2 * TOKENS * 4;                      // [2][64]
  static constexpr int ByTarget = Skip + 2 * WIDTH * 4;          // [strips][128]: sums over the strip's sources
  static constexpr int ByStep = ByTarget + STRIPS * TOKENS * 4;  // [128]
  static constexpr int ByDecay = ByStep + TOKENS * 4;            // [128]
  static constexpr int ByLast = ByDecay + TOKENS * 4;            // [strips]
  static constexpr int BySkip = ByLast + STRIPS * 4;             // [strips][64]
  static constexpr int Barriers = BySkip + STRIPS * WIDTH * 4;
  static constexpr int Bytes = Barriers + 5 * 8 + 1024;
};

// Tile (strip, target) of the triangle, target >= strip.
__device__ __forceinline__ int pair_tile(int strip, int target) {
  return strip * STRIPS - strip * (strip - 1) / 2 + target - strip;
}

// The pairs of a strip of 16 sources, whose x, g and s this warp's lanes hold, with 16 targets: adds M dy to u, E w s
// to dG, and E M to the sums over targets (`later`, without a token's pair with itself, and `same`, all of the diagonal
// tile). The sums over sources of s E M go to by_target.
template <typename T, bool Diagonal>
__device__ __forceinline__ void add_pairs(float (&u)[WIDTH / 2], float (&later)[2], float (&same)[2],
                                          const unsigned (&x_own)[4][4], const float (&g_own)[2],
                                          const float (&s_own)[2], const float* g, const uint4* pairs,
                                          float4* pair_gradient, float* by_target, unsigned dy_tile, unsigned left,
                                          unsigned right, int strip, int target) {
  const int lane = threadIdx.x % 32, quad = lane % 4;
  float joint[2][4] = {};
#pragma unroll
  for (int d = 0; d < 4; ++d) {
    unsigned b[4];
    load_tiles(b, dy_tile + target * 2048 + (right ^ d * 32));
    multiply(joint[0], x_own[d], b[0], b[1], T());
    multiply(joint[1], x_own[d], b[2], b[3], T());
  }
  const int at = pair_tile(strip, target);
  const uint4 packed = pairs[at * 32 + lane];
  const unsigned kept[4] = {packed.x, packed.y, packed.z, packed.w};
  float4 sums[2] = {pair_gradient[at * 64 + lane], pair_gradient[at * 64 + 32 + lane]};
  unsigned mixed[4];
  float column[2][2] = {};
#pragma unroll
  for (int q = 0; q < 2; ++q) {
    const float2 g_target = *reinterpret_cast<const float2*>(g + target * 16 + q * 8 + 2 * quad);
    float* sum = reinterpret_cast<float*>(&sums[q]);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float2 product = both_of<T>(kept[2 * q + h]);
      float m[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float exponent = (c ? g_target.y : g_target.x) - g_own[h];
        const int ahead = q * 8 + 2 * quad + c - (lane / 4 + 8 * h);
        if constexpr (Diagonal) exponent = ahead >= 0 ? exponent : MASKED;
        const float w = exp2_fast(exponent);
        m[c] = (c ? product.y : product.x) * w;
        const float e = joint[q][2 * h + c], both = e * m[c];
        sum[2 * h + c] += e * w * s_own[h];
        if constexpr (Diagonal) same[h] += both;
        if (!Diagonal || ahead > 0) {
          later[h] += both;
          column[q][c] += s_own[h] * both;
        }
      }
      mixed[2 * q + h] = Pair<T>::of(m[0], m[1]);
    }
  }
  pair_gradient[at * 64 + lane] = sums[0];
  pair_gradient[at * 64 + 32 + lane] = sums[1];
#pragma unroll
  for (int d = 0; d < 4; ++d) {
    unsigned b[4];
    load_tiles_transposed(b, dy_tile + target * 2048 + (left ^ d * 32));
    multiply(reinterpret_cast<float (&)[4]>(u[8 * d]), mixed, b[0], b[1], T());
    multiply(reinterpret_cast<float (&)[4]>(u[8 * d + 4]), mixed, b[2], b[3], T());
  }
  // Sums over the 16 sources: lanes share the work until each has one target.
  const bool second = lane & 16, odd = lane & 8;
  float fold[2];
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const float other = __shfl_xor_sync(~0u, second ? column[0][c] : column[1][c], 16);
    fold[c] = (second ? column[1][c] : column[0][c]) + other;
  }
  float one = (odd ? fold[1] : fold[0]) + __shfl_xor_sync(~0u, odd ? fold[0] : fold[1], 8);
  one += __shfl_xor_sync(~0u, one, 4);
  if (!(lane & 4)) by_target[target * 16 + second * 8 + 2 * quad + odd] = one;
}

}  // namespace

// Everything that one chunk gives, for a block of the heads of one group. S and T as `walk` stored them; dx [batch,
// seq, units, 64]; dB, dC [batch, seq, groups, N] of T, or with Partial float32 sums of this block's heads [head
// blocks, batch, seq, groups, N]; dstep, ddecay [batch, units, chunks * 128] and dskip [batch, units, chunks, 64]
// float32. Grid head_blocks * groups * chunks * rows; 256 threads. A warp owns 16 tokens, as sources and as targets;
// the strips of warps w and w + 4, which share a scheduler, have nine tiles of pairs together.
template <typename T, int N, bool HasD, bool SharedParams, bool Partial>
__global__ void __launch_bounds__(256, 1)
    chunk_gradients(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap dy,
                    const __grid_constant__ TensorMap B, const __grid_constant__ TensorMap C,
                    const __grid_constant__ TensorMap states, const __grid_constant__ TensorMap adjoints,
                    const float* step, const float* decay, const float* skip, T* dx, void* dB, void* dC, float* dstep,
                    float* ddecay, float* dskip, int seq, int heads, int groups, int pieces, int chunks, int batch,
                    int head_blocks, int block_units, int first_row) {
  using Memory = ChunkMemory<N>;
  extern __shared__ char raw[];
  const unsigned base = (shared_address(raw) + 1023) & ~1023u;
  char* memory = raw + (base - shared_address(raw));
  const unsigned full_group = base + Memory::Barriers, full_states = full_group + 8, full_adjoints = full_group + 16;
  const unsigned full_tokens = full_group + 24;  // two
  const Sizes sizes{seq, heads, groups, pieces, chunks};

  int block = blockIdx.x;
  const int head_block = block % head_blocks;
  block /= head_blocks;
  const int group = block % groups;
  block /= groups;
  const int chunk = block % chunks, local_row = block / chunks, row = first_row + local_row;
  const int first_unit = group * sizes.group_units() + head_block * block_units;
  const int count = min(block_units, sizes.group_units() - head_block * block_units);

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, quad = lane % 4;
  const int strip = warp < 4 ? warp : 11 - warp;
  const int upper = strip * 16 + lane / 4, lower = upper + 8;  // this lane's two tokens

  auto load_tokens = [&](int k) {
    const unsigned barrier = full_tokens + k % 2 * 8;
    const int unit = first_unit + k, token = chunk * TOKENS;
    barrier_expect(barrier, 2 * Memory::Rows + 2 * TOKENS * 4 + (HasD ? WIDTH * 4 : 0));
    for (int i = 0; i < 2; ++i) {
      copy_in(base + Memory::X + k % 2 * Memory::Rows + i * TILE, x, 0, unit, token + i * HALF, row, barrier,
              KEEP_FIRST);
      copy_in(base + Memory::DY + k % 2 * Memory::Rows + i * TILE, dy, 0, unit, token + i * HALF, row, barrier,
              KEEP_FIRST);
    }
    const size_t at = (size_t(row) * heads + unit / pieces) * sizes.padded() + token;
    copy_line_in(base + Memory::Decay + k % 2 * TOKENS * 4, decay + at, TOKENS * 4, barrier);
    copy_line_in(base + Memory::Step + k % 2 * TOKENS * 4, step + at, TOKENS * 4, barrier);
    if (HasD) {
      const float* from = skip + (size_t(SharedParams ? 0 : row) * sizes.units() + unit) * WIDTH;
      copy_line_in(base + Memory::Skip + k % 2 * WIDTH * 4, from, WIDTH * 4, barrier);
    }
  };
  auto load_state_tiles = [&](const TensorMap& map, unsigned to, int k, unsigned barrier) {
    barrier_expect(barrier, Memory::Tiles * TILE);
    for (int i = 0; i < Memory::Tiles; ++i) {
      copy_in(to + i * TILE, map, i * 64, 0, chunk, local_row * sizes.units() + first_unit + k, barrier, KEEP_FIRST);
    }
  };

  if (threadIdx.x == 0) {
    for (int i = 0; i < 5; ++i) barrier_init(full_group + i * 8, 1);
    fence_barrier_init();
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    barrier_expect(full_group, 2 * Memory::Tiles * Memory::Rows);
    for (int i = 0; i < 2 * Memory::Tiles; ++i) {
      const int to = i / 2 * Memory::Rows + i % 2 * TILE, token = chunk * TOKENS + i % 2 * HALF;
      copy_in(base + Memory::B + to, B, i / 2 * 64, group, token, row, full_group, KEEP_LAST);
      copy_in(base + Memory::C + to, C, i / 2 * 64, group, token, row, full_group, KEEP_LAST);
    }
    load_tokens(0);
    load_state_tiles(adjoints, base + Memory::Adjoint, 0, full_adjoints);
    load_state_tiles(states, base + Memory::S, 0, full_states);
    if (count > 1) load_tokens(1);
  }

  // Offsets of the fragments of 16 rows and 16 columns (the next 16: ^ 32, the next 16 rows: + 2048), of the left
  // factor or, transposed, of one whose rows are summed over; and of a right factor whose columns are summed over.
  const unsigned left = swizzled(lane % 16, lane / 16), right = swizzled(lane % 8 + lane / 16 * 8, lane / 8 % 2);
  auto* pair_gradient = reinterpret_cast<float4*>(memory + Memory::PairGradient);
  auto* pairs = reinterpret_cast<uint4*>(memory + Memory::Pairs);

  // G of this warp's sources, [source][target], kept as the lanes hold it.
  barrier_wait(full_group, 0);
#pragma unroll 1
  for (int target = strip; target < STRIPS; ++target) {
    float tile[2][4] = {};
#pragma unroll
    for (int d = 0; d < N / 16; ++d) {
      unsigned a[4], b[4];
      load_tiles(a, base + Memory::B + d / 4 * Memory::Rows + strip * 2048 + (left ^ d % 4 * 32));
      load_tiles(b, base + Memory::C + d / 4 * Memory::Rows + target * 2048 + (right ^ d % 4 * 32));
      multiply(tile[0], a, b[0], b[1], T());
      multiply(tile[1], a, b[2], b[3], T());
    }
    const int at = pair_tile(strip, target);
    pairs[at * 32 + lane] = {Pair<T>::of(tile[0][0], tile[0][1]), Pair<T>::of(tile[0][2], tile[0][3]),
                             Pair<T>::of(tile[1][0], tile[1][1]), Pair<T>::of(tile[1][2], tile[1][3])};
    pair_gradient[at * 64 + lane] = pair_gradient[at * 64 + 32 + lane] = {0, 0, 0, 0};
  }

  float source_gradient[N / 2], target_gradient[N / 2];  // dB and dC of this warp's tokens
#pragma unroll
  for (int i = 0; i < N / 2; ++i) source_gradient[i] = target_gradient[i] = 0;

#pragma unroll 1
  for (int k = 0; k < count; ++k) {
    const int buffer = k % 2;
    const unsigned x_tile = base + Memory::X + buffer * Memory::Rows;
    const unsigned dy_tile = base + Memory::DY + buffer * Memory::Rows;
    const float* g = reinterpret_cast<const float*>(memory + Memory::Decay) + buffer * TOKENS;
    const float* s = reinterpret_cast<const float*>(memory + Memory::Step) + buffer * TOKENS;
    barrier_wait(full_tokens + buffer * 8, k / 2 % 2);
    const float g_own[2] = {g[upper], g[lower]}, s_own[2] = {s[upper], s[lower]}, g_last = g[TOKENS - 1];
    unsigned x_own[4][4];
#pragma unroll
    for (int d = 0; d < 4; ++d) load_tiles(x_own[d], x_tile + strip * 2048 + (left ^ d * 32));

    // From the chunk's end: u = T B_j, and dB += s e x T.
    const float leave[2] = {exp2_fast(g_last - g_own[0]), exp2_fast(g_last - g_own[1])};
    float u[WIDTH / 2], leaving[2] = {0, 0};
    barrier_wait(full_adjoints, k % 2);
    {
      unsigned scaled[4][4];
#pragma unroll
      for (int d = 0; d < 4; ++d) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 v = both_of<T>(x_own[d][i]);
          const float weight = s_own[i % 2] * leave[i % 2];
          scaled[d][i] = Pair<T>::of(v.x * weight, v.y * weight);
        }
      }
      const unsigned adjoint = base + Memory::Adjoint;
      wgmma_fence();
#pragma unroll
      for (int d = 0; d < 4; ++d) {
        const unsigned long long b = advanced(column_descriptor(adjoint, TILE), d * 2048);
        Wgmma<T, N>::template registers<true>(source_gradient, scaled[d], b, true);
      }
      wgmma_commit();
#pragma unroll
      for (int columns = 0; columns < Memory::Tiles; ++columns) {
        unsigned a[4][4];
#pragma unroll
        for (int d = 0; d < 4; ++d) {
          load_tiles(a[d], base + Memory::B + columns * Memory::Rows + strip * 2048 + (left ^ d * 32));
        }
        wgmma_fence();
#pragma unroll
        for (int d = 0; d < 4; ++d) {
          const unsigned long long b = advanced(row_descriptor(adjoint + columns * TILE), d * 32);
          Wgmma<T, WIDTH>::template registers<false>(u, a[d], b, columns + d > 0);
        }
        wgmma_commit();
        wgmma_wait<0>();
      }
      pin(u);
      pin(source_gradient);
    }
#pragma unroll
    for (int d = 0; d < 4; ++d) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 v = both_of<T>(x_own[d][i]);
        float* part = u + 4 * (2 * d + i / 2) + 2 * (i % 2);
        leaving[i % 2] += part[0] * v.x + part[1] * v.y;
        part[0] *= leave[i % 2];
        part[1] *= leave[i % 2];
      }
    }
    leaving[0] = leave[0] * quad_sum(leaving[0]);
    leaving[1] = leave[1] * quad_sum(leaving[1]);

    barrier_wait(full_states, k % 2);
    float across = 0;  // this thread's part of <S, T>
#pragma unroll
    for (int i = 0; i < N / 32; ++i) {
      const uint4 a = reinterpret_cast<const uint4*>(memory + Memory::S)[threadIdx.x + i * 256];
      const uint4 b = reinterpret_cast<const uint4*>(memory + Memory::Adjoint)[threadIdx.x + i * 256];
      const unsigned of_state[4] = {a.x, a.y, a.z, a.w}, of_adjoint[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const float2 v = both_of<T>(of_state[j]), w = both_of<T>(of_adjoint[j]);
        across += v.x * w.x + v.y * w.y;
      }
    }
    across *= exp2_fast(g_last);
    __syncthreads();
    if (threadIdx.x == 0 && k + 1 < count) {
      load_state_tiles(adjoints, base + Memory::Adjoint, k + 1, full_adjoints);
    }

    float* by_step = reinterpret_cast<float*>(memory + Memory::ByStep);
    if (quad == 0) {
      by_step[upper] = leaving[0];
      by_step[lower] = leaving[1];
      across += s_own[0] * leaving[0] + s_own[1] * leaving[1];
    }
    across = warp_sum(across);
    if (lane == 0) reinterpret_cast<float*>(memory + Memory::ByLast)[strip] = across;

    // Pairs: this warp's sources with every target from them on.
    float later[2] = {0, 0}, same[2] = {0, 0};  // sums of E M over later targets, and over all of the diagonal tile
    float* by_target = reinterpret_cast<float*>(memory + Memory::ByTarget) + strip * TOKENS;
    add_pairs<T, true>(u, later, same, x_own, g_own, s_own, g, pairs, pair_gradient, by_target, dy_tile, left, right,
                       strip, strip);
    same[0] = same[0] - later[0], same[1] = same[1] - later[1];
#pragma unroll 1
    for (int target = strip + 1; target < STRIPS; ++target) {
      add_pairs<T, false>(u, later, same, x_own, g_own, s_own, g, pairs, pair_gradient, by_target, dy_tile, left, right,
                          strip, target);
    }

    // dx, and dD of this warp's tokens.
    unsigned dy_own[4][4];
#pragma unroll
    for (int d = 0; d < 4; ++d) load_tiles(dy_own[d], dy_tile + strip * 2048 + (left ^ d * 32));
#pragma unroll
    for (int i = 0; i < WIDTH / 2; ++i) u[i] *= s_own[i / 2 % 2];
    if constexpr (HasD) {
      const float* d_row = reinterpret_cast<const float*>(memory + Memory::Skip) + buffer * WIDTH;
      float part[16];
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float2 d = *reinterpret_cast<const float2*>(d_row + 8 * j + 2 * quad);
        part[2 * j] = part[2 * j + 1] = 0;
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float2 v = both_of<T>(dy_own[j / 2][j % 2 * 2 + h]), w = both_of<T>(x_own[j / 2][j % 2 * 2 + h]);
          u[4 * j + 2 * h] += d.x * v.x;
          u[4 * j + 2 * h + 1] += d.y * v.y;
          part[2 * j] += v.x * w.x;
          part[2 * j + 1] += v.y * w.y;
        }
      }
      float* by_skip = reinterpret_cast<float*>(memory + Memory::BySkip) + strip * WIDTH;
#pragma unroll
      for (int i = 0; i < 8; ++i) {  // column pair of eight: 8 * (i / 2) + 32 * upper half
        const bool high = lane & 16;
        part[i] = (high ? part[i + 8] : part[i]) + __shfl_xor_sync(~0u, high ? part[i] : part[i + 8], 16);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool high = lane & 8;
        part[i] = (high ? part[i + 4] : part[i]) + __shfl_xor_sync(~0u, high ? part[i] : part[i + 4], 8);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const bool high = lane & 4;
        part[i] = (high ? part[i + 2] : part[i]) + __shfl_xor_sync(~0u, high ? part[i] : part[i + 2], 4);
      }
      const int j = (lane & 16 ? 4 : 0) + (lane & 8 ? 2 : 0) + (lane & 4 ? 1 : 0);
      *reinterpret_cast<float2*>(by_skip + 8 * j + 2 * quad) = {part[0], part[1]};
    }
    {
      const size_t at = ((size_t(row) * seq + chunk * TOKENS + upper) * sizes.units() + first_unit + k) * WIDTH;
      store_rows<T, WIDTH>(u, dx + at, dx + at + size_t(8) * sizes.units() * WIDTH, chunk * TOKENS + upper < seq,
                           chunk * TOKENS + lower < seq);
    }

    // From the chunk's start: dC += exp2(g) dy S, and what it says of the decays.
    const float enter[2] = {exp2_fast(g_own[0]), exp2_fast(g_own[1])};
    float entering[2] = {0, 0};
#pragma unroll
    for (int half = 0; half < Memory::Tiles; ++half) {
      float product[32];
      wgmma_fence();
#pragma unroll
      for (int d = 0; d < 4; ++d) {
        const unsigned long long b = advanced(column_descriptor(base + Memory::S + half * TILE, TILE), d * 2048);
        Wgmma<T, 64>::template registers<true>(product, dy_own[d], b, d > 0);
      }
      wgmma_commit();
      wgmma_wait<0>();
      pin(product);
#pragma unroll
      for (int d = 0; d < 4; ++d) {
        unsigned c[4];
        load_tiles(c, base + Memory::C + half * Memory::Rows + strip * 2048 + (left ^ d * 32));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 v = both_of<T>(c[i]);
          const int j = 4 * (2 * d + i / 2) + 2 * (i % 2);
          entering[i % 2] += v.x * product[j] + v.y * product[j + 1];
          target_gradient[32 * half + j] += enter[i % 2] * product[j];
          target_gradient[32 * half + j + 1] += enter[i % 2] * product[j + 1];
        }
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      entering[h] = enter[h] * quad_sum(entering[h]);
      const float after = quad_sum(later[h]), all = after + quad_sum(same[h]);
      if (quad == 0) {
        const int token = h ? lower : upper;
        const float leaving = by_step[token];
        by_step[token] = all + leaving;
        reinterpret_cast<float*>(memory + Memory::ByDecay)[token] = entering[h] - s_own[h] * (after + leaving);
      }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      if (k + 1 < count) load_state_tiles(states, base + Memory::S, k + 1, full_states);
      if (k + 2 < count) load_tokens(k + 2);
    }

    // One warp finishes the head while the others go on: nothing it reads is written before the next barrier.
    if (warp == k % 8) {
      const size_t of_unit = size_t(row) * sizes.units() + first_unit + k;
      const size_t at = of_unit * sizes.padded() + chunk * TOKENS + lane * 4;
      const float4* targets = reinterpret_cast<const float4*>(memory + Memory::ByTarget);
      float4 sum = reinterpret_cast<const float4*>(memory + Memory::ByDecay)[lane];
      for (int i = 0; i <= lane / 4; ++i) {
        const float4 part = targets[i * 32 + lane];
        sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
      }
      const float last = warp_sum(lane < STRIPS ? reinterpret_cast<const float*>(memory + Memory::ByLast)[lane] : 0.0f);
      if (lane == 31) sum.w += last;
      sum.z += sum.w, sum.y += sum.z, sum.x += sum.y;
      float after = sum.x;  // becomes the sum of this lane and all after it
#pragma unroll
      for (int offset = 1; offset < 32; offset *= 2) {
        const float right = __shfl_down_sync(~0u, after, offset);
        if (lane + offset < 32) after += right;
      }
      after = __shfl_down_sync(~0u, after, 1);
      if (lane == 31) after = 0;
      *reinterpret_cast<float4*>(ddecay + at) = {sum.x + after, sum.y + after, sum.z + after, sum.w + after};
      *reinterpret_cast<float4*>(dstep + at) = reinterpret_cast<const float4*>(memory + Memory::ByStep)[lane];
      if constexpr (HasD) {
        float2 total{0, 0};
        for (int i = 0; i < STRIPS; ++i) {
          const float2 part = reinterpret_cast<const float2*>(memory + Memory::BySkip)[i * 32 + lane];
          total.x += part.x, total.y += part.y;
        }
        *reinterpret_cast<float2*>(dskip + (of_unit * chunks + chunk) * WIDTH + lane * 2) = total;
      }
    }
  }

  // dB += dG' C and dC += dG B, with dG summed over the heads; all tiles of it were written before the last barrier.
  auto add = [&](float (&d)[N / 2], const unsigned (&a)[4], unsigned tile, int strip) {
#pragma unroll
    for (int n = 0; n < N / 16; ++n) {
      unsigned b[4];
      load_tiles_transposed(b, tile + n / 4 * Memory::Rows + strip * 2048 + (left ^ n % 4 * 32));
      multiply(reinterpret_cast<float (&)[4]>(d[8 * n]), a, b[0], b[1], T());
      multiply(reinterpret_cast<float (&)[4]>(d[8 * n + 4]), a, b[2], b[3], T());
    }
  };
  auto packed_tile = [&](unsigned (&r)[4], int source, int target) {
    const int at = pair_tile(source, target);
    const float4 a = pair_gradient[at * 64 + lane], b = pair_gradient[at * 64 + 32 + lane];
    r[0] = Pair<T>::of(a.x, a.y), r[1] = Pair<T>::of(a.z, a.w), r[2] = Pair<T>::of(b.x, b.y),
    r[3] = Pair<T>::of(b.z, b.w);
  };
#pragma unroll 1
  for (int target = strip; target < STRIPS; ++target) {
    unsigned a[4];
    packed_tile(a, strip, target);
    add(source_gradient, a, base + Memory::C, target);
  }
#pragma unroll 1
  for (int source = 0; source <= strip; ++source) {
    unsigned tile[4];
    packed_tile(tile, source, strip);
    const unsigned a[4] = {transposed_tile(tile[0]), transposed_tile(tile[2]), transposed_tile(tile[1]),
                           transposed_tile(tile[3])};
    add(target_gradient, a, base + Memory::B, source);
  }
  const int token = chunk * TOKENS + upper;
  if constexpr (Partial) {
    const size_t at = (((size_t(head_block) * batch + row) * seq + token) * groups + group) * N;
    auto store = [&](const float (&d)[N / 2], float* to) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        if (token + 8 * h >= seq) continue;
#pragma unroll
        for (int j = 0; j < N / 8; ++j) {
          *reinterpret_cast<float2*>(to + h * size_t(8) * groups * N + 8 * j + 2 * quad) = {d[4 * j + 2 * h],
                                                                                            d[4 * j + 2 * h + 1]};
        }
      }
    };
    store(source_gradient, static_cast<float*>(dB) + at);
    store(target_gradient, static_cast<float*>(dC) + at);
  } else {
    const size_t at = ((size_t(row) * seq + token) * groups + group) * N, next = at + size_t(8) * groups * N;
    store_rows<T, N>(source_gradient, static_cast<T*>(dB) + at, static_cast<T*>(dB) + next, token < seq,
                     token + 8 < seq);
    store_rows<T, N>(target_gradient, static_cast<T*>(dC) + at, static_cast<T*>(dC) + next, token < seq,
                     token + 8 < seq);
  }
}

// result [size] = the sum over partial [parts, size], in order; size is a multiple of 4. Grid size / 1024 rounded up.
template <typename T>
__global__ void __launch_bounds__(256) sum_parts(const float* partial, T* result, long long size, int parts) {
  const long long at = (blockIdx.x * 256ll + threadIdx.x) * 4;
  if (at >= size) return;
  float4 total{0, 0, 0, 0};
  for (int k = 0; k < parts; ++k) {
    const float4 part = *reinterpret_cast<const float4*>(partial + k * size + at);
    total.x += part.x, total.y += part.y, total.z += part.z, total.w += part.w;
  }
  *reinterpret_cast<uint2*>(result + at) = {Pair<T>::of(total.x, total.y), Pair<T>::of(total.z, total.w)};
}

// ddt [batch, seq, heads] from the gradients of s and of its log decay, [batch, units, chunks * 128], and each chunk's
// part of dA and d dt_bias, [batch, heads, chunks]. Grid chunks * head tiles of 32 * batch, 256 threads.
template <typename D, bool SharedParams, bool HasBias, bool Softplus>
__global__ void __launch_bounds__(256)
    step_gradients(const D* dt, const float* bias, const float* A, const float* step, const float* dstep,
                   const float* ddecay, D* ddt, float* dA_part, float* dbias_part, int seq, int heads, int pieces,
                   int chunks, float low, float high) {
  __shared__ float tile[HEADS][TOKENS + 1];
  const auto [chunk, first_head, row] = head_tile(chunks, heads);
  const int count = min(HEADS, heads - first_head), lane = threadIdx.x % 32;
  for (int i = threadIdx.x; i < TOKENS * count; i += 256) {
    const int token = chunk * TOKENS + i / count;
    tile[i % count][i / count] =
        token < seq ? to_float(dt[(size_t(row) * seq + token) * heads + first_head + i % count]) : 0.0f;
  }
  __syncthreads();
  for (int h = threadIdx.x / 32; h < count; h += 8) {
    const int head = first_head + h, of_params = (SharedParams ? 0 : row * heads) + head;
    const size_t of_head = size_t(row) * heads + head, padded = size_t(chunks) * TOKENS;
    const float rate = A[of_params], offset = HasBias ? bias[of_params] : 0.0f;
    float dA = 0, dbias = 0;
    for (int k = lane; k < TOKENS; k += 32) {
      const size_t token = size_t(chunk) * TOKENS + k;
      const float s = step[of_head * padded + token];
      float direct = 0, da = 0;
      for (int piece = 0; piece < pieces; ++piece) {
        direct += dstep[(of_head * pieces + piece) * padded + token];
        da += ddecay[(of_head * pieces + piece) * padded + token];
      }
      if (s * (rate * LOG2E) < FLOOR) da = 0;  // cut: constant
      float gradient = direct + rate * da, value = tile[h][k] + offset;
      if (Softplus) {
        gradient /= 1.0f + expf(-value);
        value = softplus(value);
      }
      if (value < low || value > high || token >= seq) gradient = 0;
      dA += token < seq ? s * da : 0.0f;
      dbias += gradient;
      tile[h][k] = gradient;
    }
    dA = warp_sum(dA);
    dbias = warp_sum(dbias);
    if (lane == 0) {
      dA_part[of_head * chunks + chunk] = dA;
      if (HasBias) dbias_part[of_head * chunks + chunk] = dbias;
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < TOKENS * count; i += 256) {
    const int token = chunk * TOKENS + i / count;
    if (token < seq) {
      ddt[(size_t(row) * seq + token) * heads + first_head + i % count] = from_float<D>(tile[i % count][i / count]);
    }
  }
}

// dA, d dt_bias [batch, heads] and dD [batch, units, 64] from each chunk's part. Grid units * batch, 128 threads.
template <bool HasBias, bool HasD>
__global__ void __launch_bounds__(128)
    parameter_gradients(const float* dA_part, const float* dbias_part, const float* dskip_part, float* dA, float* dbias,
                        float* dskip, int pieces, int chunks) {
  __shared__ float half[WIDTH];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const size_t of_unit = blockIdx.x, of_head = of_unit / pieces;  // as heads divide a row evenly into units
  if (of_unit % pieces == 0 && warp < (HasBias ? 2 : 1)) {
    const float* part = (warp ? dbias_part : dA_part) + of_head * chunks;
    float total = 0;
    for (int chunk = lane; chunk < chunks; chunk += 32) total += part[chunk];
    total = warp_sum(total);
    if (lane == 0) (warp ? dbias : dA)[of_head] = total;
  }
  if constexpr (HasD) {
    const int p = threadIdx.x % WIDTH;
    float total = 0;
    for (int chunk = threadIdx.x / WIDTH; chunk < chunks; chunk += 2) {
      total += dskip_part[(of_unit * chunks + chunk) * WIDTH + p];
    }
    if (threadIdx.x >= WIDTH) half[p] = total;
    __syncthreads();
    if (threadIdx.x < WIDTH) dskip[of_unit * WIDTH + p] = total + half[p];
  }
}

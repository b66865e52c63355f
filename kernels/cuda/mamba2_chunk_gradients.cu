// The gradients that one chunk of a Mamba-2 scan gives, of states that fit one block; mamba2_backward.cu says how they
// are computed and from what.
//
// One block per chunk and block of heads of one group, which goes through its heads in order and keeps dB and dC in
// registers. A warp owns 16 tokens, as sources and as targets; scores stay in the registers of the warp that made them.
// A third warpgroup starts the copies and finishes what the others found for a head.

#include "async_copy.cuh"
#include "decay.cuh"
#include "fragments.cuh"
#include "mamba2_chunks.cuh"
#include "shared_memory.cuh"
#include "wgmma.cuh"

using namespace jax_ssd;

namespace {

constexpr float MASKED = -1e30f;  // an exponent whose exp2 is exactly zero
constexpr int TOKEN_WARPS = 8, TOKEN_THREADS = TOKEN_WARPS * 32, HELPERS = 4, HELPER_THREADS = HELPERS * 32;
// Of a thread: together what 168 each are, more would never come.
constexpr int TOKEN_REGISTERS = 240, HELPER_REGISTERS = 24;
constexpr int STRIPS = TOKENS / 16, HALF_STRIPS = STRIPS / 2;
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
  // [strips][128]: sums over the strip's sources. Later strips have no earlier targets: their places there are for sums
  // by source of E M and s E M across a middle, [2][2][64]: across the chunk's and across those of its halves.
  static constexpr int ByTarget = Skip + 2 * WIDTH * 4;
  static constexpr int ByFar = ByTarget + HALF_STRIPS * TOKENS * 4;
  static constexpr int ByStep = ByTarget + STRIPS * TOKENS * 4;  // [128]
  static constexpr int ByDecay = ByStep + TOKENS * 4;            // [128]
  static constexpr int ByLeaving = ByDecay + TOKENS * 4;         // [128]
  static constexpr int ByLast = ByLeaving + TOKENS * 4;          // [2][helpers]: of <S, T>
  static constexpr int BySkip = ByLast + 2 * HELPERS * 4;        // [strips][64]
  static constexpr int Barriers = BySkip + STRIPS * WIDTH * 4;
  static constexpr int Bytes = Barriers + 10 * 8;
};

// Tile (strip, target) of the triangle, target >= strip.
__device__ __forceinline__ int pair_tile(int strip, int target) {
  return strip * STRIPS - strip * (strip - 1) / 2 + target - strip;
}

// Four fragments of 16 rows of 64 columns, scaled by a factor for each of this lane's two rows; `rows` is its address.
template <typename T>
__device__ __forceinline__ void load_scaled(unsigned (&a)[4][4], unsigned rows, const float (&factor)[2]) {
#pragma unroll
  for (int d = 0; d < 4; ++d) {
    load_tiles(a[d], rows ^ d * 32);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 v = both_of<T>(a[d][i]);
      a[d][i] = Pair<T>::of(v.x * factor[i % 2], v.y * factor[i % 2]);
    }
  }
}

// u = a state times this warpgroup's rows of B or C, [Tiles][128][64] from `rows` on; in the current group of products.
template <typename T, int N>
__device__ __forceinline__ void multiply_by_state(float (&u)[WIDTH / 2], unsigned rows, unsigned state) {
#pragma unroll
  for (int d = 0; d < N / 16; ++d) {
    const unsigned long long a = row_descriptor(rows + d / 4 * ROWS), b = row_descriptor(state + d / 4 * TILE);
    Wgmma<T, WIDTH>::template shared<false, false>(u, advanced(a, d % 4 * 32), advanced(b, d % 4 * 32), d > 0);
  }
}

// Sums over a strip's 16 sources, for 16 targets: lanes share the work until each has one target.
__device__ __forceinline__ void sum_columns(const float (&column)[2][2], float* by_target) {
  const int lane = threadIdx.x % 32;
  const bool second = lane & 16, odd = lane & 8;
  float fold[2];
#pragma unroll
  for (int c = 0; c < 2; ++c) {
    const float other = __shfl_xor_sync(~0u, second ? column[0][c] : column[1][c], 16);
    fold[c] = (second ? column[1][c] : column[0][c]) + other;
  }
  float one = (odd ? fold[1] : fold[0]) + __shfl_xor_sync(~0u, odd ? fold[0] : fold[1], 8);
  one += __shfl_xor_sync(~0u, one, 4);
  if (!(lane & 4)) by_target[second * 8 + 2 * (lane % 4) + odd] = one;
}

// E of 16 sources in fragments and 16 targets; `rows` is this lane's address in dy's rows as a right factor.
template <typename T>
__device__ __forceinline__ void multiply_rows(float (&joint)[8], const unsigned (&x)[4][4], unsigned rows) {
#pragma unroll
  for (int d = 0; d < 4; ++d) {
    unsigned b[4];
    load_tiles(b, rows ^ d * 32);
    multiply(reinterpret_cast<float (&)[4]>(joint[0]), x[d], b[0], b[1], T());
    multiply(reinterpret_cast<float (&)[4]>(joint[4]), x[d], b[2], b[3], T());
  }
}

// u += M dy for a tile of M; `rows` is this lane's address in dy's 16 rows.
template <typename T>
__device__ __forceinline__ void add_mixed(float (&u)[WIDTH / 2], const unsigned (&mixed)[4], unsigned rows) {
#pragma unroll
  for (int d = 0; d < 4; ++d) {
    unsigned b[4];
    load_tiles_transposed(b, rows ^ d * 32);
    multiply(reinterpret_cast<float (&)[4]>(u[8 * d]), mixed, b[0], b[1], T());
    multiply(reinterpret_cast<float (&)[4]>(u[8 * d + 4]), mixed, b[2], b[3], T());
  }
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
  float joint[8] = {};
  multiply_rows<T>(joint, x_own, dy_tile + target * 2048 + right);
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
        float e = joint[4 * q + 2 * h + c];
        m[c] = c ? product.y : product.x;
        if constexpr (Diagonal) {  // a NaN times a masked weight would be one
          exponent = ahead >= 0 ? exponent : MASKED;
          e = ahead >= 0 ? e : 0.0f;
          m[c] = ahead >= 0 ? m[c] : 0.0f;
        }
        const float w = exp2_fast(exponent);
        m[c] *= w;
        const float both = e * m[c];
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
  add_mixed<T>(u, mixed, dy_tile + target * 2048 + left);
  sum_columns(column, by_target + target * 16);
}

// Pairs across a middle, of a source before it and a target after it: w_ij = exp2(g_mid - g_j) exp2(g_i - g_mid).

// M of a strip of sources and 16 targets, as a fragment. left: exp2(g_mid - g_j) of this lane's two sources.
template <typename T>
__device__ __forceinline__ void mix_far(unsigned (&mixed)[4], const float (&left)[2], float g_mid,
                                        const float* g_target, const uint4* pairs) {
  const int quad = threadIdx.x % 4;
  const uint4 packed = pairs[threadIdx.x % 32];
  const unsigned kept[4] = {packed.x, packed.y, packed.z, packed.w};
#pragma unroll
  for (int q = 0; q < 2; ++q) {
    const float2 g = *reinterpret_cast<const float2*>(g_target + q * 8 + 2 * quad);
    const float right[2] = {exp2_fast(g.x - g_mid), exp2_fast(g.y - g_mid)};
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float2 product = both_of<T>(kept[2 * q + h]);
      mixed[2 * q + h] = Pair<T>::of(product.x * left[h] * right[0], product.y * left[h] * right[1]);
    }
  }
}

// dG += E w s of a strip of sources and 16 targets, E in `joint`; E M is added to `later`, and the sums over the
// sources of s E M go to by_target.
template <typename T>
__device__ __forceinline__ void add_far(float (&later)[2], const float* joint, const float (&left)[2],
                                        const float (&s_own)[2], float g_mid, const float* g_target, const uint4* pairs,
                                        float4* pair_gradient, float* by_target) {
  const int lane = threadIdx.x % 32, quad = lane % 4;
  const uint4 packed = pairs[lane];
  const unsigned kept[4] = {packed.x, packed.y, packed.z, packed.w};
  float4 sums[2] = {pair_gradient[lane], pair_gradient[32 + lane]};
  float column[2][2] = {};
#pragma unroll
  for (int q = 0; q < 2; ++q) {
    const float2 g = *reinterpret_cast<const float2*>(g_target + q * 8 + 2 * quad);
    const float right[2] = {exp2_fast(g.x - g_mid), exp2_fast(g.y - g_mid)};
    float* sum = reinterpret_cast<float*>(&sums[q]);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float2 product = both_of<T>(kept[2 * q + h]);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float weighted = joint[4 * q + 2 * h + c] * (left[h] * right[c]);
        const float both = weighted * (c ? product.y : product.x);
        sum[2 * h + c] += weighted * s_own[h];
        later[h] += both;
        column[q][c] += s_own[h] * both;
      }
    }
  }
  pair_gradient[lane] = sums[0];
  pair_gradient[32 + lane] = sums[1];
  sum_columns(column, by_target);
}

// Sums of E M over far targets of a strip of sources, this lane's parts of two rows, and those times s.
__device__ __forceinline__ void store_far(float* by_far, int row, const float (&far)[2], const float (&s_far)[2]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float sum = quad_sum(far[h]);
    if (threadIdx.x % 4 == 0) {
      by_far[row + 8 * h] = sum;
      by_far[TOKENS + row + 8 * h] = s_far[h] * sum;
    }
  }
}

// Writes what was found for a chunk of a head, where dstep, ddecay and dskip point; one warp. Arrives at `finished`
// when the sums may be overwritten.
template <typename Memory, bool HasD>
__device__ __forceinline__ void finish_head(const char* memory, int buffer, unsigned finished, float* dstep,
                                            float* ddecay, float* dskip) {
  const int lane = threadIdx.x % 32;
  auto four = [&](int from, int at) { return reinterpret_cast<const float4*>(memory + from)[at]; };
  float4 sum = four(Memory::ByDecay, lane), direct = four(Memory::ByStep, lane);
  auto add_sources = [&](int at) {
    const float4 v = four(Memory::ByFar, at), w = four(Memory::ByFar, TOKENS / 4 + at);
    direct.x += v.x, direct.y += v.y, direct.z += v.z, direct.w += v.w;
    sum.x -= w.x, sum.y -= w.y, sum.z -= w.z, sum.w -= w.w;
  };
  if (lane < 16) add_sources(lane);                                       // four tokens of the first half
  if (lane % 16 < 8) add_sources(TOKENS / 2 + lane / 16 * 8 + lane % 8);  // of the first half of a half
  for (int i = 0; i <= lane / 4; ++i) {
    const float4 part = four(Memory::ByTarget, i * 32 + lane);
    sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
  }
  // What leaves counts for the chunk's total decay.
  const float4 part = four(Memory::ByLeaving, lane);
  float last = part.x + part.y + part.z + part.w;
  if (lane < HELPERS) last += reinterpret_cast<const float*>(memory + Memory::ByLast)[buffer * HELPERS + lane];
  last = warp_sum(last);
  float2 of_skip{0, 0};
  if constexpr (HasD) {
    for (int i = 0; i < STRIPS; ++i) {
      const float2 v = reinterpret_cast<const float2*>(memory + Memory::BySkip)[i * 32 + lane];
      of_skip.x += v.x, of_skip.y += v.y;
    }
  }
  __syncwarp();
  if (lane == 0) barrier_arrive(finished);
  if (lane == 31) sum.w += last;
  reinterpret_cast<float4*>(ddecay)[lane] = sums_to_the_end(sum);
  reinterpret_cast<float4*>(dstep)[lane] = direct;
  if constexpr (HasD) reinterpret_cast<float2*>(dskip)[lane] = of_skip;
}

}  // namespace

// S and T as `walk` stored them; dx [batch, seq, units, 64]; dB, dC [batch, seq, groups, N]; dstep, ddecay [batch,
// units, chunks * 128] and dskip [batch, units, chunks, 64] float32. Grid head_blocks * groups * chunks * rows, 384
// threads; if Clustered the head_blocks blocks of a group are a cluster, else there is one.
template <typename T, int N, bool HasD, bool SharedParams, bool Clustered>
__global__ void __launch_bounds__(TOKEN_THREADS + HELPER_THREADS, 1)
    chunk_gradients(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap dy,
                    const __grid_constant__ TensorMap B, const __grid_constant__ TensorMap C,
                    const __grid_constant__ TensorMap states, const __grid_constant__ TensorMap adjoints,
                    const float* step, const float* decay, const float* skip, T* dx, T* dB, T* dC, float* dstep,
                    float* ddecay, float* dskip, int seq, int heads, int groups, int pieces, int chunks,
                    int head_blocks, int block_units, int first_row) {
  using Memory = ChunkMemory<N>;
  static_assert(Memory::Bytes + 1024 <= 227 * 1024 &&
                2 * SUM_BYTES<N> <= Memory::Bytes);  // 1024: what aligning may cost
  extern __shared__ char raw[];
  const unsigned base = (shared_address(raw) + 1023) & ~1023u;
  char* memory = raw + (base - shared_address(raw));
  // A buffer is full when its copy has come, and free when every warp has read it; there are two of tokens. A head is
  // done when its sums are in memory, finished when they were read.
  const unsigned full_group = base + Memory::Barriers, full_states = full_group + 8, full_adjoints = full_group + 16;
  const unsigned full_tokens = full_group + 24, free_states = full_group + 40, free_tokens = full_group + 48;
  const unsigned done = full_group + 64, finished = full_group + 72;
  const Sizes sizes{seq, heads, groups, pieces, chunks};

  int block = blockIdx.x;
  const int head_block = block % head_blocks;
  block /= head_blocks;
  const int group = block % groups;
  block /= groups;
  const int chunk = block % chunks, local_row = block / chunks, row = first_row + local_row;
  const int first_unit = group * sizes.group_units() + head_block * block_units;
  const int count = min(block_units, sizes.group_units() - head_block * block_units);

  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, quad = lane % 4;
  const int strip = warp;
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
    barrier_init(free_states, TOKEN_WARPS + HELPERS);
    for (int i = 0; i < 2; ++i) barrier_init(free_tokens + i * 8, TOKEN_WARPS);
    barrier_init(done, TOKEN_WARPS);
    barrier_init(finished, 1);
    fence_barrier_init();
  }
  __syncthreads();
  follow_earlier_kernels();

  if (warp >= TOKEN_WARPS) {
    give_registers<HELPER_REGISTERS>();
    const bool copies = threadIdx.x == TOKEN_THREADS;
    if (copies) {
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
    __syncwarp();
    const int helper = warp - TOKEN_WARPS;
#pragma unroll 1
    for (int k = 0; k < count; ++k) {
      // <S, T>, which the chunk's total decay scales.
      barrier_wait(full_tokens + k % 2 * 8, k / 2 % 2);
      const float g_last = reinterpret_cast<const float*>(memory + Memory::Decay)[k % 2 * TOKENS + TOKENS - 1];
      barrier_wait(full_adjoints, k % 2);
      barrier_wait(full_states, k % 2);
      float across = 0;
#pragma unroll 2
      for (int i = threadIdx.x - TOKEN_THREADS; i < 8 * N; i += HELPER_THREADS) {
        const uint4 a = reinterpret_cast<const uint4*>(memory + Memory::S)[i];
        const uint4 b = reinterpret_cast<const uint4*>(memory + Memory::Adjoint)[i];
        across += dot<T>(a.x, b.x) + dot<T>(a.y, b.y) + (dot<T>(a.z, b.z) + dot<T>(a.w, b.w));
      }
      across = warp_sum(across) * exp2_fast(g_last);
      if (lane == 0) {
        reinterpret_cast<float*>(memory + Memory::ByLast)[k % 2 * HELPERS + helper] = across;
        barrier_arrive(free_states);
      }
      named_barrier(1, HELPER_THREADS);
      if (copies && k + 1 < count) {
        if (k > 0) {
          barrier_wait(free_tokens + (k - 1) % 2 * 8, (k - 1) / 2 % 2);
          load_tokens(k + 1);
        }
        barrier_wait(free_states, k % 2);
        load_state_tiles(adjoints, base + Memory::Adjoint, k + 1, full_adjoints);
        load_state_tiles(states, base + Memory::S, k + 1, full_states);
      }
      __syncwarp();
      if (helper == 1 + k % (HELPERS - 1)) {
        barrier_wait(done, k % 2);
        const size_t of_unit = size_t(row) * sizes.units() + first_unit + k;
        const size_t at = of_unit * sizes.padded() + chunk * TOKENS;
        finish_head<Memory, HasD>(memory, k % 2, finished, dstep + at, ddecay + at,
                                  dskip + (of_unit * chunks + chunk) * WIDTH);
      }
    }
    if constexpr (Clustered) cluster_barrier(), cluster_barrier();
    return;
  }
  take_registers<TOKEN_REGISTERS>();

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
    const float leave[2] = {exp2_fast(g_last - g_own[0]), exp2_fast(g_last - g_own[1])};
    const float enter[2] = {exp2_fast(g_own[0]), exp2_fast(g_own[1])};

    // From the chunk's end: dB += s e x T and u = T B_j.
    float u[WIDTH / 2], leaving[2] = {0, 0}, entering[2] = {0, 0};
    const int own_rows = warp / 4 * TILE;  // of this warpgroup in B and C
    unsigned x_own[4][4];
    {
      const float weight[2] = {s_own[0] * leave[0], s_own[1] * leave[1]};
      load_scaled<T>(x_own, x_tile + strip * 2048 + left, weight);
      barrier_wait(full_adjoints, k % 2);
      wgmma_fence();
#pragma unroll
      for (int d = 0; d < 4; ++d) {
        const unsigned long long b = column_descriptor(base + Memory::Adjoint, TILE);
        Wgmma<T, N>::template registers<true>(source_gradient, x_own[d], advanced(b, d * 2048), true);
      }
      multiply_by_state<T, N>(u, base + Memory::B + own_rows, base + Memory::Adjoint);
      wgmma_commit();
      wgmma_wait<0>();
      pin(source_gradient);
      pin(u);
    }
    // From its start: dC += exp2(g) dy S and v = S C_i; meanwhile u becomes e_j T B_j.
    {
      unsigned dy_own[4][4];
      load_scaled<T>(dy_own, dy_tile + strip * 2048 + left, enter);
      float v[WIDTH / 2];
      barrier_wait(full_states, k % 2);
      wgmma_fence();
#pragma unroll
      for (int d = 0; d < 4; ++d) {
        const unsigned long long b = column_descriptor(base + Memory::S, TILE);
        Wgmma<T, N>::template registers<true>(target_gradient, dy_own[d], advanced(b, d * 2048), true);
      }
      multiply_by_state<T, N>(v, base + Memory::C + own_rows, base + Memory::S);
      wgmma_commit();
#pragma unroll
      for (int d = 0; d < 4; ++d) {
        load_tiles(x_own[d], x_tile + strip * 2048 + (left ^ d * 32));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 w = both_of<T>(x_own[d][i]);
          float* part = u + 4 * (2 * d + i / 2) + 2 * (i % 2);
          leaving[i % 2] += part[0] * w.x + part[1] * w.y;
          part[0] *= leave[i % 2];
          part[1] *= leave[i % 2];
        }
      }
      wgmma_wait<0>();
      pin(target_gradient);
      pin(v);
      if (lane == 0) barrier_arrive(free_states);
#pragma unroll
      for (int d = 0; d < 4; ++d) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // of exp2(g) dy
          const float2 w = both_of<T>(dy_own[d][i]);
          const int j = 4 * (2 * d + i / 2) + 2 * (i % 2);
          entering[i % 2] += v[j] * w.x + v[j + 1] * w.y;
        }
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      leaving[h] = leave[h] * quad_sum(leaving[h]);
      entering[h] = quad_sum(entering[h]);
    }
    if (k > 0) barrier_wait(finished, (k - 1) % 2);
    float* by_step = reinterpret_cast<float*>(memory + Memory::ByStep);
    float* by_decay = reinterpret_cast<float*>(memory + Memory::ByDecay);
    float* by_leaving = reinterpret_cast<float*>(memory + Memory::ByLeaving);
    if (quad == 0) {
      by_step[upper] = leaving[0];
      by_step[lower] = leaving[1];
      by_decay[upper] = entering[0];
      by_decay[lower] = entering[1];
      by_leaving[upper] = s_own[0] * leaving[0];
      by_leaving[lower] = s_own[1] * leaving[1];
    }

    // Pairs: this warp's sources with every target from them on.
    float later[2] = {0, 0}, same[2] = {0, 0};  // sums of E M over later targets, and over all of the diagonal tile
    float* by_target = reinterpret_cast<float*>(memory + Memory::ByTarget) + strip * TOKENS;
    add_pairs<T, true>(u, later, same, x_own, g_own, s_own, g, pairs, pair_gradient, by_target, dy_tile, left, right,
                       strip, strip);
    same[0] = same[0] - later[0], same[1] = same[1] - later[1];
#pragma unroll 1
    for (int target = strip + 1; target < (strip | 1) + 1; ++target) {
      add_pairs<T, false>(u, later, same, x_own, g_own, s_own, g, pairs, pair_gradient, by_target, dy_tile, left, right,
                          strip, target);
    }
    // Of a half, the pairs across its middle: the warps of the sources add M dy, those of the targets do the rest.
    {
      const int first_half = strip / HALF_STRIPS * HALF_STRIPS, middle = first_half + HALF_STRIPS / 2;
      const float g_mid = g[middle * 16 - 1];
      if (strip < middle) {
        const float to_mid[2] = {exp2_fast(g_mid - g_own[0]), exp2_fast(g_mid - g_own[1])};
#pragma unroll
        for (int i = 0; i < HALF_STRIPS / 2; ++i) {
          unsigned mixed[4];
          const int target = middle + i;
          mix_far<T>(mixed, to_mid, g_mid, g + target * 16, pairs + pair_tile(strip, target) * 32);
          add_mixed<T>(u, mixed, dy_tile + target * 2048 + left);
        }
      } else {
        const int source = strip - HALF_STRIPS / 2, first = source * 16 + lane / 4;
        const float to_mid[2] = {exp2_fast(g_mid - g[first]), exp2_fast(g_mid - g[first + 8])};
        const float s_far[2] = {s[first], s[first + 8]};
        float far[2] = {0, 0};
        unsigned x_far[4][4];
#pragma unroll
        for (int d = 0; d < 4; ++d) load_tiles(x_far[d], x_tile + source * 2048 + (left ^ d * 32));
#pragma unroll
        for (int i = 0; i < HALF_STRIPS / 2; ++i) {
          const int target = middle + i, at = pair_tile(source, target);
          float joint[8] = {};
          multiply_rows<T>(joint, x_far, dy_tile + target * 2048 + right);
          add_far<T>(far, joint, to_mid, s_far, g_mid, g + target * 16, pairs + at * 32, pair_gradient + at * 64,
                     reinterpret_cast<float*>(memory + Memory::ByTarget) + source * TOKENS + target * 16);
        }
        store_far(reinterpret_cast<float*>(memory + Memory::ByFar) + 2 * TOKENS, first_half / 2 * 16 + first % HALF,
                  far, s_far);
      }
    }
    // The others have their target in the second half: one warpgroup adds M dy, the other does the rest.
    const float g_mid = g[HALF - 1];
    if (warp < HALF_STRIPS) {
      const float to_mid[2] = {exp2_fast(g_mid - g_own[0]), exp2_fast(g_mid - g_own[1])};
      unsigned mixed[HALF_STRIPS][4];
#pragma unroll
      for (int i = 0; i < HALF_STRIPS; ++i) {
        mix_far<T>(mixed[i], to_mid, g_mid, g + HALF + i * 16, pairs + pair_tile(strip, HALF_STRIPS + i) * 32);
      }
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < HALF_STRIPS; ++i) {
        const unsigned long long b = advanced(column_descriptor(dy_tile + TILE, TILE), i * 2048);
        Wgmma<T, WIDTH>::template registers<true>(u, mixed[i], b, true);
      }
      wgmma_commit();
      wgmma_wait<0>();
      pin(u);
    } else {
      float joint[HALF / 2];
      wgmma_fence();
#pragma unroll
      for (int d = 0; d < 4; ++d) {
        const unsigned long long a = row_descriptor(x_tile), b = row_descriptor(dy_tile + TILE);
        Wgmma<T, HALF>::template shared<false, false>(joint, advanced(a, d * 32), advanced(b, d * 32), d > 0);
      }
      wgmma_commit();
      const int source = warp - HALF_STRIPS, first = source * 16 + lane / 4;
      const float to_mid[2] = {exp2_fast(g_mid - g[first]), exp2_fast(g_mid - g[first + 8])};
      const float s_far[2] = {s[first], s[first + 8]};
      float far[2] = {0, 0};
      wgmma_wait<0>();
      pin(joint);
#pragma unroll
      for (int i = 0; i < HALF_STRIPS; ++i) {
        const int at = pair_tile(source, HALF_STRIPS + i), token = HALF + i * 16;
        add_far<T>(far, joint + 8 * i, to_mid, s_far, g_mid, g + token, pairs + at * 32, pair_gradient + at * 64,
                   reinterpret_cast<float*>(memory + Memory::ByTarget) + source * TOKENS + token);
      }
      store_far(reinterpret_cast<float*>(memory + Memory::ByFar), first, far, s_far);
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

#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float after = quad_sum(later[h]), all = after + quad_sum(same[h]);
      if (quad == 0) {
        const int token = h ? lower : upper;
        const float leaving = by_step[token];
        by_step[token] = all + leaving;
        by_decay[token] -= s_own[h] * (after + leaving);
      }
    }
    __syncwarp();
    if (lane == 0) {
      barrier_arrive(done);
      barrier_arrive(free_tokens + buffer * 8);
    }
  }
  named_barrier(2, TOKEN_THREADS);

  // dB += dG' C and dC += dG B, with dG summed over the heads.
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
  const size_t stride = size_t(groups) * N, of_group = ((size_t(row) * seq + chunk * TOKENS) * groups + group) * N;
  const int tokens = min(TOKENS, seq - chunk * TOKENS);
  if constexpr (Clustered) {
    named_barrier(2, TOKEN_THREADS);  // what the sums overwrite was read
    put_sums<N>(source_gradient, reinterpret_cast<float*>(memory), upper, lower);
    put_sums<N>(target_gradient, reinterpret_cast<float*>(memory + SUM_BYTES<N>), upper, lower);
    cluster_barrier();
    store_sums<T, N, TOKEN_THREADS>(base, head_blocks, head_block, threadIdx.x, dB + of_group, stride, tokens);
    store_sums<T, N, TOKEN_THREADS>(base + SUM_BYTES<N>, head_blocks, head_block, threadIdx.x, dC + of_group, stride,
                                    tokens);
    cluster_barrier();  // as long as they are read, the block must not end
  } else {
    T *to_source = dB + of_group + upper * stride, *to_target = dC + of_group + upper * stride;
    store_rows<T, N>(source_gradient, to_source, to_source + 8 * stride, upper < tokens, lower < tokens);
    store_rows<T, N>(target_gradient, to_target, to_target + 8 * stride, upper < tokens, lower < tokens);
  }
}

// The gradients that one chunk of a Mamba-2 scan gives; mamba2_backward.cu says how they are computed and from what.
//
// One block per chunk and block of heads of one group, which goes through its heads in order. Two warpgroups, "pairs",
// compute everything that belongs to a token of a head, dx and the gradients of step and decay, and accumulate dC in
// registers. The third accumulates dB, and finishes what the others found for the head before; one of its threads
// starts the copies.
//
// A strip is 8 tokens. Warp w of the pairs owns strips w and 15 - w, the rows 0 to 7 and 8 to 15 of its fragments, as
// sources and as targets: so every warp has as many pairs of a source and a later target.

#include "async_copy.cuh"
#include "decay.cuh"
#include "fragments.cuh"
#include "mamba2_chunks.cuh"
#include "shared_memory.cuh"
#include "wgmma.cuh"

using namespace jax_ssd;

namespace {

constexpr float MASKED = -1e30f;  // an exponent whose exp2 is exactly zero
constexpr int PAIR_WARPS = 8, SOURCE_WARPS = 4, WARPS = PAIR_WARPS + SOURCE_WARPS;
constexpr int PAIR_THREADS = PAIR_WARPS * 32, THREADS = WARPS * 32;
constexpr int SOURCE_REGISTERS = 176;  // of a thread; the pairs keep 168
constexpr int STRIP = 8, STRIPS = TOKENS / STRIP;
constexpr int TARGETS = 16, TARGET_TILES = TOKENS / TARGETS;   // targets of a tile of pairs, the sources are a strip
constexpr int PAIR_TILES = TARGET_TILES * (TARGET_TILES + 1);  // those that hold a pair of a token and a later one
constexpr int BLOCK_TILES = 2;                                 // target tiles that are multiplied together

// Shared memory.
template <int N>
struct Memory {
  static constexpr int Tiles = N / 64;
  static constexpr int Rows = 2 * TILE;              // a chunk's x or dy of one piece, or 64 columns of B
  static constexpr int B = 0, C = B + Tiles * Rows;  // [Tiles][128][64]
  static constexpr int S = C + Tiles * Rows, Adjoint = S + Tiles * TILE;  // [Tiles][64 channels][64]
  static constexpr int X = Adjoint + Tiles * TILE, DY = X + 2 * Rows;     // of this head and the next
  static constexpr int PairGradient = DY + 2 * Rows;                      // dG, float32 tiles as lanes hold them
  static constexpr int Pairs = PairGradient + PAIR_TILES * 512;           // G, rounded to T
  static constexpr int Decay = Pairs + PAIR_TILES * 256;                  // [2][128] float32
  static constexpr int Step = Decay + 2 * TOKENS * 4;                     // [2][128]
  static constexpr int Skip = Step + 2 * TOKENS * 4;                      // [2][64]
  static constexpr int ByTarget = Skip + 2 * WIDTH * 4;                   // [warps][128]: sums over the warp's sources
  static constexpr int ByStep = ByTarget + PAIR_WARPS * TOKENS * 4;       // [128]
  static constexpr int ByDecay = ByStep + TOKENS * 4;                     // [128]
  static constexpr int ByLeaving = ByDecay + TOKENS * 4;                  // [128]
  static constexpr int BySkip = ByLeaving + TOKENS * 4;                   // [warps][64]
  static constexpr int ByLast = BySkip + PAIR_WARPS * WIDTH * 4;          // [2][source warps]
  static constexpr int Barriers = ByLast + 2 * SOURCE_WARPS * 4;
  static constexpr int Bytes = Barriers + 11 * 8;
};

// Tile (strip, target tile) of those with a target >= strip * 8.
__device__ __forceinline__ int pair_tile(int strip, int target) {
  const int two = strip / 2;
  return two * (2 * TARGET_TILES + 1 - two) + strip % 2 * (TARGET_TILES - two) + target - two;
}

// Four fragments of 16 rows of 64 columns; `rows` is this lane's address in the first.
__device__ __forceinline__ void load_rows(unsigned (&a)[4][4], unsigned rows) {
#pragma unroll
  for (int d = 0; d < 4; ++d) load_tiles(a[d], rows ^ d * 32);
}

template <typename T>
__device__ __forceinline__ float dot(unsigned a, unsigned b) {
  const float2 v = both_of<T>(a), w = both_of<T>(b);
  return v.x * w.x + v.y * w.y;
}

// Pairs of a strip of sources (half h of the warp's rows) with 16 targets, from E in `joint`. `ahead`: this lane's
// first target less its source. M goes to the fragment `mixed`, E w s is added to dG; E M is added to `later`, or
// `same` for a token with itself, and s E M to `column`, by target.
template <typename T, bool Diagonal>
__device__ __forceinline__ void weigh_pairs(unsigned (&mixed)[4], float (&column)[4], float& later, float& same,
                                            const float* joint, int h, int ahead, float g_own, float s_own,
                                            const float* g_target, const uint2* pairs, float4* pair_gradient) {
  const int lane = threadIdx.x % 32;
  const uint2 packed = pairs[lane];
  const float4 before = pair_gradient[lane];
  float sum[2][2] = {{before.x, before.y}, {before.z, before.w}};
#pragma unroll
  for (int q = 0; q < 2; ++q) {
    const float2 g = *reinterpret_cast<const float2*>(g_target + q * 8 + 2 * (lane % 4));
    const float2 product = both_of<T>(q ? packed.y : packed.x);
    float m[2];
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const int distance = ahead + q * 8 + c;
      float exponent = (c ? g.y : g.x) - g_own;
      if (Diagonal) exponent = distance >= 0 ? exponent : MASKED;
      const float w = exp2_fast(exponent), weighted = joint[4 * q + 2 * h + c] * w;
      m[c] = (c ? product.y : product.x) * w;
      float both = (c ? product.y : product.x) * weighted;
      sum[q][c] += weighted * s_own;
      if (Diagonal) {
        same += distance == 0 ? both : 0.0f;
        both = distance > 0 ? both : 0.0f;
      }
      later += both;
      column[2 * q + c] += s_own * both;
    }
    mixed[2 * q + h] = Pair<T>::of(m[0], m[1]);
  }
  pair_gradient[lane] = {sum[0][0], sum[0][1], sum[1][0], sum[1][1]};
}

// Adds up parts over pairs of lanes 2 * Count apart; each lane goes on with half of them.
template <int Count, int Size>
__device__ __forceinline__ void halve(float (&part)[Size], int apart) {
  const bool upper = threadIdx.x & apart;
#pragma unroll
  for (int i = 0; i < Count; ++i) {
    const float other = __shfl_xor_sync(~0u, upper ? part[i] : part[i + Count], apart);
    part[i] = (upper ? part[i + Count] : part[i]) + other;
  }
}

// Sum over a warp's 16 tokens of x dy, by channel: [64] to by_skip.
template <typename T>
__device__ __forceinline__ void sum_skip(const unsigned (&x)[4][4], const unsigned (&dy)[4][4], float* by_skip) {
  const int lane = threadIdx.x % 32;
  float part[16];
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    part[2 * j] = part[2 * j + 1] = 0;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float2 v = both_of<T>(x[j / 2][j % 2 * 2 + h]), w = both_of<T>(dy[j / 2][j % 2 * 2 + h]);
      part[2 * j] += v.x * w.x;
      part[2 * j + 1] += v.y * w.y;
    }
  }
  halve<8>(part, 16);
  halve<4>(part, 8);
  halve<2>(part, 4);
  const int j = (lane & 16 ? 4 : 0) + (lane & 8 ? 2 : 0) + (lane & 4 ? 1 : 0);
  *reinterpret_cast<float2*>(by_skip + 8 * j + 2 * (lane % 4)) = {part[0], part[1]};
}

// d += a b for a fragment a and 16 rows of b, [rows][N]; `rows` is this lane's address in the first 64 columns.
template <typename T, int N>
__device__ __forceinline__ void add_product(float (&d)[N / 2], const unsigned (&a)[4], unsigned rows) {
#pragma unroll
  for (int n = 0; n < N / 16; ++n) {
    unsigned b[4];
    load_tiles_transposed(b, rows + n / 4 * Memory<N>::Rows ^ n % 4 * 32);
    multiply(reinterpret_cast<float (&)[4]>(d[8 * n]), a, b[0], b[1], T());
    multiply(reinterpret_cast<float (&)[4]>(d[8 * n + 4]), a, b[2], b[3], T());
  }
}

// Stores a warp's accumulators of dB or dC; `row` of lane l's upper row, `to` the chunk's first row.
template <typename T, int N, bool Partial>
__device__ __forceinline__ void store_group(const float (&d)[N / 2], void* to, size_t stride, int upper, int lower,
                                            int tokens) {
  if constexpr (Partial) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int token = h ? lower : upper;
      if (token >= tokens) continue;
      float* row = static_cast<float*>(to) + token * stride + 2 * (threadIdx.x % 4);
#pragma unroll
      for (int j = 0; j < N / 8; ++j) {
        *reinterpret_cast<float2*>(row + 8 * j) = {d[4 * j + 2 * h], d[4 * j + 2 * h + 1]};
      }
    }
  } else {
    T* rows = static_cast<T*>(to);
    store_rows<T, N>(d, rows + upper * stride, rows + lower * stride, upper < tokens, lower < tokens);
  }
}

}  // namespace

// S and T as `walk` stored them; dx [batch, seq, units, 64]; dB, dC [batch, seq, groups, N] of T, or with Partial
// float32 sums of this block's heads [head blocks, batch, seq, groups, N]; dstep, ddecay [batch, units, chunks * 128]
// and dskip [batch, units, chunks, 64] float32. Grid head_blocks * groups * chunks * rows, 384 threads.
template <typename T, int N, bool HasD, bool SharedParams, bool Partial>
__global__ void __launch_bounds__(THREADS, 1)
    chunk_gradients(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap dy,
                    const __grid_constant__ TensorMap B, const __grid_constant__ TensorMap C,
                    const __grid_constant__ TensorMap states, const __grid_constant__ TensorMap adjoints,
                    const float* step, const float* decay, const float* skip, T* dx, void* dB, void* dC, float* dstep,
                    float* ddecay, float* dskip, int seq, int heads, int groups, int pieces, int chunks, int batch,
                    int head_blocks, int block_units, int first_row) {
  using At = Memory<N>;
  static_assert(At::Bytes + 1024 <= 227 * 1024);  // 1024: what aligning the tiles may cost
  extern __shared__ char raw[];
  const unsigned base = (shared_address(raw) + 1023) & ~1023u;
  char* memory = raw + (base - shared_address(raw));
  auto floats = [&](int at) { return reinterpret_cast<float*>(memory + at); };
  // A buffer is full when its copy has come, and free when every warp has read it. A head is done when the pairs' sums
  // are in memory, finished when they were read.
  const unsigned full_group = base + At::Barriers, full_states = full_group + 8, full_adjoints = full_group + 16;
  const unsigned full_tokens = full_group + 24, free_states = full_group + 40, free_adjoints = full_group + 48;
  const unsigned free_tokens = full_group + 56, done = full_group + 72, finished = full_group + 80;
  const Sizes sizes{seq, heads, groups, pieces, chunks};

  int block = blockIdx.x;
  const int head_block = block % head_blocks;
  block /= head_blocks;
  const int group = block % groups;
  block /= groups;
  const int chunk = block % chunks, local_row = block / chunks, row = first_row + local_row;
  const int first_unit = group * sizes.group_units() + head_block * block_units;
  const int count = min(block_units, sizes.group_units() - head_block * block_units);
  const int tokens = min(TOKENS, seq - chunk * TOKENS);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, quad = lane % 4;

  auto load_tokens = [&](int k) {
    const unsigned barrier = full_tokens + k % 2 * 8;
    const int unit = first_unit + k, token = chunk * TOKENS;
    barrier_expect(barrier, 2 * At::Rows + 2 * TOKENS * 4 + (HasD ? WIDTH * 4 : 0));
    for (int i = 0; i < 2; ++i) {
      const unsigned to = base + k % 2 * At::Rows + i * TILE;
      copy_in(to + At::X, x, 0, unit, token + i * HALF, row, barrier, KEEP_FIRST);
      copy_in(to + At::DY, dy, 0, unit, token + i * HALF, row, barrier, KEEP_FIRST);
    }
    const size_t at = (size_t(row) * heads + unit / pieces) * sizes.padded() + token;
    copy_line_in(base + At::Decay + k % 2 * TOKENS * 4, decay + at, TOKENS * 4, barrier);
    copy_line_in(base + At::Step + k % 2 * TOKENS * 4, step + at, TOKENS * 4, barrier);
    if (HasD) {
      const float* from = skip + (size_t(SharedParams ? 0 : row) * sizes.units() + unit) * WIDTH;
      copy_line_in(base + At::Skip + k % 2 * WIDTH * 4, from, WIDTH * 4, barrier);
    }
  };
  auto load_state_tiles = [&](const TensorMap& map, unsigned to, int k, unsigned barrier) {
    barrier_expect(barrier, At::Tiles * TILE);
    for (int i = 0; i < At::Tiles; ++i) {
      copy_in(to + i * TILE, map, i * 64, 0, chunk, local_row * sizes.units() + first_unit + k, barrier, KEEP_FIRST);
    }
  };

  if (threadIdx.x == 0) {
    for (int i = 0; i < 5; ++i) barrier_init(full_group + i * 8, 1);
    for (int i = 5; i < 9; ++i) barrier_init(full_group + i * 8, WARPS);
    barrier_init(done, PAIR_WARPS);
    barrier_init(finished, 1);
    fence_barrier_init();
  }
  __syncthreads();
  const bool copies = threadIdx.x == PAIR_THREADS;
  if (copies) {
    barrier_expect(full_group, 2 * At::Tiles * At::Rows);
    for (int i = 0; i < 2 * At::Tiles; ++i) {
      const int to = i / 2 * At::Rows + i % 2 * TILE, token = chunk * TOKENS + i % 2 * HALF;
      copy_in(base + At::B + to, B, i / 2 * 64, group, token, row, full_group, KEEP_LAST);
      copy_in(base + At::C + to, C, i / 2 * 64, group, token, row, full_group, KEEP_LAST);
    }
    load_tokens(0);
    load_state_tiles(adjoints, base + At::Adjoint, 0, full_adjoints);
    load_state_tiles(states, base + At::S, 0, full_states);
    if (count > 1) load_tokens(1);
  }
  __syncwarp();

  // This lane's place in the fragments of 16 rows and 16 columns (the next 16 columns: ^ 32) of a left factor or,
  // transposed, of one whose rows are summed over; and of a right factor whose columns are summed over.
  const unsigned left = swizzled(lane % 16, lane / 16), right = swizzled(lane % 8 + lane / 16 * 8, lane / 8 % 2);
  constexpr int TileRows = TARGETS * 128;  // bytes of 16 rows of 64 columns
  auto* pair_gradient = reinterpret_cast<float4*>(memory + At::PairGradient);
  auto* pairs = reinterpret_cast<uint2*>(memory + At::Pairs);

  // G, [source][target], kept as lanes hold it, 16 x 16 at a time.
  barrier_wait(full_group, 0);
#pragma unroll 1
  for (int at = warp; at < TARGET_TILES * TARGET_TILES; at += WARPS) {
    const int source = at / TARGET_TILES, target = at % TARGET_TILES;
    if (source > target) continue;
    float tile[2][4] = {};
#pragma unroll
    for (int d = 0; d < N / 16; ++d) {
      unsigned a[4], b[4];
      load_tiles(a, base + At::B + d / 4 * At::Rows + source * TileRows + (left ^ d % 4 * 32));
      load_tiles(b, base + At::C + d / 4 * At::Rows + target * TileRows + (right ^ d % 4 * 32));
      multiply(tile[0], a, b[0], b[1], T());
      multiply(tile[1], a, b[2], b[3], T());
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int to = pair_tile(2 * source + h, target) * 32 + lane;
      pairs[to] = {Pair<T>::of(tile[0][2 * h], tile[0][2 * h + 1]), Pair<T>::of(tile[1][2 * h], tile[1][2 * h + 1])};
      pair_gradient[to] = {0, 0, 0, 0};
    }
  }
  __syncthreads();

  if (warp < PAIR_WARPS) {
    const int strips[2] = {warp, STRIPS - 1 - warp};
    const int own[2] = {strips[0] * STRIP + lane / 4, strips[1] * STRIP + lane / 4};  // this lane's two tokens
    const unsigned rows = swizzled((lane & 8 ? STRIPS - 1 - warp : warp) * STRIP + lane % 8,
                                   lane / 16);  // its place in fragments of them
    float gradient[N / 2];                      // dC of this warp's tokens
#pragma unroll
    for (int i = 0; i < N / 2; ++i) gradient[i] = 0;
    float *by_step = floats(At::ByStep), *by_decay = floats(At::ByDecay), *by_leaving = floats(At::ByLeaving);
    float* by_target = floats(At::ByTarget) + warp * TOKENS;

#pragma unroll 1
    for (int k = 0; k < count; ++k) {
      const int buffer = k % 2;
      const unsigned x_tile = base + At::X + buffer * At::Rows, dy_tile = base + At::DY + buffer * At::Rows;
      const float *g = floats(At::Decay) + buffer * TOKENS, *s = floats(At::Step) + buffer * TOKENS;
      barrier_wait(full_tokens + buffer * 8, k / 2 % 2);
      const float g_own[2] = {g[own[0]], g[own[1]]}, s_own[2] = {s[own[0]], s[own[1]]};

      // From the chunk's start: dC += exp2(g) dy S, and what it says of the decays.
      if (k > 0) barrier_wait(finished, (k - 1) % 2);
      {
        unsigned dy_own[4][4];
        load_rows(dy_own, dy_tile + rows);
        const float enter[2] = {exp2_fast(g_own[0]), exp2_fast(g_own[1])};
        float entering[2] = {0, 0};
        barrier_wait(full_states, k % 2);
#pragma unroll
        for (int columns = 0; columns < At::Tiles; ++columns) {
          float product[32];
          wgmma_fence();
#pragma unroll
          for (int d = 0; d < 4; ++d) {
            const unsigned long long b = column_descriptor(base + At::S + columns * TILE, TILE);
            Wgmma<T, 64>::template registers<true>(product, dy_own[d], advanced(b, d * 2048), d > 0);
          }
          wgmma_commit();
          wgmma_wait<0>();
          pin(product);
#pragma unroll
          for (int d = 0; d < 4; ++d) {
            unsigned c[4];
            load_tiles(c, base + At::C + columns * At::Rows + rows ^ d * 32);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const float2 v = both_of<T>(c[i]);
              const int j = 4 * (2 * d + i / 2) + 2 * (i % 2);
              entering[i % 2] += v.x * product[j] + v.y * product[j + 1];
              gradient[32 * columns + j] += enter[i % 2] * product[j];
              gradient[32 * columns + j + 1] += enter[i % 2] * product[j + 1];
            }
          }
        }
        if (lane == 0) barrier_arrive(free_states);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float sum = enter[h] * quad_sum(entering[h]);
          if (quad == 0) by_decay[own[h]] = sum;
        }
      }

      // From the chunk's end: u = T B_j.
      float u[WIDTH / 2];
      barrier_wait(full_adjoints, k % 2);
#pragma unroll
      for (int columns = 0; columns < At::Tiles; ++columns) {
        unsigned a[4][4];
        load_rows(a, base + At::B + columns * At::Rows + rows);
        wgmma_fence();
#pragma unroll
        for (int d = 0; d < 4; ++d) {
          const unsigned long long b = row_descriptor(base + At::Adjoint + columns * TILE);
          Wgmma<T, WIDTH>::template registers<false>(u, a[d], advanced(b, d * 32), columns + d > 0);
        }
        wgmma_commit();
        wgmma_wait<0>();
      }
      pin(u);
      if (lane == 0) barrier_arrive(free_adjoints);
      {
        unsigned x_own[4][4];
        load_rows(x_own, x_tile + rows);
        const float leave[2] = {exp2_fast(g[TOKENS - 1] - g_own[0]), exp2_fast(g[TOKENS - 1] - g_own[1])};
        float leaving[2] = {0, 0};
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          const float2 v = both_of<T>(x_own[i / 4][i % 4]);
          const int j = 4 * (2 * (i / 4) + i % 4 / 2) + 2 * (i % 2);
          leaving[i % 2] += u[j] * v.x + u[j + 1] * v.y;
          u[j] *= leave[i % 2];
          u[j + 1] *= leave[i % 2];
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float sum = leave[h] * quad_sum(leaving[h]);
          if (quad == 0) by_leaving[own[h]] = sum;
        }
      }

      // u += M dy over the pairs of this warp's sources.
      float later[2] = {0, 0}, same[2] = {0, 0};
#pragma unroll 1
      for (int first = warp < 4 ? 0 : 2; first < TARGET_TILES; first += BLOCK_TILES) {
        float joint[BLOCK_TILES * 8];
        {
          unsigned x_own[4][4];
          load_rows(x_own, x_tile + rows);
          wgmma_fence();
#pragma unroll
          for (int d = 0; d < 4; ++d) {
            const unsigned long long b = row_descriptor(dy_tile + first * TileRows);
            Wgmma<T, BLOCK_TILES * TARGETS>::template registers<false>(joint, x_own[d], advanced(b, d * 32), d > 0);
          }
          wgmma_commit();
          wgmma_wait<0>();
          pin(joint);
        }
        unsigned mixed[BLOCK_TILES][4] = {};
#pragma unroll
        for (int i = 0; i < BLOCK_TILES; ++i) {
          const int target = first + i;
          float column[4] = {};
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const int at = pair_tile(strips[h], target) * 32, ahead = target * TARGETS + 2 * quad - own[h];
            if (target > strips[h] / 2) {
              weigh_pairs<T, false>(mixed[i], column, later[h], same[h], joint + 8 * i, h, ahead, g_own[h], s_own[h],
                                    g + target * TARGETS, pairs + at, pair_gradient + at);
            } else if (target == strips[h] / 2) {
              weigh_pairs<T, true>(mixed[i], column, later[h], same[h], joint + 8 * i, h, ahead, g_own[h], s_own[h],
                                   g + target * TARGETS, pairs + at, pair_gradient + at);
            }
          }
          // Sums over the 16 sources: lanes share the work until each has one target.
          halve<2>(column, 16);
          halve<1>(column, 8);
          column[0] += __shfl_xor_sync(~0u, column[0], 4);
          const int place = (lane & 16 ? 8 : 0) + 2 * quad + (lane & 8 ? 1 : 0);
          if (!(lane & 4)) by_target[target * TARGETS + place] = column[0];
        }
        wgmma_fence();
#pragma unroll
        for (int i = 0; i < BLOCK_TILES; ++i) {
          const unsigned long long b = column_descriptor(dy_tile + (first + i) * TileRows, TILE);
          Wgmma<T, WIDTH>::template registers<true>(u, mixed[i], b, true);
        }
        wgmma_commit();
        wgmma_wait<0>();
        pin(u);
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float sum = quad_sum(later[h]), all = sum + quad_sum(same[h]);
        if (quad == 0) {
          by_step[own[h]] = all;
          by_decay[own[h]] -= s_own[h] * sum;
        }
      }

      // dx, and dD of this warp's tokens.
      unsigned dy_own[4][4];
      load_rows(dy_own, dy_tile + rows);
#pragma unroll
      for (int i = 0; i < WIDTH / 2; ++i) u[i] *= s_own[i / 2 % 2];
      if constexpr (HasD) {
        unsigned x_own[4][4];
        load_rows(x_own, x_tile + rows);
        sum_skip<T>(x_own, dy_own, floats(At::BySkip) + warp * WIDTH);
        const float* of_channel = floats(At::Skip) + buffer * WIDTH + 2 * quad;
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const float2 d = *reinterpret_cast<const float2*>(of_channel + 8 * j);
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const float2 v = both_of<T>(dy_own[j / 2][j % 2 * 2 + h]);
            u[4 * j + 2 * h] += d.x * v.x;
            u[4 * j + 2 * h + 1] += d.y * v.y;
          }
        }
      }
      __syncwarp();
      if (lane == 0) {
        barrier_arrive(done);
        barrier_arrive(free_tokens + buffer * 8);
      }
      T* to = dx + ((size_t(row) * seq + chunk * TOKENS) * sizes.units() + first_unit + k) * WIDTH;
      const size_t stride = size_t(sizes.units()) * WIDTH;
      store_rows<T, WIDTH>(u, to + own[0] * stride, to + own[1] * stride, own[0] < tokens, own[1] < tokens);
    }
    __syncthreads();

    // dC += dG B, with dG summed over the heads.
#pragma unroll 1
    for (int source = 0; source <= strips[1] / 2; ++source) {
      unsigned a[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // sources 8 (i / 2) on, targets of strip i % 2
        const int from = 2 * source + i / 2, target = strips[i % 2];
        unsigned tile = 0;
        if (from <= target) {
          const float4 v = pair_gradient[pair_tile(from, target / 2) * 32 + lane];
          tile = target % 2 ? Pair<T>::of(v.z, v.w) : Pair<T>::of(v.x, v.y);
        }
        a[i] = transposed_tile(tile);
      }
      add_product<T, N>(gradient, a, base + At::B + source * TileRows + left);
    }
    const size_t of_chunk = (size_t(row) * seq + chunk * TOKENS) * groups + group;
    const size_t part = Partial ? size_t(head_block) * batch * seq * groups : 0;
    void* to = Partial ? static_cast<void*>(static_cast<float*>(dC) + (part + of_chunk) * N)
                       : static_cast<void*>(static_cast<T*>(dC) + of_chunk * N);
    store_group<T, N, Partial>(gradient, to, size_t(groups) * N, own[0], own[1], tokens);
    return;
  }

  // Writes what belongs to a token of a head, once the pairs are done with it.
  auto finish = [&](int k) {
    const int buffer = k % 2;
    const size_t of_unit = size_t(row) * sizes.units() + first_unit + k;
    barrier_wait(done, k % 2);
    float4 sum = reinterpret_cast<const float4*>(memory + At::ByDecay)[lane];
    for (int i = 0; i < PAIR_WARPS && i <= lane / 4 * 2 + 1; ++i) {
      const float4 part = reinterpret_cast<const float4*>(memory + At::ByTarget)[i * 32 + lane];
      sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
    }
    // What leaves counts for the chunk's total decay, and against that up to its token.
    float4 direct = reinterpret_cast<const float4*>(memory + At::ByStep)[lane];
    float4 part = reinterpret_cast<const float4*>(memory + At::ByLeaving)[lane];
    const float4 s = reinterpret_cast<const float4*>(memory + At::Step)[buffer * 32 + lane];
    direct.x += part.x, direct.y += part.y, direct.z += part.z, direct.w += part.w;
    part.x *= s.x, part.y *= s.y, part.z *= s.z, part.w *= s.w;
    sum.x -= part.x, sum.y -= part.y, sum.z -= part.z, sum.w -= part.w;
    float last = part.x + part.y + part.z + part.w;
    if (lane < SOURCE_WARPS) last += floats(At::ByLast)[buffer * SOURCE_WARPS + lane];
    last = warp_sum(last);
    float2 of_skip{0, 0};
    if constexpr (HasD) {
      for (int i = 0; i < PAIR_WARPS; ++i) {
        const float2 v = reinterpret_cast<const float2*>(memory + At::BySkip)[i * 32 + lane];
        of_skip.x += v.x, of_skip.y += v.y;
      }
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(finished);
    if (lane == 31) sum.w += last;
    sum.z += sum.w, sum.y += sum.z, sum.x += sum.y;
    float after = sum.x;  // becomes the sum of this lane and all after it
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const float other = __shfl_down_sync(~0u, after, offset);
      if (lane + offset < 32) after += other;
    }
    after = __shfl_down_sync(~0u, after, 1);
    if (lane == 31) after = 0;
    const size_t at = of_unit * sizes.padded() + chunk * TOKENS + lane * 4;
    *reinterpret_cast<float4*>(ddecay + at) = {sum.x + after, sum.y + after, sum.z + after, sum.w + after};
    *reinterpret_cast<float4*>(dstep + at) = direct;
    if constexpr (HasD) {
      *reinterpret_cast<float2*>(dskip + (of_unit * chunks + chunk) * WIDTH + lane * 2) = of_skip;
    }
  };

  take_registers<SOURCE_REGISTERS>();
  const int source_warp = warp - PAIR_WARPS;
  float gradient[2][N / 2];  // dB of tokens 0 to 63 and 64 to 127
#pragma unroll
  for (int i = 0; i < N; ++i) gradient[i / (N / 2)][i % (N / 2)] = 0;
#pragma unroll 1
  for (int k = 0; k < count; ++k) {
    const int buffer = k % 2;
    const float *g = floats(At::Decay) + buffer * TOKENS, *s = floats(At::Step) + buffer * TOKENS;
    const unsigned x_tile = base + At::X + buffer * At::Rows + source_warp * TileRows + left;
    barrier_wait(full_tokens + buffer * 8, k / 2 % 2);
    barrier_wait(full_adjoints, k % 2);
    const float g_last = g[TOKENS - 1];
#pragma unroll
    for (int i = 0; i < 2; ++i) {  // dB += s e x T
      const int token = i * 64 + source_warp * 16 + lane / 4;
      const float weight[2] = {s[token] * exp2_fast(g_last - g[token]),
                               s[token + 8] * exp2_fast(g_last - g[token + 8])};
      unsigned a[4][4];
      load_rows(a, x_tile + i * TILE);
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        const float2 v = both_of<T>(a[j / 4][j % 4]);
        a[j / 4][j % 4] = Pair<T>::of(v.x * weight[j % 2], v.y * weight[j % 2]);
      }
      wgmma_fence();
#pragma unroll
      for (int d = 0; d < 4; ++d) {
        const unsigned long long b = column_descriptor(base + At::Adjoint, TILE);
        Wgmma<T, N>::template registers<true>(gradient[i], a[d], advanced(b, d * 2048), true);
      }
      wgmma_commit();
      wgmma_wait<0>();
      pin(gradient[i]);
    }
    // <S, T>, which the chunk's total decay scales.
    barrier_wait(full_states, k % 2);
    float across = 0;
#pragma unroll 2
    for (int i = threadIdx.x - PAIR_THREADS; i < 8 * N; i += SOURCE_WARPS * 32) {
      const uint4 a = reinterpret_cast<const uint4*>(memory + At::S)[i];
      const uint4 b = reinterpret_cast<const uint4*>(memory + At::Adjoint)[i];
      across += dot<T>(a.x, b.x) + dot<T>(a.y, b.y) + (dot<T>(a.z, b.z) + dot<T>(a.w, b.w));
    }
    across = warp_sum(across) * exp2_fast(g_last);
    if (lane == 0) {
      floats(At::ByLast)[buffer * SOURCE_WARPS + source_warp] = across;
      barrier_arrive(free_adjoints);
      barrier_arrive(free_states);
    }
    if (k > 0) {
      if (source_warp == k % SOURCE_WARPS) finish(k - 1);
      __syncwarp();
      if (lane == 0) barrier_arrive(free_tokens + (k - 1) % 2 * 8);
    }
    named_barrier(1, SOURCE_WARPS * 32);  // this head's part of ByLast is there, the one before may be overwritten
    if (copies && k + 1 < count) {
      if (k > 0) {
        barrier_wait(free_tokens + (k - 1) % 2 * 8, (k - 1) / 2 % 2);
        load_tokens(k + 1);
      }
      barrier_wait(free_adjoints, k % 2);
      load_state_tiles(adjoints, base + At::Adjoint, k + 1, full_adjoints);
      barrier_wait(free_states, k % 2);
      load_state_tiles(states, base + At::S, k + 1, full_states);
    }
    __syncwarp();
  }
  if (source_warp == 0) finish(count - 1);
  __syncthreads();

  // dB += dG' C.
  const size_t of_chunk = (size_t(row) * seq + chunk * TOKENS) * groups + group;
  const size_t part = Partial ? size_t(head_block) * batch * seq * groups : 0;
  void* to = Partial ? static_cast<void*>(static_cast<float*>(dB) + (part + of_chunk) * N)
                     : static_cast<void*>(static_cast<T*>(dB) + of_chunk * N);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int source = 4 * i + source_warp;
#pragma unroll 1
    for (int target = source; target < TARGET_TILES; ++target) {
      const float4 v = pair_gradient[pair_tile(2 * source, target) * 32 + lane];
      const float4 w = pair_gradient[pair_tile(2 * source + 1, target) * 32 + lane];
      const unsigned a[4] = {Pair<T>::of(v.x, v.y), Pair<T>::of(w.x, w.y), Pair<T>::of(v.z, v.w),
                             Pair<T>::of(w.z, w.w)};
      add_product<T, N>(gradient[i], a, base + At::C + target * TileRows + left);
    }
    const int upper = source * 16 + lane / 4;
    store_group<T, N, Partial>(gradient[i], to, size_t(groups) * N, upper, upper + 8, tokens);
  }
}

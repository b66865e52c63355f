// Pairs of a token and a later one in a chunk of Mamba-2, and what they give to the gradients of x, steps and decays:
// what the kernels of chunk gradients share; mamba2_backward.cu says what is computed.
//
// A strip is 8 tokens. Two warpgroups share the pairs: warp w owns strips w and 15 - w, the rows 0 to 7 and 8 to 15 of
// its fragments, as sources and as targets: so every warp has as many pairs of a source and a later target.
#pragma once

#include "async_copy.cuh"
#include "decay.cuh"
#include "fragments.cuh"
#include "mamba2_chunks.cuh"
#include "shared_memory.cuh"
#include "wgmma.cuh"

namespace jax_ssd {

constexpr float MASKED = -1e30f;  // an exponent whose exp2 is exactly zero
constexpr int PAIR_WARPS = 8, PAIR_THREADS = PAIR_WARPS * 32;
constexpr int STRIP = 8, STRIPS = TOKENS / STRIP;
constexpr int TARGETS = 16, TARGET_TILES = TOKENS / TARGETS;   // targets of a tile of pairs, the sources are a strip
constexpr int PAIR_TILES = TARGET_TILES * (TARGET_TILES + 1);  // those that hold a pair of a token and a later one
constexpr int BLOCK_TILES = 2;                                 // target tiles that are multiplied together
constexpr int TILE_ROWS = TARGETS * 128;                       // bytes of 16 rows of 64 columns

// Shared memory for the tokens of this head and the next and for the pairs, from an offset on.
template <int From>
struct PairMemory {
  static constexpr int X = From, DY = X + 2 * ROWS;                  // [2][128][64]
  static constexpr int PairGradient = DY + 2 * ROWS;                 // dG, float32 tiles as lanes hold them
  static constexpr int Pairs = PairGradient + PAIR_TILES * 512;      // G, rounded to T
  static constexpr int Decay = Pairs + PAIR_TILES * 256;             // [2][128] float32
  static constexpr int Step = Decay + 2 * TOKENS * 4;                // [2][128]
  static constexpr int Skip = Step + 2 * TOKENS * 4;                 // [2][64]
  static constexpr int ByTarget = Skip + 2 * WIDTH * 4;              // [warps][128]: sums over the warp's sources
  static constexpr int ByStep = ByTarget + PAIR_WARPS * TOKENS * 4;  // [128]
  static constexpr int ByDecay = ByStep + TOKENS * 4;                // [128]
  static constexpr int ByLeaving = ByDecay + TOKENS * 4;             // [128]
  static constexpr int BySkip = ByLeaving + TOKENS * 4;              // [warps][64]
  static constexpr int End = BySkip + PAIR_WARPS * WIDTH * 4;
};

// A block's shared memory, as an address and as a pointer.
struct Block {
  unsigned base;
  char* memory;
  __device__ float* floats(int at) const { return reinterpret_cast<float*>(memory + at); }
};

// This lane's two tokens, and its place in the fragments of the warp's strips in a tile of [128][64].
struct Strips {
  int strip[2], own[2];
  unsigned rows;
  __device__ explicit Strips(int warp) {
    const int lane = threadIdx.x % 32;
    strip[0] = warp, strip[1] = STRIPS - 1 - warp;
    own[0] = strip[0] * STRIP + lane / 4, own[1] = strip[1] * STRIP + lane / 4;
    rows = swizzled((lane & 8 ? strip[1] : strip[0]) * STRIP + lane % 8, lane / 16);
  }
};

// Starts the copies of what belongs to the tokens of a head: to buffer 0 or 1. decay, step and skip begin with them.
template <typename At, bool HasD>
__device__ __forceinline__ void load_head(unsigned base, int buffer, unsigned barrier, const TensorMap& x,
                                          const TensorMap& dy, const float* decay, const float* step, const float* skip,
                                          int unit, int token, int row) {
  barrier_expect(barrier, 2 * ROWS + 2 * TOKENS * 4 + (HasD ? WIDTH * 4 : 0));
  for (int i = 0; i < 2; ++i) {
    const unsigned to = base + buffer * ROWS + i * TILE;
    copy_in(to + At::X, x, 0, unit, token + i * HALF, row, barrier, KEEP_FIRST);
    copy_in(to + At::DY, dy, 0, unit, token + i * HALF, row, barrier, KEEP_FIRST);
  }
  copy_line_in(base + At::Decay + buffer * TOKENS * 4, decay, TOKENS * 4, barrier);
  copy_line_in(base + At::Step + buffer * TOKENS * 4, step, TOKENS * 4, barrier);
  if (HasD) copy_line_in(base + At::Skip + buffer * WIDTH * 4, skip, WIDTH * 4, barrier);
}

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
      float exponent = (c ? g.y : g.x) - g_own, e = joint[4 * q + 2 * h + c];
      m[c] = c ? product.y : product.x;
      if (Diagonal) {  // a NaN times a masked weight would be one
        exponent = distance >= 0 ? exponent : MASKED;
        e = distance >= 0 ? e : 0.0f;
        m[c] = distance >= 0 ? m[c] : 0.0f;
      }
      const float w = exp2_fast(exponent), weighted = e * w;
      float both = m[c] * weighted;
      m[c] *= w;
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

// What a token's own pair and the later ones give: u = T B_j becomes e_j T B_j.
template <typename T, typename At>
__device__ __forceinline__ void weigh_leaving(float (&u)[WIDTH / 2], const Block& block, const Strips& strips,
                                              unsigned x_tile, const float* g) {
  unsigned x_own[4][4];
  load_rows(x_own, x_tile + strips.rows);
  const float last = g[TOKENS - 1];
  const float leave[2] = {exp2_fast(last - g[strips.own[0]]), exp2_fast(last - g[strips.own[1]])};
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
    if (threadIdx.x % 4 == 0) block.floats(At::ByLeaving)[strips.own[h]] = sum;
  }
}

// u += M dy over the pairs of this warp's sources, dG += E w s, and their part of the gradients of step and decay.
template <typename T, typename At, bool AddsDecay>
__device__ __forceinline__ void add_pairs(float (&u)[WIDTH / 2], const Block& block, const Strips& strips, int warp,
                                          unsigned x_tile, unsigned dy_tile, const float* g, const float* s) {
  const int lane = threadIdx.x % 32, quad = lane % 4;
  auto* pair_gradient = reinterpret_cast<float4*>(block.memory + At::PairGradient);
  const auto* pairs = reinterpret_cast<const uint2*>(block.memory + At::Pairs);
  float* by_target = block.floats(At::ByTarget) + warp * TOKENS;
  const float g_own[2] = {g[strips.own[0]], g[strips.own[1]]}, s_own[2] = {s[strips.own[0]], s[strips.own[1]]};
  float later[2] = {0, 0}, same[2] = {0, 0};
#pragma unroll 1
  for (int first = warp < 4 ? 0 : 2; first < TARGET_TILES; first += BLOCK_TILES) {
    float joint[BLOCK_TILES * 8];
    {
      unsigned x_own[4][4];
      load_rows(x_own, x_tile + strips.rows);
      wgmma_fence();
#pragma unroll
      for (int d = 0; d < 4; ++d) {
        const unsigned long long b = row_descriptor(dy_tile + first * TILE_ROWS);
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
        const int at = pair_tile(strips.strip[h], target) * 32, ahead = target * TARGETS + 2 * quad - strips.own[h];
        if (target > strips.strip[h] / 2) {
          weigh_pairs<T, false>(mixed[i], column, later[h], same[h], joint + 8 * i, h, ahead, g_own[h], s_own[h],
                                g + target * TARGETS, pairs + at, pair_gradient + at);
        } else if (target == strips.strip[h] / 2) {
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
      const unsigned long long b = column_descriptor(dy_tile + (first + i) * TILE_ROWS, TILE);
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
      const int token = strips.own[h];
      block.floats(At::ByStep)[token] = all;
      const float before = AddsDecay ? block.floats(At::ByDecay)[token] : 0.0f;
      block.floats(At::ByDecay)[token] = before - s_own[h] * sum;
    }
  }
}

// dx of this warp's tokens, in u, and its part of dD.
template <typename T, typename At, bool HasD>
__device__ __forceinline__ void finish_sources(float (&u)[WIDTH / 2], const Block& block, const Strips& strips,
                                               int warp, unsigned x_tile, unsigned dy_tile, const float* s,
                                               const float* skip) {
  unsigned dy_own[4][4];
  load_rows(dy_own, dy_tile + strips.rows);
  const float s_own[2] = {s[strips.own[0]], s[strips.own[1]]};
#pragma unroll
  for (int i = 0; i < WIDTH / 2; ++i) u[i] *= s_own[i / 2 % 2];
  if constexpr (HasD) {
    unsigned x_own[4][4];
    load_rows(x_own, x_tile + strips.rows);
    sum_skip<T>(x_own, dy_own, block.floats(At::BySkip) + warp * WIDTH);
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 d = *reinterpret_cast<const float2*>(skip + 8 * j + 2 * (threadIdx.x % 4));
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float2 v = both_of<T>(dy_own[j / 2][j % 2 * 2 + h]);
        u[4 * j + 2 * h] += d.x * v.x;
        u[4 * j + 2 * h + 1] += d.y * v.y;
      }
    }
  }
}

// Writes what the pairs found for a chunk of a head, where dstep, ddecay and dskip point; one warp. `last`: this lane's
// part of what else the chunk's total decay changes. Arrives at `finished` when the sums may be overwritten.
template <typename At, bool HasD>
__device__ __forceinline__ void finish_head(const Block& block, int buffer, float last, unsigned finished, float* dstep,
                                            float* ddecay, float* dskip) {
  const int lane = threadIdx.x % 32;
  auto four = [&](int at) { return reinterpret_cast<const float4*>(block.memory + at)[lane]; };
  float4 sum = four(At::ByDecay);
  for (int i = 0; i < PAIR_WARPS && i <= lane / 4 * 2 + 1; ++i) {
    const float4 part = four(At::ByTarget + i * TOKENS * 4);
    sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
  }
  // What leaves counts for the chunk's total decay, and against that up to its token.
  float4 direct = four(At::ByStep), part = four(At::ByLeaving);
  const float4 s = four(At::Step + buffer * TOKENS * 4);
  direct.x += part.x, direct.y += part.y, direct.z += part.z, direct.w += part.w;
  part.x *= s.x, part.y *= s.y, part.z *= s.z, part.w *= s.w;
  sum.x -= part.x, sum.y -= part.y, sum.z -= part.z, sum.w -= part.w;
  last = warp_sum(last + (part.x + part.y + part.z + part.w));
  float2 of_skip{0, 0};
  if constexpr (HasD) {
    for (int i = 0; i < PAIR_WARPS; ++i) {
      const float2 v = reinterpret_cast<const float2*>(block.memory + At::BySkip)[i * 32 + lane];
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

}  // namespace jax_ssd

// Pairs of a token and a later one in a chunk of Mamba-2, and what they give to the gradients of x, steps and decays:
// what the kernels of chunk gradients share; mamba2_backward.cu says what is computed.
//
// Eight warps, two warpgroups, own 16 tokens each, a strip, as sources and as targets. Pairs across the middle of the
// chunk, or of one of its halves, have weights of two factors, w_ij = exp2(g_mid - g_j) exp2(g_i - g_mid): the warps of
// the sources add them to dx, those of the targets do the rest, so that no warp has much more to do than another.
#pragma once

#include "async_copy.cuh"
#include "decay.cuh"
#include "fragments.cuh"
#include "mamba2_chunks.cuh"
#include "shared_memory.cuh"
#include "wgmma.cuh"

namespace jax_ssd {

constexpr float MASKED = -1e30f;  // an exponent whose exp2 is exactly zero
constexpr int TOKEN_WARPS = 8, TOKEN_THREADS = TOKEN_WARPS * 32;
constexpr int STRIPS = TOKENS / 16, HALF_STRIPS = STRIPS / 2;
constexpr int PAIR_TILES = STRIPS * (STRIPS + 1) / 2;  // 16 x 16 tiles that hold a pair of a token and a later one

// Shared memory for the tokens of this head and the next and for the pairs, from an offset on.
template <int From>
struct PairMemory {
  static constexpr int X = From, DY = X + 2 * ROWS;               // [2][128][64]
  static constexpr int PairGradient = DY + 2 * ROWS;              // dG, float32 tiles as lanes hold them
  static constexpr int Pairs = PairGradient + PAIR_TILES * 1024;  // G, rounded to T
  static constexpr int Decay = Pairs + PAIR_TILES * 512;          // [2][128] float32
  static constexpr int Step = Decay + 2 * TOKENS * 4;             // [2][128]
  static constexpr int Skip = Step + 2 * TOKENS * 4;              // [2][64]
  static constexpr int ByStep = Skip + 2 * WIDTH * 4;             // [128]
  static constexpr int ByDecay = ByStep + TOKENS * 4;             // [128]
  static constexpr int BySkip = ByDecay + TOKENS * 4;             // [strips][64]
  static constexpr int End = BySkip + STRIPS * WIDTH * 4;
};

// This lane's place in a fragment of 16 rows of 64 columns, a left factor or, transposed, one whose rows are summed
// over; the next 16 columns are at ^ 32.
__device__ __forceinline__ unsigned place_in_rows(int lane) { return swizzled(lane % 16, lane / 16); }

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

// Tile (strip, target) of the triangle, target >= strip.
__device__ __forceinline__ int pair_tile(int strip, int target) {
  return strip * STRIPS - strip * (strip - 1) / 2 + target - strip;
}

// Four fragments of 16 rows of 64 columns, scaled by a factor for each of this lane's two rows; `rows` is its address.
template <typename T>
__device__ __forceinline__ void load_scaled(unsigned (&a)[4][4], unsigned rows, const float (&factor)[2]) {
  const unsigned factors[2] = {Pair<T>::of(factor[0], factor[0]), Pair<T>::of(factor[1], factor[1])};
#pragma unroll
  for (int d = 0; d < 4; ++d) {
    load_tiles(a[d], rows ^ d * 32);
#pragma unroll
    for (int i = 0; i < 4; ++i) a[d][i] = Pair<T>::product(a[d][i], factors[i % 2]);
  }
}

// u = T B_j becomes e_j T B_j; <x_j, T B_j> e_j goes to leaving.
template <typename T>
__device__ __forceinline__ void weigh_leaving(float (&u)[WIDTH / 2], float (&leaving)[2], unsigned (&x_own)[4][4],
                                              unsigned rows, const float (&leave)[2]) {
#pragma unroll
  for (int d = 0; d < 4; ++d) {
    load_tiles(x_own[d], rows ^ d * 32);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 w = both_of<T>(x_own[d][i]);
      float* part = u + 4 * (2 * d + i / 2) + 2 * (i % 2);
      leaving[i % 2] += part[0] * w.x + part[1] * w.y;
      part[0] *= leave[i % 2];
      part[1] *= leave[i % 2];
    }
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
  by_target[second * 8 + 2 * (lane % 4) + odd] = one;  // two lanes the same
}

// E of 16 sources in fragments and 16 targets; `rows` is this lane's address in dy's rows as a right factor.
template <typename T>
__device__ __forceinline__ void multiply_rows(float (&joint)[8], const unsigned (&x)[4][4], unsigned rows) {
#pragma unroll
  for (int i = 0; i < 8; ++i) joint[i] = 0;
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

// The pairs of a strip of 16 sources, whose g and s this warp's lanes hold, with 16 targets, E in `joint`: adds M dy to
// u, E w s to dG, and E M to the sums over targets (`later`, without a token's pair with itself, and `same`, all of the
// diagonal tile). The sums over sources of s E M go to by_target, the targets' place.
template <typename T, bool Diagonal>
__device__ __forceinline__ void add_pairs(float (&u)[WIDTH / 2], float (&later)[2], float (&same)[2],
                                          const float (&joint)[8], const float (&g_own)[2], const float (&s_own)[2],
                                          const float* g, const uint4* pairs, float4* pair_gradient, float* by_target,
                                          unsigned dy_tile, unsigned left, int strip, int target) {
  const int lane = threadIdx.x % 32, quad = lane % 4;
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
      if (Diagonal && q < h) {  // the last eight sources with the first eight targets
        mixed[2 * q + h] = 0;
        continue;
      }
      const bool masked = Diagonal && q == h;
      const float2 product = both_of<T>(kept[2 * q + h]);
      float m[2];
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float exponent = (c ? g_target.y : g_target.x) - g_own[h];
        const int ahead = q * 8 + 2 * quad + c - (lane / 4 + 8 * h);
        float e = joint[4 * q + 2 * h + c];
        m[c] = c ? product.y : product.x;
        if (masked) {  // a NaN times a masked weight would be one
          exponent = ahead >= 0 ? exponent : MASKED;
          e = ahead >= 0 ? e : 0.0f;
          m[c] = ahead >= 0 ? m[c] : 0.0f;
        }
        const float w = exp2_fast(exponent);
        m[c] *= w;
        const float both = e * m[c];
        sum[2 * h + c] += e * w * s_own[h];
        if constexpr (Diagonal) same[h] += both;
        if (!masked || ahead > 0) {
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
  sum_columns(column, by_target);
}

// As add_pairs, of targets in a strip after the sources': w_ij = exp2(g_end - g_j) exp2(g_i - g_end), with g_end at the
// strip's end. What is added to u and later lacks the first factor; left_s is that times s. g and by_target are the
// targets', pairs and pair_gradient this lane's in the tile, `rows` its address in dy's 16 rows.
template <typename T>
__device__ __forceinline__ void add_later_pairs(float (&u)[WIDTH / 2], float (&later)[2], const float (&joint)[8],
                                                const float (&left_s)[2], float g_end, const float* g,
                                                const uint4* pairs, float4* pair_gradient, float* by_target,
                                                unsigned rows) {
  const int quad = threadIdx.x % 4;
  const uint4 packed = *pairs;
  const unsigned kept[4] = {packed.x, packed.y, packed.z, packed.w};
  float4 sums[2] = {pair_gradient[0], pair_gradient[32]};
  unsigned mixed[4];
  float column[2][2] = {};
#pragma unroll
  for (int q = 0; q < 2; ++q) {
    const float2 g_two = *reinterpret_cast<const float2*>(g + q * 8 + 2 * quad);
    const float right[2] = {exp2_fast(g_two.x - g_end), exp2_fast(g_two.y - g_end)};
    const unsigned rights = Pair<T>::of(right[0], right[1]);
    float* sum = reinterpret_cast<float*>(&sums[q]);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      mixed[2 * q + h] = Pair<T>::product(kept[2 * q + h], rights);
      const float2 product = both_of<T>(kept[2 * q + h]);
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        const float weighted = joint[4 * q + 2 * h + c] * right[c];
        const float both = weighted * (c ? product.y : product.x);
        sum[2 * h + c] += weighted * left_s[h];
        later[h] += both;
        column[q][c] += left_s[h] * both;
      }
    }
  }
  pair_gradient[0] = sums[0];
  pair_gradient[32] = sums[1];
  add_mixed<T>(u, mixed, rows);
  sum_columns(column, by_target);
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

// All pairs of a head of which this warp owns the sources, or which it weighs for another: adds M dy to u, E w s to dG,
// and what they say of the gradients of steps and decays to later, same and the sums in memory.
template <typename T, typename Memory>
__device__ __forceinline__ void add_all_pairs(float (&u)[WIDTH / 2], float (&later)[2], float (&same)[2],
                                              const unsigned (&x_own)[4][4], const float (&g_own)[2],
                                              const float (&s_own)[2], const float* g, const float* s, char* memory,
                                              unsigned x_tile, unsigned dy_tile, int warp) {
  const int lane = threadIdx.x % 32, strip = warp;
  const unsigned left = place_in_rows(lane), right = swizzled(lane % 8 + lane / 16 * 8, lane / 8 % 2);
  auto* pair_gradient = reinterpret_cast<float4*>(memory + Memory::PairGradient);
  const auto* pairs = reinterpret_cast<const uint4*>(memory + Memory::Pairs);
  float* by_target = reinterpret_cast<float*>(memory + Memory::ByTarget) + strip * TOKENS;
  float joint[8];
  multiply_rows<T>(joint, x_own, dy_tile + strip * 2048 + right);
  add_pairs<T, true>(u, later, same, joint, g_own, s_own, g, pairs, pair_gradient, by_target + strip * 16, dy_tile,
                     left, strip, strip);
  same[0] = same[0] - later[0], same[1] = same[1] - later[1];
  if (strip % 2 == 0) {
    multiply_rows<T>(joint, x_own, dy_tile + (strip + 1) * 2048 + right);
    add_pairs<T, false>(u, later, same, joint, g_own, s_own, g, pairs, pair_gradient, by_target + (strip + 1) * 16,
                        dy_tile, left, strip, strip + 1);
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
        float joint[8];
        multiply_rows<T>(joint, x_far, dy_tile + target * 2048 + right);
        add_far<T>(far, joint, to_mid, s_far, g_mid, g + target * 16, pairs + at * 32, pair_gradient + at * 64,
                   reinterpret_cast<float*>(memory + Memory::ByTarget) + source * TOKENS + target * 16);
      }
      store_far(reinterpret_cast<float*>(memory + Memory::ByFar) + 2 * TOKENS, first_half / 2 * 16 + first % HALF, far,
                s_far);
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
}

// dx of this warp's tokens, in u, and its part of dD.
template <typename T, typename Memory, bool HasD>
__device__ __forceinline__ void finish_sources(float (&u)[WIDTH / 2], const unsigned (&x_own)[4][4],
                                               const float (&s_own)[2], char* memory, int buffer, unsigned dy_tile,
                                               int strip) {
#pragma unroll
  for (int i = 0; i < WIDTH / 2; ++i) u[i] *= s_own[i / 2 % 2];
  if constexpr (HasD) {
    const int lane = threadIdx.x % 32, quad = lane % 4;
    const unsigned left = place_in_rows(lane);
    const float* d_row = reinterpret_cast<const float*>(memory + Memory::Skip) + buffer * WIDTH;
    float part[16];
    unsigned dy_own[4];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      if (j % 2 == 0) load_tiles(dy_own, dy_tile + strip * 2048 + (left ^ j / 2 * 32));
      const float2 d = *reinterpret_cast<const float2*>(d_row + 8 * j + 2 * quad);
      part[2 * j] = part[2 * j + 1] = 0;
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float2 v = both_of<T>(dy_own[j % 2 * 2 + h]), w = both_of<T>(x_own[j / 2][j % 2 * 2 + h]);
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
}

// Writes what was found for a chunk of a head, where dstep, ddecay and dskip point; one warp. Arrives at `finished`
// when the sums may be overwritten.
template <typename Memory, bool HasD>
__device__ __forceinline__ void finish_head(const char* memory, float last, unsigned finished, float* dstep,
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
  last = warp_sum(last + (part.x + part.y + part.z + part.w));
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
  reinterpret_cast<float4*>(ddecay)[lane] = sums_to_the_end<32>(sum);
  reinterpret_cast<float4*>(dstep)[lane] = direct;
  if constexpr (HasD) reinterpret_cast<float2*>(dskip)[lane] = of_skip;
}

}  // namespace jax_ssd

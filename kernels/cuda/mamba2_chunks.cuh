// What the kernels of the backward of Mamba-2 share: the sizes of a chunk and of a call, products and stores of
// accumulators.
#pragma once

#include "async_copy.cuh"
#include "fragments.cuh"
#include "shared_memory.cuh"

namespace jax_ssd {

constexpr int TOKENS = 128;             // of a chunk
constexpr int HALF = 64;                // tokens of a copy
constexpr int WIDTH = 64;               // channels of a piece of a head
constexpr int TILE = HALF * WIDTH * 2;  // bytes of a copied tile, [64][64] of 16 bits
constexpr int ROWS = 2 * TILE;          // of a chunk's x or dy of one piece, or 64 columns of its B or C

// A kernel begins while the one ahead of it in the stream ends: before anything is read that another kernel wrote, or
// written that another reads.
__device__ __forceinline__ void follow_earlier_kernels() {
  wait_for_earlier_kernels();
  let_next_kernel_start();
}

struct Sizes {
  int seq, heads, groups, pieces, chunks;  // pieces: of one head
  __device__ int units() const { return heads * pieces; }
  __device__ int group_units() const { return heads / groups * pieces; }
  __device__ size_t padded() const { return size_t(chunks) * TOKENS; }
};

// Rounds rows l/4 and l/4 + 8 (of lane l) of a warp's accumulators to T and stores them where `upper` and `lower` say.
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

template <typename T>
__device__ __forceinline__ float dot(unsigned a, unsigned b) {
  const float2 v = both_of<T>(a), w = both_of<T>(b);
  return v.x * w.x + v.y * w.y;
}

// d += a b for a fragment a and 16 rows of b, [rows][N]; `rows` is this lane's address in the first 64 columns.
template <typename T, int N>
__device__ __forceinline__ void add_product(float (&d)[N / 2], const unsigned (&a)[4], unsigned rows) {
#pragma unroll
  for (int n = 0; n < N / 16; ++n) {
    unsigned b[4];
    load_tiles_transposed(b, rows + n / 4 * ROWS ^ n % 4 * 32);
    multiply(reinterpret_cast<float (&)[4]>(d[8 * n]), a, b[0], b[1], T());
    multiply(reinterpret_cast<float (&)[4]>(d[8 * n + 4]), a, b[2], b[3], T());
  }
}

// Rows of N sums in shared memory: their distance keeps rows that a warp writes together in different banks.
template <int N>
constexpr int SUM_ROW = N + 8;
template <int N>
constexpr int SUM_BYTES = TOKENS * SUM_ROW<N> * 4;  // of a chunk

// A warp's accumulators of dB or dC to such rows.
template <int N>
__device__ __forceinline__ void put_sums(const float (&d)[N / 2], float* rows, int upper, int lower) {
#pragma unroll
  for (int j = 0; j < N / 8; ++j) {
    const int column = 8 * j + 2 * (threadIdx.x % 4);
    *reinterpret_cast<float2*>(rows + upper * SUM_ROW<N> + column) = {d[4 * j], d[4 * j + 1]};
    *reinterpret_cast<float2*>(rows + lower * SUM_ROW<N> + column) = {d[4 * j + 2], d[4 * j + 3]};
  }
}

// Adds up the rows of all blocks of a cluster, in their order, and stores the sums, each block those of some tokens.
// `rows` is their address in every block, `to` the chunk's first row; Threads threads, of which this is one.
template <typename T, int N, int Threads>
__device__ __forceinline__ void store_sums(unsigned rows, int blocks, int rank, int thread, T* to, size_t stride,
                                           int tokens) {
  for (int token = rank + thread / (N / 4) * blocks; token < tokens; token += Threads / (N / 4) * blocks) {
    const int column = thread % (N / 4) * 4;
    float4 sum{0, 0, 0, 0};
    for (int block = 0; block < blocks; ++block) {
      const float4 v = load_from_block(rows + (token * SUM_ROW<N> + column) * 4, block);
      sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    }
    *reinterpret_cast<uint2*>(to + token * stride + column) = {Pair<T>::of(sum.x, sum.y), Pair<T>::of(sum.z, sum.w)};
  }
}

// Sums from each token, of which a lane holds four, to the last of so many lanes.
template <int Lanes>
__device__ __forceinline__ float4 sums_to_the_end(float4 v) {
  const int lane = threadIdx.x % Lanes;
  v.z += v.w, v.y += v.z, v.x += v.y;
  float after = v.x;  // becomes the sum of this lane and all after it
#pragma unroll
  for (int offset = 1; offset < Lanes; offset *= 2) {
    const float other = __shfl_down_sync(~0u, after, offset);
    if (lane + offset < Lanes) after += other;
  }
  after = __shfl_down_sync(~0u, after, 1);
  if (lane == Lanes - 1) after = 0;
  return {v.x + after, v.y + after, v.z + after, v.w + after};
}

}  // namespace jax_ssd

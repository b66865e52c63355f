// What the Hopper kernels of the backward of Mamba-3 share: the sizes of a call, tiles of 64 rows in shared memory,
// rows of q, k, v and the output's adjoint made ready for products, sums over the rows of accumulators.
//
// Rows of a tile are the tokens of a chunk times the ranks, row = token * kRank + rank. Columns of q and k are kept in
// the order in which rotated pairs are neighbours, whatever the order in memory. Phases are 16 bits, token after token
// of a head. Tiles are panels of 64 rows and 64 columns, swizzled as wgmma.cuh wants them;
// states and their adjoints are tiles [head_dim][state] in device memory too.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "async_copy.cuh"
#include "decay.cuh"
#include "fragments.cuh"
#include "gates.cuh"
#include "mamba3_phase.cuh"
#include "wgmma.cuh"

namespace jax_ssd {

using bf16 = __nv_bfloat16;
using Pairs16 = Pair<bf16>;

// The order of a chunk's tokens and ranks in the rows of its tiles. It is such that a thread that has 16 of them, rows
// or columns 8 j + 2 (lane % 4) + e of accumulators, has all ranks of kOwn tokens, the own ones. kLate: the tokens of
// two rows that are 8 apart.
template <int Rank>
struct ChunkOrder {
  static constexpr int kOwn = 16 / Rank, kLate = Rank < 4 ? 2 : 1;

  static __device__ __forceinline__ int token(int row) { return Rank < 4 ? row / Rank : row / 16 * 4 + row % 8 / 2; }
  static __device__ __forceinline__ int rank(int row) { return Rank < 4 ? row % Rank : row % 2 + row / 8 % 2 * 2; }
  static __device__ __forceinline__ int row(int token, int rank) {
    return Rank < 4 ? token * Rank + rank : token / 4 * 16 + token % 4 * 2 + rank % 2 + rank / 2 * 8;
  }
  static __device__ __forceinline__ int own_token(int i) {
    const int lane = threadIdx.x % 4;
    return Rank == 1 ? i / 2 * 8 + lane * 2 + i % 2 : 4 * i + lane;
  }
};

// Half: rotated pairs are (i, i + 64), else (2i, 2i + 1). SharedParams: parameters have one row for all of the batch.
// Weighted: ranks have weights, and are folded. State, Final: there is an initial state, a cotangent of the final one.
template <int Heads, int Groups, int Rank, int Pairs, bool Half, bool SharedParams, bool Weighted, bool Gate, bool Skip,
          bool State, bool Final>
struct BackwardCall {
  static constexpr int kHeads = Heads, kGroups = Groups, kRank = Rank, kPairs = Pairs;
  static constexpr bool kHalf = Half, kSharedParams = SharedParams, kWeighted = Weighted, kGate = Gate, kSkip = Skip,
                        kState = State, kFinal = Final;
  static constexpr int kRows = 64, kN = 128, kP = 64, kTokens = kRows / Rank, kGroupHeads = Heads / Groups;
  using Order = ChunkOrder<Rank>;
  static_assert((Rank == 1 || Rank == 2 || Rank == 4) && Pairs % (Rank == 4 ? 8 : 4) == 0 && Pairs <= kN / 2);

  // A chunk's part of the parameters' gradients, of one head, as mamba3_backward_time.cu sums them up.
  static constexpr int kQBiasAt = 0, kKBiasAt = Rank * kN, kMimoVAt = 2 * Rank * kN, kMimoOAt = kMimoVAt + Rank * kP,
                       kMimoZAt = kMimoOAt + Rank * kP, kSkipAt = kMimoZAt + Rank * kP + kP, kRecord = kSkipAt + 4;

  // Where column n of a tile is in memory.
  static __device__ constexpr int column(int n) { return kHalf ? n % 2 * (kN / 2) + n / 2 : n; }
  static __device__ __forceinline__ int param_row(int b) { return kSharedParams ? 0 : b; }
};

constexpr int kPanel = 8192;  // bytes

// Lanes know that all of them have the same.
__device__ __forceinline__ int uniform(int value) { return __shfl_sync(0xffffffff, value, 0); }

// The thread in its warpgroup, read anew: what is computed from it does not stay in registers from one head to the
// next.
__device__ __forceinline__ int thread_anew() {
  unsigned thread = threadIdx.x;
  asm volatile("" : "+r"(thread));
  return thread % 128;
}

__device__ __forceinline__ void unpack8(uint4 words, float (&x)[8]) {
  const unsigned word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) x[2 * i] = Pairs16::low(word[i]), x[2 * i + 1] = Pairs16::high(word[i]);
}

__device__ __forceinline__ uint4 pack8(const float (&x)[8]) {
  return make_uint4(Pairs16::of(x[0], x[1]), Pairs16::of(x[2], x[3]), Pairs16::of(x[4], x[5]), Pairs16::of(x[6], x[7]));
}

__device__ __forceinline__ float2 unpack2(unsigned pair) {
  return make_float2(Pairs16::low(pair), Pairs16::high(pair));
}

__device__ __forceinline__ void load8(const float* p, float (&x)[8]) {
  const float4 a = reinterpret_cast<const float4*>(p)[0], b = reinterpret_cast<const float4*>(p)[1];
  x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
}

// A copy to shared memory, of 16 bytes or 4, as part of the thread's current group.
__device__ __forceinline__ void copy_piece(void* to, const float4* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
__device__ __forceinline__ void copy_piece(void* to, const float* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(to)), "l"(from) : "memory");
}
// The same of 16 bytes, or of zeros if they are not there.
__device__ __forceinline__ void copy_piece(unsigned to, const void* from, bool there = true) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}
__device__ __forceinline__ void pieces_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int Pending>
__device__ __forceinline__ void pieces_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

// At once: the compiler makes four of a plain store.
__device__ __forceinline__ void store4(float* p, float4 v) {
  asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}

__device__ __forceinline__ uint4 read_once(const bf16* p) { return __ldg(reinterpret_cast<const uint4*>(p)); }

// Columns 8 * unit to 8 * unit + 7 of a tile, of a row of q or k in memory, in words as they are there, with kHalf four
// numbers of each half: what is loaded ahead of its use is not to be waited for. `unpack_unit` gives the tile's order.
template <class C>
__device__ __forceinline__ uint4 load_unit(const bf16* row, int unit) {
  if constexpr (!C::kHalf) return read_once(row + 8 * unit);
  const uint2 a = __ldg(reinterpret_cast<const uint2*>(row + 4 * unit)),
              b = __ldg(reinterpret_cast<const uint2*>(row + C::kN / 2 + 4 * unit));
  return make_uint4(a.x, a.y, b.x, b.y);
}
template <class C>
__device__ __forceinline__ void unpack_unit(uint4 words, float (&x)[8]) {
  if constexpr (!C::kHalf) return unpack8(words, x);
  const unsigned low[2] = {words.x, words.y}, high[2] = {words.z, words.w};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    x[4 * i] = Pairs16::low(low[i]), x[4 * i + 1] = Pairs16::low(high[i]);
    x[4 * i + 2] = Pairs16::high(low[i]), x[4 * i + 3] = Pairs16::high(high[i]);
  }
}

// A unit of a bias, in the order of the tile.
template <class C>
__device__ __forceinline__ void load_bias(const float* row, int unit, float (&x)[8]) {
  const int first = C::kHalf ? 4 * unit : 8 * unit, second = C::kHalf ? C::kN / 2 + 4 * unit : 8 * unit + 4;
  const float4 a = __ldg(reinterpret_cast<const float4*>(row + first)),
               b = __ldg(reinterpret_cast<const float4*>(row + second));
  const float low[4] = {a.x, a.y, a.z, a.w}, high[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    x[C::kHalf ? 2 * i : i] = low[i];
    x[C::kHalf ? 2 * i + 1 : 4 + i] = high[i];
  }
}

// d (64 x N) = A B, plus d where `accumulate`, over a depth of 16 * Steps. ColumnsA, ColumnsB: the depth runs across
// the rows of the tile.
template <int N, int Steps, bool ColumnsA, bool ColumnsB>
__device__ __forceinline__ void multiply_tiles(float (&d)[N / 2], unsigned a, unsigned b, bool accumulate) {
  const unsigned long long first = ColumnsA ? column_descriptor(a, kPanel) : row_descriptor(a),
                           second = ColumnsB ? column_descriptor(b, kPanel) : row_descriptor(b);
#pragma unroll
  for (int k = 0; k < Steps; ++k) {
    const unsigned along = k / 4 * kPanel + k % 4 * 32, across = 2048 * k;
    Wgmma<bf16, N>::template shared<ColumnsA, ColumnsB>(d, advanced(first, ColumnsA ? across : along),
                                                        advanced(second, ColumnsB ? across : along),
                                                        accumulate || k > 0);
  }
}

// Accumulators rounded: four words are an A operand of 16 columns.
__device__ __forceinline__ void pack(const float (&d)[32], unsigned (&words)[16]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) words[i] = Pairs16::of(d[2 * i], d[2 * i + 1]);
}

// 64 rows and 64 columns, so rounded, into a panel.
__device__ __forceinline__ void store_operand(unsigned panel, const unsigned (&words)[16]) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const unsigned tiles[4] = {words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]};
    store_tiles(panel + swizzled(row, 2 * i + lane / 16), tiles);
  }
}

__device__ __forceinline__ void store_panel(unsigned panel, const float (&d)[32]) {
  unsigned words[16];
  pack(d, words);
  store_operand(panel, words);
}

// The four phases of a word pair, in units of 2**-16 turns, as sines and cosines.
__device__ __forceinline__ void sincos_of_phases(uint2 words, float (&sine)[4], float (&cosine)[4]) {
  const unsigned phases[4] = {words.x << 16, words.x & 0xffff0000, words.y << 16, words.y & 0xffff0000};
#pragma unroll
  for (int i = 0; i < 4; ++i) sincos_of_phase_fast(phases[i], sine[i], cosine[i]);
}

// Sums, over lanes that differ in the bits Offset, Offset / 2, ... Last of their number, of Count values in each. Of
// these a lane keeps an equal part, those bits telling which, at the beginning of x.
template <int Count, int Offset, int Last>
__device__ __forceinline__ void share_sums(float* x) {
  if constexpr (Offset >= Last) {
    const bool upper = threadIdx.x & Offset;
#pragma unroll
    for (int i = 0; i < Count / 2; ++i) {
      const float other = __shfl_xor_sync(0xffffffff, upper ? x[i] : x[i + Count / 2], Offset);
      x[i] = (upper ? x[i + Count / 2] : x[i]) + other;
    }
    share_sums<Count / 2, Offset / 2, Last>(x);
  }
}

// Brings the line at an address, or so many bytes, a multiple of 16, to the L2 cache: copies come from there sooner.
__device__ __forceinline__ void want(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }
__device__ __forceinline__ void want(const void* from, unsigned bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

// The reverse, as part of the thread's current group of copies.
__device__ __forceinline__ void copy_line_out(void* to, unsigned from, unsigned bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
               : "memory");
}

}  // namespace jax_ssd

// Numbers of the general backward of Mamba-3, bfloat16 or float32: rows in device memory and in tiles of shared memory,
// and products of tiles on the tensor cores of any GPU from sm_80 on. float32 goes in as TF32, in one pass or three.
#pragma once

#include <cuda_bf16.h>

#include "fragments.cuh"
#include "mamba3_products.cuh"
#include "shared_memory.cuh"

namespace jax_ssd {

__device__ inline float2 unpack(unsigned pair) { return make_float2(low_of_pair(pair), high_of_pair(pair)); }

__device__ inline float2 load_pair(const __nv_bfloat16* p) { return unpack(*reinterpret_cast<const unsigned*>(p)); }
__device__ inline float2 load_pair(const float* p) { return *reinterpret_cast<const float2*>(p); }
__device__ inline void store_pair(__nv_bfloat16* p, float a, float b) {
  *reinterpret_cast<unsigned*>(p) = bfloat16_pair(a, b);
}
__device__ inline void store_pair(float* p, float a, float b) { *reinterpret_cast<float2*>(p) = make_float2(a, b); }
__device__ inline void store_one(__nv_bfloat16* p, float a) { *p = __float2bfloat16_rn(a); }
__device__ inline void store_one(float* p, float a) { *p = a; }

// Eight neighbours as they lie in memory.
template <typename T>
struct Eight;
template <>
struct Eight<__nv_bfloat16> {
  uint4 words;
};
template <>
struct Eight<float> {
  float4 low, high;
};

__device__ inline Eight<__nv_bfloat16> eight_at(const __nv_bfloat16* p) { return {*reinterpret_cast<const uint4*>(p)}; }
__device__ inline Eight<float> eight_at(const float* p) {
  return {reinterpret_cast<const float4*>(p)[0], reinterpret_cast<const float4*>(p)[1]};
}

// Four neighbours of each, in turns.
__device__ inline Eight<__nv_bfloat16> eight_of(const __nv_bfloat16* first, const __nv_bfloat16* second) {
  const uint2 a = *reinterpret_cast<const uint2*>(first), b = *reinterpret_cast<const uint2*>(second);
  return {make_uint4(__byte_perm(a.x, b.x, 0x5410), __byte_perm(a.x, b.x, 0x7632), __byte_perm(a.y, b.y, 0x5410),
                     __byte_perm(a.y, b.y, 0x7632))};
}
__device__ inline Eight<float> eight_of(const float* first, const float* second) {
  const float4 a = *reinterpret_cast<const float4*>(first), b = *reinterpret_cast<const float4*>(second);
  return {make_float4(a.x, b.x, a.y, b.y), make_float4(a.z, b.z, a.w, b.w)};
}

__device__ inline void unpack8(const Eight<__nv_bfloat16>& from, float (&x)[8]) {
  const unsigned word[4] = {from.words.x, from.words.y, from.words.z, from.words.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) x[2 * i] = low_of_pair(word[i]), x[2 * i + 1] = high_of_pair(word[i]);
}
__device__ inline void unpack8(const Eight<float>& from, float (&x)[8]) {
  x[0] = from.low.x, x[1] = from.low.y, x[2] = from.low.z, x[3] = from.low.w;
  x[4] = from.high.x, x[5] = from.high.y, x[6] = from.high.z, x[7] = from.high.w;
}
__device__ inline void load8(const float* p, float (&x)[8]) { unpack8(eight_at(p), x); }

template <int Count>
__device__ inline void load_run(const float* from, float (&x)[Count]) {
  static_assert(Count % 2 == 0);
#pragma unroll
  for (int i = 0; i < Count; i += Count % 4 == 0 ? 4 : 2) {
    if constexpr (Count % 4 == 0) {
      const float4 w = *reinterpret_cast<const float4*>(from + i);
      x[i] = w.x, x[i + 1] = w.y, x[i + 2] = w.z, x[i + 3] = w.w;
    } else {
      const float2 w = *reinterpret_cast<const float2*>(from + i);
      x[i] = w.x, x[i + 1] = w.y;
    }
  }
}

// Count neighbours, 4 or 8, from the one at `first` on.
template <int Count, int Size>
__device__ inline void store_run(__nv_bfloat16* to, const float (&x)[Size], int first = 0) {
  static_assert(Count == 4 || Count == 8);
  const unsigned a = bfloat16_pair(x[first], x[first + 1]), b = bfloat16_pair(x[first + 2], x[first + 3]);
  if constexpr (Count == 4) {
    *reinterpret_cast<uint2*>(to) = make_uint2(a, b);
  } else {
    *reinterpret_cast<uint4*>(to) =
        make_uint4(a, b, bfloat16_pair(x[first + 4], x[first + 5]), bfloat16_pair(x[first + 6], x[first + 7]));
  }
}
template <int Count, int Size>
__device__ inline void store_run(float* to, const float (&x)[Size], int first = 0) {
#pragma unroll
  for (int i = 0; i < Count; i += 4) {
    *reinterpret_cast<float4*>(to + i) =
        make_float4(x[first + i], x[first + i + 1], x[first + i + 2], x[first + i + 3]);
  }
}

// ---------------------------------------------------------------------------------------------------------------------
// Products of tiles. A step of the summed dimension is 32 bytes of a row: 16 numbers of bfloat16, 8 of float32.

// x as it goes into a tile: rounded to TF32 where one pass is made of it, since the hardware cuts what it is given.
template <typename T, int Passes>
__device__ __forceinline__ float for_products(float x) {
  if constexpr (sizeof(T) == 4 && Passes == 1) {
    unsigned r;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(x));
    return __uint_as_float(r);
  }
  return x;
}

// What one step takes of a factor, in a thread's registers. float32 in three passes is rounded to TF32, and `low` is
// the rest; of a NaN that rounding loses, the rest is one still.
template <typename T, int Passes, int Size>
struct Fragment {
  unsigned high[Size], low[Passes == 3 ? Size : 1];

  __device__ __forceinline__ void split() {
    if constexpr (sizeof(T) == 4 && Passes == 3) {
#pragma unroll
      for (int i = 0; i < Size; ++i) {
        const float x = __uint_as_float(high[i]);
        high[i] = (high[i] + 0x1000u) & 0xffffe000u;
        low[i] = __float_as_uint(x - __uint_as_float(high[i]));
      }
    }
  }
};

__device__ __forceinline__ void multiply(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, float) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

enum class Zeros { kNone, kAbove, kBelow };  // where the 16 x 16 blocks of the first factor are zero and skipped

// d += A B for one warp: d is Ms x 16 by Ns x 8, the sum goes over Ks x 16. A is stored [m][k], or [k][m] if
// TransposedA; B is stored [k][n], or [n][k] if TransposedB. first_m: the block row at which `a` begins.
// Apart: from one eight columns of B that a warp takes to the next.
template <int Passes, int Ms, int Ns, int Ks, bool TransposedA, bool TransposedB, Zeros Skipped = Zeros::kNone,
          int Apart = 8, typename T>
__device__ inline void add_product(float (&d)[Ms][Ns][4], const T* a, int pitch_a, const T* b, int pitch_b,
                                   int first_m = 0) {
  constexpr int kSize = sizeof(T), kDepth = 32 / kSize, kUnit = 16 / kSize, kSteps = 16 / kDepth;
  constexpr bool kMovesA = kSize == 2 || !TransposedA, kMovesB = kSize == 2 || TransposedB;  // by ldmatrix
  const int lane = threadIdx.x % 32, low = lane % 8, second = lane / 8 % 2, third = lane / 16;
  unsigned at_a = 0, at_b = 0;
  int next_a, next_m, next_b, next_n;  // bytes, or numbers, from one step or block to the next
  if constexpr (!kMovesA) {
    a += lane % 4 * pitch_a + lane / 4;
    next_a = kDepth * pitch_a, next_m = 16;
  } else if constexpr (TransposedA) {
    at_a = shared_address(a + (third * 8 + low) * pitch_a + second * 8);
    next_a = 32 * pitch_a, next_m = 32;
  } else {
    at_a = shared_address(a + (second * 8 + low) * pitch_a + third * kUnit);
    next_a = 32, next_m = 16 * kSize * pitch_a;
  }
  if constexpr (!kMovesB) {
    b += lane % 4 * pitch_b + lane / 4;
    next_b = kDepth * pitch_b, next_n = 2 * Apart;
  } else if constexpr (TransposedB) {
    at_b = shared_address(b + (third * Apart + low) * pitch_b + second * kUnit);
    next_b = 32, next_n = 2 * kSize * Apart * pitch_b;
  } else {
    at_b = shared_address(b + (second * 8 + low) * pitch_b + third * Apart);
    next_b = 32 * pitch_b, next_n = 4 * Apart;
  }
  const auto skipped = [&](int m, int k) {
    if constexpr (Skipped == Zeros::kAbove) return first_m + m < k;
    if constexpr (Skipped == Zeros::kBelow) return first_m + m > k;
    return false;
  };
#pragma unroll
  for (int step = 0; step < Ks * kSteps; ++step) {
    const int k = step / kSteps;
    if (skipped(Skipped == Zeros::kAbove ? Ms - 1 : 0, k)) continue;
    Fragment<T, Passes, 4> columns[(Ns + 1) / 2];
#pragma unroll
    for (int n = 0; n < (Ns + 1) / 2; ++n) {
      auto& own = columns[n];
      if constexpr (!kMovesB) {
        const T* from = b + step * next_b + n * next_n;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          own.high[i] = 2 * n + i / 2 < Ns ? __float_as_uint(from[i % 2 * 4 * pitch_b + i / 2 * Apart]) : 0;
        }
      } else if constexpr (TransposedB) {
        load_tiles(own.high, at_b + step * next_b + n * next_n);
      } else {
        load_tiles_transposed(own.high, at_b + step * next_b + n * next_n);
      }
      own.split();
    }
#pragma unroll
    for (int m = 0; m < Ms; ++m) {
      if (skipped(m, k)) continue;
      Fragment<T, Passes, 4> rows;
      if constexpr (!kMovesA) {
        const T* from = a + step * next_a + m * next_m;
#pragma unroll
        for (int i = 0; i < 4; ++i) rows.high[i] = __float_as_uint(from[i / 2 * 4 * pitch_a + i % 2 * 8]);
      } else if constexpr (TransposedA) {
        load_tiles_transposed(rows.high, at_a + step * next_a + m * next_m);
      } else {
        load_tiles(rows.high, at_a + step * next_a + m * next_m);
      }
      rows.split();
#pragma unroll
      for (int n = 0; n < Ns; ++n) {
        const auto& pair = columns[n / 2];
        const int first = n % 2 * 2;
        if constexpr (Passes == 3) {  // low times low is below float32's rounding
          multiply(d[m][n], rows.low, pair.high[first], pair.high[first + 1], T());
          multiply(d[m][n], rows.high, pair.low[first], pair.low[first + 1], T());
        }
        multiply(d[m][n], rows.high, pair.high[first], pair.high[first + 1], T());
      }
    }
  }
}

// The same of one block of rows, both factors stored [k][...]. Of float32 a thread's numbers lie side by side: row r of
// A is the column 2 (r % 8) + r / 8 of `a`, and column c of the n-th block of B is at c * Ns + n.
template <int Passes, int Ns, int Ks>
__device__ inline void add_product_of_columns(float (&d)[1][Ns][4], const __nv_bfloat16* a, int pitch_a,
                                              const __nv_bfloat16* b, int pitch_b) {
  add_product<Passes, 1, Ns, Ks, true, false>(d, a, pitch_a, b, pitch_b);
}

template <int Passes, int Ns, int Ks>
__device__ inline void add_product_of_columns(float (&d)[1][Ns][4], const float* a, int pitch_a, const float* b,
                                              int pitch_b) {
  const int lane = threadIdx.x % 32;
  a += lane % 4 * pitch_a + lane / 4 * 2;
  b += lane % 4 * pitch_b + lane / 4 * Ns;
#pragma unroll
  for (int k = 0; k < 16 * Ks; k += 8) {
    Fragment<float, Passes, 4> rows;
    Fragment<float, Passes, 2 * Ns> columns;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 x = load_pair(a + (k + 4 * half) * pitch_a);
      rows.high[2 * half] = __float_as_uint(x.x), rows.high[2 * half + 1] = __float_as_uint(x.y);
      float run[Ns];
      load_run(b + (k + 4 * half) * pitch_b, run);
#pragma unroll
      for (int n = 0; n < Ns; ++n) columns.high[2 * n + half] = __float_as_uint(run[n]);
    }
    rows.split();
    columns.split();
#pragma unroll
    for (int n = 0; n < Ns; ++n) {
      if constexpr (Passes == 3) {
        multiply(d[0][n], rows.low, columns.high[2 * n], columns.high[2 * n + 1], 0.0f);
        multiply(d[0][n], rows.high, columns.low[2 * n], columns.low[2 * n + 1], 0.0f);
      }
      multiply(d[0][n], rows.high, columns.high[2 * n], columns.high[2 * n + 1], 0.0f);
    }
  }
}

}  // namespace jax_ssd

// Matrices in shared memory and products of them on the tensor cores of any GPU from sm_80 on: bfloat16 in one pass,
// float32 as TF32 in one pass or three. Accumulators are float32 in blocks of 16 x 8: thread with lane l of a warp
// holds
//   d[0], d[1]   row l/4,     columns 2(l%4), +1
//   d[2], d[3]   row l/4 + 8, the same columns
#pragma once

#include <cuda_bf16.h>

#include "shared_memory.cuh"

namespace jax_ssd {

// threadIdx.x, read anew: what is computed from it in a loop does not stay in registers from one turn to the next.
__device__ __forceinline__ int thread_here() {
  int thread = threadIdx.x;
  asm volatile("" : "+r"(thread));
#ifdef __CUDACC_RTC__
  __builtin_assume(thread >= 0 && thread < 1024);
#endif
  return thread;
}

__device__ constexpr int padded(int size, int multiple) { return (size + multiple - 1) / multiple * multiple; }

__device__ __forceinline__ unsigned bfloat16_pair(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const unsigned*>(&pair);
}
__device__ __forceinline__ float low_of_pair(unsigned pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_of_pair(unsigned pair) { return __uint_as_float(pair & 0xffff0000u); }

// sum + 0 * pair: stays zero, but for signs, as long as all are finite.
__device__ __forceinline__ unsigned plus_zero_times(unsigned sum, unsigned pair) {
  asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(sum) : "r"(pair), "r"(0u));
  return sum;
}

// The thread's part of an operand of 8 x 8 ones and zeros, see `add_pairs`.
__device__ __forceinline__ unsigned identity_tile() {
  const int column = threadIdx.x % 32 / 4, row = threadIdx.x % 4 * 2;
  return column == row ? 0x3f80u : column == row + 1 ? 0x3f800000u : 0u;
}

// d = the four bfloat16 of two words + c: a product with the identity is one instruction, where unpacking and adding
// are eight. The words of the lanes from a multiple of four on are rows of 8: a NaN or an infinity in the first word
// makes them all NaN, and in the second one.
__device__ __forceinline__ void add_pairs(float* d, const unsigned* words, unsigned identity, const float* c) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%7, %8, %9, %10};"
               : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
               : "r"(words[0]), "r"(words[1]), "r"(identity), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

__device__ __forceinline__ void store_shared(unsigned to, unsigned a, unsigned b, unsigned c, unsigned d) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
__device__ __forceinline__ void store_shared(unsigned to, unsigned a, unsigned b) {
  asm volatile("st.shared.v2.b32 [%0], {%1, %2};" ::"r"(to), "r"(a), "r"(b) : "memory");
}

// Copies of 4, 8 or 16 bytes to shared memory that run beside the thread, and the wait for all of its own.
template <int Bytes>
__device__ __forceinline__ void copy_ahead(unsigned to, const void* from) {
  static_assert(Bytes == 4 || Bytes == 8 || Bytes == 16, "4, 8 or 16 bytes");
  if constexpr (Bytes == 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(Bytes) : "memory");
  }
}
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// A matrix in shared memory whose rows are stored one after another, as `Product` reads it.
template <typename T, int Rows, int Columns>
struct Matrix;

// Panels of 64 columns, each [Rows][128 bytes], swizzled: wgmma reads it as well. Starts at a multiple of 1024 bytes.
template <int Rows, int Columns>
struct Matrix<__nv_bfloat16, Rows, Columns> {
  static_assert(Rows % 8 == 0, "the swizzle repeats after 8 rows");
  static constexpr int kPanelBytes = Rows * 128;
  static constexpr int kBytes = (Columns + 63) / 64 * kPanelBytes;
  using At = unsigned;  // where an element is
  unsigned base;

  __device__ explicit Matrix(void* memory) : base(shared_address(memory)) {}

  __device__ __forceinline__ unsigned address(int row, int column) const {
    return base + column / 64 * kPanelBytes + swizzled(row, column % 64 / 8) + column % 8 * 2;
  }
  // The same column, `count` times `Down` rows below.
  template <int Down>
  static __device__ __forceinline__ unsigned below(unsigned at, int count) {
    static_assert(Down % 8 == 0, "rows that are permuted alike");
    return at + count * (Down * 128);
  }
  static constexpr int kAlike = 8;  // rows after which the order of columns repeats

  // Neighbouring elements of a row from a multiple of their number on: 4 or 8, to and from registers and from global
  // memory. Where `Finite`, a NaN or an infinity among those stored is replaced, with its neighbours, by zeros, and the
  // result is false.
  static __device__ __forceinline__ void load(float (&v)[8], unsigned at) {
    unsigned w[4];
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w[0]), "=r"(w[1]), "=r"(w[2]), "=r"(w[3])
                 : "r"(at)
                 : "memory");
#pragma unroll
    for (int i = 0; i < 4; ++i) v[2 * i] = low_of_pair(w[i]), v[2 * i + 1] = high_of_pair(w[i]);
  }
  static __device__ __forceinline__ void load(float (&v)[4], unsigned at) {
    unsigned w[2];
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(w[0]), "=r"(w[1]) : "r"(at) : "memory");
#pragma unroll
    for (int i = 0; i < 2; ++i) v[2 * i] = low_of_pair(w[i]), v[2 * i + 1] = high_of_pair(w[i]);
  }
  template <int Count>
  static __device__ __forceinline__ void fetch(unsigned at, const __nv_bfloat16* from) {
    copy_ahead<2 * Count>(at, from);
  }
  template <bool Finite, int Count>
  static __device__ __forceinline__ bool store(unsigned to, const float (&v)[Count]) {
    unsigned words[Count / 2], probe = 0;
#pragma unroll
    for (int i = 0; i < Count / 2; ++i) {
      words[i] = bfloat16_pair(v[2 * i], v[2 * i + 1]);
      if constexpr (Finite) probe = plus_zero_times(probe, words[i]);
    }
    const bool finite = (probe & 0x7fff7fffu) == 0;
    if (!finite) {
#pragma unroll
      for (int i = 0; i < Count / 2; ++i) words[i] = 0;
    }
    if constexpr (Count == 8) {
      store_shared(to, words[0], words[1], words[2], words[3]);
    } else if constexpr (Count == 4) {
      store_shared(to, words[0], words[1]);
    } else {
      static_assert(Count == 2, "2, 4 or 8 elements");
      asm volatile("st.shared.b32 [%0], %1;" ::"r"(to), "r"(words[0]) : "memory");
    }
    return finite;
  }
};

// Rows of 8 words more than a multiple of 32: pairs of a column's neighbours are read without conflicts of banks.
template <int Rows, int Columns>
struct Matrix<float, Rows, Columns> {
  static constexpr int kStride = padded(Columns, 32) + 8;
  static constexpr int kBytes = Rows * kStride * 4;
  using At = float*;
  float* base;

  __device__ explicit Matrix(void* memory) : base(static_cast<float*>(memory)) {}

  __device__ __forceinline__ float* address(int row, int column) const { return base + row * kStride + column; }
  template <int Down>
  static __device__ __forceinline__ float* below(float* at, int count) {
    return at + count * (Down * kStride);
  }
  static constexpr int kAlike = 1;

  template <int Count>
  static __device__ __forceinline__ void load(float (&v)[Count], const float* at) {
#pragma unroll
    for (int i = 0; i < Count; i += 4) {
      const float4 w = *reinterpret_cast<const float4*>(at + i);
      v[i] = w.x, v[i + 1] = w.y, v[i + 2] = w.z, v[i + 3] = w.w;
    }
  }
  template <int Count>
  static __device__ __forceinline__ void fetch(float* at, const float* from) {
#pragma unroll
    for (int i = 0; i < Count; i += 4) copy_ahead<16>(shared_address(at + i), from + i);
  }
  template <bool Finite, int Count>
  static __device__ __forceinline__ bool store(float* to, const float (&v)[Count]) {
    float probe = 0.0f;
    if constexpr (Finite) {
#pragma unroll
      for (int i = 0; i < Count; ++i) probe = fmaf(v[i], 0.0f, probe);
    }
    const bool finite = probe == 0.0f;
#pragma unroll
    for (int i = 0; i < Count; i += 2) {
      *reinterpret_cast<float2*>(to + i) = finite ? make_float2(v[i], v[i + 1]) : make_float2(0.0f, 0.0f);
    }
    return finite;
  }
};

// d (16 x 8) += a (16 x kDepth) b (kDepth x 8). Operands are fragments in the registers of a warp: `a`, `b` of a matrix
// whose rows run along the summed dimension, `..._transposed` of one whose rows run across it. b comes in twos, for 16
// columns of the product. Passes: of float32, 3 for full precision.
template <typename T, int Passes>
struct Product;

template <int Passes>
struct Product<__nv_bfloat16, Passes> {
  static constexpr int kDepth = 16;
  struct A {
    unsigned r[4];
  };
  struct B {
    unsigned r[2];
  };

  template <class M>
  static __device__ __forceinline__ A a(const M& matrix, int row, int depth) {
    const int lane = threadIdx.x % 32;
    A a;
    load_tiles(a.r, matrix.address(row + lane % 16, depth + lane / 16 * 8));
    return a;
  }
  template <class M>
  static __device__ __forceinline__ A a_transposed(const M& matrix, int depth, int row) {
    const int lane = threadIdx.x % 32;
    A a;
    load_tiles_transposed(a.r, matrix.address(depth + lane % 8 + lane / 16 * 8, row + lane / 8 % 2 * 8));
    return a;
  }
  template <class M>
  static __device__ __forceinline__ void b(B (&b)[2], const M& matrix, int column, int depth) {
    const int lane = threadIdx.x % 32;
    unsigned r[4];
    load_tiles(r, matrix.address(column + lane % 8 + lane / 16 * 8, depth + lane / 8 % 2 * 8));
    b[0] = {r[0], r[1]};
    b[1] = {r[2], r[3]};
  }
  template <class M>
  static __device__ __forceinline__ void b_transposed(B (&b)[2], const M& matrix, int depth, int column) {
    const int lane = threadIdx.x % 32;
    unsigned r[4];
    load_tiles_transposed(r, matrix.address(depth + lane % 16, column + lane / 16 * 8));
    b[0] = {r[0], r[1]};
    b[1] = {r[2], r[3]};
  }
  // Of neighbouring accumulators of the same rows, from the one at `first` on, the summed dimension being their
  // columns.
  template <int Size>
  static __device__ __forceinline__ A of_accumulators(const float (&d)[Size], int first) {
    A a;
#pragma unroll
    for (int i = 0; i < 4; ++i) a.r[i] = bfloat16_pair(d[first + 2 * i], d[first + 2 * i + 1]);
    return a;
  }
  // a diag(w); weights(i) is w at the positions i and i + 1, i even, of the summed dimension.
  template <class Weights>
  static __device__ __forceinline__ void scale(A& a, Weights weights) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 w = weights(half * 8 + lane % 4 * 2);
#pragma unroll
      for (int i = half * 2; i < half * 2 + 2; ++i) {
        a.r[i] = bfloat16_pair(low_of_pair(a.r[i]) * w.x, high_of_pair(a.r[i]) * w.y);
      }
    }
  }
  // d: the accumulators from `first` on.
  template <int Size>
  static __device__ __forceinline__ void add(float (&d)[Size], int first, const A& a, const B& b) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, "
        "%2, %3};"
        : "+f"(d[first]), "+f"(d[first + 1]), "+f"(d[first + 2]), "+f"(d[first + 3])
        : "r"(a.r[0]), "r"(a.r[1]), "r"(a.r[2]), "r"(a.r[3]), "r"(b.r[0]), "r"(b.r[1]));
  }
};

// The summed dimension is taken in the order 0, 2, 4, 6, 1, 3, 5, 7 on both sides, which makes fragments of pairs.
template <int Passes>
struct Product<float, Passes> {
  static constexpr int kDepth = 8;
  struct A {
    float r[4];
  };
  struct B {
    float r[2];
  };

  template <class M>
  static __device__ __forceinline__ A a(const M& matrix, int row, int depth) {
    const int lane = threadIdx.x % 32;
    const float2 low = *reinterpret_cast<const float2*>(matrix.address(row + lane / 4, depth + lane % 4 * 2));
    const float2 high = *reinterpret_cast<const float2*>(matrix.address(row + lane / 4 + 8, depth + lane % 4 * 2));
    return {low.x, high.x, low.y, high.y};
  }
  template <class M>
  static __device__ __forceinline__ A a_transposed(const M& matrix, int depth, int row) {
    const int lane = threadIdx.x % 32;
    const float* at = matrix.address(depth + lane % 4 * 2, row + lane / 4);
    return {at[0], at[8], at[M::kStride], at[M::kStride + 8]};
  }
  template <class M>
  static __device__ __forceinline__ void b(B (&b)[2], const M& matrix, int column, int depth) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 pair =
          *reinterpret_cast<const float2*>(matrix.address(column + 8 * i + lane / 4, depth + lane % 4 * 2));
      b[i] = {pair.x, pair.y};
    }
  }
  template <class M>
  static __device__ __forceinline__ void b_transposed(B (&b)[2], const M& matrix, int depth, int column) {
    const int lane = threadIdx.x % 32;
    const float* at = matrix.address(depth + lane % 4 * 2, column + lane / 4);
    b[0] = {at[0], at[M::kStride]};
    b[1] = {at[8], at[M::kStride + 8]};
  }
  template <int Size>
  static __device__ __forceinline__ A of_accumulators(const float (&d)[Size], int first) {
    return {d[first], d[first + 2], d[first + 1], d[first + 3]};
  }
  template <class Weights>
  static __device__ __forceinline__ void scale(A& a, Weights weights) {
    const float2 w = weights(threadIdx.x % 4 * 2);
    a.r[0] *= w.x;
    a.r[1] *= w.x;
    a.r[2] *= w.y;
    a.r[3] *= w.y;
  }
  template <int Size>
  static __device__ __forceinline__ void add(float (&d)[Size], int first, const A& a, const B& b) {
    unsigned a_high[4], b_high[2];
#pragma unroll
    for (int i = 0; i < 4; ++i) a_high[i] = rounded(a.r[i]);
#pragma unroll
    for (int i = 0; i < 2; ++i) b_high[i] = rounded(b.r[i]);
    if constexpr (Passes == 3) {  // x = high + low, each with 11 bits; low low is below float32's rounding
      unsigned a_low[4], b_low[2];
#pragma unroll
      for (int i = 0; i < 4; ++i) a_low[i] = rounded(a.r[i] - __uint_as_float(a_high[i]));
#pragma unroll
      for (int i = 0; i < 2; ++i) b_low[i] = rounded(b.r[i] - __uint_as_float(b_high[i]));
      multiply(d, first, a_low, b_high);
      multiply(d, first, a_high, b_low);
    }
    multiply(d, first, a_high, b_high);
  }

 private:
  static __device__ __forceinline__ unsigned rounded(float v) {
    unsigned r;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(r) : "f"(v));
    return r;
  }
  template <int Size>
  static __device__ __forceinline__ void multiply(float (&d)[Size], int first, const unsigned (&a)[4],
                                                  const unsigned (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
        "%3};"
        : "+f"(d[first]), "+f"(d[first + 1]), "+f"(d[first + 2]), "+f"(d[first + 3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
};

}  // namespace jax_ssd

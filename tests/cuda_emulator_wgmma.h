// Takes the place of kernels/cuda/wgmma.cuh in the emulator: products are made at once, where the threads of a
// warpgroup meet, from operands at the addresses that descriptors and the 128-byte swizzle name.
#pragma once

#include "shared_memory.cuh"

namespace jax_ssd {

inline unsigned long long row_descriptor(unsigned address) {
  return (unsigned long long)((address & 0x3FFFF) >> 4) | 1ull << 16 | (1024ull >> 4) << 32 | 1ull << 62;
}
inline unsigned long long column_descriptor(unsigned address, unsigned tile_stride) {
  return (unsigned long long)((address & 0x3FFFF) >> 4) | (unsigned long long)(tile_stride >> 4) << 16 |
         (1024ull >> 4) << 32 | 1ull << 62;
}
inline unsigned long long advanced(unsigned long long d, unsigned bytes) { return d + (bytes >> 4); }
inline void wgmma_fence() {}
inline void wgmma_commit() {}
template <int Pending>
inline void wgmma_wait() {}
template <int Size>
inline void pin(float (&)[Size]) {}

// The element of an operand at a row (or, of B, a column) of the product and a depth.
inline float operand(unsigned long long descriptor, bool columns, int outer, int depth) {
  const unsigned start = unsigned(descriptor & 0x3FFF) << 4, stride = unsigned(descriptor >> 16 & 0x3FFF) << 4;
  unsigned at = columns ? start + depth * 128 + outer / 64 * stride + outer % 64 * 2 : start + outer * 128 + depth * 2;
  at ^= (at >> 7 & 7) << 4;
  unsigned short bits;
  std::memcpy(&bits, emulator::shared(at, 2, 2), 2);
  return emulator::bfloat16(bits);
}

template <typename T, int N>
struct Wgmma {
  template <class A>
  static void multiply(float (&d)[N / 2], A a, unsigned long long b, bool columns_b, bool accumulate) {
    using namespace emulator;
    const int group = current / 128 * 128;
    auto& own = fibers[current];
    own.slots[70] = reinterpret_cast<uint64_t>(&d[0]);
    meet(groups[current / 128], 128, [&] {
      static float matrix[16][N];
      for (int k = 0; k < 16; ++k)
        for (int n = 0; n < N; ++n) matrix[k][n] = operand(b, columns_b, n, k);
      for (int t = 0; t < 128; ++t) {
        float* acc = reinterpret_cast<float*>(fibers[group + t].slots[70]);
        for (int i = 0; i < N / 2; ++i) {
          const int row = t / 32 * 16 + t % 32 / 4 + i / 2 % 2 * 8, n = i / 4 * 8 + t % 4 * 2 + i % 2;
          float sum = accumulate ? acc[i] : 0.0f;
          for (int k = 0; k < 16; ++k) sum += a(row, k) * matrix[k][n];
          acc[i] = sum;
        }
      }
    });
  }
  template <bool ColumnsA = false, bool ColumnsB = false>
  static void shared(float (&d)[N / 2], unsigned long long a, unsigned long long b, bool accumulate) {
    multiply(d, [=](int row, int k) { return operand(a, ColumnsA, row, k); }, b, ColumnsB, accumulate);
  }
  template <bool ColumnsB = false>
  static void registers(float (&d)[N / 2], const unsigned (&a)[4], unsigned long long b, bool accumulate) {
    using namespace emulator;
    for (int i = 0; i < 4; ++i) fibers[current].slots[60 + i] = a[i];
    const int group = current / 128 * 128;
    multiply(
        d,
        [=](int row, int k) {
          const int t = row / 16 * 32 + row % 8 * 4 + k % 8 / 2, i = row % 16 / 8 + k / 8 * 2;
          return bfloat16(fibers[group + t].slots[60 + i] >> (k % 2 * 16) & 0xffff);
        },
        b, ColumnsB, accumulate);
  }
};

}  // namespace jax_ssd

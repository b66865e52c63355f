// Neighbouring values of a row, moved in words as wide as their number allows.
#pragma once

#include "values.cuh"

namespace jax_ssd {

__device__ constexpr int smaller(int a, int b) { return a < b ? a : b; }
__device__ constexpr int larger(int a, int b) { return a > b ? a : b; }
__device__ constexpr int ceiling(int a, int b) { return (a + b - 1) / b; }
__device__ constexpr int common_divisor(int a, int b) { return b == 0 ? a : common_divisor(b, a % b); }
__device__ constexpr int power_of_two(int n) { return n <= 1 ? 1 : 2 * power_of_two((n + 1) / 2); }

// What one instruction moves.
template <int Bytes>
struct WordOf;
template <>
struct WordOf<2> {
  using Type = unsigned short;
};
template <>
struct WordOf<4> {
  using Type = unsigned;
};
template <>
struct WordOf<8> {
  using Type = uint2;
};
template <>
struct WordOf<16> {
  using Type = uint4;
};

// Width values of T that lie together. Streaming: passed by the caches.
template <typename T, int Width>
struct Pack {
  static constexpr int kWordBytes = smaller(16, Width* int(sizeof(T)));
  static constexpr int kWords = Width * int(sizeof(T)) / kWordBytes;
  using Word = typename WordOf<kWordBytes>::Type;
  Word words[kWords];

  template <bool Streaming = false>
  __device__ void load(const T* from) {
    const Word* source = reinterpret_cast<const Word*>(from);
#pragma unroll
    for (int i = 0; i < kWords; ++i) words[i] = Streaming ? __ldcs(source + i) : source[i];
  }
  template <bool Streaming = false>
  __device__ void store(T* to) const {
    Word* target = reinterpret_cast<Word*>(to);
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if (Streaming) {
        __stcs(target + i, words[i]);
      } else {
        target[i] = words[i];
      }
    }
  }
  __device__ void unpack(float (&values)[Width]) const {
    T parts[Width];
    memcpy(parts, words, sizeof(words));
#pragma unroll
    for (int i = 0; i < Width; ++i) values[i] = to_float(parts[i]);
  }
  __device__ void pack(const float (&values)[Width]) {
    T parts[Width];
#pragma unroll
    for (int i = 0; i < Width; ++i) parts[i] = from_float<T>(values[i]);
    memcpy(words, parts, sizeof(words));
  }
};

// From memory to float32, and back.
template <typename T, int Width>
__device__ __forceinline__ void load_values(float (&values)[Width], const T* from) {
  Pack<T, Width> pack;
  pack.load(from);
  pack.unpack(values);
}

template <typename T, int Width>
__device__ __forceinline__ void store_values(T* to, const float (&values)[Width]) {
  Pack<T, Width> pack;
  pack.pack(values);
  pack.store(to);
}

}  // namespace jax_ssd

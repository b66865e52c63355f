// The chunks of tokens that a block of the Mamba-3 pipeline works on.
#pragma once

#include "mamba3_call.cuh"

namespace jax_ssd {

// Tokens in a row that are worked on at once, and the sequence they belong to. None: count is 0.
struct Chunk {
  int t, count;
  int sequence, first, end;

  __device__ bool begins() const { return count > 0 && t == first; }
  __device__ bool ends() const { return count > 0 && t + count == end; }
};

// The chunks of a block that are worked on in a turn, by age.
template <int Tokens, bool Packed>
struct Chunks {
  int seq, start, limit, turn;  // the block's tokens are those from start to limit

  __device__ Chunks(const int*, int, int seq, const Place&, int start, int limit)
      : seq(seq), start(start), limit(limit), turn(0) {}
  __device__ __forceinline__ Chunk of_turn(int turn) const {
    const int t = start + turn * Tokens;
    return {t, turn < 0 ? 0 : max(0, min(Tokens, limit - t)), 0, 0, seq};
  }
  __device__ __forceinline__ Chunk later() const { return of_turn(turn); }
  __device__ __forceinline__ Chunk after() const { return of_turn(turn - 1); }
  __device__ __forceinline__ Chunk next() const { return of_turn(turn - 2); }
  __device__ __forceinline__ Chunk now() const { return of_turn(turn - 3); }
  __device__ __forceinline__ bool any() const { return start + (turn - 3) * Tokens < limit; }
  __device__ __forceinline__ void pass() { ++turn; }
};

// Chunks end with sequences.
template <int Tokens>
struct Chunks<Tokens, true> {
  const int* bounds;
  int sequences, seq, limit, turn;
  Chunk all[4];
  Place place;

  __device__ Chunks(const int* bounds, int sequences, int seq, const Place& place, int start, int limit)
      : bounds(bounds), sequences(sequences), seq(seq), limit(limit), turn(0), place(place) {
#pragma unroll
    for (int i = 1; i < 4; ++i) all[i] = Chunk{0, 0, 0, 0, 0};
    all[0] = from(start);
  }
  __device__ __forceinline__ Chunk from(int t) {
    if (t < limit && (turn == 0 || t >= place.end)) place.find(bounds, sequences, t, seq);
    return {t, max(0, min(Tokens, min(limit, place.end) - t)), place.sequence, place.first, place.end};
  }
  __device__ __forceinline__ const Chunk& later() const { return all[0]; }
  __device__ __forceinline__ const Chunk& after() const { return all[1]; }
  __device__ __forceinline__ const Chunk& next() const { return all[2]; }
  __device__ __forceinline__ const Chunk& now() const { return all[3]; }
  __device__ __forceinline__ bool any() const {
    return (all[0].count | all[1].count | all[2].count | all[3].count) > 0;
  }
  __device__ __forceinline__ void pass() {
#pragma unroll
    for (int i = 3; i > 0; --i) all[i] = all[i - 1];
    ++turn;
    all[0] = from(all[1].t + all[1].count);
  }
};

}  // namespace jax_ssd

// What a chunk of Mamba-3 tokens needs before its matrix products, made by the threads of one block in shared memory:
// weights and decays, the table of rotations, rotated keys and queries, values of every rank.
//
// Tokens and ranks of a chunk are the rows of its matrices, row = token * Rank + rank. Rows beyond the chunk's tokens
// keep what an earlier chunk left there: it is finite, and their weights are zero.
#pragma once

#include <cuda_bf16.h>

#include "decay.cuh"
#include "mamba3_phase.cuh"
#include "mamba3_products.cuh"
#include "values.cuh"

namespace jax_ssd {

// The sizes of a call. Half: rotated pairs are (i, i + State / 2), else (2i, 2i + 1).
template <typename Value_, int Heads, int Groups, int Rank, int HeadDim, int State, int Pairs, bool Half>
struct Sizes {
  using Value = Value_;
  static constexpr int kHeads = Heads, kGroups = Groups, kRank = Rank, kHeadDim = HeadDim, kState = State,
                       kPairs = Pairs;
  static constexpr bool kHalf = Half;
  static constexpr bool kExact = sizeof(Value) == 4;  // sines and exponentials to the last bit or two
};

__device__ __forceinline__ void load_values(float (&v)[4], const float* from) {
  const float4 w = *reinterpret_cast<const float4*>(from);
  v[0] = w.x, v[1] = w.y, v[2] = w.z, v[3] = w.w;
}
__device__ __forceinline__ void load_values(float (&v)[8], const float* from) {
  const float4 a = reinterpret_cast<const float4*>(from)[0], b = reinterpret_cast<const float4*>(from)[1];
  v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}
__device__ __forceinline__ void load_values(float (&v)[4], const __nv_bfloat16* from) {
  const uint2 w = *reinterpret_cast<const uint2*>(from);
  v[0] = low_of_pair(w.x), v[1] = high_of_pair(w.x), v[2] = low_of_pair(w.y), v[3] = high_of_pair(w.y);
}
__device__ __forceinline__ void load_values(float (&v)[8], const __nv_bfloat16* from) {
  const uint4 w = *reinterpret_cast<const uint4*>(from);
  v[0] = low_of_pair(w.x), v[1] = high_of_pair(w.x), v[2] = low_of_pair(w.y), v[3] = high_of_pair(w.y);
  v[4] = low_of_pair(w.z), v[5] = high_of_pair(w.z), v[6] = low_of_pair(w.w), v[7] = high_of_pair(w.w);
}

__device__ __forceinline__ float sigmoid(float v) { return 1.0f / (1.0f + expf(-v)); }

template <bool Exact>
__device__ __forceinline__ float exp2_of(float v) {
  if constexpr (Exact) return exp2f(v);
  return exp2_fast(v);
}

// Weights and decays of a chunk's tokens, all arrays [Tokens]. Padding has weight 0.
template <int Tokens>
struct Schedule {
  float sum[Tokens], rest[Tokens];  // log2 decay from the chunk's start up to and with the token; what float32 drops
  float gamma[Tokens];              // weight of a token with itself
  float f[Tokens];                  // weight of its key with later tokens: gamma and the next token's delta
  float kept[Tokens];               // f decayed to the chunk's end
  float from_start[Tokens];         // decay of the state before the chunk
};

// A chunk's part of the schedule as it is given, and dt and trap of the token after it, where there is one.
template <int Tokens>
struct alignas(16) GivenSchedule {
  float adt[Tokens], dt[Tokens + 1], trap[Tokens + 1];
};

// Copies it beside the threads. By threads 0 to Tokens; `left`: tokens that there are from the
// arrays' beginning on.
template <int Tokens>
__device__ __forceinline__ void fetch_schedule(GivenSchedule<Tokens>& to, const float* adt, const float* dt,
                                               const float* trap, int left, int c) {
  if (c <= Tokens && c < left) {
    if (c < Tokens) copy_ahead<4>(shared_address(&to.adt[c]), adt + c);
    copy_ahead<4>(shared_address(&to.dt[c]), dt + c);
    copy_ahead<4>(shared_address(&to.trap[c]), trap + c);
  }
}

// A number that sums of a schedule are made in, and sigmoids: by the hardware where 16-bit numbers are made of them.
template <bool Exact>
struct ScheduleNumber {
  using Sum = double;
  static __device__ __forceinline__ float sigmoid_of(float v) { return sigmoid(v); }
};
template <>
struct ScheduleNumber<false> {
  using Sum = float;
  static __device__ __forceinline__ float sigmoid_of(float v) { return __fdividef(1.0f, 1.0f + __expf(-v)); }
};

// By one warp. `more`: a token of the same sequence follows the chunk's `count`.
template <bool Exact, int Tokens>
__device__ void make_schedule(Schedule<Tokens>& to, const GivenSchedule<Tokens>& given, int count, bool more) {
  using Number = ScheduleNumber<Exact>;
  using Sum = typename Number::Sum;
  constexpr int kEach = (Tokens + 31) / 32;
  const int lane = threadIdx.x % 32;
  Sum sums[kEach], total = 0;
  float gamma[kEach], f[kEach];
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    const int c = lane * kEach + e;
    Sum step = 0;
    gamma[e] = f[e] = 0.0f;
    if (c < count) {
      step = static_cast<Sum>(given.adt[c]) * static_cast<Sum>(1.4426950408889634);
      step = step < FLOOR ? FLOOR : step;  // a NaN stays
      gamma[e] = f[e] = Number::sigmoid_of(given.trap[c]) * given.dt[c];
      if (c + 1 < count || more) f[e] += Number::sigmoid_of(-given.trap[c + 1]) * given.dt[c + 1];
    }
    total += step;
    sums[e] = total;
  }
  Sum scan = total;
#pragma unroll
  for (int distance = 1; distance < 32 && distance * kEach < Tokens; distance *= 2) {
    const Sum before = __shfl_up_sync(~0u, scan, distance);
    if (lane >= distance) scan += before;
  }
  const Sum last = __shfl_sync(~0u, scan, (Tokens - 1) / kEach);
  Sum before = __shfl_up_sync(~0u, scan, 1);  // not scan - total: a NaN would reach the lane's earlier tokens
  if (lane == 0) before = 0;
#pragma unroll
  for (int e = 0; e < kEach; ++e) {
    const int c = lane * kEach + e;
    if (c < Tokens) {
      const Sum sum = before + sums[e];
      to.sum[c] = static_cast<float>(sum);
      to.rest[c] = static_cast<float>(sum - static_cast<Sum>(to.sum[c]));
      to.gamma[c] = gamma[e];
      to.f[c] = f[e];
      to.kept[c] = f[e] * exp2_of<Exact>(static_cast<float>(last - sum));
      to.from_start[c] = exp2_of<Exact>(static_cast<float>(sum));
    }
  }
}

// Sines and cosines of a chunk's phases in shared memory. Four neighbouring pairs are loaded at once; four words more
// in a row, and another order of fours for each eight tokens in long chunks, of eights for each four in others, let
// threads that write for different tokens meet less often in a bank.
template <class S, int Tokens>
struct Rotations {
  static constexpr int kPadded = padded(S::kPairs, 4), kStride = kPadded + 4;
  static constexpr int kLong = Tokens >= 64 ? 2 : 1, kMost = 4 * kLong;
  static constexpr int kOrders = kPadded % 32 == 0 ? kMost : kPadded % 16 == 0 ? kMost / 2 : 1;
  static constexpr int kBytes = 2 * Tokens * kStride * 4;
  float *sine, *cosine;

  __device__ explicit Rotations(void* memory)
      : sine(static_cast<float*>(memory)), cosine(static_cast<float*>(memory) + Tokens * kStride) {}

  static __device__ __forceinline__ int place(int token, int pair) {
    return token * kStride + (pair ^ token / (4 * kLong) % kOrders * (8 / kLong));
  }

  // Pairs that are there to fill up four do not rotate.
  template <int Threads>
  __device__ void fill() const {
    for (int token = threadIdx.x; token < Tokens; token += Threads) {
      for (int pair = S::kPairs; pair < kPadded; ++pair) {
        sine[place(token, pair)] = 0.0f;
        cosine[place(token, pair)] = 1.0f;
      }
    }
  }
};

// The running phases of a head. Parts: of the chunk's tokens, which lanes of a warp have, 32 / Parts pairs each; there
// are as many sets of pairs as there must be. An integer cannot be NaN: `lost`, in shared memory, is nonzero for pairs
// that met a number that is not finite. Only the warp that has a pair reads and writes it.
template <class S, int Tokens, int Threads, int Parts = 4>
struct PhaseWalk {
  static constexpr int kSpan = (Tokens + Parts - 1) / Parts;  // tokens of one part
  static constexpr int kPairs = 32 / Parts;                   // of a warp at a time
  static constexpr int kSets = (S::kPairs + Threads / Parts - 1) / (Threads / Parts);
  unsigned phase[kSets];        // after the last token so far
  float angles[kSets * kSpan];  // on the way
  const float* from;            // angles of the next chunk to load

  // all: [token][heads][pairs] at the first token and the head.
  __device__ __forceinline__ explicit PhaseWalk(const float* all) : from(all + pair(0)) {}

  static __device__ __forceinline__ int pair(int set) {
    return set * (Threads / Parts) + threadIdx.x % Threads / 32 * kPairs + threadIdx.x % kPairs;
  }

  // From the phases of an earlier part, which lie where `lost` will.
  __device__ void begin(unsigned* lost) {
#pragma unroll
    for (int set = 0; set < kSets; ++set) phase[set] = pair(set) < S::kPairs ? lost[pair(set)] : 0u;
    clear(lost);
  }

  // From angles, or from zero if there are none. Whether all are finite.
  __device__ bool begin(const float* angles, unsigned* lost) {
    clear(lost);
    bool finite = true;
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
      const float angle = angles != nullptr && pair(set) < S::kPairs ? angles[pair(set)] : 0.0f;
      phase[set] = phase_of_radians(angle);
      if (is_finite(angle)) continue;
      lost[pair(set)] = 1;
      finite = false;
    }
    return finite;
  }

  // Marks the pairs that lose their phase in tokens that `advance` walked over. Apart from it, for it is rare.
  static __device__ void lose(const float* angles, const float* dt, int count, unsigned* lost) {
    for (int set = 0; set < kSets; ++set) {
      if (pair(set) >= S::kPairs) continue;
#pragma unroll 1
      for (int c = threadIdx.x % 32 / kPairs; c < count; c += Parts) {
        const float angle = angles[(long long)c * (S::kHeads * S::kPairs) + pair(set)];
        if (angle != angle || !is_finite(dt[c])) lost[pair(set)] = 1;
      }
    }
    __syncwarp();
  }

  __device__ void clear(unsigned* lost) {
    __syncwarp();
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
      if (threadIdx.x % 32 < kPairs && pair(set) < S::kPairs) lost[pair(set)] = 0;
    }
    __syncwarp();
  }

  // Past an earlier part, by what `write_phases` wrote of it.
  __device__ void skip(const unsigned* phases, unsigned* lost) {
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
      if (pair(set) >= S::kPairs) continue;
      phase[set] += phases[pair(set)];
      if (threadIdx.x % 32 < kPairs) lost[pair(set)] |= phases[S::kPairs + pair(set)];
    }
    __syncwarp();
  }

  // The phases reached, [pairs], then which of them are lost.
  __device__ void write_phases(unsigned* to, const unsigned* lost) const {
    if (threadIdx.x % 32 >= kPairs) return;
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
      if (pair(set) >= S::kPairs) continue;
      to[pair(set)] = phase[set];
      to[S::kPairs + pair(set)] = lost[pair(set)];
    }
  }

  // The angles reached, [pairs]; NaN for those that are lost.
  __device__ void write_angles(float* to, const unsigned* lost) const {
    if (threadIdx.x % 32 >= kPairs) return;
#pragma unroll
    for (int set = 0; set < kSets; ++set) {
      if (pair(set) >= S::kPairs) continue;
      to[pair(set)] = lost[pair(set)] ? __int_as_float(0x7fffffff) : radians_of_phase(phase[set]);
    }
  }

  // Where `write_angles` wrote a NaN, the keys that go with it, [rank][state], become NaN as well.
  static __device__ void spoil_keys(const float* angles, float* keys) {
    if (threadIdx.x % 32 >= kPairs) return;
    for (int set = 0; set < kSets; ++set) {
      if (pair(set) >= S::kPairs || angles[pair(set)] == angles[pair(set)]) continue;
      for (int rank = 0; rank < S::kRank; ++rank) {
        float* key = keys + rank * S::kState + (S::kHalf ? pair(set) : 2 * pair(set));
        key[0] = key[S::kHalf ? S::kState / 2 : 1] = __int_as_float(0x7fffffff);
      }
    }
  }

  // Of the next chunk, of `count` tokens. Beyond them the last one's are loaded.
  __device__ __forceinline__ void load(int count) {
    const int part = threadIdx.x % 32 / kPairs;
#pragma unroll
    for (int i = 0; i < kSpan; ++i) {
      const float* token = from + min(part * kSpan + i, count - 1) * (S::kHeads * S::kPairs);
#pragma unroll
      for (int set = 0; set < kSets; ++set) {
        const bool is_there = S::kPairs % kPairs == 0 && kSets * (Threads / Parts) == S::kPairs;
        angles[set * kSpan + i] = is_there || pair(set) < S::kPairs ? token[pair(set) - pair(0)] : 0.0f;
      }
    }
    from += (long long)count * (S::kHeads * S::kPairs);
  }

  // Over the `count` tokens that `load` was given; their rotations go to the table. The next chunk is loaded as well,
  // of next_count tokens, if there are any. A token with a number that is not finite is marked in `bad`, and the result
  // is true. Sets take turns in the first registers, so that the loop over them need not be unrolled.
  __device__ bool advance(const float* dt, int count, int next_count, const Rotations<S, Tokens>& table, int* bad) {
    const int lane = threadIdx.x % 32, part = lane / kPairs;
    bool found = false;
    float given[kSets * kSpan];
#pragma unroll
    for (int i = 0; i < kSets * kSpan; ++i) given[i] = angles[i];
    // One set's are asked for once those before have been used: asked for here they would be loaded to registers of
    // their own, and waited for when they are moved.
    if (kSets > 1 && next_count > 0) load(next_count);
    // Where tokens are the parts' alone and spans fours, a span's dt are loaded at once; rotations beyond the chunk are
    // written like others, and finite.
    constexpr bool kWhole = Parts * kSpan == Tokens;
#pragma unroll 1
    for (int set = 0; set < kSets; ++set) {
      float steps[kSpan];
#pragma unroll
      for (int i = 0; i < kSpan; ++i) {
        const int c = part * kSpan + i;
        if constexpr (kWhole && kSpan % 4 == 0 && Tokens % 4 == 0) {
          if (i % 4 == 0) load_values(reinterpret_cast<float (&)[4]>(steps[i]), dt + c);
          steps[i] = c < count ? steps[i] : 0.0f;
        } else {
          steps[i] = c < count ? dt[c] : 0.0f;
        }
      }
#pragma unroll
      for (int i = 0; i < kSpan; ++i) {
        steps[i] = S::kExact ? turns_of_step(given[i], steps[i]) : turns_of_step_fast(given[i], steps[i]);
      }
      unsigned sums[kSpan], sum = 0;
      bool finite = true;
#pragma unroll
      for (int i = 0; i < kSpan; ++i) {
        finite = finite && is_finite(steps[i]);
        sum += phase_of_turns(steps[i]);
        sums[i] = sum;
      }
      if (!finite) {
        found = true;
#pragma unroll
        for (int i = 0; i < kSpan; ++i) {
          if (!is_finite(steps[i])) bad[part * kSpan + i] = 1;
        }
      }
      unsigned scan = sum;
#pragma unroll
      for (int distance = 1; distance < Parts; distance *= 2) {
        const unsigned earlier = __shfl_up_sync(~0u, scan, distance * kPairs);
        if (part >= distance) scan += earlier;
      }
      const unsigned before = phase[0] + scan - sum;
      const unsigned after = phase[0] + __shfl_sync(~0u, scan, 32 - kPairs + lane % kPairs);
#pragma unroll
      for (int i = 0; i < kSpan; ++i) {
        const int c = part * kSpan + i;
        if (pair(set) < S::kPairs && (kWhole || c < count)) {
          float sine, cosine;
          if constexpr (S::kExact) {
            sincos_of_phase(before + sums[i], sine, cosine);
          } else {
            sincos_of_phase_fast(before + sums[i], sine, cosine);
          }
          const int at = Rotations<S, Tokens>::place(c, pair(set));
          table.sine[at] = sine;
          table.cosine[at] = cosine;
        }
      }
#pragma unroll
      for (int other = 0; other + 1 < kSets; ++other) {
        phase[other] = phase[other + 1];
#pragma unroll
        for (int i = 0; i < kSpan; ++i) given[other * kSpan + i] = given[(other + 1) * kSpan + i];
      }
      phase[kSets - 1] = after;
    }
    if (kSets == 1 && next_count > 0) load(next_count);
    return found;
  }
};

// Eight coordinates of a key or query in four pairs.
template <class S>
struct Unit {
  static constexpr int kCount = S::kState / 8;
  float v[8];

  __device__ __forceinline__ Unit() {}

  template <typename T>
  __device__ __forceinline__ Unit(const T* row, int unit) {
    if constexpr (S::kHalf) {
      float low[4], high[4];
      load_values(low, row + 4 * unit);
      load_values(high, row + S::kState / 2 + 4 * unit);
#pragma unroll
      for (int i = 0; i < 4; ++i) v[i] = low[i], v[4 + i] = high[i];
    } else {
      load_values(v, row + 8 * unit);
    }
  }

  // Where a unit of a row is in a matrix: all of it, or its two halves.
  template <class M>
  struct Spot {
    typename M::At low, high;

    __device__ __forceinline__ Spot(const M& matrix, int row, int unit) {
      low = matrix.address(row, S::kHalf ? 4 * unit : 8 * unit);
      high = S::kHalf ? matrix.address(row, S::kState / 2 + 4 * unit) : low;
    }
    template <int Down>
    __device__ __forceinline__ Spot below(int count) const {
      Spot spot = *this;
      spot.low = M::template below<Down>(low, count);
      spot.high = M::template below<Down>(high, count);
      return spot;
    }
  };

  template <class M>
  __device__ __forceinline__ void load(const Spot<M>& at) {
    if constexpr (S::kHalf) {
      float low[4], high[4];
      M::load(low, at.low);
      M::load(high, at.high);
#pragma unroll
      for (int i = 0; i < 4; ++i) v[i] = low[i], v[4 + i] = high[i];
    } else {
      M::load(v, at.low);
    }
  }

  // From global memory to where `load` finds it, beside the thread.
  template <class M>
  static __device__ __forceinline__ void fetch(const Spot<M>& at, int unit, const typename S::Value* from) {
    if constexpr (S::kHalf) {
      M::template fetch<4>(at.low, from + 4 * unit);
      M::template fetch<4>(at.high, from + S::kState / 2 + 4 * unit);
    } else {
      M::template fetch<8>(at.low, from + 8 * unit);
    }
  }

  // For units with rotated pairs.
  template <class Table>
  __device__ __forceinline__ void rotate_by(const Table& table, int token, int unit) {
    const int at = Table::place(token, 4 * unit);
    float sine[4], cosine[4];
    load_values(sine, table.sine + at);
    load_values(cosine, table.cosine + at);
    rotate_by(sine, cosine);
  }
  __device__ __forceinline__ void rotate_by(const float (&sine)[4], const float (&cosine)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (S::kHalf) {
        rotate(v[i], v[4 + i], sine[i], cosine[i]);
      } else {
        rotate(v[2 * i], v[2 * i + 1], sine[i], cosine[i]);
      }
    }
  }

  template <bool Finite, class M>
  __device__ __forceinline__ bool store(const Spot<M>& at) const {
    if constexpr (!S::kHalf) return M::template store<Finite>(at.low, v);
    const float low[4] = {v[0], v[1], v[2], v[3]}, high[4] = {v[4], v[5], v[6], v[7]};
    const bool first = M::template store<Finite>(at.low, low);
    return M::template store<Finite>(at.high, high) && first;
  }

  __device__ __forceinline__ void write(float* row, int unit) const {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      row[S::kHalf ? (i < 4 ? 4 * unit + i : S::kState / 2 + 4 * unit + i - 4) : 8 * unit + i] = v[i];
    }
  }
};

// Where keys and queries come from: arrays at the chunk's first token and the head's group.
template <class S>
struct KeySource {
  const typename S::Value *q, *k;
};

// Keys, and queries if they are wanted, of a chunk: fetched to their matrices as they are given, biased and rotated
// there by the threads that fetched them.
template <class S, int Tokens, int Threads, bool Queries, class M>
struct KeyStage {
  // Eight lanes share a row and take neighbouring units; these slots go to tokens, ranks, q or k, and parts of the row,
  // so that a warp works on rotated units only or on others only, where it can.
  static constexpr int kSlots = Threads / 8, kKinds = Queries ? 2 : 1, kParts = (Unit<S>::kCount + 7) / 8;
  static constexpr int kJobs = kParts * kKinds * S::kRank, kTogether = kSlots > kJobs ? kSlots / kJobs : 1;
  static constexpr int kStride = S::kRank * S::kGroups * S::kState, kBatch = 4;

  // function(unit, rank, whether it is a query, the slot's first token)
  template <class Function>
  static __device__ __forceinline__ void each(Function function) {
    const int thread = thread_here(), slot = thread / 8;
    for (int job = slot / kTogether; job < kJobs; job += kSlots / kTogether) {
      const int unit = job / (S::kRank * kKinds) * 8 + thread % 8;
      if (unit < Unit<S>::kCount) {
        function(unit, job % S::kRank, Queries && job / S::kRank % kKinds != 0, slot % kTogether);
      }
    }
  }

  // A slot's tokens are taken in strides over rows that are permuted alike, so that one address serves a batch of them.
  static constexpr int kStep = kTogether * S::kRank;  // rows from token to token
  static __device__ constexpr int stride() {
    int tokens = 1;
    while (tokens * kStep % M::kAlike != 0) ++tokens;
    return tokens;
  }
  static constexpr int kSkip = stride();
  using Spot = typename Unit<S>::template Spot<M>;

  static __device__ void fetch(const KeySource<S>& source, int count, const M& queries, const M& keys) {
    each([&](int unit, int rank, bool is_query, int first) {
      const M& to = is_query ? queries : keys;
      const typename S::Value* from =
          (is_query ? source.q : source.k) + rank * (S::kGroups * S::kState) + first * kStride;
#pragma unroll
      for (int start = 0; start < kSkip; ++start) {
        const Spot spot(to, (first + start * kTogether) * S::kRank + rank, unit);
#pragma unroll
        for (int i = 0; start + i * kSkip < (Tokens + kTogether - 1) / kTogether; ++i) {
          const int turn = start + i * kSkip;
          if (first + turn * kTogether < count) {
            Unit<S>::fetch(spot.template below<kSkip * kStep>(i), unit, from + turn * (kTogether * kStride));
          }
        }
      }
    });
  }

  // q_bias, k_bias: of the head. last_key: where the key of token `last` is written in float32 too. A key that is not
  // finite becomes zero and marks its token in `bad`; then the result is true.
  static __device__ bool rotate(const Rotations<S, Tokens>& table, const float* q_bias, const float* k_bias, int count,
                                const M& queries, const M& keys, int* bad, int last, float* last_key) {
    bool found = false;
    each([&](int unit, int rank, bool is_query, int first) {
      const Unit<S> bias((is_query ? q_bias : k_bias) + rank * S::kState, unit);
      if (Queries && is_query) {
        rotate_units<false>(table, bias, count, queries, bad, -1, nullptr, unit, rank, first);
      } else {
        found |= rotate_units<true>(table, bias, count, keys, bad, last, last_key, unit, rank, first);
      }
    });
    return found;
  }

 private:
  // One unit of some tokens' rows: several at a time in a full chunk, for the latency of shared memory.
  template <bool Keys>
  static __device__ __forceinline__ bool rotate_units(const Rotations<S, Tokens>& table, const Unit<S>& bias, int count,
                                                      const M& in, int* bad, int last, float* last_key, int unit,
                                                      int rank, int first) {
    bool found = false;
    int c = first;
    constexpr int kRound = kBatch * kSkip;  // turns after which the strides have met all tokens
    constexpr int kRounds = Tokens / (kTogether * kRound);
    if (kRounds > 0 && count == Tokens) {
#pragma unroll 1
      for (int batch = 0; batch < kRounds * kSkip; ++batch) {
        const int turn = batch / kSkip * kRound + batch % kSkip;
        found |= rotate_batch<Keys, kBatch>(table, bias, in, bad, last, last_key, unit, rank, first + turn * kTogether);
      }
      c += kRounds * kRound * kTogether;
    }
#pragma unroll 1
    for (; c < count; c += kTogether) {
      found |= rotate_batch<Keys, 1>(table, bias, in, bad, last, last_key, unit, rank, c);
    }
    return found;
  }

  template <bool Keys, int Batch>
  static __device__ __forceinline__ bool rotate_batch(const Rotations<S, Tokens>& table, const Unit<S>& bias,
                                                      const M& in, int* bad, int last, float* last_key, int unit,
                                                      int rank, int first) {
    constexpr int kApart = kSkip * kTogether;  // tokens
    const Spot spot(in, first * S::kRank + rank, unit);
    const auto at = [&](int i) { return spot.template below<kSkip * kStep>(i); };
    bool found = false;
    Unit<S> x[Batch];
#pragma unroll
    for (int i = 0; i < Batch; ++i) x[i].load(at(i));
#pragma unroll
    for (int i = 0; i < Batch; ++i) {
#pragma unroll
      for (int e = 0; e < 8; ++e) x[i].v[e] += bias.v[e];
    }
    if (4 * unit < S::kPairs) {
#pragma unroll
      for (int i = 0; i < Batch; ++i) x[i].rotate_by(table, first + i * kApart, unit);
    }
#pragma unroll
    for (int i = 0; i < Batch; ++i) {
      if constexpr (Keys) {
        const int c = first + i * kApart;
        if (c == last) x[i].write(last_key + rank * S::kState, unit);
        if (!x[i].template store<true>(at(i))) {
          bad[c] = 1;
          found = true;
        }
      } else {
        x[i].template store<false>(at(i));
      }
    }
    return found;
  }
};

// Values of a chunk, loaded ahead, then expanded to ranks by weights [Rank][HeadDim] (Weighted, else there is one
// rank).
template <class S, int Tokens, int Threads, bool Weighted>
struct ValuesAhead {
  static constexpr int kPieces = S::kHeadDim / 8, kItems = (Tokens * kPieces + Threads - 1) / Threads;
  static constexpr int kWords = sizeof(typename S::Value) / 2;
  uint4 raw[kItems][kWords];

  // v begins at the chunk's first token and the head.
  __device__ __forceinline__ void load(const typename S::Value* v, int count) {
    const int thread = thread_here();
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
      const int i = (thread + Threads / 2) % Threads + item * Threads;  // warps that have few phases first
      if (i >= count * kPieces) continue;
      const typename S::Value* from = v + (long long)(i / kPieces) * (S::kHeads * S::kHeadDim) + i % kPieces * 8;
#pragma unroll
      for (int word = 0; word < kWords; ++word) raw[item][word] = reinterpret_cast<const uint4*>(from)[word];
    }
  }

  // What is not finite is treated as in KeyStage.
  template <class M>
  __device__ __forceinline__ bool store(const float* weights, int count, const M& values, int* bad) const {
    const int thread = thread_here();
    bool found = false;
#pragma unroll
    for (int item = 0; item < kItems; ++item) {
      const int i = (thread + Threads / 2) % Threads + item * Threads;  // warps that have few phases first
      if (i >= count * kPieces) continue;
      const int c = i / kPieces, column = i % kPieces * 8;
      float x[8];
      load_values(x, reinterpret_cast<const typename S::Value*>(raw[item]));
#pragma unroll
      for (int rank = 0; rank < S::kRank; ++rank) {
        float row[8];
        if constexpr (Weighted) load_values(row, weights + rank * S::kHeadDim + column);
#pragma unroll
        for (int e = 0; e < 8; ++e) row[e] = Weighted ? row[e] * x[e] : x[e];
        if (!M::template store<true>(values.address(c * S::kRank + rank, column), row)) {
          bad[c] = 1;
          found = true;
        }
      }
    }
    return found;
  }
};

// Brings the line at an address towards the L2 cache.
__device__ __forceinline__ void prefetch(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

template <int Bytes>
__device__ void clear(unsigned char* memory, int threads) {
  static_assert(Bytes % 16 == 0, "whole pieces");
  for (int i = threadIdx.x * 16; i < Bytes; i += threads * 16)
    *reinterpret_cast<uint4*>(memory + i) = uint4{0, 0, 0, 0};
}

}  // namespace jax_ssd

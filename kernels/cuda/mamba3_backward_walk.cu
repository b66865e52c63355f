// States before each chunk of a Mamba-3 scan, walking forward, and adjoints of the states after it, walking backward,
// on Hopper. A block walks along a segment of one head in one direction, the state in registers:
//
//   s <- exp(a_last) s + V' diag(f exp(a_last - a)) K        T <- exp(a_last) T + dO' diag(exp(a)) Q
//
// With more than one segment, every segment is first walked from zeros to its end; from the ends of all segments before
// it a second walk makes what its own begins with.

#include "mamba3_backward_tiles.cuh"

namespace jax_ssd {

constexpr int kWalkThreads = 256;

struct WalkArrays {
  const bf16 *q, *k, *v, *z, *dy;
  const float *q_bias, *k_bias, *mimo_v, *mimo_o, *mimo_z, *f, *decay;
  const unsigned short* phases;
  const float *dt, *trap, *state_ssm, *state_k, *state_v, *d_final;
  bf16 *states, *adjoints;
  float *d_state_ssm, *ends, *totals;
  int batch, seq, segments, segment_chunks;
};

template <class C>
struct WalkMemory {
  static constexpr int kKeys = 0, kValues = kKeys + 4 * kPanel, kOut = kValues + 2 * kPanel, kBias = kOut + 4 * kPanel,
                       kWeights = kBias + C::kRank * C::kN * 4,
                       kBytes = kWeights + (C::kWeighted ? 2 * C::kRank * C::kP * 4 : 0);
};

// Numbers of shared memory, 64 of them as eight pieces of eight: the first halves of all pieces, then the second ones,
// so that what eight lanes load at once lies side by side.
__device__ __forceinline__ int halves_at(int i) { return i / 64 * 64 + i % 8 / 4 * 32 + i % 64 / 8 * 4 + i % 4; }
__device__ __forceinline__ void load_halves(const float* numbers, int piece, float (&x)[8]) {
  const float4* from = reinterpret_cast<const float4*>(numbers) + piece / 8 * 16 + piece % 8;
  const float4 a = from[0], b = from[8];
  x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
}

// What a walk begins with at an end of the row: an element of the initial state, with the half step that is owed to its
// last key, or of the final state's cotangent.
template <class C>
__device__ __forceinline__ float outer_state(const WalkArrays& in, bool backward, int b, int h, int p, int n) {
  const long long head = (long long)b * C::kHeads + h, at = (head * C::kP + p) * C::kN + C::column(n);
  if (backward) return C::kFinal ? in.d_final[at] : 0.0f;
  if constexpr (!C::kState) return 0.0f;
  const float pending = in.dt[head * in.seq] / (1.0f + expf(in.trap[head * in.seq]));
  const float* weights = in.mimo_v + ((long long)C::param_row(b) * C::kHeads + h) * C::kRank * C::kP;
  float sum = 0.0f;
#pragma unroll
  for (int r = 0; r < C::kRank; ++r) {
    sum += in.state_k[(head * C::kRank + r) * C::kN + C::column(n)] * (C::kWeighted ? weights[r * C::kP + p] : 1.0f);
  }
  return in.state_ssm[at] + pending * in.state_v[head * C::kP + p] * sum;
}

template <class C, bool Backward>
struct Walker {
  using Memory = WalkMemory<C>;
  // A thread has so many units of keys, eight columns of a token each, and so many ranks of them. Half of them are of
  // the first 64 columns, those that turn, so that all threads have as much to do.
  static constexpr int kRanks = C::kRank < 2 ? C::kRank : 2, kParts = C::kRank / kRanks;
  static constexpr int kKeyTokens = C::kTokens / (32 / kParts), kKeys = 2 * kKeyTokens;
  // A thread has two rows of values, of one token if there are ranks enough, else of two tokens.
  static constexpr bool kOneToken = C::kRank > 1;
  static constexpr int kValueTokens = kOneToken ? 1 : 2;

  const WalkArrays& in;
  char* memory;
  int b, h;
  // Where token 0 is; of values, the thread's columns.
  const bf16 *key, *value, *gate;
  const unsigned short* phase;
  const float *decay, *f;

  __device__ Walker(const WalkArrays& arrays, char* shared, int row, int head)
      : in(arrays), memory(shared), b(row), h(head) {
    const long long tokens = (long long)b * in.seq, schedule = ((long long)b * C::kHeads + h) * in.seq;
    const long long at = (tokens * C::kHeads + h) * C::kP + threadIdx.x % 8 * 8;
    key = (Backward ? in.q : in.k) + (tokens * (C::kRank * C::kGroups) + h / C::kGroupHeads) * C::kN;
    value = (Backward ? in.dy : in.v) + at;
    gate = in.z + at;
    phase = in.phases + schedule * C::kPairs;
    decay = in.decay + schedule, f = in.f + schedule;
  }

  // What a thread will stage of a chunk.
  struct Raw {
    uint4 key[kKeys][kRanks], value[kValueTokens], gate[kValueTokens];
    uint2 phase[kKeys];
    float decay[kValueTokens], f[kValueTokens], total;
  };

  static __device__ __forceinline__ int key_token(int i) {
    return threadIdx.x / (8 * kParts) + 32 / kParts * (i % kKeyTokens);
  }
  static __device__ __forceinline__ int key_rank(int r) { return threadIdx.x / 8 % kParts * kRanks + r; }
  static __device__ __forceinline__ int key_unit(int i) { return threadIdx.x % 8 + 8 * (i / kKeyTokens); }
  static __device__ __forceinline__ int value_row(int i) {
    return kOneToken ? threadIdx.x / 8 * 2 + i : threadIdx.x / 8 + 32 * i;
  }

  // Beyond the row's last token it is that token's again, with values of no weight.
  __device__ __forceinline__ void load(Raw& raw, int chunk) const {
    const int t0 = chunk * C::kTokens, end = in.seq - 1;
    raw.total = decay[min(t0 + C::kTokens - 1, end)];
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      const int unit = key_unit(i);
      const long long t = min(t0 + key_token(i), end);
      const bf16* from = key + t * (C::kRank * C::kGroups * C::kN);
#pragma unroll
      for (int r = 0; r < kRanks; ++r) raw.key[i][r] = load_unit<C>(from + key_rank(r) * (C::kGroups * C::kN), unit);
      if (unit < C::kPairs / 4) {
        raw.phase[i] = __ldg(reinterpret_cast<const uint2*>(phase + t * C::kPairs + 4 * unit));
      }
    }
#pragma unroll
    for (int i = 0; i < kValueTokens; ++i) {
      const int own = t0 + value_row(i) / C::kRank;
      const long long t = min(own, end);
      raw.value[i] = read_once(value + t * (C::kHeads * C::kP));
      if constexpr (Backward && C::kGate) raw.gate[i] = read_once(gate + t * (C::kHeads * C::kP));
      raw.decay[i] = decay[t];
      raw.f[i] = own > end ? 0.0f : Backward ? 1.0f : f[t];
    }
  }

  // Lines that a later chunk will be loaded from; those of keys by the first head of a group, for all of it.
  __device__ __forceinline__ void want_chunk(int chunk) const {
    const int t0 = chunk * C::kTokens, end = in.seq - 1, which = threadIdx.x / C::kTokens;
    if (which < (Backward && C::kGate ? 3 : 2)) {
      const long long t = min(t0 + static_cast<int>(threadIdx.x) % C::kTokens, end);
      const void* from = value - threadIdx.x % 8 * 8 + t * (C::kHeads * C::kP);
      if (which == 1) from = phase + t * C::kPairs;
      if (which == 2) from = gate - threadIdx.x % 8 * 8 + t * (C::kHeads * C::kP);
      want(from);
    }
    if (h % C::kGroupHeads == 0 && threadIdx.x < 2 * C::kRows) {
      const int row = threadIdx.x / 2;
      const long long t = min(t0 + row / C::kRank, end);
      want(key + (t * C::kRank + row % C::kRank) * (C::kGroups * C::kN) + threadIdx.x % 2 * 64);
    }
  }

  __device__ __forceinline__ void stage(const Raw& raw, int buffer) const {
    const float *bias = reinterpret_cast<const float*>(memory + Memory::kBias),
                *weights = reinterpret_cast<const float*>(memory + Memory::kWeights);
#pragma unroll
    for (int i = 0; i < kKeys; ++i) {
      const int unit = key_unit(i);
      char* keys = memory + Memory::kKeys + buffer * 2 * kPanel + unit / 8 * kPanel;
      float cosine[4], sine[4];
      if (unit < C::kPairs / 4) sincos_of_phases(raw.phase[i], sine, cosine);
#pragma unroll
      for (int r = 0; r < kRanks; ++r) {
        float x[8], offset[8];
        unpack_unit<C>(raw.key[i][r], x);
        load_halves(bias + key_rank(r) * C::kN, unit, offset);
#pragma unroll
        for (int e = 0; e < 8; ++e) x[e] += offset[e];
        if (unit < C::kPairs / 4) {
#pragma unroll
          for (int e = 0; e < 4; ++e) rotate(x[2 * e], x[2 * e + 1], sine[e], cosine[e]);
        }
        *reinterpret_cast<uint4*>(keys + swizzled(key_token(i) * C::kRank + key_rank(r), threadIdx.x % 8)) = pack8(x);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = value_row(i), own = kOneToken ? 0 : i;
      const float scale = raw.f[own] * exp2_fast(Backward ? raw.decay[own] : raw.total - raw.decay[own]);
      float x[8], weight[8];
      unpack8(raw.value[own], x);
#pragma unroll
      for (int e = 0; e < 8; ++e) x[e] *= scale;
      if constexpr (C::kWeighted) {
        load_halves(weights + row % C::kRank * C::kP, threadIdx.x % 8, weight);
#pragma unroll
        for (int e = 0; e < 8; ++e) x[e] *= weight[e];
      }
      if constexpr (Backward && C::kGate) {
        float half[8];
        unpack8(raw.gate[own], half);
        if constexpr (C::kWeighted) load_halves(weights + (C::kRank + row % C::kRank) * C::kP, threadIdx.x % 8, weight);
#pragma unroll
        for (int e = 0; e < 8; ++e) x[e] *= silu_of_half(half[e] * (C::kWeighted ? weight[e] : 0.5f));
      }
      *reinterpret_cast<uint4*>(memory + Memory::kValues + buffer * kPanel + swizzled(row, threadIdx.x % 8)) = pack8(x);
    }
  }

  // ends_only: from zeros, and only the last state is kept.
  __device__ __forceinline__ void walk(int segment, bool ends_only) const {
    const int chunks = (in.seq + C::kTokens - 1) / C::kTokens;
    const int begin = segment * in.segment_chunks, steps = min(in.segment_chunks, chunks - begin);
    const int thread = threadIdx.x, lane = thread % 32, team = uniform(thread / 128);
    const int row = thread / 32 % 4 * 16 + lane / 4, column = team * 64 + lane % 4 * 2;
    const long long head = (long long)b * C::kHeads + h;
    const long long param = ((long long)C::param_row(b) * C::kHeads + h) * C::kRank;
    const long long line = (Backward ? (long long)in.batch * C::kHeads + head : head) * in.segments;
    float *ends = in.ends + line * (C::kP * C::kN), *totals = in.totals + line;

    float* bias = reinterpret_cast<float*>(memory + Memory::kBias);
    for (int i = thread; i < C::kRank * C::kN; i += kWalkThreads) {
      bias[halves_at(i)] = (Backward ? in.q_bias : in.k_bias)[param * C::kN + i / C::kN * C::kN + C::column(i % C::kN)];
    }
    if constexpr (C::kWeighted) {
      float* weights = reinterpret_cast<float*>(memory + Memory::kWeights);
      for (int i = thread; i < C::kRank * C::kP; i += kWalkThreads) {
        weights[halves_at(i)] = (Backward ? in.mimo_o : in.mimo_v)[param * C::kP + i];
        if constexpr (C::kGate) weights[C::kRank * C::kP + halves_at(i)] = 0.5f * in.mimo_z[param * C::kP + i];
      }
    }

    float state[32];
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const int p = row + i / 2 % 2 * 8, n = column + i / 4 * 8 + i % 2;
      state[i] = ends_only ? 0.0f : outer_state<C>(in, Backward, b, h, p, n);
    }
    if (!ends_only) {
#pragma unroll 2
      for (int before = Backward ? in.segments - 1 : 0; before != segment; before += Backward ? -1 : 1) {
        const float keep = exp2_fast(totals[before]);
        const float* own = ends + before * (C::kP * C::kN);
#pragma unroll
        for (int i = 0; i < 32; i += 2) {
          const float2 x = *reinterpret_cast<const float2*>(own + (row + i / 2 % 2 * 8) * C::kN + column + i / 4 * 8);
          state[i] = keep * state[i] + x.x, state[i + 1] = keep * state[i + 1] + x.y;
        }
      }
    }
    bf16* stored = (Backward ? in.adjoints : in.states) + head * chunks * (C::kP * C::kN);
    const auto chunk_of = [&](int step) { return Backward ? begin + steps - 1 - step : begin + step; };
    Raw raw;
    load(raw, chunk_of(0));
    // The second buffer is zero, so that the first product is none.
    for (int i = thread; i < 3 * kPanel / 16; i += kWalkThreads) {
      const int at = i < 2 * kPanel / 16 ? Memory::kKeys + 2 * kPanel + 16 * i : Memory::kValues - kPanel + 16 * i;
      *reinterpret_cast<uint4*>(memory + at) = make_uint4(0, 0, 0, 0);
    }
    fence_async_proxy();
    __syncthreads();
    float total = 0.0f, all = 0.0f;
    const auto multiply = [&](int step) {  // the state after that chunk
      const unsigned keys = shared_address(memory) + Memory::kKeys + step % 2 * 2 * kPanel + team * kPanel,
                     values = shared_address(memory) + Memory::kValues + step % 2 * kPanel;
      const float keep = exp2_fast(total);
      all += total;
#pragma unroll
      for (int i = 0; i < 32; ++i) state[i] *= keep;
      wgmma_fence();
      multiply_tiles<64, 4, true, true>(state, values, keys, true);
      wgmma_commit();
    };
#pragma unroll 1
    for (int step = 0; step < steps; ++step) {
      const unsigned out = shared_address(memory) + Memory::kOut + step % 2 * 2 * kPanel;
      multiply(step + 1);  // of the chunk before, while this one's rows are made
      stage(raw, step % 2);
      total = raw.total;
      if (step + 1 < steps) load(raw, chunk_of(step + 1));
      // No further ahead: at three steps lines leave the L2 cache before they are loaded, and are read twice.
      if (step + 2 < steps) want_chunk(chunk_of(step + 2));
      wgmma_wait<0>();
      pin(state);
      if (!ends_only) store_panel(out + team * kPanel, state);
      fence_async_proxy();
      if (thread == 0) copies_wait_read<0>();  // the other buffer is free after the barrier
      __syncthreads();
      if (!ends_only && thread == 0) {
        copy_line_out(stored + (long long)chunk_of(step) * (C::kP * C::kN), out, 2 * kPanel);
        copies_commit();
      }
    }
    const bool keeps_last = ends_only || (C::kState && Backward && segment == 0);
    if (keeps_last) {
      multiply(steps + 1);
      wgmma_wait<0>();
      pin(state);
    }
    if (ends_only) {
#pragma unroll
      for (int i = 0; i < 32; i += 2) {
        const int p = row + i / 2 % 2 * 8, n = column + i / 4 * 8;
        *reinterpret_cast<float2*>(ends + (segment * C::kP + p) * C::kN + n) = make_float2(state[i], state[i + 1]);
      }
      if (thread == 0) totals[segment] = all;
    } else if (C::kState && Backward && segment == 0) {
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        const int p = row + i / 2 % 2 * 8, n = column + i / 4 * 8 + i % 2;
        in.d_state_ssm[(head * C::kP + p) * C::kN + C::column(n)] = state[i];
      }
    }
    if (thread == 0) copies_wait<0>();
  }
};

// Blocks: (head of a row of the batch, segment, direction).
template <class C, bool EndsOnly>
__global__ void __launch_bounds__(kWalkThreads, 2)
    mamba3_backward_walk(const bf16* q, const bf16* k, const bf16* v, const bf16* z, const bf16* dy,
                         const float* q_bias, const float* k_bias, const float* mimo_v, const float* mimo_o,
                         const float* mimo_z, const float* f, const float* decay, const unsigned short* phases,
                         const float* dt, const float* trap, const float* state_ssm, const float* state_k,
                         const float* state_v, const float* d_final, bf16* states, bf16* adjoints, float* d_state_ssm,
                         float* ends, float* totals, int batch, int seq, int segments, int segment_chunks) {
  extern __shared__ __align__(1024) char shared[];
  let_next_kernel_start();
  wait_for_earlier_kernels();
  const WalkArrays in{q,        k,           v,      z,      dy,    q_bias,    k_bias,   mimo_v,        mimo_o,  mimo_z,
                      f,        decay,       phases, dt,     trap,  state_ssm, state_k,  state_v,       d_final, states,
                      adjoints, d_state_ssm, ends,   totals, batch, seq,       segments, segment_chunks};
  const int h = blockIdx.x % C::kHeads, b = blockIdx.x / C::kHeads, segment = blockIdx.y;
  if (blockIdx.z == 0) {
    if (EndsOnly && segment == segments - 1) return;  // nothing follows
    Walker<C, false>(in, shared, b, h).walk(segment, EndsOnly);
  } else {
    if (EndsOnly && segment == 0) return;
    Walker<C, true>(in, shared, b, h).walk(segment, EndsOnly);
  }
}

}  // namespace jax_ssd

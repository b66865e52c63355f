// The backward of Mamba-3 along time, on Hopper: the phases and weights of tokens that walks and chunks begin with, and
// the gradients of angles, steps and parameters that they end in.
//
// A thread has four pairs, a unit, of a run of neighbouring tokens, some lanes share a run, so that a token's pairs are
// read at once. What is summed along time is summed in runs, then over the runs of a warp, the warps of a block. Phases
// are summed over blocks as well: a cluster takes some columns of a row of the batch in rounds.

#include "mamba3_backward_tiles.cuh"

namespace jax_ssd {

constexpr int kTimeThreads = 256, kTimeWarps = kTimeThreads / 32, kMostBlocks = 8;
constexpr int kRun = 8;    // tokens of a thread
constexpr int kDepth = 2;  // rounds of the schedule whose angles are here or on their way

// Sends a word to this address in the shared memory of a block of the cluster, and tells the barrier at that address
// there of its four bytes. Unlike the cluster's barrier it waits for no other memory.
__device__ __forceinline__ void send_to_block(unsigned address, unsigned barrier, unsigned rank, unsigned word) {
  unsigned there, barrier_there;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(barrier_there) : "r"(barrier), "r"(rank));
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(there), "r"(word),
               "r"(barrier_there)
               : "memory");
}

// 1 / (1 + exp(2 v)) by the hardware: tanh(v) is 1 less twice that.
__device__ __forceinline__ float tail_of_tanh(float v) { return rcp_fast(1.0f + exp2_fast(v * (2.0f * LOG2E))); }

// How a cluster shares a row of the batch: its columns are the pairs of all heads, a unit has four, a cluster as many
// units as lanes share a run.
template <class C, int Lanes>
struct ScheduleShare {
  static constexpr int kHeadUnits = C::kPairs / 4, kUnits = C::kHeads * kHeadUnits;
  static constexpr int kGroups = (kUnits + Lanes - 1) / Lanes;                              // of units, in a row
  static constexpr int kTokens = kTimeThreads / Lanes * kRun;                               // of a block in a round
  static constexpr bool kEven = Lanes % kHeadUnits == 0 || kHeadUnits % Lanes == 0;         // heads do not straddle
  static constexpr int kHeads = (Lanes + (kEven ? 1 : 2) * (kHeadUnits - 1)) / kHeadUnits;  // that a group touches
  static constexpr int kSharers = !kEven ? 1 : kHeadUnits < Lanes ? kHeadUnits : Lanes;     // lanes of a head's steps
  static constexpr int kBegun = (Lanes + kHeadUnits - 1) / kHeadUnits;                      // heads begun in a group
  static constexpr int kWeights = (kBegun * kTokens + kTimeThreads - 1) / kTimeThreads;     // of a thread in a round
  static constexpr int kDecays = (kBegun * kTokens / 2 + kTimeThreads - 1) / kTimeThreads;  // of two tokens

  struct alignas(16) Memory {
    float4 angles[kDepth][kRun][kTimeThreads];
    float steps[kDepth][kTimeThreads / Lanes][kHeads][kRun];
    unsigned warps[kTimeWarps][4 * Lanes], blocks[2][kMostBlocks][4 * Lanes];
    unsigned long long barriers[2];
  };
};

// Sums of a number of every column of every run, for the runs before each, and of them all.
template <class S, int Lanes>
struct ClusterSums {
  typename S::Memory& memory;
  int warp, block, blocks, round = 0;

  struct alignas(16) Four {
    unsigned x[4];
  };

  __device__ __forceinline__ unsigned barrier(int which) const { return shared_address(&memory.barriers[which]); }

  // The block arrives at the cluster's barrier, where it waits for the others before it stores to them.
  __device__ __forceinline__ void begin() const {
    if (threadIdx.x == 0) {
      for (int which = 0; which < 2; ++which) barrier_init(barrier(which), Lanes / 8);  // warps of columns
      fence_barrier_init();
    }
    __syncthreads();
    cluster_arrive();
  }

  // To be called by all threads in every round. Adds to `beyond` and `all`.
  __device__ __forceinline__ void sum(const unsigned (&own)[4], unsigned (&beyond)[4], unsigned (&all)[4]) {
    const int lane = threadIdx.x % 32, first = lane % Lanes * 4, which = round % 2;
    unsigned scan[4] = {own[0], own[1], own[2], own[3]};  // with those of the warp's runs before
#pragma unroll
    for (int offset = Lanes; offset < 32; offset *= 2) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const unsigned other = __shfl_up_sync(0xffffffff, scan[e], offset);
        scan[e] += lane >= offset ? other : 0;
      }
    }
    if (lane >= 32 - Lanes) *reinterpret_cast<Four*>(&memory.warps[warp][first]) = {scan[0], scan[1], scan[2], scan[3]};
    __syncthreads();
    if (round == 0) cluster_wait();
    if (warp < Lanes / 8) {
      const int column = threadIdx.x;
      unsigned of_warp[kTimeWarps], sum = 0;
#pragma unroll
      for (int w = 0; w < kTimeWarps; ++w) of_warp[w] = memory.warps[w][column];
#pragma unroll
      for (int w = 0; w < kTimeWarps; ++w) {
        memory.warps[w][column] = sum;
        sum += of_warp[w];
      }
      const unsigned to = shared_address(&memory.blocks[which][block][column]);
#pragma unroll 1
      for (int n = 0; n < blocks; ++n) send_to_block(to, barrier(which), n, sum);
      __syncwarp();
      if (column == 0) {
        barrier_expect(barrier(which), blocks * Lanes * 16);
      } else if (lane == 0) {
        barrier_arrive(barrier(which));
      }
    }
    barrier_wait(barrier(which), round / 2 % 2);
    const Four before = *reinterpret_cast<const Four*>(&memory.warps[warp][first]);
#pragma unroll
    for (int e = 0; e < 4; ++e) beyond[e] += before.x[e] + scan[e] - own[e];
#pragma unroll
    for (int n = 0; n < kMostBlocks; ++n) {
      if (n >= blocks) break;
      const Four other = *reinterpret_cast<const Four*>(&memory.blocks[which][n][first]);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        all[e] += other.x[e];
        if (n < block) beyond[e] += other.x[e];
      }
    }
    ++round;
  }
};

__device__ __forceinline__ float sigmoid_fast(float v) { return rcp_fast(1.0f + exp2_fast(v * -LOG2E)); }

// The phase of up to 64 turns as phase_of_turns makes it, without conversions, which the hardware is slow at: a sum
// with 1.5 * 2**7 is a multiple of 2**-16, with 1.5 * 2**-9 of 2**-32, and says in its last bits which.
__device__ __forceinline__ unsigned phase_of_few_turns(float turns) {
  constexpr float kCoarse = 192.0f, kFine = 0.0029296875f;
  const float coarse = turns + kCoarse, fine = turns - (coarse - kCoarse) + kFine;
  return (__float_as_uint(coarse) << 16) + (__float_as_uint(fine) - 0x3b400000u);
}

// gamma, f and the running sum of adt in base 2 of every token, within its chunk; the phases, in units of 2**-16 turns,
// those of a head one after the other. Blocks: (block of a cluster, first of the groups of units that it takes one
// after the other, as many as there are clusters apart).
template <class C, int Lanes>
__global__ void __launch_bounds__(kTimeThreads, 2)
    mamba3_backward_schedule(const float* angles, const float* adt, const float* dt, const float* trap,
                             const float* start, float* gamma, float* f, float* decay, unsigned short* phases,
                             int batch, int seq) {
  using S = ScheduleShare<C, Lanes>;
  constexpr long long kNext = C::kHeads * C::kPairs;  // from a token's angles to the next one's
  constexpr int kMostTurns = 64;
  extern __shared__ __align__(1024) char shared[];
  auto& memory = *reinterpret_cast<typename S::Memory*>(shared);
  const int blocks = gridDim.x, block = blockIdx.x, thread = threadIdx.x, groups = batch * S::kGroups;
  const int warp = uniform(thread / 32), lane = thread % 32, run = thread / Lanes;
  const int own = block * S::kTokens, stride = blocks * S::kTokens;  // of a round
  ClusterSums<S, Lanes> sums{memory, warp, block, blocks};
  sums.begin();
  let_next_kernel_start();
  wait_for_earlier_kernels();

  // The thread's run in a round.
  struct Run {
    int group, begin;         // begin: the block's first token
    int unit;                 // of the row of the batch
    long long angles, steps;  // the first of them
  };
  const auto find = [&](int group) {
    const int b = group / S::kGroups, unit = group % S::kGroups * Lanes + lane % Lanes, first = own + run * kRun;
    const long long head = (long long)b * C::kHeads + unit / S::kHeadUnits;
    return Run{group, own, unit, ((long long)b * seq + first) * kNext + 4 * unit, head * seq + first};
  };
  const auto advance = [&](Run& at) {
    at.begin += stride, at.angles += stride * kNext, at.steps += stride;
    if (at.begin - own >= seq) at = find(at.group + gridDim.y);
  };
  const auto step_at = [&](const Run& at, int stage) {
    return memory.steps[stage][run][at.unit / S::kHeadUnits - (at.unit - lane % Lanes) / S::kHeadUnits];
  };
  // What is beyond the end, or no unit, is not copied: it is added to nothing that anyone reads.
  const auto copy = [&](const Run& at, int stage) {
    if (at.group < groups && at.unit < S::kUnits) {
      const float4* from = reinterpret_cast<const float4*>(angles + at.angles);
      const int left = seq - at.begin - run * kRun;
      if (left >= kRun) {
#pragma unroll
        for (int j = 0; j < kRun; ++j) copy_piece(&memory.angles[stage][j][thread], from + j * (kNext / 4));
      } else {
#pragma unroll 1
        for (int j = 0; j < left; ++j) copy_piece(&memory.angles[stage][j][thread], from + j * (kNext / 4));
      }
      const bool first = lane % Lanes == 0 || at.unit % S::kHeadUnits == 0;
      const int sharer = S::kEven ? at.unit % S::kSharers : first ? 0 : kRun;
#pragma unroll
      for (int j = 0; j < kRun; j += S::kSharers) {
        if (j + sharer < min(left, kRun)) copy_piece(step_at(at, stage) + j + sharer, dt + at.steps + j + sharer);
      }
    }
    pieces_commit();
  };

  // Weights of the heads that begin in a group, where they are in memory; none where it is negative.
  long long weights[S::kWeights], decays[S::kDecays];
  const auto find_heads = [&](int group) {
    const int unit = group % S::kGroups * Lanes, first = (unit + S::kHeadUnits - 1) / S::kHeadUnits;
    const long long row = (long long)(group / S::kGroups) * C::kHeads;
    const auto head = [&](int i) {
      const bool begun = first + i < C::kHeads && (first + i) * S::kHeadUnits < unit + Lanes;
      return begun ? (row + first + i) * seq : -1ll;
    };
#pragma unroll
    for (int n = 0; n < S::kWeights; ++n) weights[n] = head((thread + n * kTimeThreads) / S::kTokens);
#pragma unroll
    for (int n = 0; n < S::kDecays; ++n) decays[n] = head((thread + n * kTimeThreads) / (S::kTokens / 2));
  };
  const int of_weight = thread % S::kTokens, of_decay = thread % (S::kTokens / 2) * 2;  // tokens
  float step[S::kWeights][2], mix[S::kWeights][2], adts[S::kDecays][2];  // of tokens and the ones after them
  const auto load = [&](int begin) {
#pragma unroll
    for (int n = 0; n < S::kWeights; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int t = begin + of_weight + i;
        const bool there = weights[n] >= 0 && t < seq;
        step[n][i] = there ? __ldg(dt + weights[n] + t) : 0.0f;  // no step follows the last token
        mix[n][i] = there ? __ldg(trap + weights[n] + t) : 0.0f;
      }
    }
#pragma unroll
    for (int n = 0; n < S::kDecays; ++n) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int t = begin + of_decay + i;
        adts[n][i] = decays[n] >= 0 && t < seq ? __ldg(adt + decays[n] + t) : 0.0f;
      }
    }
  };
  const auto weigh = [&](int begin) {
#pragma unroll
    for (int n = 0; n < S::kWeights; ++n) {
      const int t = begin + of_weight;
      if (weights[n] < 0 || t >= seq) continue;
      const float weight = step[n][0] * sigmoid_fast(mix[n][0]);
      gamma[weights[n] + t] = weight;
      f[weights[n] + t] = weight + step[n][1] * sigmoid_fast(-mix[n][1]);
    }
#pragma unroll
    for (int n = 0; n < S::kDecays; ++n) {
      constexpr int kChunkLanes = C::kTokens / 2;
      const int t = begin + of_decay;
      const float one = log2_decay(1.0f, adts[n][0]);
      float sum = one + log2_decay(1.0f, adts[n][1]);
#pragma unroll
      for (int offset = 1; offset < kChunkLanes; offset *= 2) {
        const float other = __shfl_up_sync(0xffffffff, sum, offset);
        if (lane % kChunkLanes >= offset) sum += other;
      }
      float earlier = __shfl_up_sync(0xffffffff, sum, 1);
      if (lane % kChunkLanes == 0) earlier = 0.0f;
      if (decays[n] < 0) continue;
      if (t < seq) decay[decays[n] + t] = earlier + one;
      if (t + 1 < seq) decay[decays[n] + t + 1] = sum;
    }
  };

  Run now = find(blockIdx.y), ahead = now;
#pragma unroll
  for (int stage = 0; stage < kDepth; ++stage) {
    copy(ahead, stage);
    advance(ahead);
  }
  find_heads(now.group);
  load(own);
  unsigned before[4] = {};  // the phases after all earlier rounds
  int stage = 0;
#pragma unroll 1
  while (now.group < groups) {
    const bool paired = now.unit < S::kUnits;
    if (now.begin == own) {
      const long long first = (long long)(now.group / S::kGroups) * kNext + 4 * now.unit;
#pragma unroll
      for (int e = 0; e < 4; ++e) before[e] = 0x8000 + (C::kState && paired ? phase_of_radians(start[first + e]) : 0);
    }
    pieces_wait<kDepth - 1>();
    __syncwarp();
    float turns[kRun][4], most = 0.0f;
    const float* steps = step_at(now, stage);
#pragma unroll
    for (int j = 0; j < kRun; ++j) {
      const float4 angle = memory.angles[stage][j][thread];
      const float of_pairs[4] = {angle.x, angle.y, angle.z, angle.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) turns[j][e] = 0.5f * steps[j] - steps[j] * tail_of_tanh(of_pairs[e]);
      most = fmaxf(most, fabsf(steps[j]));
    }
    if (most > kMostTurns) {
#pragma unroll
      for (int j = 0; j < kRun; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) turns[j][e] -= rintf(turns[j][e]);
      }
    }
    unsigned sum[kRun][4], total[4] = {};
#pragma unroll
    for (int j = 0; j < kRun; ++j) {
#pragma unroll
      for (int e = 0; e < 4; ++e) sum[j][e] = total[e] += phase_of_few_turns(turns[j][e]);
    }
    weigh(now.begin);
    __syncwarp();  // steps have been read
    copy(ahead, stage);
    advance(ahead);
    stage = stage + 1 < kDepth ? stage + 1 : 0;
    const Run own_run = now;
    advance(now);
    if (now.group != own_run.group && now.group < groups) find_heads(now.group);
    if (now.group < groups) load(now.begin);
    unsigned beyond[4] = {before[0], before[1], before[2], before[3]};
    sums.sum(total, beyond, before);
    unsigned short* to = phases + own_run.steps * C::kPairs + own_run.unit % S::kHeadUnits * 4;
    const int left = paired ? seq - own_run.begin - run * kRun : 0;
#pragma unroll
    for (int j = 0; j < kRun; ++j) {
      const uint2 words = make_uint2(__byte_perm(beyond[0] + sum[j][0], beyond[1] + sum[j][1], 0x7632),
                                     __byte_perm(beyond[2] + sum[j][2], beyond[3] + sum[j][3], 0x7632));
      if (j < left) *reinterpret_cast<uint2*>(to + j * C::kPairs) = words;
    }
  }
}

// Gradients of the parameters, a row of the batch each, and what mimo_v gets of initial states besides.
struct ParameterSums {
  const bf16* records;
  const float* of_states;
  float *q_bias, *k_bias, *mimo_v, *mimo_o, *mimo_z, *skip;

  // Two neighbouring elements of a row's records, summed over its chunks.
  template <class C>
  __device__ __forceinline__ void sum(int b, int i, int chunks) const {
    constexpr int kWeights = C::kRank * C::kP;
    if (i >= C::kHeads * C::kRecord) return;
    const int h = i / C::kRecord, at = i % C::kRecord;
    const long long head = (long long)b * C::kHeads + h;
    float* to = nullptr;
    int second = 1;  // where the other element is
    if (at < C::kMimoVAt) {
      const int inner = at % C::kKBiasAt, n = inner % C::kN;
      to = (at < C::kKBiasAt ? q_bias : k_bias) + (head * C::kRank + inner / C::kN) * C::kN + C::column(n);
      second = C::column(n + 1) - C::column(n);
    } else if (at < C::kMimoZAt + kWeights) {
      const int inner = at - C::kMimoVAt, which = inner / kWeights;
      if (C::kWeighted && (which < 2 || C::kGate)) {
        to = (which == 0 ? mimo_v : which == 1 ? mimo_o : mimo_z) + head * kWeights + inner % kWeights;
      }
    } else if (C::kSkip && at == C::kSkipAt) {
      to = skip + head, second = 0;
    }
    if (to == nullptr) return;
    const bf16* from = records + (long long)b * chunks * C::kHeads * C::kRecord + i;
    float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll 16
    for (int n = 0; n < chunks; ++n) {
      const float2 own = unpack2(*reinterpret_cast<const unsigned*>(from + (long long)n * C::kHeads * C::kRecord));
      sum.x += own.x, sum.y += own.y;
    }
    if (C::kState && C::kWeighted && at >= C::kMimoVAt && at < C::kMimoOAt) {
      const float2 own = *reinterpret_cast<const float2*>(of_states + head * kWeights + at - C::kMimoVAt);
      sum.x += own.x, sum.y += own.y;
    }
    if (second) to[second] = sum.y;
    *to = sum.x;
  }
};

// What a thread copies for its run: the angles, and its part of the state between two chunks and its adjoint.
template <class C, int Span>
struct SpanShare {
  static constexpr int kLanes = C::kPairs <= 32 ? 8 : 16;  // that share a token's pairs
  static constexpr int kThreads = Span / kRun * kLanes, kWarps = kThreads / 32, kParts = kThreads / kLanes;
  static constexpr int kOf = C::kFinal ? 0 : 2;  // of state and adjoint
  static_assert(kThreads % 32 == 0 && kThreads <= kTimeThreads && Span % C::kTokens == 0 && C::kP % kParts == 0);

  struct alignas(16) Memory {
    float4 angles[kRun][kThreads], sums[2][kWarps][kLanes];
    float steps[kParts][kRun], trap[kParts][kRun], d_f[2][kParts][kRun], d_gamma[kParts][kRun];  // d_f: before, own
    uint4 states[kOf ? kOf : 1][kOf ? C::kP / kParts : 1][kOf ? kThreads : 1];
  };
};

// The thread's part of the moments of a state with its adjoint, of its four pairs: the sum over p of dS_a S_b - dS_b
// S_a for the columns a and b of a pair.
__device__ __forceinline__ void add_moments(float (&sum)[4], uint4 adjoint, uint4 state) {
  float x[8], y[8];
  unpack8(adjoint, x);
  unpack8(state, y);
#pragma unroll
  for (int e = 0; e < 4; ++e) sum[e] += x[2 * e] * y[2 * e + 1] - x[2 * e + 1] * y[2 * e];
}

// What angles, dt and trap get, from what the phases do, which is in the memory of the angles' gradient. A block has a
// span of tokens of a head; the first blocks sum up parameters. All that comes after it is the moment of the state
// there with its adjoint (see mamba3_moments, which makes them ahead if the final state has a cotangent). d_delta: of
// the weight of an initial state's key.
template <class C, int Span>
__global__ void __launch_bounds__(SpanShare<C, Span>::kThreads, 768 / SpanShare<C, Span>::kThreads)
    mamba3_backward_time(const float* angles, const float* dt, const float* trap, const float* d_f,
                         const float* d_gamma, const bf16* states, const bf16* adjoints, const float* moments,
                         const float* d_delta, float* d_angles, float* d_dt, float* d_trap, float* d_start,
                         const bf16* records, const float* of_states, float* d_q_bias, float* d_k_bias, float* d_mimo_v,
                         float* d_mimo_o, float* d_mimo_z, float* d_skip, int batch, int seq) {
  using S = SpanShare<C, Span>;
  constexpr long long kNext = C::kHeads * C::kPairs;  // from a token's pairs to the next one's
  constexpr int kLanes = S::kLanes, kThreads = S::kThreads, kWarps = S::kWarps;
  constexpr float kPi = 3.14159265358979f;
  extern __shared__ __align__(1024) char shared[];
  auto& memory = *reinterpret_cast<typename S::Memory*>(shared);
  let_next_kernel_start();
  wait_for_earlier_kernels();
  constexpr int kSums = (C::kHeads * C::kRecord / 2 + kThreads - 1) / kThreads;  // blocks of a row of the batch
  const int chunks = (seq + C::kTokens - 1) / C::kTokens, block = blockIdx.x - batch * kSums;
  if (block < 0) {
    const ParameterSums sums{records, of_states, d_q_bias, d_k_bias, d_mimo_v, d_mimo_o, d_mimo_z, d_skip};
    const int unit = blockIdx.x % kSums * kThreads + threadIdx.x;
    return sums.template sum<C>(blockIdx.x / kSums, 2 * unit, chunks);
  }
  // The last first: their rows of the angles' gradient are those that the chunks' kernel wrote last.
  const int spans = (seq + Span - 1) / Span, unit = batch * C::kHeads * spans - 1 - block;
  const int span = unit % spans, h = unit / spans % C::kHeads, b = unit / spans / C::kHeads;
  const int warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32, pair = lane % kLanes * 4;
  const int run = threadIdx.x / kLanes, begin = span * Span + run * kRun, next = (span + 1) * Span;
  const int own = begin + lane % kLanes * kRun / kLanes;  // one token of each lane, or of two lanes
  const bool paired = pair < C::kPairs;
  const long long row = (long long)b * C::kHeads + h, head = row * seq;
  const long long first = ((long long)b * seq + begin) * kNext + h * C::kPairs + pair;
  dt += head, trap += head, d_f += head, d_gamma += head, d_dt += head, d_trap += head;
  angles += first, d_angles += first;

  // All that the thread needs is asked for at once.
  const bool owns = own < seq && lane % (kLanes / kRun) == 0;
  if (owns) {
    copy_piece(&memory.steps[run][own - begin], dt + own);
    copy_piece(&memory.trap[run][own - begin], trap + own);
    copy_piece(&memory.d_f[1][run][own - begin], d_f + own);
    copy_piece(&memory.d_gamma[run][own - begin], d_gamma + own);
    if (own > 0) copy_piece(&memory.d_f[0][run][own - begin], d_f + own - 1);
  }
  if (paired) {
#pragma unroll
    for (int j = 0; j < kRun; ++j) {
      if (begin + j >= seq) break;
      copy_piece(&memory.angles[j][threadIdx.x], reinterpret_cast<const float4*>(angles + j * kNext));
    }
  }
  const bool bounded = next < seq && paired;
  if (bounded && !C::kFinal) {
    const long long at = (row * chunks + next / C::kTokens) * (C::kP * C::kN) + pair / 32 * (64 * C::kP);
#pragma unroll
    for (int n = 0; n < C::kP / S::kParts; ++n) {
      const int p = run + n * S::kParts, unit = p * 64 + (pair % 32 / 4 ^ p % 8) * 8;
      copy_piece(&memory.states[0][n][threadIdx.x],
                 reinterpret_cast<const float4*>(adjoints + at - C::kP * C::kN + unit));
      copy_piece(&memory.states[1][n][threadIdx.x], reinterpret_cast<const float4*>(states + at + unit));
    }
  }
  pieces_commit();
  float4 phase[kRun];
#pragma unroll
  for (int j = 0; j < kRun; ++j) {
    phase[j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (begin + j < seq && paired) phase[j] = *reinterpret_cast<const float4*>(d_angles + j * kNext);
  }
  float moment[4] = {};
  if (bounded && C::kFinal && run == 0) {
#pragma unroll
    for (int e = 0; e < 4; ++e) moment[e] = moments[(row * spans + span) * C::kPairs + pair + e];
  }

  float total[4] = {};  // of the run and those of the warp after it
#pragma unroll
  for (int j = kRun - 1; j >= 0; --j) {
    total[0] += phase[j].x, total[1] += phase[j].y, total[2] += phase[j].z, total[3] += phase[j].w;
  }
  __syncwarp();  // keeps the wait behind the loads
  pieces_wait<0>();
  if (bounded && !C::kFinal) {
#pragma unroll
    for (int n = 0; n < C::kP / S::kParts; ++n) {
      add_moments(moment, memory.states[0][n][threadIdx.x], memory.states[1][n][threadIdx.x]);
    }
  }
#pragma unroll
  for (int offset = kLanes; offset < 32; offset *= 2) {
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float other = __shfl_down_sync(0xffffffff, total[e], offset);
      total[e] += lane + offset < 32 ? other : 0.0f;
      moment[e] += __shfl_xor_sync(0xffffffff, moment[e], offset);
    }
  }
  if (lane < kLanes) {
    memory.sums[0][warp][lane] = make_float4(total[0], total[1], total[2], total[3]);
    memory.sums[1][warp][lane] = make_float4(moment[0], moment[1], moment[2], moment[3]);
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) {  // from here on of all that comes after the run
    const float other = __shfl_down_sync(0xffffffff, total[e], kLanes);
    total[e] = lane + kLanes < 32 ? other : 0.0f;
  }
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    float4 other = memory.sums[1][w][lane % kLanes];
    total[0] += other.x, total[1] += other.y, total[2] += other.z, total[3] += other.w;
    if (w > warp) {
      other = memory.sums[0][w][lane % kLanes];
      total[0] += other.x, total[1] += other.y, total[2] += other.z, total[3] += other.w;
    }
  }

  float d_step[kRun];
#pragma unroll
  for (int j = kRun - 1; j >= 0; --j) {
    const float of_phase[4] = {phase[j].x, phase[j].y, phase[j].z, phase[j].w}, step = memory.steps[run][j];
    const float4 angle = paired ? memory.angles[j][threadIdx.x] : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    const float of_angle[4] = {angle.x, angle.y, angle.z, angle.w};
    float x[4];
    d_step[j] = 0.0f;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      total[e] += of_phase[e];
      const float tail = tail_of_tanh(of_angle[e]), turned = kPi * total[e];
      x[e] = turned * step * (4.0f * tail * (1.0f - tail));
      d_step[j] += turned * (1.0f - 2.0f * tail);
    }
    if (begin + j < seq && paired) store4(d_angles + j * kNext, make_float4(x[0], x[1], x[2], x[3]));
  }
  if constexpr (C::kState) {
    if (begin == 0 && paired) {
      store4(d_start + row * C::kPairs + pair, make_float4(total[0], total[1], total[2], total[3]));
    }
  }
  share_sums<kRun, kLanes / 2, kLanes / kRun>(d_step);
  if constexpr (kLanes == 16) d_step[0] += __shfl_xor_sync(0xffffffff, d_step[0], 1);
  if (owns) {
    const float step = memory.steps[run][own - begin], mix = sigmoid_fast(memory.trap[run][own - begin]);
    const float weight = memory.d_f[1][run][own - begin] + memory.d_gamma[run][own - begin];
    const float before = own > 0 ? memory.d_f[0][run][own - begin] : C::kState ? d_delta[row] : 0.0f;
    d_dt[own] = d_step[0] + mix * weight + (1.0f - mix) * before;
    d_trap[own] = step * (weight - before) * mix * (1.0f - mix);
  }
}

}  // namespace jax_ssd

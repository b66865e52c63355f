// The backward of Mamba-3 along time, on Hopper: the phases and weights of tokens that walks and chunks begin with, and
// the gradients of angles, steps and parameters that they end in.
//
// A thread has four pairs of a run of neighbouring tokens, some lanes share a run, so that a token's pairs are read at
// once. What is summed along time is summed in runs, then over the runs of a warp, the warps of a block. Phases are
// summed over blocks as well: a cluster takes a head of a row in rounds.

#include "mamba3_backward_tiles.cuh"

namespace jax_ssd {

constexpr int kTimeThreads = 256, kTimeWarps = kTimeThreads / 32, kMostBlocks = 8;
constexpr int kRun = 8, kScheduleRun = 8;  // tokens of a thread

template <class C>
struct Runs {
  static constexpr int kLanes = C::kPairs <= 32 ? 8 : 16, kOfWarp = 32 / kLanes, kColumns = 4 * kLanes;
  static constexpr int kScheduleTokens = kTimeWarps * kOfWarp * kScheduleRun;  // of a block in a round
  static constexpr long long kNext = C::kHeads * C::kPairs;                    // from a token's pairs to the next one's
};

template <int Columns>
struct alignas(16) SumsMemory {
  unsigned warps[kTimeWarps][Columns], blocks[2][kMostBlocks][Columns];
};

// Sums of a number of every column of every run, for the runs before each, and of them all. A thread
// has the four columns that begin with 4 * (its lane in the run).
template <int Lanes>
struct ClusterSums {
  SumsMemory<4 * Lanes>& memory;
  int warp, block, blocks, round = 0;  // before the first round the block has arrived at the cluster's barrier

  struct alignas(16) Four {
    unsigned x[4];
  };

  // To be called by all threads in every round.
  __device__ __forceinline__ void sum(const unsigned (&own)[4], unsigned (&beyond)[4], unsigned (&all)[4]) {
    const int lane = threadIdx.x % 32, column = lane % Lanes * 4;
    unsigned scan[4] = {own[0], own[1], own[2], own[3]};  // with those of the warp's runs before
#pragma unroll
    for (int offset = Lanes; offset < 32; offset *= 2) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const unsigned other = __shfl_up_sync(0xffffffff, scan[e], offset);
        scan[e] += lane >= offset ? other : 0;
      }
    }
    if (lane >= 32 - Lanes) {
      *reinterpret_cast<Four*>(&memory.warps[warp][column]) = {scan[0], scan[1], scan[2], scan[3]};
    }
    __syncthreads();
#pragma unroll
    for (int e = 0; e < 4; ++e) beyond[e] = scan[e] - own[e], all[e] = 0;
#pragma unroll
    for (int w = 0; w < kTimeWarps; ++w) {
      const Four other = *reinterpret_cast<const Four*>(&memory.warps[w][column]);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        all[e] += other.x[e];
        if (w < warp) beyond[e] += other.x[e];
      }
    }
    if (round == 0) cluster_wait();  // all blocks are there
    if (warp < blocks && lane < Lanes) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        store_to_block(shared_address(&memory.blocks[round % 2][block][column + e]), warp, all[e]);
      }
    }
    cluster_barrier();
#pragma unroll
    for (int e = 0; e < 4; ++e) all[e] = 0;
#pragma unroll
    for (int n = 0; n < kMostBlocks; ++n) {
      if (n >= blocks) break;
      const Four other = *reinterpret_cast<const Four*>(&memory.blocks[round % 2][n][column]);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        all[e] += other.x[e];
        if (n < block) beyond[e] += other.x[e];
      }
    }
    ++round;
  }
};

// 1 / (1 + exp(2 v)) by the hardware: tanh(v) is 1 less twice that.
__device__ __forceinline__ float tail_of_tanh(float v) { return rcp_fast(1.0f + exp2_fast(v * (2.0f * LOG2E))); }

// What a thread of the schedule begins a round with: its runs of angles and steps, and one or two tokens of the rest.
struct ScheduleInputs {
  float4 angle[kScheduleRun];
  float step[kScheduleRun], dt[2], trap[2], adt[2];
};

// gamma, f and the running sum of adt in base 2 of every token, within its chunk; the phases, in units of 2**-16 turns,
// those of a head one after the other. Blocks: (block of a cluster, first of the heads that it takes
// one after the other, as many as there are clusters apart).
template <class C>
__global__ void __launch_bounds__(kTimeThreads, 2)
    mamba3_backward_schedule(const float* angles, const float* adt, const float* dt, const float* trap,
                             const float* start, float* gamma, float* f, float* decay, unsigned short* phases,
                             int batch, int seq) {
  using R = Runs<C>;
  using Memory = SumsMemory<R::kColumns>;
  __shared__ Memory memory;
  let_next_kernel_start();
  wait_for_earlier_kernels();
  cluster_arrive();
  const int blocks = gridDim.x, block = blockIdx.x, rows = batch * C::kHeads, thread = threadIdx.x;
  const int warp = uniform(thread / 32), lane = thread % 32;
  const int pair = lane % R::kLanes * 4, run = warp * R::kOfWarp + lane / R::kLanes;
  const int tokens = R::kScheduleTokens, own = block * tokens;  // of the block, in each round
  const bool paired = pair < C::kPairs;
  ClusterSums<R::kLanes> sums{memory, warp, block, blocks};

  const auto angles_at = [&](int row, int t) {  // of a token's pairs
    return (((long long)(row / C::kHeads) * seq + t) * C::kHeads + row % C::kHeads) * C::kPairs;
  };
  ScheduleInputs in;
  const auto load = [&](int row, int first) {
    const long long head = (long long)row * seq;
    const float* from = angles + angles_at(row, first + run * kScheduleRun) + pair;
#pragma unroll
    for (int j = 0; j < kScheduleRun; ++j) {
      const int t = first + run * kScheduleRun + j;
      in.angle[j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f), in.step[j] = 0.0f;
      if (t < seq && paired) in.angle[j] = __ldg(reinterpret_cast<const float4*>(from + j * R::kNext));
      if (t < seq) in.step[j] = __ldg(dt + head + t);
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int t = first + thread + i, pair_t = first + 2 * thread + i;
      in.dt[i] = in.trap[i] = in.adt[i] = 0.0f;
      if (thread < tokens && t < seq) in.dt[i] = __ldg(dt + head + t), in.trap[i] = __ldg(trap + head + t);
      if (thread < tokens / 2 && pair_t < seq) in.adt[i] = __ldg(adt + head + pair_t);
    }
  };

  int row = blockIdx.y, begin = own;
  unsigned before[4] = {};  // the phases after all earlier rounds
  load(row, begin);
#pragma unroll 1
  while (row < rows) {
    const int first = begin;
    const long long head = (long long)row * seq;
    if (first == own) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        before[e] = C::kState && paired ? phase_of_radians(start[row * C::kPairs + pair + e]) : 0;
      }
    }
    if (const int t = first + thread; thread < tokens && t < seq) {
      const float weight = in.dt[0] / (1.0f + expf(-in.trap[0]));
      gamma[head + t] = weight;
      f[head + t] = weight + in.dt[1] / (1.0f + expf(in.trap[1]));  // no step follows the last token
    }
    if (thread < tokens / 2) {  // whole warps
      constexpr int kChunkLanes = C::kTokens / 2;
      const int t = first + 2 * thread;
      const float one = log2_decay(1.0f, in.adt[0]);
      float sum = one + log2_decay(1.0f, in.adt[1]);
#pragma unroll
      for (int offset = 1; offset < kChunkLanes; offset *= 2) {
        const float other = __shfl_up_sync(0xffffffff, sum, offset);
        if (lane % kChunkLanes >= offset) sum += other;
      }
      float earlier = __shfl_up_sync(0xffffffff, sum, 1);
      if (lane % kChunkLanes == 0) earlier = 0.0f;
      if (t < seq) decay[head + t] = earlier + one;
      if (t + 1 < seq) decay[head + t + 1] = sum;
    }
    unsigned sum[kScheduleRun][4], total[4] = {}, ahead[4], all[4];
#pragma unroll
    for (int j = 0; j < kScheduleRun; ++j) {
      const float of_pairs[4] = {in.angle[j].x, in.angle[j].y, in.angle[j].z, in.angle[j].w};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float turns = 0.5f * in.step[j] - in.step[j] * tail_of_tanh(of_pairs[e]);
        total[e] += static_cast<unsigned>(__float2int_rn((turns - rintf(turns)) * 4294967296.0f));
        sum[j][e] = total[e];
      }
    }
    begin += blocks * tokens;
    if (begin - own >= seq) begin = own, row += gridDim.y;
    if (row < rows) load(row, begin);  // on its way while blocks wait for each other
    sums.sum(total, ahead, all);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      ahead[e] += before[e] + 0x8000;  // to the nearest unit
      before[e] += all[e];
    }
    unsigned short* to = phases + (head + first + run * kScheduleRun) * C::kPairs + pair;
#pragma unroll
    for (int j = 0; j < kScheduleRun; ++j) {
      const uint2 words = make_uint2(__byte_perm(ahead[0] + sum[j][0], ahead[1] + sum[j][1], 0x7632),
                                     __byte_perm(ahead[2] + sum[j][2], ahead[3] + sum[j][3], 0x7632));
      if (first + run * kScheduleRun + j < seq && paired) *reinterpret_cast<uint2*>(to + j * C::kPairs) = words;
    }
  }
}

// The thread's part of the moments of the state between two chunks with its adjoint, of its four pairs: the sum over p
// of dS_a S_b - dS_b S_a for the columns a and b of a pair. Part: which of Parts threads with these pairs it is.
template <class C, int Parts>
__device__ __forceinline__ void add_moments(float (&sum)[4], const bf16* adjoint, const bf16* state, int pair,
                                            int part) {
  const int panel = pair / 32 * (64 * C::kP), unit = pair % 32 / 4;
#pragma unroll
  for (int p = part; p < C::kP; p += Parts) {
    const int at = panel + p * 64 + (unit ^ p % 8) * 8;
    float x[8], y[8];
    unpack8(read_once(adjoint + at), x);
    unpack8(read_once(state + at), y);
#pragma unroll
    for (int e = 0; e < 4; ++e) sum[e] += x[2 * e] * y[2 * e + 1] - x[2 * e + 1] * y[2 * e];
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

// What angles, dt and trap get, from what the phases do, which is in the memory of the angles' gradient. A block has a
// span of tokens of a head; the first blocks sum up parameters. All that comes after it is the moment of the state
// there with its adjoint (see mamba3_moments, which makes them ahead if the final state has a cotangent). d_delta: of
// the weight of an initial state's key.
template <class C, int Span>
__global__ void __launch_bounds__(Span / kRun * Runs<C>::kLanes, 512 / (Span / kRun * Runs<C>::kLanes))
    mamba3_backward_time(const float* angles, const float* dt, const float* trap, const float* d_f,
                         const float* d_gamma, const bf16* states, const bf16* adjoints, const float* moments,
                         const float* d_delta, float* d_angles, float* d_dt, float* d_trap, float* d_start,
                         const bf16* records, const float* of_states, float* d_q_bias, float* d_k_bias, float* d_mimo_v,
                         float* d_mimo_o, float* d_mimo_z, float* d_skip, int batch, int seq) {
  using R = Runs<C>;
  constexpr int kLanes = R::kLanes, kThreads = Span / kRun * kLanes, kWarps = kThreads / 32;
  constexpr float kPi = 3.14159265358979f;
  static_assert(kThreads % 32 == 0 && kThreads <= 512 && Span % C::kTokens == 0);
  __shared__ float4 runs[kWarps][kLanes], ahead[kWarps][kLanes];
  let_next_kernel_start();
  wait_for_earlier_kernels();
  constexpr int kSums = (C::kHeads * C::kRecord / 2 + kThreads - 1) / kThreads;  // blocks of a row of the batch
  const int chunks = (seq + C::kTokens - 1) / C::kTokens, block = blockIdx.x - batch * kSums;
  if (block < 0) {
    const ParameterSums sums{records, of_states, d_q_bias, d_k_bias, d_mimo_v, d_mimo_o, d_mimo_z, d_skip};
    const int unit = blockIdx.x % kSums * kThreads + threadIdx.x;
    return sums.template sum<C>(blockIdx.x / kSums, 2 * unit, chunks);
  }
  const int spans = (seq + Span - 1) / Span, span = block % spans, h = block / spans % C::kHeads;
  const int b = block / spans / C::kHeads;
  const int warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32, pair = lane % kLanes * 4;
  const int run = threadIdx.x / kLanes, begin = span * Span + run * kRun, next = (span + 1) * Span;
  const int own = begin + lane % kLanes * kRun / kLanes;  // one token of each lane, or of two lanes
  const bool paired = pair < C::kPairs;
  const long long row = (long long)b * C::kHeads + h, head = row * seq;
  const long long first = ((long long)b * seq + begin) * R::kNext + h * C::kPairs + pair;
  dt += head, trap += head, d_f += head, d_gamma += head, d_dt += head, d_trap += head;
  angles += first, d_angles += first;

  float4 phase[kRun], angle[kRun];
  float step[kRun];
#pragma unroll
  for (int j = 0; j < kRun; ++j) {
    const bool there = begin + j < seq;
    phase[j] = angle[j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    step[j] = there ? __ldg(dt + begin + j) : 0.0f;
    if (there && paired) {
      phase[j] = *reinterpret_cast<const float4*>(d_angles + j * R::kNext);
      angle[j] = __ldg(reinterpret_cast<const float4*>(angles + j * R::kNext));
    }
  }
  float own_step = 0.0f, mix = 0.0f, weight = 0.0f, before = 0.0f;
  if (own < seq) {
    own_step = __ldg(dt + own), mix = 1.0f / (1.0f + expf(-__ldg(trap + own)));
    weight = __ldg(d_f + own) + __ldg(d_gamma + own);
    before = own > 0 ? __ldg(d_f + own - 1) : C::kState ? d_delta[row] : 0.0f;
  }
  float moment[4] = {};
  if (next < seq && paired) {
    if constexpr (C::kFinal) {
      const long long at = (row * spans + span) * C::kPairs + pair;
#pragma unroll
      for (int e = 0; e < 4; ++e) moment[e] = run == 0 ? moments[at + e] : 0.0f;
    } else {
      const long long at = (row * chunks + next / C::kTokens) * (C::kP * C::kN);
      add_moments<C, kThreads / kLanes>(moment, adjoints + at - C::kP * C::kN, states + at, pair, run);
    }
  }

  float total[4] = {};  // of the run and those of the warp after it
#pragma unroll
  for (int j = kRun - 1; j >= 0; --j) {
    total[0] += phase[j].x, total[1] += phase[j].y, total[2] += phase[j].z, total[3] += phase[j].w;
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
    runs[warp][lane] = make_float4(total[0], total[1], total[2], total[3]);
    ahead[warp][lane] = make_float4(moment[0], moment[1], moment[2], moment[3]);
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) {  // from here on of all that comes after the run
    const float other = __shfl_down_sync(0xffffffff, total[e], kLanes);
    total[e] = lane + kLanes < 32 ? other : 0.0f;
  }
  __syncthreads();
#pragma unroll
  for (int w = 0; w < kWarps; ++w) {
    float4 other = ahead[w][lane % kLanes];
    total[0] += other.x, total[1] += other.y, total[2] += other.z, total[3] += other.w;
    if (w > warp) {
      other = runs[w][lane % kLanes];
      total[0] += other.x, total[1] += other.y, total[2] += other.z, total[3] += other.w;
    }
  }

  float d_step[kRun];
#pragma unroll
  for (int j = kRun - 1; j >= 0; --j) {
    const float of_phase[4] = {phase[j].x, phase[j].y, phase[j].z, phase[j].w};
    const float of_angle[4] = {angle[j].x, angle[j].y, angle[j].z, angle[j].w};
    float x[4];
    d_step[j] = 0.0f;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      total[e] += of_phase[e];
      const float tail = tail_of_tanh(of_angle[e]), turned = kPi * total[e];
      x[e] = turned * step[j] * (4.0f * tail * (1.0f - tail));
      d_step[j] += turned * (1.0f - 2.0f * tail);
    }
    if (begin + j < seq && paired) store4(d_angles + j * R::kNext, make_float4(x[0], x[1], x[2], x[3]));
  }
  if constexpr (C::kState) {
    if (begin == 0 && paired) {
      store4(d_start + row * C::kPairs + pair, make_float4(total[0], total[1], total[2], total[3]));
    }
  }
  share_sums<kRun, kLanes / 2, kLanes / kRun>(d_step);
  if constexpr (kLanes == 16) d_step[0] += __shfl_xor_sync(0xffffffff, d_step[0], 1);
  if (own < seq && lane % (kLanes / kRun) == 0) {
    d_dt[own] = d_step[0] + mix * weight + (1.0f - mix) * before;
    d_trap[own] = own_step * (weight - before) * mix * (1.0f - mix);
  }
}

}  // namespace jax_ssd

// The backward of Mamba-3 along time, on Hopper: the phases and weights of tokens that walks and chunks begin with.
//
// A cluster of blocks takes a head of a row in rounds. A thread has four pairs of a run of neighbouring tokens, some
// lanes share a run, so that a token's pairs are read at once. What is summed along time is summed in runs, then over
// the runs of a warp, the warps of a block, the blocks.

#include "mamba3_backward_tiles.cuh"

namespace jax_ssd {

constexpr int kTimeThreads = 256, kTimeWarps = kTimeThreads / 32, kMostBlocks = 8, kRun = 8;

template <class C>
struct Runs {
  static constexpr int kLanes = C::kPairs <= 32 ? 8 : 16, kOfWarp = 32 / kLanes, kColumns = 4 * kLanes;
  static constexpr int kTokensOfBlock = kTimeWarps * kOfWarp * kRun;
  static constexpr long long kNext = C::kHeads * C::kPairs;  // from a token's pairs to the next one's
};

template <typename T, int Columns>
struct alignas(16) SumsMemory {
  T warps[kTimeWarps][Columns], blocks[2][kMostBlocks][Columns];
};

// Sums of a number of every column of every run, for the runs before each, and of them all. A thread
// has the four columns that begin with 4 * (its lane in the run).
template <typename T, int Lanes>
struct ClusterSums {
  SumsMemory<T, 4 * Lanes>& memory;
  int warp, block, blocks, round = 0;

  struct alignas(16) Four {
    T x[4];
  };

  // To be called by all threads in every round.
  __device__ __forceinline__ void sum(const T (&own)[4], T (&beyond)[4], T (&all)[4]) {
    const int lane = threadIdx.x % 32, column = lane % Lanes * 4;
    T scan[4] = {own[0], own[1], own[2], own[3]};  // with those of the warp's runs before
#pragma unroll
    for (int offset = Lanes; offset < 32; offset *= 2) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const T other = __shfl_up_sync(0xffffffff, scan[e], offset);
        scan[e] += lane >= offset ? other : T(0);
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

// gamma, f and the running sum of adt in base 2 of every token, within its chunk; the phases, in units of 2**-16 turns,
// in the first half of each row of the angles' gradient.
template <class C>
__global__ void __launch_bounds__(kTimeThreads, 2)
    mamba3_backward_schedule(const float* angles, const float* adt, const float* dt, const float* trap,
                             const float* start, float* gamma, float* f, float* decay, float* phases, int batch,
                             int seq) {
  using R = Runs<C>;
  using Memory = SumsMemory<unsigned, R::kColumns>;
  __shared__ Memory memory;
  let_next_kernel_start();
  wait_for_earlier_kernels();
  cluster_barrier();  // all blocks are there
  const int blocks = gridDim.x, block = blockIdx.x, h = blockIdx.y % C::kHeads, b = blockIdx.y / C::kHeads;
  const int warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32;
  const long long head = ((long long)b * C::kHeads + h) * seq;
  adt += head, dt += head, trap += head, gamma += head, f += head, decay += head;

  for (int t = block * kTimeThreads + threadIdx.x; t < seq; t += blocks * kTimeThreads) {
    const float step = dt[t], mix = 1.0f / (1.0f + expf(-trap[t]));
    const float next = t + 1 < seq ? dt[t + 1] / (1.0f + expf(trap[t + 1])) : 0.0f;
    gamma[t] = mix * step;
    f[t] = mix * step + next;
  }
  const int chunks = (seq + C::kTokens - 1) / C::kTokens;
  for (int n = block * kTimeWarps + warp; n < chunks; n += blocks * kTimeWarps) {
    const int c = 2 * lane, t = n * C::kTokens + c;
    const float first = c < C::kTokens && t < seq ? log2_decay(1.0f, adt[t]) : 0.0f;
    const float both = first + (c + 1 < C::kTokens && t + 1 < seq ? log2_decay(1.0f, adt[t + 1]) : 0.0f);
    float sum = both;
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
      const float other = __shfl_up_sync(0xffffffff, sum, offset);
      if (lane >= offset) sum += other;
    }
    float before = __shfl_up_sync(0xffffffff, sum, 1);
    if (lane == 0) before = 0.0f;
    if (c < C::kTokens && t < seq) decay[t] = before + first;
    if (c + 1 < C::kTokens && t + 1 < seq) decay[t + 1] = sum;
  }

  ClusterSums<unsigned, R::kLanes> sums{memory, warp, block, blocks};
  const int pair = lane % R::kLanes * 4, run = warp * R::kOfWarp + lane / R::kLanes;
  const bool paired = pair < C::kPairs;
  const long long row = (long long)b * C::kHeads + h, first = (long long)b * seq * R::kNext + h * C::kPairs + pair;
  angles += first, phases += first - pair;
  unsigned before[4] = {};  // all earlier rounds
  if constexpr (C::kState) {
#pragma unroll
    for (int e = 0; e < 4; ++e) before[e] = paired ? phase_of_radians(start[row * C::kPairs + pair + e]) : 0;
  }
#pragma unroll 1
  for (int begin = (block * kTimeWarps * R::kOfWarp + run) * kRun, left = seq; left > 0;
       begin += blocks * R::kTokensOfBlock, left -= blocks * R::kTokensOfBlock) {
    const float* from = angles + begin * R::kNext;
    float4 angle[kRun];
    float step[kRun];
#pragma unroll
    for (int j = 0; j < kRun; ++j) {
      const bool there = begin + j < seq;
      angle[j] = make_float4(0.0f, 0.0f, 0.0f, 0.0f), step[j] = 0.0f;
      if (there && paired) angle[j] = __ldg(reinterpret_cast<const float4*>(from + j * R::kNext));
      if (there) step[j] = __ldg(dt + begin + j);
    }
    unsigned sum[kRun][4], total[4] = {}, ahead[4], all[4];
#pragma unroll
    for (int j = 0; j < kRun; ++j) {
      const float of_pairs[4] = {angle[j].x, angle[j].y, angle[j].z, angle[j].w};
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const float turns = 0.5f * step[j] - step[j] * tail_of_tanh(of_pairs[e]);
        total[e] += static_cast<unsigned>(__float2int_rn((turns - rintf(turns)) * 4294967296.0f));
        sum[j][e] = total[e];
      }
    }
    sums.sum(total, ahead, all);
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      ahead[e] += before[e] + 0x8000;  // to the nearest unit
      before[e] += all[e];
    }
    unsigned short* to = reinterpret_cast<unsigned short*>(phases + begin * R::kNext) + pair;
#pragma unroll
    for (int j = 0; j < kRun; ++j) {
      const uint2 words = make_uint2(__byte_perm(ahead[0] + sum[j][0], ahead[1] + sum[j][1], 0x7632),
                                     __byte_perm(ahead[2] + sum[j][2], ahead[3] + sum[j][3], 0x7632));
      if (begin + j < seq && paired) *reinterpret_cast<uint2*>(to + j * 2 * R::kNext) = words;
    }
  }
}

}  // namespace jax_ssd

// The backward of Mamba-3 along time, on Hopper: the phases and weights of tokens that walks and chunks begin with, and
// what dt, trap and the angles get of the gradients that chunks end with.
//
// A cluster of blocks takes a head of a row in rounds; a warp has a run of neighbouring tokens of a round, a lane a
// pair, or two. What is summed along time is summed in runs, then over the warps of a block, then over the blocks.

#include "mamba3_backward_tiles.cuh"

namespace jax_ssd {

constexpr int kTimeThreads = 256, kTimeWarps = kTimeThreads / 32, kMostBlocks = 8, kRun = 8;

template <typename T, int Columns>
struct SumsMemory {
  T warps[kTimeWarps][Columns], blocks[2][kMostBlocks][Columns];
};

// Sums of a number of every column of every warp, for the warps before (or, Later, after) each, and of them all.
template <typename T, int Columns, bool Later>
struct ClusterSums {
  SumsMemory<T, Columns>& memory;
  int warp, block, blocks, round = 0;

  // To be called by all threads in every round; a lane has column lane + 32 * i.
  template <int Own>
  __device__ __forceinline__ void sum(const T (&own)[Own], T (&beyond)[Own], T (&all)[Own]) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < Own; ++i) memory.warps[warp][lane + 32 * i] = own[i];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < Own; ++i) {
      beyond[i] = all[i] = 0;
#pragma unroll
      for (int w = 0; w < kTimeWarps; ++w) {
        const T other = memory.warps[w][lane + 32 * i];
        all[i] += other;
        beyond[i] += (Later ? w > warp : w < warp) ? other : 0;
      }
      if (warp < blocks) store_to_block(shared_address(&memory.blocks[round % 2][block][lane + 32 * i]), warp, all[i]);
    }
    cluster_barrier();
#pragma unroll
    for (int i = 0; i < Own; ++i) {
      all[i] = 0;
#pragma unroll
      for (int n = 0; n < kMostBlocks; ++n) {
        if (n >= blocks) break;
        const T other = memory.blocks[round % 2][n][lane + 32 * i];
        all[i] += other;
        beyond[i] += (Later ? n > block : n < block) ? other : 0;
      }
    }
    ++round;
  }
};

// 1 / (1 + exp(v)) by the hardware.
__device__ __forceinline__ float sigmoid_of_negative(float v) { return rcp_fast(1.0f + exp2_fast(v * LOG2E)); }

// gamma, f and the running sum of adt in base 2 of every token, within its chunk; the phases, in units of 2**-16 turns,
// in the first half of each row of the angles' gradient.
template <class C>
__global__ void __launch_bounds__(kTimeThreads)
    mamba3_backward_schedule(const float* angles, const float* adt, const float* dt, const float* trap,
                             const float* start, float* gamma, float* f, float* decay, unsigned short* phases,
                             int batch, int seq) {
  constexpr int kOwn = (C::kPairs + 31) / 32;
  using Memory = SumsMemory<unsigned, 32 * kOwn>;
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

  ClusterSums<unsigned, 32 * kOwn, false> sums{memory, warp, block, blocks};
  const long long first = ((long long)b * seq * C::kHeads + h) * C::kPairs;
  unsigned before[kOwn] = {};  // all earlier rounds
  if constexpr (C::kState) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int pair = min(lane + 32 * i, C::kPairs - 1);
      before[i] = phase_of_radians(start[((long long)b * C::kHeads + h) * C::kPairs + pair]);
    }
  }
#pragma unroll 1
  for (int begin = (block * kTimeWarps + warp) * kRun, left = seq; left > 0;
       begin += blocks * kTimeWarps * kRun, left -= blocks * kTimeWarps * kRun) {
    float angle[kOwn][kRun], step[kRun];
#pragma unroll
    for (int j = 0; j < kRun; ++j) {
      const int t = min(begin + j, seq - 1);
      const float* from = angles + first + (long long)t * (C::kHeads * C::kPairs);
#pragma unroll
      for (int i = 0; i < kOwn; ++i) angle[i][j] = __ldg(from + min(lane + 32 * i, C::kPairs - 1));
      step[j] = begin + j < seq ? __ldg(dt + t) : 0.0f;  // no turn where there is no token
    }
    unsigned sum[kOwn][kRun], total[kOwn] = {}, ahead[kOwn], all[kOwn];
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
#pragma unroll
      for (int j = 0; j < kRun; ++j) {
        const float tanh_angle = 1.0f - 2.0f * sigmoid_of_negative(2.0f * angle[i][j]);
        total[i] += phase_of_turns(0.5f * tanh_angle * step[j]);
        sum[i][j] = total[i];
      }
    }
    sums.sum(total, ahead, all);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      ahead[i] += before[i];
      before[i] += all[i];
#pragma unroll
      for (int j = 0; j < kRun; ++j) {
        if (lane + 32 * i < C::kPairs && begin + j < seq) {
          phases[2 * (first + (long long)(begin + j) * (C::kHeads * C::kPairs)) + lane + 32 * i] =
              static_cast<unsigned short>((ahead[i] + sum[i][j] + 0x8000u) >> 16);
        }
      }
    }
  }
}

// The phases' gradients, in the memory of the angles', are summed from the end, and with them dt, trap and the angles.
template <class C>
__global__ void __launch_bounds__(kTimeThreads)
    mamba3_backward_time(const float* angles, const float* dt, const float* trap, const float* d_f,
                         const float* d_gamma, float* d_angles, float* d_dt, float* d_trap, float* d_start, int batch,
                         int seq) {
  constexpr int kOwn = (C::kPairs + 31) / 32;
  constexpr float kPi = 3.14159265358979f;
  using Memory = SumsMemory<float, 32 * kOwn>;
  __shared__ Memory memory;
  let_next_kernel_start();
  wait_for_earlier_kernels();
  cluster_barrier();
  const int blocks = gridDim.x, block = blockIdx.x, h = blockIdx.y % C::kHeads, b = blockIdx.y / C::kHeads;
  const int warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32, round = blocks * kTimeWarps * kRun;
  const long long head = ((long long)b * C::kHeads + h) * seq;
  const long long first = ((long long)b * seq * C::kHeads + h) * C::kPairs + lane;
  dt += head, trap += head, d_f += head, d_gamma += head, d_dt += head, d_trap += head;
  ClusterSums<float, 32 * kOwn, true> sums{memory, warp, block, blocks};
  float after[kOwn] = {};  // all later rounds
#pragma unroll 1
  for (int start = (seq - 1) / round * round; start >= 0; start -= round) {
    const int begin = start + (block * kTimeWarps + warp) * kRun;
    float sum[kOwn][kRun], angle[kOwn][kRun], total[kOwn], later[kOwn], all[kOwn];
#pragma unroll
    for (int j = 0; j < kRun; ++j) {
      const long long at = first + (long long)(begin + j) * (C::kHeads * C::kPairs);
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        const bool there = lane + 32 * i < C::kPairs && begin + j < seq;
        sum[i][j] = there ? d_angles[at + 32 * i] : 0.0f;
        angle[i][j] = there ? __ldg(angles + at + 32 * i) : 0.0f;
      }
    }
    float step = 0.0f, mix = 0.0f, weight = 0.0f, own_weight = 0.0f, before = 0.0f;
    const int own = begin + lane / 4;  // four lanes have a token
    if (own < seq) {
      step = dt[own], mix = 1.0f / (1.0f + expf(-trap[own]));
      weight = d_f[own], own_weight = weight + d_gamma[own], before = own > 0 ? d_f[own - 1] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
#pragma unroll
      for (int j = kRun - 2; j >= 0; --j) sum[i][j] += sum[i][j + 1];
      total[i] = sum[i][0];
    }
    sums.sum(total, later, all);
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      later[i] += after[i];
      after[i] += all[i];
    }
    float d_step[kRun];
#pragma unroll
    for (int j = 0; j < kRun; ++j) {
      d_step[j] = 0.0f;
      const float scale = kPi * __shfl_sync(0xffffffff, step, 4 * j);
      float* to = d_angles + first + (long long)(begin + j) * (C::kHeads * C::kPairs);
#pragma unroll
      for (int i = 0; i < kOwn; ++i) {
        // tanh is 1 - 2 s, and its derivative 4 s (1 - s)
        const float s = sigmoid_of_negative(2.0f * angle[i][j]), gradient = later[i] + sum[i][j];
        d_step[j] += gradient - 2.0f * (gradient * s);
        if (lane + 32 * i < C::kPairs && begin + j < seq) to[32 * i] = gradient * scale * (4.0f * (s - s * s));
      }
    }
    share_sums<kRun, 16, 4>(d_step);
    const float sum_step = kPi * quad_sum(d_step[0]);
    if (lane % 4 == 0 && own < seq) {
      d_dt[own] = sum_step + mix * own_weight + (1.0f - mix) * before;
      d_trap[own] = step * (own_weight - before) * mix * (1.0f - mix);
    }
  }
  if (C::kState && block == 0 && warp == 0) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      if (lane + 32 * i < C::kPairs) d_start[((long long)b * C::kHeads + h) * C::kPairs + lane + 32 * i] = after[i];
    }
  }
}

}  // namespace jax_ssd

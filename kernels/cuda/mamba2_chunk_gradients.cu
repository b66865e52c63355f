// The gradients that one chunk of a Mamba-2 scan gives, of states that fit one block; mamba2_backward.cu says how they
// are computed and from what.
//
// One block per chunk and block of heads of one group, which goes through its heads in order and keeps dB and dC in
// registers. A warp owns 16 tokens, as sources and as targets; scores stay in the registers of the warp that made them.
// A third warpgroup starts the copies and finishes what the others found for a head.

#include "async_copy.cuh"
#include "decay.cuh"
#include "fragments.cuh"
#include "mamba2_chunks.cuh"
#include "mamba2_pairs.cuh"
#include "shared_memory.cuh"
#include "wgmma.cuh"

using namespace jax_ssd;

namespace {

constexpr int HELPERS = 4, HELPER_THREADS = HELPERS * 32;
// Of a thread: together what 168 each are, more would never come.
constexpr int TOKEN_REGISTERS = 240, HELPER_REGISTERS = 24;

// Shared memory of chunk_gradients.
template <int N>
struct ChunkMemory : PairMemory<6 * (N / 64) * TILE> {
  static constexpr int Tiles = N / 64;
  static constexpr int B = 0, C = B + Tiles * ROWS;                       // [Tiles][128][64]
  static constexpr int S = C + Tiles * ROWS, Adjoint = S + Tiles * TILE;  // [Tiles][64 channels][64]
  static constexpr int ByLast = PairMemory<6 * Tiles * TILE>::End;        // [2][helpers]: of <S, T>
  static constexpr int Barriers = ByLast + 2 * HELPERS * 4;
  static constexpr int Bytes = Barriers + 10 * 8;
};

// u = a state times this warpgroup's rows of B or C, [Tiles][128][64] from `rows` on; in the current group of products.
template <typename T, int N>
__device__ __forceinline__ void multiply_by_state(float (&u)[WIDTH / 2], unsigned rows, unsigned state) {
#pragma unroll
  for (int d = 0; d < N / 16; ++d) {
    const unsigned long long a = row_descriptor(rows + d / 4 * ROWS), b = row_descriptor(state + d / 4 * TILE);
    Wgmma<T, WIDTH>::template shared<false, false>(u, advanced(a, d % 4 * 32), advanced(b, d % 4 * 32), d > 0);
  }
}

}  // namespace

// S and T as `walk` stored them; dx [batch, seq, units, 64]; dB, dC [batch, seq, groups, N]; dstep, ddecay [batch,
// units, chunks * 128] and dskip [batch, units, chunks, 64] float32. Grid head_blocks * groups * chunks * rows, 384
// threads; if Clustered the head_blocks blocks of a group are a cluster, else there is one.
template <typename T, int N, bool HasD, bool SharedParams, bool Clustered>
__global__ void __launch_bounds__(TOKEN_THREADS + HELPER_THREADS, 1)
    chunk_gradients(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap dy,
                    const __grid_constant__ TensorMap B, const __grid_constant__ TensorMap C,
                    const __grid_constant__ TensorMap states, const __grid_constant__ TensorMap adjoints,
                    const float* step, const float* decay, const float* skip, T* dx, T* dB, T* dC, float* dstep,
                    float* ddecay, float* dskip, int seq, int heads, int groups, int pieces, int chunks,
                    int head_blocks, int block_units, int first_row) {
  using Memory = ChunkMemory<N>;
  static_assert(Memory::Bytes + 1024 <= 227 * 1024 &&
                2 * SUM_BYTES<N> <= Memory::Bytes);  // 1024: what aligning may cost
  extern __shared__ char raw[];
  const unsigned base = (shared_address(raw) + 1023) & ~1023u;
  char* memory = raw + (base - shared_address(raw));
  // A buffer is full when its copy has come, and free when every warp has read it; there are two of tokens. A head is
  // done when its sums are in memory, finished when they were read.
  const unsigned full_group = base + Memory::Barriers, full_states = full_group + 8, full_adjoints = full_group + 16;
  const unsigned full_tokens = full_group + 24, free_states = full_group + 40, free_tokens = full_group + 48;
  const unsigned done = full_group + 64, finished = full_group + 72;
  const Sizes sizes{seq, heads, groups, pieces, chunks};

  int block = blockIdx.x;
  const int head_block = block % head_blocks;
  block /= head_blocks;
  const int group = block % groups;
  block /= groups;
  const int chunk = block % chunks, local_row = block / chunks, row = first_row + local_row;
  const int first_unit = group * sizes.group_units() + head_block * block_units;
  const int count = min(block_units, sizes.group_units() - head_block * block_units);

  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, quad = lane % 4;
  const int strip = warp;
  const int upper = strip * 16 + lane / 4, lower = upper + 8;  // this lane's two tokens

  auto load_tokens = [&](int k) {
    const int unit = first_unit + k;
    const size_t at = (size_t(row) * heads + unit / pieces) * sizes.padded() + chunk * TOKENS;
    const float* of_unit = skip + (size_t(SharedParams ? 0 : row) * sizes.units() + unit) * WIDTH;
    load_head<Memory, HasD>(base, k % 2, full_tokens + k % 2 * 8, x, dy, decay + at, step + at, of_unit, unit,
                            chunk * TOKENS, row);
  };
  auto load_state_tiles = [&](const TensorMap& map, unsigned to, int k, unsigned barrier) {
    barrier_expect(barrier, Memory::Tiles * TILE);
    for (int i = 0; i < Memory::Tiles; ++i) {
      copy_in(to + i * TILE, map, i * 64, 0, chunk, local_row * sizes.units() + first_unit + k, barrier, KEEP_FIRST);
    }
  };

  if (threadIdx.x == 0) {
    for (int i = 0; i < 5; ++i) barrier_init(full_group + i * 8, 1);
    barrier_init(free_states, TOKEN_WARPS + HELPERS);
    for (int i = 0; i < 2; ++i) barrier_init(free_tokens + i * 8, TOKEN_WARPS);
    barrier_init(done, TOKEN_WARPS);
    barrier_init(finished, 1);
    fence_barrier_init();
  }
  __syncthreads();
  follow_earlier_kernels();

  if (warp >= TOKEN_WARPS) {
    give_registers<HELPER_REGISTERS>();
    const bool copies = threadIdx.x == TOKEN_THREADS;
    if (copies) {
      barrier_expect(full_group, 2 * Memory::Tiles * ROWS);
      for (int i = 0; i < 2 * Memory::Tiles; ++i) {
        const int to = i / 2 * ROWS + i % 2 * TILE, token = chunk * TOKENS + i % 2 * HALF;
        copy_in(base + Memory::B + to, B, i / 2 * 64, group, token, row, full_group, KEEP_LAST);
        copy_in(base + Memory::C + to, C, i / 2 * 64, group, token, row, full_group, KEEP_LAST);
      }
      load_tokens(0);
      load_state_tiles(adjoints, base + Memory::Adjoint, 0, full_adjoints);
      load_state_tiles(states, base + Memory::S, 0, full_states);
      if (count > 1) load_tokens(1);
    }
    __syncwarp();
    const int helper = warp - TOKEN_WARPS;
#pragma unroll 1
    for (int k = 0; k < count; ++k) {
      // <S, T>, which the chunk's total decay scales.
      barrier_wait(full_tokens + k % 2 * 8, k / 2 % 2);
      const float g_last = reinterpret_cast<const float*>(memory + Memory::Decay)[k % 2 * TOKENS + TOKENS - 1];
      barrier_wait(full_adjoints, k % 2);
      barrier_wait(full_states, k % 2);
      float across = 0;
#pragma unroll 2
      for (int i = threadIdx.x - TOKEN_THREADS; i < 8 * N; i += HELPER_THREADS) {
        const uint4 a = reinterpret_cast<const uint4*>(memory + Memory::S)[i];
        const uint4 b = reinterpret_cast<const uint4*>(memory + Memory::Adjoint)[i];
        across += dot<T>(a.x, b.x) + dot<T>(a.y, b.y) + (dot<T>(a.z, b.z) + dot<T>(a.w, b.w));
      }
      across = warp_sum(across) * exp2_fast(g_last);
      if (lane == 0) {
        reinterpret_cast<float*>(memory + Memory::ByLast)[k % 2 * HELPERS + helper] = across;
        barrier_arrive(free_states);
      }
      named_barrier(1, HELPER_THREADS);
      if (copies && k + 1 < count) {
        if (k > 0) {
          barrier_wait(free_tokens + (k - 1) % 2 * 8, (k - 1) / 2 % 2);
          load_tokens(k + 1);
        }
        barrier_wait(free_states, k % 2);
        load_state_tiles(adjoints, base + Memory::Adjoint, k + 1, full_adjoints);
        load_state_tiles(states, base + Memory::S, k + 1, full_states);
      }
      __syncwarp();
      if (helper == 1 + k % (HELPERS - 1)) {
        barrier_wait(done, k % 2);
        const size_t of_unit = size_t(row) * sizes.units() + first_unit + k;
        const size_t at = of_unit * sizes.padded() + chunk * TOKENS;
        const auto* by_last = reinterpret_cast<const float*>(memory + Memory::ByLast) + k % 2 * HELPERS;
        const float last = lane < HELPERS ? by_last[lane] : 0.0f;
        finish_head<Memory, HasD>(memory, last, finished, dstep + at, ddecay + at,
                                  dskip + (of_unit * chunks + chunk) * WIDTH);
      }
    }
    if constexpr (Clustered) cluster_barrier(), cluster_barrier();
    return;
  }
  take_registers<TOKEN_REGISTERS>();

  // Offsets of the fragments of 16 rows and 16 columns (the next 16: ^ 32, the next 16 rows: + 2048), of the left
  // factor or, transposed, of one whose rows are summed over; and of a right factor whose columns are summed over.
  const unsigned left = swizzled(lane % 16, lane / 16), right = swizzled(lane % 8 + lane / 16 * 8, lane / 8 % 2);
  auto* pair_gradient = reinterpret_cast<float4*>(memory + Memory::PairGradient);
  auto* pairs = reinterpret_cast<uint4*>(memory + Memory::Pairs);

  // G of this warp's sources, [source][target], kept as the lanes hold it.
  barrier_wait(full_group, 0);
#pragma unroll 1
  for (int target = strip; target < STRIPS; ++target) {
    float tile[2][4] = {};
#pragma unroll
    for (int d = 0; d < N / 16; ++d) {
      unsigned a[4], b[4];
      load_tiles(a, base + Memory::B + d / 4 * ROWS + strip * 2048 + (left ^ d % 4 * 32));
      load_tiles(b, base + Memory::C + d / 4 * ROWS + target * 2048 + (right ^ d % 4 * 32));
      multiply(tile[0], a, b[0], b[1], T());
      multiply(tile[1], a, b[2], b[3], T());
    }
    const int at = pair_tile(strip, target);
    pairs[at * 32 + lane] = {Pair<T>::of(tile[0][0], tile[0][1]), Pair<T>::of(tile[0][2], tile[0][3]),
                             Pair<T>::of(tile[1][0], tile[1][1]), Pair<T>::of(tile[1][2], tile[1][3])};
    pair_gradient[at * 64 + lane] = pair_gradient[at * 64 + 32 + lane] = {0, 0, 0, 0};
  }

  named_barrier(2, TOKEN_THREADS);  // pairs across a middle are weighed by the warps of their targets

  float source_gradient[N / 2], target_gradient[N / 2];  // dB and dC of this warp's tokens
#pragma unroll
  for (int i = 0; i < N / 2; ++i) source_gradient[i] = target_gradient[i] = 0;

#pragma unroll 1
  for (int k = 0; k < count; ++k) {
    const int buffer = k % 2;
    const unsigned x_tile = base + Memory::X + buffer * ROWS;
    const unsigned dy_tile = base + Memory::DY + buffer * ROWS;
    const float* g = reinterpret_cast<const float*>(memory + Memory::Decay) + buffer * TOKENS;
    const float* s = reinterpret_cast<const float*>(memory + Memory::Step) + buffer * TOKENS;
    barrier_wait(full_tokens + buffer * 8, k / 2 % 2);
    const float g_own[2] = {g[upper], g[lower]}, s_own[2] = {s[upper], s[lower]}, g_last = g[TOKENS - 1];
    const float leave[2] = {exp2_fast(g_last - g_own[0]), exp2_fast(g_last - g_own[1])};
    const float enter[2] = {exp2_fast(g_own[0]), exp2_fast(g_own[1])};

    // From the chunk's end: dB += s e x T and u = T B_j.
    float u[WIDTH / 2], leaving[2] = {0, 0}, entering[2] = {0, 0};
    const int own_rows = warp / 4 * TILE;  // of this warpgroup in B and C
    unsigned x_own[4][4];
    {
      const float weight[2] = {s_own[0] * leave[0], s_own[1] * leave[1]};
      load_scaled<T>(x_own, x_tile + strip * 2048 + left, weight);
      barrier_wait(full_adjoints, k % 2);
      wgmma_fence();
#pragma unroll
      for (int d = 0; d < 4; ++d) {
        const unsigned long long b = column_descriptor(base + Memory::Adjoint, TILE);
        Wgmma<T, N>::template registers<true>(source_gradient, x_own[d], advanced(b, d * 2048), true);
      }
      multiply_by_state<T, N>(u, base + Memory::B + own_rows, base + Memory::Adjoint);
      wgmma_commit();
      wgmma_wait<0>();
      pin(source_gradient);
      pin(u);
    }
    // From its start: dC += exp2(g) dy S and v = S C_i; meanwhile u becomes e_j T B_j.
    {
      unsigned dy_own[4][4];
      load_scaled<T>(dy_own, dy_tile + strip * 2048 + left, enter);
      float v[WIDTH / 2];
      barrier_wait(full_states, k % 2);
      wgmma_fence();
#pragma unroll
      for (int d = 0; d < 4; ++d) {
        const unsigned long long b = column_descriptor(base + Memory::S, TILE);
        Wgmma<T, N>::template registers<true>(target_gradient, dy_own[d], advanced(b, d * 2048), true);
      }
      multiply_by_state<T, N>(v, base + Memory::C + own_rows, base + Memory::S);
      wgmma_commit();
      weigh_leaving<T>(u, leaving, x_own, x_tile + strip * 2048 + left, leave);
      wgmma_wait<0>();
      pin(target_gradient);
      pin(v);
      if (lane == 0) barrier_arrive(free_states);
#pragma unroll
      for (int d = 0; d < 4; ++d) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // of exp2(g) dy
          const float2 w = both_of<T>(dy_own[d][i]);
          const int j = 4 * (2 * d + i / 2) + 2 * (i % 2);
          entering[i % 2] += v[j] * w.x + v[j + 1] * w.y;
        }
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      leaving[h] = leave[h] * quad_sum(leaving[h]);
      entering[h] = quad_sum(entering[h]);
    }
    if (k > 0) barrier_wait(finished, (k - 1) % 2);
    float* by_step = reinterpret_cast<float*>(memory + Memory::ByStep);
    float* by_decay = reinterpret_cast<float*>(memory + Memory::ByDecay);
    float* by_leaving = reinterpret_cast<float*>(memory + Memory::ByLeaving);
    if (quad == 0) {
      by_step[upper] = leaving[0];
      by_step[lower] = leaving[1];
      by_decay[upper] = entering[0];
      by_decay[lower] = entering[1];
      by_leaving[upper] = s_own[0] * leaving[0];
      by_leaving[lower] = s_own[1] * leaving[1];
    }

    float later[2] = {0, 0}, same[2] = {0, 0};
    add_all_pairs<T, Memory>(u, later, same, x_own, g_own, s_own, g, s, memory, x_tile, dy_tile, warp);
    finish_sources<T, Memory, HasD>(u, s_own, memory, buffer, x_tile, dy_tile, warp);
    {
      const size_t at = ((size_t(row) * seq + chunk * TOKENS + upper) * sizes.units() + first_unit + k) * WIDTH;
      store_rows<T, WIDTH>(u, dx + at, dx + at + size_t(8) * sizes.units() * WIDTH, chunk * TOKENS + upper < seq,
                           chunk * TOKENS + lower < seq);
    }

#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float after = quad_sum(later[h]), all = after + quad_sum(same[h]);
      if (quad == 0) {
        const int token = h ? lower : upper;
        const float leaving = by_step[token];
        by_step[token] = all + leaving;
        by_decay[token] -= s_own[h] * (after + leaving);
      }
    }
    __syncwarp();
    if (lane == 0) {
      barrier_arrive(done);
      barrier_arrive(free_tokens + buffer * 8);
    }
  }
  named_barrier(2, TOKEN_THREADS);

  // dB += dG' C and dC += dG B, with dG summed over the heads.
  auto add = [&](float (&d)[N / 2], const unsigned (&a)[4], unsigned tile, int strip) {
#pragma unroll
    for (int n = 0; n < N / 16; ++n) {
      unsigned b[4];
      load_tiles_transposed(b, tile + n / 4 * ROWS + strip * 2048 + (left ^ n % 4 * 32));
      multiply(reinterpret_cast<float (&)[4]>(d[8 * n]), a, b[0], b[1], T());
      multiply(reinterpret_cast<float (&)[4]>(d[8 * n + 4]), a, b[2], b[3], T());
    }
  };
  auto packed_tile = [&](unsigned (&r)[4], int source, int target) {
    const int at = pair_tile(source, target);
    const float4 a = pair_gradient[at * 64 + lane], b = pair_gradient[at * 64 + 32 + lane];
    r[0] = Pair<T>::of(a.x, a.y), r[1] = Pair<T>::of(a.z, a.w), r[2] = Pair<T>::of(b.x, b.y),
    r[3] = Pair<T>::of(b.z, b.w);
  };
#pragma unroll 1
  for (int target = strip; target < STRIPS; ++target) {
    unsigned a[4];
    packed_tile(a, strip, target);
    add(source_gradient, a, base + Memory::C, target);
  }
#pragma unroll 1
  for (int source = 0; source <= strip; ++source) {
    unsigned tile[4];
    packed_tile(tile, source, strip);
    const unsigned a[4] = {transposed_tile(tile[0]), transposed_tile(tile[2]), transposed_tile(tile[1]),
                           transposed_tile(tile[3])};
    add(target_gradient, a, base + Memory::B, source);
  }
  const size_t stride = size_t(groups) * N, of_group = ((size_t(row) * seq + chunk * TOKENS) * groups + group) * N;
  const int tokens = min(TOKENS, seq - chunk * TOKENS);
  if constexpr (Clustered) {
    named_barrier(2, TOKEN_THREADS);  // what the sums overwrite was read
    put_sums<N>(source_gradient, reinterpret_cast<float*>(memory), upper, lower);
    put_sums<N>(target_gradient, reinterpret_cast<float*>(memory + SUM_BYTES<N>), upper, lower);
    cluster_barrier();
    store_sums<T, N, TOKEN_THREADS>(base, head_blocks, head_block, threadIdx.x, dB + of_group, stride, tokens);
    store_sums<T, N, TOKEN_THREADS>(base + SUM_BYTES<N>, head_blocks, head_block, threadIdx.x, dC + of_group, stride,
                                    tokens);
    cluster_barrier();  // as long as they are read, the block must not end
  } else {
    T *to_source = dB + of_group + upper * stride, *to_target = dC + of_group + upper * stride;
    store_rows<T, N>(source_gradient, to_source, to_source + 8 * stride, upper < tokens, lower < tokens);
    store_rows<T, N>(target_gradient, to_target, to_target + 8 * stride, upper < tokens, lower < tokens);
  }
}

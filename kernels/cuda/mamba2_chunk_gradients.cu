// The gradients that one chunk of a Mamba-2 scan gives, of states that fit one block; mamba2_backward.cu says how they
// are computed and from what.
//
// One block per chunk and block of heads of one group, which goes through its heads in order. Two warpgroups, "pairs",
// compute everything that belongs to a token of a head, dx and the gradients of step and decay, and accumulate dC in
// registers. The third accumulates dB, and finishes what the others found for the head before; one of its threads
// starts the copies.

#include "async_copy.cuh"
#include "decay.cuh"
#include "fragments.cuh"
#include "mamba2_chunks.cuh"
#include "mamba2_pairs.cuh"
#include "shared_memory.cuh"
#include "wgmma.cuh"

using namespace jax_ssd;

namespace {

constexpr int SOURCE_WARPS = 4, WARPS = PAIR_WARPS + SOURCE_WARPS, THREADS = WARPS * 32;
constexpr int PAIR_REGISTERS = 160,
              SOURCE_REGISTERS = 184;  // of a thread: together what 168 each are, more would never come

// Shared memory.
template <int N>
struct Memory : PairMemory<6 * (N / 64) * TILE> {
  static constexpr int Tiles = N / 64;
  static constexpr int B = 0, C = B + Tiles * ROWS;                       // [Tiles][128][64]
  static constexpr int S = C + Tiles * ROWS, Adjoint = S + Tiles * TILE;  // [Tiles][64 channels][64]
  static constexpr int ByLast = PairMemory<6 * Tiles * TILE>::End;        // [2][source warps]
  static constexpr int Barriers = ByLast + 2 * SOURCE_WARPS * 4;
  static constexpr int Bytes = Barriers + 11 * 8;
};

}  // namespace

// S and T as `walk` stored them; dx [batch, seq, units, 64]; dB, dC [batch, seq, groups, N]; dstep, ddecay [batch,
// units, chunks * 128] and dskip [batch, units, chunks, 64] float32. Grid head_blocks * groups * chunks * rows, 384
// threads; if Clustered the head_blocks blocks of a group are a cluster, else there is one.
template <typename T, int N, bool HasD, bool SharedParams, bool Clustered>
__global__ void __launch_bounds__(THREADS, 1)
    chunk_gradients(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap dy,
                    const __grid_constant__ TensorMap B, const __grid_constant__ TensorMap C,
                    const __grid_constant__ TensorMap states, const __grid_constant__ TensorMap adjoints,
                    const float* step, const float* decay, const float* skip, T* dx, T* dB, T* dC, float* dstep,
                    float* ddecay, float* dskip, int seq, int heads, int groups, int pieces, int chunks,
                    int head_blocks, int block_units, int first_row) {
  using At = Memory<N>;
  static_assert(At::Bytes + 1024 <= 227 * 1024 && 2 * SUM_BYTES<N> <= At::Bytes);  // 1024: what aligning may cost
  extern __shared__ char raw[];
  const unsigned base = (shared_address(raw) + 1023) & ~1023u;
  const Block memory{base, raw + (base - shared_address(raw))};
  // A buffer is full when its copy has come, and free when every warp has read it. A head is done when the pairs' sums
  // are in memory, finished when they were read.
  const unsigned full_group = base + At::Barriers, full_states = full_group + 8, full_adjoints = full_group + 16;
  const unsigned full_tokens = full_group + 24, free_states = full_group + 40, free_adjoints = full_group + 48;
  const unsigned free_tokens = full_group + 56, done = full_group + 72, finished = full_group + 80;
  const Sizes sizes{seq, heads, groups, pieces, chunks};

  int block = blockIdx.x;
  const int head_block = block % head_blocks;
  block /= head_blocks;
  const int group = block % groups;
  block /= groups;
  const int chunk = block % chunks, local_row = block / chunks, row = first_row + local_row;
  const int first_unit = group * sizes.group_units() + head_block * block_units;
  const int count = min(block_units, sizes.group_units() - head_block * block_units);
  const int tokens = min(TOKENS, seq - chunk * TOKENS);
  const size_t of_group = ((size_t(row) * seq + chunk * TOKENS) * groups + group) * N;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, quad = lane % 4;

  auto load_tokens = [&](int k) {
    const int unit = first_unit + k;
    const size_t at = (size_t(row) * heads + unit / pieces) * sizes.padded() + chunk * TOKENS;
    const float* of_unit = skip + (size_t(SharedParams ? 0 : row) * sizes.units() + unit) * WIDTH;
    load_head<At, HasD>(base, k % 2, full_tokens + k % 2 * 8, x, dy, decay + at, step + at, of_unit, unit,
                        chunk * TOKENS, row);
  };
  auto load_state_tiles = [&](const TensorMap& map, unsigned to, int k, unsigned barrier) {
    barrier_expect(barrier, At::Tiles * TILE);
    for (int i = 0; i < At::Tiles; ++i) {
      copy_in(to + i * TILE, map, i * 64, 0, chunk, local_row * sizes.units() + first_unit + k, barrier, KEEP_FIRST);
    }
  };

  if (threadIdx.x == 0) {
    for (int i = 0; i < 5; ++i) barrier_init(full_group + i * 8, 1);
    for (int i = 5; i < 9; ++i) barrier_init(full_group + i * 8, WARPS);
    barrier_init(done, PAIR_WARPS);
    barrier_init(finished, 1);
    fence_barrier_init();
  }
  __syncthreads();
  follow_earlier_kernels();
  const bool copies = threadIdx.x == PAIR_THREADS;
  if (copies) {
    barrier_expect(full_group, 2 * At::Tiles * ROWS);
    for (int i = 0; i < 2 * At::Tiles; ++i) {
      const int to = i / 2 * ROWS + i % 2 * TILE, token = chunk * TOKENS + i % 2 * HALF;
      copy_in(base + At::B + to, B, i / 2 * 64, group, token, row, full_group, KEEP_LAST);
      copy_in(base + At::C + to, C, i / 2 * 64, group, token, row, full_group, KEEP_LAST);
    }
    load_tokens(0);
    load_state_tiles(adjoints, base + At::Adjoint, 0, full_adjoints);
    load_state_tiles(states, base + At::S, 0, full_states);
    if (count > 1) load_tokens(1);
  }
  __syncwarp();

  // This lane's place in the fragments of 16 rows and 16 columns (the next 16 columns: ^ 32) of a left factor or,
  // transposed, of one whose rows are summed over; and of a right factor whose columns are summed over.
  const unsigned left = swizzled(lane % 16, lane / 16), right = swizzled(lane % 8 + lane / 16 * 8, lane / 8 % 2);
  auto* pair_gradient = reinterpret_cast<float4*>(memory.memory + At::PairGradient);
  auto* pairs = reinterpret_cast<uint2*>(memory.memory + At::Pairs);

  // G, [source][target], kept as lanes hold it, 16 x 16 at a time.
  barrier_wait(full_group, 0);
#pragma unroll 1
  for (int at = warp; at < TARGET_TILES * TARGET_TILES; at += WARPS) {
    const int source = at / TARGET_TILES, target = at % TARGET_TILES;
    if (source > target) continue;
    float tile[2][4] = {};
#pragma unroll
    for (int d = 0; d < N / 16; ++d) {
      unsigned a[4], b[4];
      load_tiles(a, base + At::B + d / 4 * ROWS + source * TILE_ROWS + (left ^ d % 4 * 32));
      load_tiles(b, base + At::C + d / 4 * ROWS + target * TILE_ROWS + (right ^ d % 4 * 32));
      multiply(tile[0], a, b[0], b[1], T());
      multiply(tile[1], a, b[2], b[3], T());
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int to = pair_tile(2 * source + h, target) * 32 + lane;
      pairs[to] = {Pair<T>::of(tile[0][2 * h], tile[0][2 * h + 1]), Pair<T>::of(tile[1][2 * h], tile[1][2 * h + 1])};
      pair_gradient[to] = {0, 0, 0, 0};
    }
  }
  __syncthreads();

  if (warp < PAIR_WARPS) {
    give_registers<PAIR_REGISTERS>();
    const Strips strips(warp);
    float gradient[N / 2];  // dC of this warp's tokens
#pragma unroll
    for (int i = 0; i < N / 2; ++i) gradient[i] = 0;

#pragma unroll 1
    for (int k = 0; k < count; ++k) {
      const int buffer = k % 2;
      const unsigned x_tile = base + At::X + buffer * ROWS, dy_tile = base + At::DY + buffer * ROWS;
      const float *g = memory.floats(At::Decay) + buffer * TOKENS, *s = memory.floats(At::Step) + buffer * TOKENS;
      barrier_wait(full_tokens + buffer * 8, k / 2 % 2);

      // From the chunk's start: dC += exp2(g) dy S, and what it says of the decays.
      if (k > 0) barrier_wait(finished, (k - 1) % 2);
      {
        unsigned dy_own[4][4];
        load_rows(dy_own, dy_tile + strips.rows);
        const float enter[2] = {exp2_fast(g[strips.own[0]]), exp2_fast(g[strips.own[1]])};
        float entering[2] = {0, 0};
        barrier_wait(full_states, k % 2);
#pragma unroll
        for (int columns = 0; columns < At::Tiles; ++columns) {
          float product[32];
          wgmma_fence();
#pragma unroll
          for (int d = 0; d < 4; ++d) {
            const unsigned long long b = column_descriptor(base + At::S + columns * TILE, TILE);
            Wgmma<T, 64>::template registers<true>(product, dy_own[d], advanced(b, d * 2048), d > 0);
          }
          wgmma_commit();
          wgmma_wait<0>();
          pin(product);
#pragma unroll
          for (int d = 0; d < 4; ++d) {
            unsigned c[4];
            load_tiles(c, base + At::C + columns * ROWS + strips.rows ^ d * 32);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const float2 v = both_of<T>(c[i]);
              const int j = 4 * (2 * d + i / 2) + 2 * (i % 2);
              entering[i % 2] += v.x * product[j] + v.y * product[j + 1];
              gradient[32 * columns + j] += enter[i % 2] * product[j];
              gradient[32 * columns + j + 1] += enter[i % 2] * product[j + 1];
            }
          }
        }
        if (lane == 0) barrier_arrive(free_states);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float sum = enter[h] * quad_sum(entering[h]);
          if (quad == 0) memory.floats(At::ByDecay)[strips.own[h]] = sum;
        }
      }

      // From the chunk's end: u = T B_j.
      float u[WIDTH / 2];
      barrier_wait(full_adjoints, k % 2);
#pragma unroll
      for (int columns = 0; columns < At::Tiles; ++columns) {
        unsigned a[4][4];
        load_rows(a, base + At::B + columns * ROWS + strips.rows);
        wgmma_fence();
#pragma unroll
        for (int d = 0; d < 4; ++d) {
          const unsigned long long b = row_descriptor(base + At::Adjoint + columns * TILE);
          Wgmma<T, WIDTH>::template registers<false>(u, a[d], advanced(b, d * 32), columns + d > 0);
        }
        wgmma_commit();
        wgmma_wait<0>();
      }
      pin(u);
      if (lane == 0) barrier_arrive(free_adjoints);
      weigh_leaving<T, At>(u, memory, strips, x_tile, g);
      add_pairs<T, At, true>(u, memory, strips, warp, x_tile, dy_tile, g, s);
      finish_sources<T, At, HasD>(u, memory, strips, warp, x_tile, dy_tile, s,
                                  memory.floats(At::Skip) + buffer * WIDTH);
      __syncwarp();
      if (lane == 0) {
        barrier_arrive(done);
        barrier_arrive(free_tokens + buffer * 8);
      }
      T* to = dx + ((size_t(row) * seq + chunk * TOKENS) * sizes.units() + first_unit + k) * WIDTH;
      const size_t stride = size_t(sizes.units()) * WIDTH;
      store_rows<T, WIDTH>(u, to + strips.own[0] * stride, to + strips.own[1] * stride, strips.own[0] < tokens,
                           strips.own[1] < tokens);
    }
    __syncthreads();

    // dC += dG B, with dG summed over the heads.
#pragma unroll 1
    for (int source = 0; source <= strips.strip[1] / 2; ++source) {
      unsigned a[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // sources 8 (i / 2) on, targets of strip i % 2
        const int from = 2 * source + i / 2, target = strips.strip[i % 2];
        unsigned tile = 0;
        if (from <= target) {
          const float4 v = pair_gradient[pair_tile(from, target / 2) * 32 + lane];
          tile = target % 2 ? Pair<T>::of(v.z, v.w) : Pair<T>::of(v.x, v.y);
        }
        a[i] = transposed_tile(tile);
      }
      add_product<T, N>(gradient, a, base + At::B + source * TILE_ROWS + left);
    }
    T* to = dC + of_group;
    const size_t stride = size_t(groups) * N;
    if constexpr (Clustered) {
      __syncthreads();  // what the sums overwrite was read
      put_sums<N>(gradient, memory.floats(0), strips.own[0], strips.own[1]);
      cluster_barrier();
      store_sums<T, N, PAIR_THREADS>(base, head_blocks, head_block, threadIdx.x, to, stride, tokens);
      cluster_barrier();  // as long as they are read, the block must not end
    } else {
      store_rows<T, N>(gradient, to + strips.own[0] * stride, to + strips.own[1] * stride, strips.own[0] < tokens,
                       strips.own[1] < tokens);
    }
    return;
  }

  // Writes what belongs to a token of a head, once the pairs are done with it.
  auto finish = [&](int k) {
    const size_t of_unit = size_t(row) * sizes.units() + first_unit + k;
    const size_t at = of_unit * sizes.padded() + chunk * TOKENS;
    barrier_wait(done, k % 2);
    const float last = lane < SOURCE_WARPS ? memory.floats(At::ByLast)[k % 2 * SOURCE_WARPS + lane] : 0.0f;
    finish_head<At, HasD>(memory, k % 2, last, finished, dstep + at, ddecay + at,
                          dskip + (of_unit * chunks + chunk) * WIDTH);
  };

  take_registers<SOURCE_REGISTERS>();
  const int source_warp = warp - PAIR_WARPS;
  float gradient[2][N / 2];  // dB of tokens 0 to 63 and 64 to 127
#pragma unroll
  for (int i = 0; i < N; ++i) gradient[i / (N / 2)][i % (N / 2)] = 0;
#pragma unroll 1
  for (int k = 0; k < count; ++k) {
    const int buffer = k % 2;
    const float *g = memory.floats(At::Decay) + buffer * TOKENS, *s = memory.floats(At::Step) + buffer * TOKENS;
    const unsigned x_tile = base + At::X + buffer * ROWS + source_warp * TILE_ROWS + left;
    barrier_wait(full_tokens + buffer * 8, k / 2 % 2);
    barrier_wait(full_adjoints, k % 2);
    const float g_last = g[TOKENS - 1];
#pragma unroll
    for (int i = 0; i < 2; ++i) {  // dB += s e x T
      const int token = i * 64 + source_warp * 16 + lane / 4;
      const float weight[2] = {s[token] * exp2_fast(g_last - g[token]),
                               s[token + 8] * exp2_fast(g_last - g[token + 8])};
      unsigned a[4][4];
      load_rows(a, x_tile + i * TILE);
#pragma unroll
      for (int j = 0; j < 16; ++j) {
        const float2 v = both_of<T>(a[j / 4][j % 4]);
        a[j / 4][j % 4] = Pair<T>::of(v.x * weight[j % 2], v.y * weight[j % 2]);
      }
      wgmma_fence();
#pragma unroll
      for (int d = 0; d < 4; ++d) {
        const unsigned long long b = column_descriptor(base + At::Adjoint, TILE);
        Wgmma<T, N>::template registers<true>(gradient[i], a[d], advanced(b, d * 2048), true);
      }
      wgmma_commit();
      wgmma_wait<0>();
      pin(gradient[i]);
    }
    // <S, T>, which the chunk's total decay scales.
    barrier_wait(full_states, k % 2);
    float across = 0;
#pragma unroll 2
    for (int i = threadIdx.x - PAIR_THREADS; i < 8 * N; i += SOURCE_WARPS * 32) {
      const uint4 a = reinterpret_cast<const uint4*>(memory.memory + At::S)[i];
      const uint4 b = reinterpret_cast<const uint4*>(memory.memory + At::Adjoint)[i];
      across += dot<T>(a.x, b.x) + dot<T>(a.y, b.y) + (dot<T>(a.z, b.z) + dot<T>(a.w, b.w));
    }
    across = warp_sum(across) * exp2_fast(g_last);
    if (lane == 0) {
      memory.floats(At::ByLast)[buffer * SOURCE_WARPS + source_warp] = across;
      barrier_arrive(free_adjoints);
      barrier_arrive(free_states);
    }
    if (k > 0) {
      if (source_warp == k % SOURCE_WARPS) finish(k - 1);
      __syncwarp();
      if (lane == 0) barrier_arrive(free_tokens + (k - 1) % 2 * 8);
    }
    named_barrier(1, SOURCE_WARPS * 32);  // this head's part of ByLast is there, the one before may be overwritten
    if (copies && k + 1 < count) {
      if (k > 0) {
        barrier_wait(free_tokens + (k - 1) % 2 * 8, (k - 1) / 2 % 2);
        load_tokens(k + 1);
      }
      barrier_wait(free_adjoints, k % 2);
      load_state_tiles(adjoints, base + At::Adjoint, k + 1, full_adjoints);
      barrier_wait(free_states, k % 2);
      load_state_tiles(states, base + At::S, k + 1, full_states);
    }
    __syncwarp();
  }
  if (source_warp == 0) finish(count - 1);
  __syncthreads();

  // dB += dG' C.
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int source = 4 * i + source_warp;
#pragma unroll 1
    for (int target = source; target < TARGET_TILES; ++target) {
      const float4 v = pair_gradient[pair_tile(2 * source, target) * 32 + lane];
      const float4 w = pair_gradient[pair_tile(2 * source + 1, target) * 32 + lane];
      const unsigned a[4] = {Pair<T>::of(v.x, v.y), Pair<T>::of(w.x, w.y), Pair<T>::of(v.z, v.w),
                             Pair<T>::of(w.z, w.w)};
      add_product<T, N>(gradient[i], a, base + At::C + target * TILE_ROWS + left);
    }
  }
  T* to = dB + of_group;
  const size_t stride = size_t(groups) * N;
  auto upper = [&](int i) { return (4 * i + source_warp) * 16 + lane / 4; };
  if constexpr (Clustered) {
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 2; ++i) put_sums<N>(gradient[i], memory.floats(SUM_BYTES<N>), upper(i), upper(i) + 8);
    cluster_barrier();
    store_sums<T, N, SOURCE_WARPS * 32>(base + SUM_BYTES<N>, head_blocks, head_block, threadIdx.x - PAIR_THREADS, to,
                                        stride, tokens);
    cluster_barrier();
  } else {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      store_rows<T, N>(gradient[i], to + upper(i) * stride, to + (upper(i) + 8) * stride, upper(i) < tokens,
                       upper(i) + 8 < tokens);
    }
  }
}

// The gradients that one chunk of a Mamba-2 scan gives, of states that are too large for the registers of one block;
// mamba2_backward.cu says how they are computed and from what.
//
// Two kernels. pair_gradients: one block per chunk and block of heads of one group goes through its heads in order,
// with everything that belongs to a token of a head, dx and the gradients of step and decay, and sums dG over the
// heads. state_gradients: one block per chunk, block of heads and block of state columns, with dB and dC of these
// columns in registers. What enters a chunk counts for the decays too, column block by column block: a part of ddecay
// each.

#include "async_copy.cuh"
#include "decay.cuh"
#include "fragments.cuh"
#include "mamba2_chunks.cuh"
#include "mamba2_pairs.cuh"
#include "shared_memory.cuh"
#include "wgmma.cuh"

using namespace jax_ssd;

namespace {

// Shared memory of pair_gradients. A stage has 64 columns of B, and of C or T.
struct PairsAt : PairMemory<3 * 2 * ROWS> {
  static constexpr int Stages = 3, Stage = 2 * ROWS;
  // [strips][128]: sums over the strip's sources. Later strips have no earlier targets: their places there are for sums
  // by source of E M and s E M across a middle, [2][2][64]: across the chunk's and across those of its halves.
  static constexpr int ByTarget = PairMemory<Stages * Stage>::End;
  static constexpr int ByFar = ByTarget + HALF_STRIPS * TOKENS * 4;
  static constexpr int ByLeaving = ByTarget + STRIPS * TOKENS * 4;  // [128]
  static constexpr int Barriers = ByLeaving + TOKENS * 4;
  static constexpr int Bytes = Barriers + (2 * Stages + 6) * 8;
};

constexpr int COPY_WARP = TOKEN_WARPS, FINISH_WARP = TOKEN_WARPS + 1;

}  // namespace

// T as `walk` stored it; dx [batch, seq, units, 64]; pair_gradient [blocks, 36, 32] of eight numbers of T, dG as lanes
// hold it; dstep, ddecay [batch, units, chunks * 128] and dskip [batch, units, chunks, 64] float32. Grid head_blocks *
// groups * chunks * rows, 320 threads.
template <typename T, bool HasD, bool SharedParams>
__global__ void __launch_bounds__(TOKEN_THREADS + 64, 1)
    pair_gradients(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap dy,
                   const __grid_constant__ TensorMap B, const __grid_constant__ TensorMap C,
                   const __grid_constant__ TensorMap adjoints, const float* step, const float* decay, const float* skip,
                   T* dx, uint4* pair_gradient, float* dstep, float* ddecay, float* dskip, int seq, int heads,
                   int groups, int pieces, int chunks, int state, int head_blocks, int block_units, int first_row) {
  using At = PairsAt;
  static_assert(At::Bytes + 1024 <= 227 * 1024);  // 1024: what aligning the tiles may cost
  extern __shared__ char raw[];
  const unsigned base = (shared_address(raw) + 1023) & ~1023u;
  char* memory = raw + (base - shared_address(raw));
  // A stage or buffer is full when its copies have come, and free when every warp has read it. A head is done when the
  // pairs' sums are in memory, finished when they were read.
  const unsigned full = base + At::Barriers, free = full + At::Stages * 8;
  const unsigned full_tokens = free + At::Stages * 8, free_tokens = full_tokens + 16;
  const unsigned done = full_tokens + 32, finished = full_tokens + 40;
  const Sizes sizes{seq, heads, groups, pieces, chunks};

  int block = blockIdx.x;
  const int head_block = block % head_blocks;
  block /= head_blocks;
  const int group = block % groups;
  block /= groups;
  const int chunk = block % chunks, local_row = block / chunks, row = first_row + local_row;
  const int first_unit = group * sizes.group_units() + head_block * block_units;
  const int count = min(block_units, sizes.group_units() - head_block * block_units);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, tiles = state / 64;

  if (threadIdx.x == 0) {
    for (int i = 0; i < At::Stages; ++i) {
      barrier_init(full + i * 8, 1);
      barrier_init(free + i * 8, TOKEN_WARPS);
    }
    for (int i = 0; i < 2; ++i) {
      barrier_init(full_tokens + i * 8, 1);
      barrier_init(free_tokens + i * 8, TOKEN_WARPS + 1);
    }
    barrier_init(done, TOKEN_WARPS);
    barrier_init(finished, 1);
    fence_barrier_init();
  }
  __syncthreads();
  follow_earlier_kernels();

  if (warp == COPY_WARP) {
    if (lane > 0) return;
    int stage = 0;
    auto load = [&](int columns, int unit) {  // of B with those of the adjoint of a unit, or of C
      const unsigned to = base + stage % At::Stages * At::Stage, barrier = full + stage % At::Stages * 8;
      if (stage >= At::Stages) barrier_wait(free + stage % At::Stages * 8, (stage / At::Stages - 1) % 2);
      ++stage;
      barrier_expect(barrier, unit < 0 ? 2 * ROWS : ROWS + TILE);
      for (int i = 0; i < 2; ++i) {
        const int token = chunk * TOKENS + i * HALF;
        copy_in(to + i * TILE, B, columns * 64, group, token, row, barrier, KEEP_LAST);
        if (unit < 0) copy_in(to + ROWS + i * TILE, C, columns * 64, group, token, row, barrier, KEEP_LAST);
      }
      if (unit >= 0) {
        copy_in(to + ROWS, adjoints, columns * 64, 0, chunk, local_row * sizes.units() + unit, barrier, KEEP_LAST);
      }
    };
    for (int i = 0; i < tiles; ++i) load(i, -1);
    for (int k = 0; k < count; ++k) {
      const int unit = first_unit + k;
      if (k > 1) barrier_wait(free_tokens + k % 2 * 8, (k / 2 - 1) % 2);
      const size_t at = (size_t(row) * heads + unit / pieces) * sizes.padded() + chunk * TOKENS;
      const float* of_unit = skip + (size_t(SharedParams ? 0 : row) * sizes.units() + unit) * WIDTH;
      load_head<At, HasD>(base, k % 2, full_tokens + k % 2 * 8, x, dy, decay + at, step + at, of_unit, unit,
                          chunk * TOKENS, row);
      for (int i = 0; i < tiles; ++i) load(i, unit);
    }
    return;
  }

  if (warp == FINISH_WARP) {
    for (int k = 0; k < count; ++k) {
      const size_t of_unit = size_t(row) * sizes.units() + first_unit + k;
      const size_t at = of_unit * sizes.padded() + chunk * TOKENS;
      barrier_wait(done, k % 2);
      finish_head<At, HasD>(memory, 0, finished, dstep + at, ddecay + at, dskip + (of_unit * chunks + chunk) * WIDTH);
      if (lane == 0) barrier_arrive(free_tokens + k % 2 * 8);
    }
    return;
  }

  const int quad = lane % 4, upper = warp * 16 + lane / 4, lower = upper + 8;  // this lane's two tokens
  const int own_rows = warp / 4 * TILE;                                        // of this warpgroup in B
  auto* sums = reinterpret_cast<float4*>(memory + At::PairGradient) + lane;
  int stage = 0;
  auto next_stage = [&] {  // its address, when it is full
    barrier_wait(full + stage % At::Stages * 8, stage / At::Stages % 2);
    return base + stage % At::Stages * At::Stage;
  };
  auto finish_stage = [&] {  // and its products
    wgmma_commit();
    wgmma_wait<0>();
    if (lane == 0) barrier_arrive(free + stage % At::Stages * 8);
    ++stage;
  };

  {  // G of this warp's sources, kept as lanes hold it.
    float products[TOKENS / 2];
#pragma unroll 1
    for (int i = 0; i < tiles; ++i) {
      const unsigned at = next_stage();
      wgmma_fence();
#pragma unroll
      for (int d = 0; d < 4; ++d) {
        const unsigned long long a = row_descriptor(at + own_rows), b = row_descriptor(at + ROWS);
        Wgmma<T, TOKENS>::template shared<false, false>(products, advanced(a, d * 32), advanced(b, d * 32), i + d > 0);
      }
      finish_stage();
      pin(products);
    }
    auto* pairs = reinterpret_cast<uint4*>(memory + At::Pairs) + lane;
#pragma unroll
    for (int target = 0; target < STRIPS; ++target) {
      if (target < warp) continue;
      const int at = pair_tile(warp, target);
      const float* tile = products + 8 * target;
      pairs[at * 32] = {Pair<T>::of(tile[0], tile[1]), Pair<T>::of(tile[2], tile[3]), Pair<T>::of(tile[4], tile[5]),
                        Pair<T>::of(tile[6], tile[7])};
      sums[at * 64] = sums[at * 64 + 32] = {0, 0, 0, 0};
    }
  }
  named_barrier(1, TOKEN_THREADS);  // pairs across a middle are weighed by the warps of their targets

#pragma unroll 1
  for (int k = 0; k < count; ++k) {
    const int buffer = k % 2;
    const unsigned x_tile = base + At::X + buffer * ROWS, dy_tile = base + At::DY + buffer * ROWS;
    const float* g = reinterpret_cast<const float*>(memory + At::Decay) + buffer * TOKENS;
    const float* s = reinterpret_cast<const float*>(memory + At::Step) + buffer * TOKENS;
    float u[WIDTH / 2];  // T B_j
#pragma unroll 1
    for (int i = 0; i < tiles; ++i) {
      const unsigned at = next_stage();
      wgmma_fence();
#pragma unroll
      for (int d = 0; d < 4; ++d) {
        const unsigned long long a = row_descriptor(at + own_rows), b = row_descriptor(at + ROWS);
        Wgmma<T, WIDTH>::template shared<false, false>(u, advanced(a, d * 32), advanced(b, d * 32), i + d > 0);
      }
      finish_stage();
      pin(u);
    }
    barrier_wait(full_tokens + buffer * 8, k / 2 % 2);
    const float g_own[2] = {g[upper], g[lower]}, s_own[2] = {s[upper], s[lower]};
    const float leave[2] = {exp2_fast(g[TOKENS - 1] - g_own[0]), exp2_fast(g[TOKENS - 1] - g_own[1])};
    unsigned x_own[4][4];
    float leaving[2] = {0, 0}, later[2] = {0, 0}, same[2] = {0, 0};
    weigh_leaving<T>(u, leaving, x_own, x_tile + warp * 2048 + place_in_rows(lane), leave);
    if (k > 0) barrier_wait(finished, (k - 1) % 2);
    add_all_pairs<T, At>(u, later, same, x_own, g_own, s_own, g, s, memory, x_tile, dy_tile, warp);
    finish_sources<T, At, HasD>(u, x_own, s_own, memory, buffer, dy_tile, warp);
    T* to = dx + ((size_t(row) * seq + chunk * TOKENS + upper) * sizes.units() + first_unit + k) * WIDTH;
    store_rows<T, WIDTH>(u, to, to + size_t(8) * sizes.units() * WIDTH, chunk * TOKENS + upper < seq,
                         chunk * TOKENS + lower < seq);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float direct = leave[h] * quad_sum(leaving[h]), after = quad_sum(later[h]), own = quad_sum(same[h]);
      if (quad == 0) {
        const int token = h ? lower : upper;
        reinterpret_cast<float*>(memory + At::ByStep)[token] = after + own + direct;
        reinterpret_cast<float*>(memory + At::ByLeaving)[token] = s_own[h] * direct;
        reinterpret_cast<float*>(memory + At::ByDecay)[token] = -s_own[h] * (after + direct);
      }
    }
    __syncwarp();
    if (lane == 0) {
      barrier_arrive(done);
      barrier_arrive(free_tokens + buffer * 8);
    }
  }
  named_barrier(1, TOKEN_THREADS);

  uint4* to = pair_gradient + size_t(blockIdx.x) * (PAIR_TILES * 32) + lane;
  for (int target = warp; target < STRIPS; ++target) {
    const int at = pair_tile(warp, target);
    const float4 v = sums[at * 64], w = sums[at * 64 + 32];
    to[at * 32] = {Pair<T>::of(v.x, v.y), Pair<T>::of(v.z, v.w), Pair<T>::of(w.x, w.y), Pair<T>::of(w.z, w.w)};
  }
}

namespace {

constexpr int SIDE_WARPS = 8, STATE_WARPS = 2 * SIDE_WARPS;  // half of them for dB, the other half for dC
constexpr int STATE_REGISTERS = 112,
              COPY_REGISTERS = 32;  // of their threads, and of those that copy: together what 96 each are

// Shared memory of state_gradients, for a block of state columns.
template <int Columns>
struct StatesAt {
  static constexpr int Tiles = Columns / 64;
  static constexpr int B = 0, C = B + Tiles * ROWS;                                  // [Tiles][128][64]
  static constexpr int Head = C + Tiles * ROWS;                                      // of this head and the next:
  static constexpr int X = 0, DY = ROWS, S = DY + ROWS, Adjoint = S + Tiles * TILE;  // in a head
  static constexpr int HeadBytes = Adjoint + Tiles * TILE;
  static constexpr int Decay = Head + 2 * HeadBytes, Step = Decay + 2 * TOKENS * 4;  // [2][128] float32
  static constexpr int ByEntering = Step + 2 * TOKENS * 4;                           // [2][128]
  static constexpr int ByLast = ByEntering + 2 * TOKENS * 4;                         // [2][side warps]
  static constexpr int Barriers = ByLast + 2 * SIDE_WARPS * 4;
  static constexpr int Bytes = Barriers + 5 * 8;
};

}  // namespace

// S and T as `walk` stored them, which left out zeros, pair_gradient as pair_gradients did; dB, dC [batch, seq, groups,
// state]; ddecay [state / Columns, batch, units, chunks * 128] float32. Grid head_blocks * state / Columns * groups *
// chunks * rows, 640 threads; if Clustered the head_blocks blocks of a group are a cluster, else there is one.
template <typename T, int Columns, bool Clustered>
__global__ void __launch_bounds__(STATE_WARPS * 32 + 128, 1)
    state_gradients(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap dy,
                    const __grid_constant__ TensorMap B, const __grid_constant__ TensorMap C,
                    const __grid_constant__ TensorMap states, const __grid_constant__ TensorMap adjoints,
                    const float* step, const float* decay, const uint4* pair_gradient, T* dB, T* dC, float* ddecay,
                    int seq, int heads, int groups, int pieces, int chunks, int kept_states, int state, int batch,
                    int head_blocks, int block_units, int first_row) {
  using At = StatesAt<Columns>;
  static_assert(At::Bytes + 1024 <= 227 * 1024 && 2 * SUM_BYTES<Columns> <= At::Bytes);  // 1024: what aligning may cost
  extern __shared__ char raw[];
  const unsigned base = (shared_address(raw) + 1023) & ~1023u;
  char* memory = raw + (base - shared_address(raw));
  auto floats = [&](int at) { return reinterpret_cast<float*>(memory + at); };
  // A head is full when its copies have come, and done when every warp has read it and what it found is in memory.
  const unsigned full_group = base + At::Barriers, full = full_group + 8, done = full_group + 24;
  const Sizes sizes{seq, heads, groups, pieces, chunks};

  int block = blockIdx.x;
  const int head_block = block % head_blocks;
  block /= head_blocks;
  const int column_block = block % (state / Columns), first_column = column_block * Columns;
  block /= state / Columns;
  const uint4* sums = pair_gradient + (size_t(block) * head_blocks + head_block) * (PAIR_TILES * 32) + threadIdx.x % 32;
  const int group = block % groups;
  block /= groups;
  const int chunk = block % chunks, local_row = block / chunks, row = first_row + local_row;
  const int first_unit = group * sizes.group_units() + head_block * block_units;
  const int count = min(block_units, sizes.group_units() - head_block * block_units);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;

  if (threadIdx.x == 0) {
    barrier_init(full_group, 1);
    for (int i = 0; i < 2; ++i) {
      barrier_init(full + i * 8, 1);
      barrier_init(done + i * 8, STATE_WARPS);
    }
    fence_barrier_init();
  }
  __syncthreads();
  follow_earlier_kernels();

  if (warp >= STATE_WARPS) {  // the first of these copies, and finishes heads
    give_registers<COPY_REGISTERS>();
    if (warp > STATE_WARPS) {
      if constexpr (Clustered) cluster_barrier(), cluster_barrier();
      return;
    }
    auto load = [&](int k) {
      const unsigned barrier = full + k % 2 * 8, to = base + At::Head + k % 2 * At::HeadBytes;
      const int unit = first_unit + k, of_unit = local_row * sizes.units() + unit;
      barrier_expect(barrier, At::HeadBytes + 2 * TOKENS * 4);
      for (int i = 0; i < 2; ++i) {
        const int token = chunk * TOKENS + i * HALF;
        copy_in(to + At::X + i * TILE, x, 0, unit, token, row, barrier, KEEP_LAST);
        copy_in(to + At::DY + i * TILE, dy, 0, unit, token, row, barrier, KEEP_LAST);
      }
      for (int i = 0; i < At::Tiles; ++i) {
        copy_in(to + At::S + i * TILE, states, first_column + i * 64, 0, chunk - (chunks - kept_states), of_unit,
                barrier, KEEP_FIRST);
        copy_in(to + At::Adjoint + i * TILE, adjoints, first_column + i * 64, 0, chunk, of_unit, barrier, KEEP_FIRST);
      }
      const size_t at = (size_t(row) * heads + unit / pieces) * sizes.padded() + chunk * TOKENS;
      copy_line_in(base + At::Decay + k % 2 * TOKENS * 4, decay + at, TOKENS * 4, barrier);
      copy_line_in(base + At::Step + k % 2 * TOKENS * 4, step + at, TOKENS * 4, barrier);
    };
    if (lane == 0) {
      load(0);
      barrier_expect(full_group, 2 * At::Tiles * ROWS);
      for (int i = 0; i < 2 * At::Tiles; ++i) {
        const int to = i / 2 * ROWS + i % 2 * TILE, token = chunk * TOKENS + i % 2 * HALF;
        copy_in(base + At::B + to, B, first_column + i / 2 * 64, group, token, row, full_group, KEEP_LAST);
        copy_in(base + At::C + to, C, first_column + i / 2 * 64, group, token, row, full_group, KEEP_LAST);
      }
      if (count > 1) load(1);
    }
    for (int k = 0; k < count; ++k) {
      barrier_wait(done + k % 2 * 8, k / 2 % 2);
      float4 entering = reinterpret_cast<const float4*>(floats(At::ByEntering) + k % 2 * TOKENS)[lane];
      const float last = warp_sum(lane < SIDE_WARPS ? floats(At::ByLast)[k % 2 * SIDE_WARPS + lane] : 0.0f);
      __syncwarp();
      if (lane == 0 && k + 2 < count) load(k + 2);
      if (lane == 31) entering.w += last;
      const size_t of_unit = (size_t(column_block) * batch + row) * sizes.units() + first_unit + k;
      reinterpret_cast<float4*>(ddecay + of_unit * sizes.padded() + chunk * TOKENS)[lane] =
          sums_to_the_end<32>(entering);
    }
    if constexpr (Clustered) cluster_barrier(), cluster_barrier();
    return;
  }

  // A warp owns 16 tokens, of dB or of dC.
  const int strip = warp % SIDE_WARPS, upper = strip * 16 + lane / 4, lower = upper + 8;
  const unsigned left = swizzled(lane % 16, lane / 16);  // this lane's place in a fragment of 16 rows
  auto store = [&](const float (&gradient)[Columns / 2], T* result, int side) {
    const size_t stride = size_t(groups) * state;
    const int tokens = min(TOKENS, seq - chunk * TOKENS);
    T* to = result + ((size_t(row) * seq + chunk * TOKENS) * groups + group) * state + first_column;
    if constexpr (Clustered) {
      const int from = side * SUM_BYTES<Columns>;
      named_barrier(1, STATE_WARPS * 32);  // what the sums overwrite was read
      put_sums<Columns>(gradient, floats(from), upper, lower);
      cluster_barrier();
      store_sums<T, Columns, SIDE_WARPS * 32>(base + from, head_blocks, head_block, threadIdx.x % (SIDE_WARPS * 32), to,
                                              stride, tokens);
      cluster_barrier();  // as long as they are read, the block must not end
    } else {
      store_rows<T, Columns>(gradient, to + upper * stride, to + lower * stride, upper < tokens, lower < tokens);
    }
  };

  if (warp < SIDE_WARPS) {
    take_registers<STATE_REGISTERS>();
    float gradient[Columns / 2];
#pragma unroll
    for (int i = 0; i < Columns / 2; ++i) gradient[i] = 0;
#pragma unroll 1
    for (int k = 0; k < count; ++k) {  // dB += s e x T
      const int buffer = k % 2, head = At::Head + buffer * At::HeadBytes;
      const float *g = floats(At::Decay) + buffer * TOKENS, *s = floats(At::Step) + buffer * TOKENS;
      barrier_wait(full + buffer * 8, k / 2 % 2);
      const float last = g[TOKENS - 1];
      const float weight[2] = {s[upper] * exp2_fast(last - g[upper]), s[lower] * exp2_fast(last - g[lower])};
      unsigned a[4][4];
      load_scaled<T>(a, base + head + At::X + strip * 2048 + left, weight);
      wgmma_fence();
#pragma unroll
      for (int d = 0; d < 4; ++d) {
        const unsigned long long b = column_descriptor(base + head + At::Adjoint, TILE);
        Wgmma<T, Columns>::template registers<true>(gradient, a[d], advanced(b, d * 2048), true);
      }
      wgmma_commit();
      // <S, T>, which the chunk's total decay scales.
      const auto* of_state = reinterpret_cast<const uint4*>(memory + head + At::S);
      const auto* of_adjoint = reinterpret_cast<const uint4*>(memory + head + At::Adjoint);
      float across = 0;
#pragma unroll
      for (int i = 0; i < Columns / 32; ++i) {
        const uint4 v = of_state[threadIdx.x + i * 256], w = of_adjoint[threadIdx.x + i * 256];
        across += dot<T>(v.x, w.x) + dot<T>(v.y, w.y) + (dot<T>(v.z, w.z) + dot<T>(v.w, w.w));
      }
      across = warp_sum(across) * exp2_fast(last);
      if (lane == 0) floats(At::ByLast)[buffer * SIDE_WARPS + strip] = across;
      wgmma_wait<0>();
      pin(gradient);
      __syncwarp();
      if (lane == 0) barrier_arrive(done + buffer * 8);
    }
    barrier_wait(full_group, 0);
#pragma unroll 1
    for (int target = strip; target < STRIPS; ++target) {  // dB += dG' C
      const uint4 v = sums[pair_tile(strip, target) * 32];
      const unsigned a[4] = {v.x, v.y, v.z, v.w};
      add_product<T, Columns>(gradient, a, base + At::C + target * 2048 + left);
    }
    store(gradient, dB, 0);
  } else {
    take_registers<STATE_REGISTERS>();
    float gradient[Columns / 2];
#pragma unroll
    for (int i = 0; i < Columns / 2; ++i) gradient[i] = 0;
    barrier_wait(full_group, 0);
#pragma unroll 1
    for (int k = 0; k < count; ++k) {  // dC += exp2(g) dy S, and what it says of the decays
      const int buffer = k % 2, head = At::Head + buffer * At::HeadBytes;
      const float* g = floats(At::Decay) + buffer * TOKENS;
      barrier_wait(full + buffer * 8, k / 2 % 2);
      const float enter[2] = {exp2_fast(g[upper]), exp2_fast(g[lower])};
      float entering[2] = {0, 0};
#pragma unroll
      for (int columns = 0; columns < At::Tiles; ++columns) {
        float product[32];
        wgmma_fence();
#pragma unroll
        for (int d = 0; d < 4; ++d) {
          const unsigned long long a = row_descriptor(base + head + At::DY + strip / 4 * TILE);
          const unsigned long long b = column_descriptor(base + head + At::S + columns * TILE, TILE);
          Wgmma<T, 64>::template shared<false, true>(product, advanced(a, d * 32), advanced(b, d * 2048), d > 0);
        }
        wgmma_commit();
        wgmma_wait<0>();
        pin(product);
#pragma unroll
        for (int d = 0; d < 4; ++d) {
          unsigned c[4];
          load_tiles(c, base + At::C + columns * ROWS + strip * 2048 + left ^ d * 32);
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
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float sum = enter[h] * quad_sum(entering[h]);
        if (lane % 4 == 0) floats(At::ByEntering)[buffer * TOKENS + (h ? lower : upper)] = sum;
      }
      __syncwarp();
      if (lane == 0) barrier_arrive(done + buffer * 8);
    }
#pragma unroll 1
    for (int source = 0; source <= strip; ++source) {  // dC += dG B
      const uint4 v = sums[pair_tile(source, strip) * 32];
      const unsigned a[4] = {transposed_tile(v.x), transposed_tile(v.z), transposed_tile(v.y), transposed_tile(v.w)};
      add_product<T, Columns>(gradient, a, base + At::B + source * 2048 + left);
    }
    store(gradient, dC, 1);
  }
}

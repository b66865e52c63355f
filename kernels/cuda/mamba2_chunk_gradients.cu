// The gradients that one chunk of a Mamba-2 scan gives, of states that fit one block; mamba2_backward.cu says how they
// are computed and from what.
//
// One block per chunk and block of heads of one group, which goes through its heads in order and keeps dB and dC in
// registers. A warp owns 16 tokens, as sources and as targets; scores stay in the registers of the warp that made them.

#include "async_copy.cuh"
#include "decay.cuh"
#include "fragments.cuh"
#include "mamba2_chunks.cuh"
#include "mamba2_pairs.cuh"
#include "shared_memory.cuh"
#include "wgmma.cuh"

using namespace jax_ssd;

namespace {

constexpr int FINISH_WARP = HALF_STRIPS;  // which leads, and helps no other
// The strips of the first tokens have most targets: the first of them keep so many, and those of the last tokens, in
// reverse order, take the others.
constexpr int OWN_STRIPS = 5, HELPED = STRIPS - OWN_STRIPS;
constexpr int TARGETS = PAIR_TILES * 16;

// Shared memory of chunk_gradients.
template <int N>
struct ChunkMemory : PairMemory<6 * (N / 64) * TILE> {
  static constexpr int Tiles = N / 64;
  static constexpr int B = 0, C = B + Tiles * ROWS;                       // [Tiles][128][64]
  static constexpr int S = C + Tiles * ROWS, Adjoint = S + Tiles * TILE;  // [Tiles][64 channels][64]
  static constexpr int ByTarget = PairMemory<6 * Tiles * TILE>::End;  // of two heads, [tiles][16]: sums over sources
  static constexpr int ByHelped = ByTarget + 2 * TARGETS * 4;         // [strips][32 lanes][2]
  static constexpr int ByLast = ByHelped + HELPED * 32 * 8;           // [2][strips]
  static constexpr int Barriers = ByLast + 2 * STRIPS * 4;
  static constexpr int Bytes = Barriers + (8 + HELPED) * 8;
};

}  // namespace

// Rows of fewer than 128 tokens, Row of 16, 32 or 64, share a chunk: they lie in one line, a call's only row, and
// neither begin with a state nor end in one.
//
// S and T as `walk` stored them, which left out zeros (nothing with short rows); dx [batch, seq, units, 64]; dB, dC
// [batch, seq, groups, N]; dstep, ddecay [batch, units, chunks * 128] and dskip [batch, units, chunks, 64], of short
// rows [rows, units, 64], float32. Grid head_blocks * groups * chunks * rows, 256 threads; if Clustered the head_blocks
// blocks of a group are a cluster, else there is one.
//
// The second warpgroup leads: the first meets a head's states after it, so that one has products of states while the
// other has pairs.
template <typename T, int N, int Row, bool HasD, bool SharedParams, bool Clustered>
__global__ void __launch_bounds__(TOKEN_THREADS, 1)
    chunk_gradients(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap dy,
                    const __grid_constant__ TensorMap B, const __grid_constant__ TensorMap C,
                    const __grid_constant__ TensorMap states, const __grid_constant__ TensorMap adjoints,
                    const __grid_constant__ TensorMap dx, const float* step, const float* decay, const float* skip,
                    T* dB, T* dC, float* dstep, float* ddecay, float* dskip, int seq, int heads, int groups, int pieces,
                    int chunks, int kept_states, int head_blocks, int block_units, int first_row) {
  using Memory = ChunkMemory<N>;
  static_assert(Memory::Bytes + 1024 <= 227 * 1024 &&
                2 * SUM_BYTES<N> <= Memory::Bytes);  // 1024: what aligning may cost
  extern __shared__ char raw[];
  const unsigned base = (shared_address(raw) + 1023) & ~1023u;
  char* memory = raw + (base - shared_address(raw));
  // Copies have come: of the group, of a head's states and, in two buffers, of its tokens. A head's states and x are
  // read, by the warpgroup that leads or by all; its sums are in memory (done), and were read there (finished).
  const unsigned full_group = base + Memory::Barriers, full_states = full_group + 8, full_tokens = full_group + 16;
  const unsigned led = full_group + 32, read = led + 8, done = led + 16, finished = led + 24;
  const unsigned helped = full_group + 64;  // so many strips
  const Sizes sizes{seq, heads, groups, pieces, chunks};
  constexpr bool Short = Row < TOKENS;
  constexpr int RowStrips = Row / 16;

  int block = blockIdx.x;
  const int head_block = block % head_blocks;
  block /= head_blocks;
  const int group = block % groups;
  block /= groups;
  const int chunk = block % chunks, local_row = block / chunks, row = first_row + local_row;
  const int first_unit = group * sizes.group_units() + head_block * block_units;
  const int count = min(block_units, sizes.group_units() - head_block * block_units);

  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, quad = lane % 4;
  const int strip = warp, upper = strip * 16 + lane / 4, lower = upper + 8;              // this lane has two tokens
  const int row_strip = strip / RowStrips * RowStrips, row_end = row_strip + RowStrips;  // strips of the same row
  const bool leads = warp >= HALF_STRIPS;
  const int own_end = Short ? row_end : min(strip + OWN_STRIPS, STRIPS);

  auto load_tokens = [&](int k) {
    const int unit = first_unit + k;
    const size_t at = (size_t(row) * heads + unit / pieces) * sizes.padded() + chunk * TOKENS;
    const float* of_unit = skip + (size_t(SharedParams ? 0 : row) * sizes.units() + unit) * WIDTH;
    load_head<Memory, HasD>(base, k % 2, full_tokens + k % 2 * 8, x, dy, decay + at, step + at, of_unit, unit,
                            chunk * TOKENS, row);
  };
  auto load_state_tiles = [&](int k) {
    const int of_unit = local_row * sizes.units() + first_unit + k;
    barrier_expect(full_states, 2 * Memory::Tiles * TILE);
    for (int i = 0; i < Memory::Tiles; ++i) {
      copy_in(base + Memory::Adjoint + i * TILE, adjoints, i * 64, 0, chunk, of_unit, full_states, KEEP_FIRST);
      copy_in(base + Memory::S + i * TILE, states, i * 64, 0, chunk - (chunks - kept_states), of_unit, full_states,
              KEEP_FIRST);
    }
  };

  if (threadIdx.x == 0) {
    for (int i = 0; i < 4; ++i) barrier_init(full_group + i * 8, 1);
    barrier_init(led, TOKEN_WARPS / 2);
    barrier_init(read, TOKEN_WARPS);
    barrier_init(done, TOKEN_WARPS);
    for (int i = 0; i < 1 + HELPED; ++i) barrier_init(finished + i * 8, 1);
    fence_barrier_init();
  }
  __syncthreads();
  follow_earlier_kernels();
  if (threadIdx.x == 0) {
    barrier_expect(full_group, 2 * Memory::Tiles * ROWS);
    for (int i = 0; i < 2 * Memory::Tiles; ++i) {
      const int to = i / 2 * ROWS + i % 2 * TILE, token = chunk * TOKENS + i % 2 * HALF;
      copy_in(base + Memory::B + to, B, i / 2 * 64, group, token, row, full_group, KEEP_LAST);
      copy_in(base + Memory::C + to, C, i / 2 * 64, group, token, row, full_group, KEEP_LAST);
    }
    load_tokens(0);
    if (!Short) load_state_tiles(0);
    if (count > 1) load_tokens(1);
  }

  // Offsets of the fragments of 16 rows and 16 columns (the next 16: ^ 32, the next 16 rows: + 2048), of the left
  // factor or, transposed, of one whose rows are summed over; and of a right factor whose columns are summed over.
  const unsigned left = place_in_rows(lane), right = swizzled(lane % 8 + lane / 16 * 8, lane / 8 % 2);
  // The rows of this warpgroup.
  const unsigned own_B = base + Memory::B + warp / 4 * TILE, own_C = base + Memory::C + warp / 4 * TILE;
  auto* pair_gradient = reinterpret_cast<float4*>(memory + Memory::PairGradient);
  auto* pairs = reinterpret_cast<uint4*>(memory + Memory::Pairs);

  barrier_wait(full_group, 0);
  {  // G of this warp's sources, [source][target], kept as the lanes hold it.
    float products[TOKENS / 2];
    wgmma_fence();
#pragma unroll
    for (int d = 0; d < N / 16; ++d) {
      const unsigned long long a = row_descriptor(own_B + d / 4 * ROWS),
                               b = row_descriptor(base + Memory::C + d / 4 * ROWS);
      Wgmma<T, TOKENS>::template shared<false, false>(products, advanced(a, d % 4 * 32), advanced(b, d % 4 * 32),
                                                      d > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    pin(products);
#pragma unroll
    for (int target = 0; target < STRIPS; ++target) {
      if (target < strip || target >= row_end) continue;
      const int at = pair_tile(strip, target);
      const float* tile = products + 8 * target;
      pairs[at * 32 + lane] = {Pair<T>::of(tile[0], tile[1]), Pair<T>::of(tile[2], tile[3]),
                               Pair<T>::of(tile[4], tile[5]), Pair<T>::of(tile[6], tile[7])};
      pair_gradient[at * 64 + lane] = pair_gradient[at * 64 + 32 + lane] = {0, 0, 0, 0};
    }
  }
  __syncthreads();  // some warps help others with their pairs

  // What the sums in memory say of head k, when every warp has done its part.
  auto finish = [&](int k) {
    barrier_wait(done, k % 2);
    const size_t of_unit = size_t(row) * sizes.units() + first_unit + k;
    const size_t at = of_unit * sizes.padded() + chunk * TOKENS + lane * 4;
    const float4* targets = reinterpret_cast<const float4*>(memory + Memory::ByTarget) + k % 2 * (TARGETS / 4);
    float4 sum = reinterpret_cast<const float4*>(memory + Memory::ByDecay)[lane];
#pragma unroll
    for (int i = 0; i < STRIPS; ++i) {
      if (i < lane / 4 / RowStrips * RowStrips || i > lane / 4) continue;
      const float4 part = targets[pair_tile(i, lane / 4) * 4 + lane % 4];
      sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
    }
    if constexpr (!Short) {
      const float* by_last = reinterpret_cast<const float*>(memory + Memory::ByLast) + k % 2 * STRIPS;
      const float last = warp_sum(lane < STRIPS ? by_last[lane] : 0.0f);
      if (lane == 31) sum.w += last;
    }
    *reinterpret_cast<float4*>(ddecay + at) = sums_to_the_end<Row / 4>(sum);
    *reinterpret_cast<float4*>(dstep + at) = reinterpret_cast<const float4*>(memory + Memory::ByStep)[lane];
    if constexpr (HasD) {
      for (int first = 0; first < STRIPS; first += RowStrips) {
        float2 total{0, 0};
        for (int i = first; i < first + RowStrips; ++i) {
          const float2 part = reinterpret_cast<const float2*>(memory + Memory::BySkip)[i * 32 + lane];
          total.x += part.x, total.y += part.y;
        }
        const int short_row = chunk * (TOKENS / Row) + first / RowStrips;
        if (Short && short_row * Row >= seq) break;
        const size_t of_row = Short ? size_t(short_row) * sizes.units() + first_unit + k : of_unit * chunks + chunk;
        *reinterpret_cast<float2*>(dskip + of_row * WIDTH + lane * 2) = total;
      }
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(finished);
  };

  float source_gradient[N / 2], target_gradient[N / 2];  // dB and dC of this warp's tokens
#pragma unroll
  for (int i = 0; i < N / 2; ++i) source_gradient[i] = target_gradient[i] = 0;

#pragma unroll 1
  for (int k = 0; k < count; ++k) {
    const int buffer = k % 2;
    const unsigned x_tile = base + Memory::X + buffer * ROWS, x_rows = x_tile + strip * 2048 + left;
    const unsigned dy_tile = base + Memory::DY + buffer * ROWS, dy_rows = dy_tile + strip * 2048 + left;
    const float* g = reinterpret_cast<const float*>(memory + Memory::Decay) + buffer * TOKENS;
    const float* s = reinterpret_cast<const float*>(memory + Memory::Step) + buffer * TOKENS;
    barrier_wait(full_tokens + buffer * 8, k / 2 % 2);
    const float g_own[2] = {g[upper], g[lower]}, s_own[2] = {s[upper], s[lower]}, g_end = g[strip * 16 + 15];

    float u[WIDTH / 2], leaving[2] = {0, 0}, entering[2] = {0, 0};
    unsigned x_own[4][4];
    if constexpr (Short) {
#pragma unroll
      for (int i = 0; i < WIDTH / 2; ++i) u[i] = 0;
#pragma unroll
      for (int d = 0; d < 4; ++d) load_tiles(x_own[d], x_rows ^ d * 32);
    } else {
      // From the chunk's end: u = T B_j and dB += s e x T; from its start: v = S C_i and dC += exp2(g) dy S.
      const float g_last = g[TOKENS - 1];
      const float leave[2] = {exp2_fast(g_last - g_own[0]), exp2_fast(g_last - g_own[1])};
      const float enter[2] = {exp2_fast(g_own[0]), exp2_fast(g_own[1])};
      const unsigned entered[2] = {Pair<T>::of(enter[0], enter[0]), Pair<T>::of(enter[1], enter[1])};
      float across = 0;  // this thread's part of <S, T>
      barrier_wait(full_states, k % 2);
      if (!leads) barrier_wait(led, k % 2);
      float v[WIDTH / 2];
      wgmma_fence();
#pragma unroll
      for (int d = 0; d < N / 16; ++d) {
        const unsigned long long a = row_descriptor(own_B + d / 4 * ROWS);
        const unsigned long long b = row_descriptor(base + Memory::Adjoint + d / 4 * TILE);
        Wgmma<T, WIDTH>::template shared<false, false>(u, advanced(a, d % 4 * 32), advanced(b, d % 4 * 32), d > 0);
      }
      wgmma_commit();
#pragma unroll
      for (int d = 0; d < N / 16; ++d) {
        const unsigned long long a = row_descriptor(own_C + d / 4 * ROWS);
        const unsigned long long b = row_descriptor(base + Memory::S + d / 4 * TILE);
        Wgmma<T, WIDTH>::template shared<false, false>(v, advanced(a, d % 4 * 32), advanced(b, d % 4 * 32), d > 0);
      }
      wgmma_commit();
      const float weight[2] = {s_own[0] * leave[0], s_own[1] * leave[1]};
      unsigned x_scaled[4][4], dy_scaled[4][4];
      load_scaled<T>(x_scaled, x_rows, weight);
      wgmma_fence();
#pragma unroll
      for (int d = 0; d < 4; ++d) {
        const unsigned long long b = column_descriptor(base + Memory::Adjoint, TILE);
        Wgmma<T, N>::template registers<true>(source_gradient, x_scaled[d], advanced(b, d * 2048), true);
      }
      wgmma_commit();
      wgmma_wait<2>();
      pin(u);
      const float tail = exp2_fast(g_last - g_end);  // the rest of e is a factor of all later pairs
      weigh_leaving<T>(u, leaving, x_own, x_rows, {tail, tail});
      wgmma_wait<1>();
      pin(v);
#pragma unroll
      for (int d = 0; d < 4; ++d) {
        load_tiles(dy_scaled[d], dy_rows ^ d * 32);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float2 w = both_of<T>(dy_scaled[d][i]);
          const float* part = v + 4 * (2 * d + i / 2) + 2 * (i % 2);
          entering[i % 2] += part[0] * w.x + part[1] * w.y;
          dy_scaled[d][i] = Pair<T>::product(dy_scaled[d][i], entered[i % 2]);
        }
      }
      pin(entering);  // the sums first: later there are no registers for what goes into them
      pin(leaving);
      wgmma_fence();
#pragma unroll
      for (int d = 0; d < 4; ++d) {
        const unsigned long long b = column_descriptor(base + Memory::S, TILE);
        Wgmma<T, N>::template registers<true>(target_gradient, dy_scaled[d], advanced(b, d * 2048), true);
      }
      wgmma_commit();
      // <S, T>: the diagonal of S T', eight channels a warp.
      float diagonal[2][4] = {};
#pragma unroll
      for (int i = 0; i < N / 32; ++i) {
        const unsigned at = base + i / 2 * TILE + swizzled(warp * 8 + lane % 8, i % 2 * 4 + lane / 8);
        unsigned a[4], b[4];
        load_tiles(a, at + Memory::S);
        load_tiles(b, at + Memory::Adjoint);
        multiply(diagonal[0], {a[0], 0, a[1], 0}, b[0], b[1], T());
        multiply(diagonal[1], {a[2], 0, a[3], 0}, b[2], b[3], T());
      }
      if (lane / 8 == quad) across = lane / 4 % 2 ? diagonal[0][1] + diagonal[1][1] : diagonal[0][0] + diagonal[1][0];
      wgmma_wait<0>();
      pin(source_gradient);
      pin(target_gradient);
      across *= exp2_fast(g_last);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        leaving[h] *= leave[h];
        entering[h] *= enter[h];
        across += s_own[h] * leaving[h];
      }
      across = warp_sum(across);
      if (lane == 0) reinterpret_cast<float*>(memory + Memory::ByLast)[buffer * STRIPS + strip] = across;
    }
    if (lane == 0) copies_wait_read<0>();  // the last head's dx
    __syncwarp();
    if (lane == 0) {
      barrier_arrive(read);
      if (leads) barrier_arrive(led);
    }
    if (threadIdx.x == 0 && k + 1 < count) {
      barrier_wait(read, k % 2);
      if (!Short) load_state_tiles(k + 1);
      if (k > 0) load_tokens(k + 1);
    }
    if (warp == FINISH_WARP && k > 0) finish(k - 1);

    // Pairs: this warp's sources with the targets after them, as far as another warp does not take the last ones, and
    // with each other.
    float later[2] = {0, 0}, same[2] = {0, 0};  // sums of E M over later targets, and over all of the diagonal tile
    auto by_target = [&](int tile) {
      return reinterpret_cast<float*>(memory + Memory::ByTarget) + buffer * TARGETS + tile * 16;
    };
    float joint[8], next[8];
    auto joint_with = [&](float (&joint)[8], int target) {
      multiply_rows<T>(joint, x_own, dy_tile + target * 2048 + right);
    };
    // Of a strip of sources with some later targets; E of the first of them is in joint, then that of target
    // `next_one`.
    auto add_later = [&](const float (&left_s)[2], float g_end, int source, int first, int end, int next_one) {
      const int at = pair_tile(source, first);
      const uint4* pairs_at = pairs + at * 32 + lane;
      float4* sums_at = pair_gradient + at * 64 + lane;
      float* by_target_at = by_target(at);
      const float* g_at = g + first * 16;
      unsigned rows = dy_tile + first * 2048 + left;
#pragma unroll 1
      for (int target = first; target < end; ++target) {
        joint_with(next, target + 1 < end ? target + 1 : next_one);
        add_later_pairs<T>(u, later, joint, left_s, g_end, g_at, pairs_at, sums_at, by_target_at, rows);
        pairs_at += 32, sums_at += 64, by_target_at += 16, g_at += 16, rows += 2048;
#pragma unroll
        for (int i = 0; i < 8; ++i) joint[i] = next[i];
      }
    };
    const float to_end[2] = {exp2_fast(g_end - g_own[0]), exp2_fast(g_end - g_own[1])};
    joint_with(joint, strip + 1 < own_end ? strip + 1 : strip);
    add_later({to_end[0] * s_own[0], to_end[1] * s_own[1]}, g_end, strip, strip + 1, own_end, strip);
    // What another warp found of u lies where x of the two was.
    auto shared_u = [&](int i, int strip) {
      const unsigned at = Memory::X + buffer * ROWS + (i < 4 ? strip : STRIPS - 1 - strip) * 2048 + i % 4 * 512;
      return reinterpret_cast<float4*>(memory + at) + lane;
    };
    auto shared_later = [&](int strip) {
      return reinterpret_cast<float2*>(memory + Memory::ByHelped) + strip * 32 + lane;
    };
    if (!Short && own_end < row_end) {
      barrier_wait(helped + strip * 8, k % 2);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float4 v = *shared_u(i, strip);
        u[4 * i] += v.x, u[4 * i + 1] += v.y, u[4 * i + 2] += v.z, u[4 * i + 3] += v.w;
      }
      const float2 v = *shared_later(strip);
      later[0] += v.x, later[1] += v.y;
    }
#pragma unroll
    for (int i = 0; i < WIDTH / 2; ++i) u[i] *= to_end[i / 2 % 2];
    const float far[2] = {to_end[0] * later[0], to_end[1] * later[1]};
    later[0] = later[1] = 0;
    add_pairs<T, true>(u, later, same, joint, g_own, s_own, g, pairs, pair_gradient, by_target(pair_tile(strip, strip)),
                       dy_tile, left, strip, strip);
    same[0] = same[0] - later[0], same[1] = same[1] - later[1];
    later[0] += far[0], later[1] += far[1];

    if (k > 0) barrier_wait(finished, (k - 1) % 2);  // the other sums in memory can be written again
    finish_sources<T, Memory, HasD>(u, x_own, s_own, memory, buffer, dy_tile, strip);
    __syncwarp();  // what the others of the warp read there
#pragma unroll
    for (int d = 0; d < 4; ++d) {
      store_tiles(x_rows ^ d * 32, {Pair<T>::of(u[8 * d], u[8 * d + 1]), Pair<T>::of(u[8 * d + 2], u[8 * d + 3]),
                                    Pair<T>::of(u[8 * d + 4], u[8 * d + 5]), Pair<T>::of(u[8 * d + 6], u[8 * d + 7])});
    }
    fence_async_proxy();
    __syncwarp();
    if (lane == 0) {
      copy_out(dx, 0, first_unit + k, chunk * TOKENS + strip * 16, row, x_tile + strip * 2048, KEEP);
      copies_commit();
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float after = later[h] + leaving[h];
      const float of_step = quad_sum(after + same[h]), of_decay = quad_sum(entering[h] - s_own[h] * after);
      if (quad == 0) {
        const int token = h ? lower : upper;
        reinterpret_cast<float*>(memory + Memory::ByStep)[token] = of_step;
        reinterpret_cast<float*>(memory + Memory::ByDecay)[token] = of_decay;
      }
    }
    if (!Short && strip >= STRIPS - HELPED) {  // the last targets of a strip with more of them
      const int other = STRIPS - 1 - strip, first = other * 16 + lane / 4;
      const float g_end = g[other * 16 + 15];
      const float left_s[2] = {s[first] * exp2_fast(g_end - g[first]), s[first + 8] * exp2_fast(g_end - g[first + 8])};
#pragma unroll
      for (int d = 0; d < 4; ++d) load_tiles(x_own[d], x_tile + other * 2048 + (left ^ d * 32));
#pragma unroll
      for (int i = 0; i < WIDTH / 2; ++i) u[i] = 0;
      later[0] = later[1] = 0;
      joint_with(joint, other + OWN_STRIPS);
      add_later(left_s, g_end, other, other + OWN_STRIPS, STRIPS, STRIPS - 1);
      barrier_wait(read, k % 2);             // the other warp has its x
      if (lane == 0) copies_wait_read<0>();  // of dx
      __syncwarp();
#pragma unroll
      for (int i = 0; i < 8; ++i) *shared_u(i, other) = {u[4 * i], u[4 * i + 1], u[4 * i + 2], u[4 * i + 3]};
      *shared_later(other) = {later[0], later[1]};
      fence_async_proxy();  // the next head's x comes there
      __syncwarp();
      if (lane == 0) barrier_arrive(helped + other * 8);
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(done);
  }
  if (warp == FINISH_WARP) finish(count - 1);
  if (lane == 0) copies_wait_read<0>();
  __syncthreads();

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
  for (int target = strip; target < row_end; ++target) {
    unsigned a[4];
    packed_tile(a, strip, target);
    add(source_gradient, a, base + Memory::C, target);
  }
#pragma unroll 1
  for (int source = row_strip; source <= strip; ++source) {
    unsigned tile[4];
    packed_tile(tile, source, strip);
    const unsigned a[4] = {transposed_tile(tile[0]), transposed_tile(tile[2]), transposed_tile(tile[1]),
                           transposed_tile(tile[3])};
    add(target_gradient, a, base + Memory::B, source);
  }
  const size_t stride = size_t(groups) * N, of_group = ((size_t(row) * seq + chunk * TOKENS) * groups + group) * N;
  const int tokens = min(TOKENS, seq - chunk * TOKENS);
  if constexpr (Clustered) {
    __syncthreads();  // what the sums overwrite was read
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

// The gradients of a Mamba-2 scan in 16-bit types, chunk by chunk of 128 tokens.
//
// Notation of a chunk of one head: g the inclusive running sum of log2 decays, w_ij = exp2(g_i - g_j) for i >= j, else
// 0, s the step sizes, e_j = exp2(g_last - g_j), S the state at the chunk's start, T the adjoint of the state at its
// end, both [head_dim, state]. With G = C B', E = dY X' and M = G w:
//
//   dx_j = s_j (sum_i M_ij dy_i + e_j T B_j) + D dy_j        dG = sum over heads of E w s
//   dB_j = sum_i dG_ij C_i + sum over heads of s_j e_j T' x_j
//   dC_i = sum_j dG_ij B_j + sum over heads of exp2(g_i) S' dy_i
//   ds_j = sum_i E_ij M_ij + e_j <x_j, T B_j>, and the gradients of g follow from the same products.
//
// Kernels, in order: step_sizes; walk, which stores S and T of every chunk, both directions in one launch (with several
// segments of a row first without storing, to find what every segment gives alone, which join turns into the states
// between them); chunk_gradients, or for states of more than 128 columns pair_gradients and state_gradients (files of
// their own), which go through the heads of a group in order; step_gradients and parameter_gradients.
//
// A head of more than 64 channels is several pieces of 64 that share their decays: the kernels count pieces. Rows count
// from `first_row`: a launch may cover some rows only, then states and starts hold just those.

#include "async_copy.cuh"
#include "decay.cuh"
#include "fragments.cuh"
#include "mamba2_chunks.cuh"
#include "shared_memory.cuh"
#include "values.cuh"
#include "wgmma.cuh"

using namespace jax_ssd;

namespace {

// A block's tile of heads in the kernels that cross between [seq, heads] and [heads, seq].
constexpr int HEADS = 32;

struct HeadTile {
  int chunk, first_head, row;
};

__device__ __forceinline__ HeadTile head_tile(int chunks, int heads) {
  const int tiles = (heads + HEADS - 1) / HEADS, block = blockIdx.x / chunks;
  return {int(blockIdx.x % chunks), block % tiles * HEADS, block / tiles};
}

}  // namespace

// dt [batch, seq, heads] -> step, decay [batch, heads, chunks * 128]: step sizes, 0 past the end, and the inclusive
// running log2 decay of the chunk, or of each Row tokens of it: rows that share it. Grid chunks * head tiles of 32 *
// batch, 256 threads.
template <typename D, int Row, bool SharedParams, bool HasBias, bool Softplus>
__global__ void __launch_bounds__(256) step_sizes(const D* dt, const float* bias, const float* A, float* step,
                                                  float* decay, int seq, int heads, int chunks, float low, float high) {
  __shared__ float tile[HEADS][TOKENS + 1];
  let_next_kernel_start();  // the first of its plan, launched when all before it have ended
  const auto [chunk, first_head, row] = head_tile(chunks, heads);
  const int count = min(HEADS, heads - first_head);
  for (int i = threadIdx.x; i < TOKENS * count; i += 256) {
    const int token = chunk * TOKENS + i / count, head = first_head + i % count;
    float value = 0;
    if (token < seq) {
      value = to_float(dt[(size_t(row) * seq + token) * heads + head]);
      if (HasBias) value += bias[(SharedParams ? 0 : row * heads) + head];
      value = step_size<Softplus>(value, low, high);
    }
    tile[i % count][i / count] = value;
  }
  __syncthreads();
  const int lane = threadIdx.x % 32;
  for (int h = threadIdx.x / 32; h < count; h += 8) {
    const int head = first_head + h;
    const float rate = A[(SharedParams ? 0 : row * heads) + head];
    const size_t at = ((size_t(row) * heads + head) * chunks + chunk) * TOKENS;
    float before = 0;
    for (int k = 0; k < TOKENS; k += 32) {
      const float size = tile[h][k + lane];
      float sum = chunk * TOKENS + k + lane < seq ? log2_decay(size, rate) : 0.0f;
#pragma unroll
      for (int offset = 1; offset < min(Row, 32); offset *= 2) {
        const float left = __shfl_up_sync(~0u, sum, offset);
        if (lane % Row >= offset) sum += left;
      }
      if (k % Row == 0) before = 0;
      if (Row >= 32) sum += before;
      before = __shfl_sync(~0u, sum, 31);
      step[at + k + lane] = size;
      decay[at + k + lane] = sum;
    }
  }
}

namespace {

// Shared memory of a walk.
template <int Columns, int Heads, int Stages>
struct WalkMemory {
  static constexpr int ChunksAhead = Stages / 2 + 1;  // of which some half is in memory
  static constexpr int Tiles = Columns / 64;
  static constexpr int Stage = (Heads + Tiles) * TILE;
  static constexpr int Lines = Stages * Stage;                                  // g and s, [ChunksAhead][Heads][2][128]
  static constexpr int Weights = Lines + ChunksAhead * Heads * 2 * TOKENS * 4;  // [2][Heads][128] float32
  static constexpr int Barriers = Weights + 2 * Heads * TOKENS * 4;
};

// Accumulators [64][Columns] of a warpgroup from or to float32 rows in memory.
template <int Columns>
__device__ __forceinline__ void load_state(float (&state)[Columns / 2], const float* from, int stride) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4;
#pragma unroll
  for (int j = 0; j < Columns / 8; ++j) {
    const float2 a = *reinterpret_cast<const float2*>(from + row * stride + 8 * j + 2 * (lane % 4));
    const float2 b = *reinterpret_cast<const float2*>(from + (row + 8) * stride + 8 * j + 2 * (lane % 4));
    state[4 * j] = a.x, state[4 * j + 1] = a.y, state[4 * j + 2] = b.x, state[4 * j + 3] = b.y;
  }
}

template <int Columns>
__device__ __forceinline__ void store_state(const float (&state)[Columns / 2], float* to, int stride) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4;
#pragma unroll
  for (int j = 0; j < Columns / 8; ++j) {
    float* at = to + row * stride + 8 * j + 2 * (lane % 4);
    *reinterpret_cast<float2*>(at) = {state[4 * j], state[4 * j + 1]};
    *reinterpret_cast<float2*>(at + 8 * stride) = {state[4 * j + 2], state[4 * j + 3]};
  }
}

}  // namespace

// Walks the chunks of a segment, forwards with (x, B) from the state at its start, or backwards with (dy, C) from the
// adjoint of the state at its end; one warpgroup per piece of a head, Heads of them in a block share B or C. A block
// walks Columns columns of the state: the others are walks of their own.
//
// Stores: the state at every chunk's start and the adjoint at every chunk's end to states and adjoints [rows, units,
// kept, 64, N] of T, and the first chunk's adjoint of its start to dinitial [batch, units, 64, N] (if not null). Kept
// are the states of the last chunks and the adjoints of the first ones: a zero at the end of a row is left out.
// starts, stops [rows, units, segments, 64, N] float32, null for zero. Otherwise: what a segment gives alone, from
// zero, to starts of the segment after it, or stops of the one before.
// Grid 2 * N / Columns * (units / Heads) * segments (if not Stores, less one) * rows, the direction varies fastest.
template <typename T, int N, int Columns, int Heads, int Stages, bool Stores>
__global__ void __launch_bounds__(Heads * 128, Heads > 4 ? 1 : 4 / Heads)
    walk(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap dy, const __grid_constant__ TensorMap B,
         const __grid_constant__ TensorMap C, const float* step, const float* decay, float* starts, float* stops,
         T* states, T* adjoints, float* dinitial, int seq, int heads, int groups, int pieces, int chunks,
         int kept_states, int kept_adjoints, int segments, int segment_chunks, int first_row) {
  using Memory = WalkMemory<Columns, Heads, Stages>;
  constexpr int Together = Heads > 4 ? 1 : 4;  // products: as many as there are registers for the fragments of
  extern __shared__ char raw[];
  const unsigned base = (shared_address(raw) + 1023) & ~1023u;
  char* memory = raw + (base - shared_address(raw));
  // A stage is full when its copies have come, and free when every warp has read it.
  const unsigned full = base + Memory::Barriers, free = full + Stages * 8;
  const Sizes sizes{seq, heads, groups, pieces, chunks};

  const int walked = Stores ? segments : segments - 1;
  int block = blockIdx.x;
  const bool backwards = block % 2;
  block /= 2;
  const int first_column = block % (N / Columns) * Columns;
  block /= N / Columns;
  const int first_unit = block % (sizes.units() / Heads) * Heads;
  block /= sizes.units() / Heads;
  const int segment = block % walked + (!Stores && backwards), local_row = block / walked;
  const int row = first_row + local_row, group = first_unit / sizes.group_units();
  const int first = segment * segment_chunks, count = min(segment_chunks, chunks - first);
  const bool last_matters = !Stores || (backwards && segment == 0 && dinitial != nullptr);
  const int stages = 2 * (last_matters ? count : count - 1);

  auto chunk_at = [&](int k) { return backwards ? first + count - 1 - k : first + k; };

  if (threadIdx.x == 0) {
    for (int i = 0; i < Stages; ++i) {
      barrier_init(full + i * 8, 1);
      barrier_init(free + i * 8, Heads * 4);
    }
    fence_barrier_init();
  }
  __syncthreads();
  follow_earlier_kernels();

  auto load = [&](int stage) {  // half a chunk
    const unsigned barrier = full + stage % Stages * 8, to = base + stage % Stages * Memory::Stage;
    const int token = chunk_at(stage / 2) * TOKENS + stage % 2 * HALF;
    const bool lines = stage % 2 == 0;
    barrier_expect(barrier, Memory::Stage + (lines ? Heads * (backwards ? 1 : 2) * TOKENS * 4 : 0));
#pragma unroll 1
    for (int i = 0; i < Heads; ++i) {
      copy_in(to + i * TILE, backwards ? dy : x, 0, first_unit + i, token, row, barrier, KEEP_LAST);
      if (!lines) continue;
      const size_t at = (size_t(row) * heads + (first_unit + i) / pieces) * sizes.padded() + token;
      const unsigned line = base + Memory::Lines + (stage / 2 % Memory::ChunksAhead * Heads + i) * 2 * TOKENS * 4;
      copy_line_in(line, decay + at, TOKENS * 4, barrier);
      if (!backwards) copy_line_in(line + TOKENS * 4, step + at, TOKENS * 4, barrier);
    }
#pragma unroll 1
    for (int i = 0; i < Memory::Tiles; ++i) {
      copy_in(to + (Heads + i) * TILE, backwards ? C : B, first_column + i * 64, group, token, row, barrier, KEEP_LAST);
    }
  };
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < min(Stages, stages); ++stage) load(stage);
  }

  const int piece = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const int unit = first_unit + piece;
  const size_t of_unit = size_t(local_row) * sizes.units() + unit;
  float state[Columns / 2];
#pragma unroll
  for (int i = 0; i < Columns / 2; ++i) state[i] = 0;
  const float* entered = backwards ? stops : starts;
  if (Stores && entered != nullptr) {
    load_state<Columns>(state, entered + (of_unit * segments + segment) * (WIDTH * N) + first_column, N);
  }

  int stage = 0;
  auto wait_stage = [&] { barrier_wait(full + stage % Stages * 8, stage / Stages % 2); };
  for (int k = 0; k < count; ++k) {
    const int kept = backwards ? kept_adjoints : kept_states, place = chunk_at(k) - (backwards ? 0 : chunks - kept);
    if (Stores && place >= 0 && place < kept) {
      const int p = warp * 16 + lane / 4;
      T* to = (backwards ? adjoints : states) + (of_unit * kept + place) * (WIDTH * N) + first_column;
      store_rows<T, Columns>(state, to + p * N, to + (p + 8) * N, true, true);
    }
    if (stage == stages) break;
    // Of a thread's token. A chunk's weights are read until its end, so two buffers suffice.
    float* weights = reinterpret_cast<float*>(memory + Memory::Weights) + (k % 2 * Heads + piece) * TOKENS;
    const float* line =
        reinterpret_cast<const float*>(memory + Memory::Lines) + (k % Memory::ChunksAhead * Heads + piece) * 2 * TOKENS;
    wait_stage();
    const int token = threadIdx.x % TOKENS;
    const float own = line[token], last = line[TOKENS - 1];
    weights[token] = backwards ? exp2_fast(own) : line[TOKENS + token] * exp2_fast(last - own);
    named_barrier(1 + piece, 128);
    const float carried = exp2_fast(last);
#pragma unroll
    for (int i = 0; i < Columns / 2; ++i) state[i] *= carried;
    for (int half = 0; half < 2; ++half, ++stage) {
      const unsigned tiles = base + stage % Stages * Memory::Stage;
      const float* weight = weights + half * HALF;
      if (half > 0) wait_stage();
#pragma unroll
      for (int d = 0; d < 4; d += Together) {
        unsigned a[Together][4];
#pragma unroll
        for (int i = 0; i < Together; ++i) {  // [64 channels][16 tokens], the tile's transpose
          const int token = (d + i) * 16 + lane % 8 + lane / 16 * 8;
          load_tiles_transposed(a[i], tiles + piece * TILE + swizzled(token, warp * 2 + lane / 8 % 2));
#pragma unroll
          for (int j = 0; j < 4; ++j) {
            const float2 w = *reinterpret_cast<const float2*>(weight + (d + i) * 16 + j / 2 * 8 + 2 * (lane % 4));
            const float2 v = both_of<T>(a[i][j]);
            a[i][j] = Pair<T>::of(v.x * w.x, v.y * w.y);
          }
        }
        wgmma_fence();
        const unsigned long long other = column_descriptor(tiles + Heads * TILE, TILE);
#pragma unroll
        for (int i = 0; i < Together; ++i) {
          Wgmma<T, Columns>::template registers<true>(state, a[i], advanced(other, (d + i) * 2048), true);
        }
        wgmma_commit();
        wgmma_wait<0>();
        pin(state);
      }
      if (lane == 0) barrier_arrive(free + stage % Stages * 8);
      // The stage before this one is refilled: by now most warps have read it.
      if (threadIdx.x == 0 && stage > 0 && stage - 1 + Stages < stages) {
        barrier_wait(free + (stage - 1) % Stages * 8, (stage - 1) / Stages % 2);
        load(stage - 1 + Stages);
      }
    }
  }
  if (!Stores) {
    float* alone = (backwards ? stops : starts) + first_column;
    store_state<Columns>(state, alone + (of_unit * segments + (backwards ? segment - 1 : segment + 1)) * (WIDTH * N),
                         N);
  } else if (last_matters) {
    store_state<Columns>(state, dinitial + (size_t(row) * sizes.units() + unit) * (WIDTH * N) + first_column, N);
  }
}

// From what the segments give alone to the state at every segment's start and its adjoint at every segment's end, in
// place. initial, dfinal [rows, units, 64 * N] float32, null for zero. Grid 2 * (64 * N / 1024) * units * rows, 256
// threads, four elements each.
template <int N>
__global__ void __launch_bounds__(256)
    join(const float* decay, const float* initial, const float* dfinal, float* starts, float* stops, int heads,
         int pieces, int chunks, int segments, int segment_chunks, int first_row) {
  __shared__ float factor[64];  // of a segment
  follow_earlier_kernels();
  constexpr size_t elements = WIDTH * N;
  const bool backwards = blockIdx.x % 2;
  const size_t of_unit = blockIdx.x / (2 * elements / 1024),
               at = blockIdx.x / 2 % (elements / 1024) * 1024 + threadIdx.x * 4;
  const float* g = decay + (size_t(first_row) * heads + of_unit / pieces) * chunks * TOKENS;
  if (threadIdx.x < segments) {
    float total = 0;
    const int first = threadIdx.x * segment_chunks, end = min(first + segment_chunks, chunks);
    for (int chunk = first; chunk < end; ++chunk) total += g[size_t(chunk) * TOKENS + TOKENS - 1];
    factor[threadIdx.x] = exp2_fast(total);
  }
  __syncthreads();
  const float* entering = backwards ? dfinal : initial;
  float* array = (backwards ? stops : starts) + of_unit * segments * elements + at;
  float4 state{0, 0, 0, 0};
  if (entering != nullptr) state = *reinterpret_cast<const float4*>(entering + of_unit * elements + at);
  auto slot = [&](int k) { return reinterpret_cast<float4*>(array + (backwards ? segments - 1 - k : k) * elements); };
  float4 next = *slot(1);
  for (int k = 0; k < segments; ++k) {
    *slot(k) = state;
    if (k + 1 == segments) break;
    const float4 alone = next;
    if (k + 2 < segments) next = *slot(k + 2);
    const float f = factor[backwards ? segments - 1 - k : k];
    state = {f * state.x + alone.x, f * state.y + alone.y, f * state.z + alone.z, f * state.w + alone.w};
  }
}

// ddt [batch, seq, heads] from the gradients of s, [batch, units, chunks * 128], and of its log decay, [parts, batch,
// units, chunks * 128], and each chunk's part of dA and d dt_bias, [batch, heads, chunks], or of rows that share a
// chunk, Row tokens each, all of theirs, [rows, heads]. Grid chunks * head tiles of 32 * batch, 256 threads.
template <typename D, int Row, bool SharedParams, bool HasBias, bool Softplus>
__global__ void __launch_bounds__(256, Row < TOKENS ? 5 : 6)
    step_gradients(const D* dt, const float* bias, const float* A, const float* step, const float* dstep,
                   const float* ddecay, D* ddt, float* dA_part, float* dbias_part, int seq, int heads, int pieces,
                   int chunks, int parts, int batch, float low, float high) {
  __shared__ float tile[HEADS][TOKENS + 1];
  follow_earlier_kernels();
  const auto [chunk, first_head, row] = head_tile(chunks, heads);
  const int count = min(HEADS, heads - first_head), lane = threadIdx.x % 32;
#pragma unroll 8
  for (int i = threadIdx.x; i < TOKENS * count; i += 256) {
    const int token = chunk * TOKENS + i / count;
    tile[i % count][i / count] =
        token < seq ? to_float(dt[(size_t(row) * seq + token) * heads + first_head + i % count]) : 0.0f;
  }
  __syncthreads();
  for (int h = threadIdx.x / 32; h < count; h += 8) {
    const int head = first_head + h, of_params = (SharedParams ? 0 : row * heads) + head;
    const size_t of_head = size_t(row) * heads + head, padded = size_t(chunks) * TOKENS;
    const float rate = A[of_params], offset = HasBias ? bias[of_params] : 0.0f;
    // What belongs to a token comes all at once: one load after the other would take most of the kernel's time.
    constexpr int OWN = TOKENS / 32;
    const size_t first = of_head * pieces * padded + size_t(chunk) * TOKENS + lane;
    float s[OWN], direct[OWN], da[OWN];
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
      s[i] = step[of_head * padded + size_t(chunk) * TOKENS + lane + i * 32];
      direct[i] = dstep[first + i * 32];
      da[i] = ddecay[first + i * 32];
    }
    for (int piece = 0; piece < pieces; ++piece) {
      for (int part = 0; part < parts; ++part) {
        const size_t at = first + piece * padded, of_part = size_t(part) * batch * heads * pieces * padded;
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
          if (piece + part > 0) da[i] += ddecay[of_part + at + i * 32];
          if (piece > 0 && part == 0) direct[i] += dstep[at + i * 32];
        }
      }
    }
    float dA[OWN], dbias[OWN];
#pragma unroll
    for (int i = 0; i < OWN; ++i) {
      const int k = lane + i * 32;
      const size_t token = size_t(chunk) * TOKENS + k;
      if (s[i] * (rate * LOG2E) < FLOOR) da[i] = 0;  // cut: constant
      float gradient = direct[i] + rate * da[i], value = tile[h][k] + offset;
      if (Softplus) {
        gradient /= 1.0f + expf(-value);
        value = softplus(value);
      }
      if (value < low || value > high || token >= seq) gradient = 0;
      dA[i] = token < seq ? s[i] * da[i] : 0.0f;
      dbias[i] = gradient;
      tile[h][k] = gradient;
    }
    constexpr int Steps = Row > 32 ? Row / 32 : 1, Lanes = Row < 32 ? Row : 32;  // of a row
#pragma unroll
    for (int i = 0; i < OWN; i += Steps) {
#pragma unroll
      for (int j = 1; j < Steps; ++j) dA[i] += dA[i + j], dbias[i] += dbias[i + j];
#pragma unroll
      for (int offset = Lanes / 2; offset; offset /= 2) {
        dA[i] += __shfl_xor_sync(~0u, dA[i], offset);
        dbias[i] += __shfl_xor_sync(~0u, dbias[i], offset);
      }
      const int token = chunk * TOKENS + i * 32 + lane;
      if (lane % Lanes == 0 && token < seq) {
        const size_t part = Row < TOKENS ? size_t(token / Row) * heads + head : of_head * chunks + chunk;
        dA_part[part] = dA[i];
        if (HasBias) dbias_part[part] = dbias[i];
      }
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < TOKENS * count; i += 256) {
    const int token = chunk * TOKENS + i / count;
    if (token < seq) {
      ddt[(size_t(row) * seq + token) * heads + first_head + i % count] = from_float<D>(tile[i % count][i / count]);
    }
  }
}

// dA, d dt_bias [batch, heads] and dD [batch, units, 64] from each chunk's part. Grid units * batch, 128 threads.
template <bool HasBias, bool HasD>
__global__ void __launch_bounds__(128)
    parameter_gradients(const float* dA_part, const float* dbias_part, const float* dskip_part, float* dA, float* dbias,
                        float* dskip, int pieces, int chunks) {
  __shared__ float half[WIDTH];
  follow_earlier_kernels();
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const size_t of_unit = blockIdx.x, of_head = of_unit / pieces;  // as heads divide a row evenly into units
  if (of_unit % pieces == 0 && warp < (HasBias ? 2 : 1)) {
    const float* part = (warp ? dbias_part : dA_part) + of_head * chunks;
    float total = 0;
    for (int chunk = lane; chunk < chunks; chunk += 32) total += part[chunk];
    total = warp_sum(total);
    if (lane == 0) (warp ? dbias : dA)[of_head] = total;
  }
  if constexpr (HasD) {
    const int p = threadIdx.x % WIDTH;
    float total = 0;
    for (int chunk = threadIdx.x / WIDTH; chunk < chunks; chunk += 2) {
      total += dskip_part[(of_unit * chunks + chunk) * WIDTH + p];
    }
    if (threadIdx.x >= WIDTH) half[p] = total;
    __syncthreads();
    if (threadIdx.x < WIDTH) dskip[of_unit * WIDTH + p] = total + half[p];
  }
}

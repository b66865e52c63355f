// Small kernels for tests/test_cuda_emulator.py: each instruction alone, and each mistake that the emulator must find.
#include "async_copy.cuh"
#include "fragments.cuh"
#include "shared_memory.cuh"
#include "values.cuh"
#include "wgmma.cuh"
#include "wgmma_tf32.cuh"

using namespace jax_ssd;

// out [7][64]: what each thread of two warps gets.
__global__ void collectives(int* out) {
  const int thread = threadIdx.x, lane = thread % 32;
  out[0 * 64 + thread] = __shfl_up_sync(~0u, thread, 3);
  out[1 * 64 + thread] = __shfl_down_sync(~0u, thread, 3);
  out[2 * 64 + thread] = __shfl_xor_sync(~0u, thread, 5);
  out[3 * 64 + thread] = __shfl_sync(~0u, thread, lane / 8, 8);
  // The halves of a warp go separate ways.
  out[4 * 64 + thread] = lane < 16 ? __shfl_sync(0x0000FFFFu, thread, 7) : __shfl_sync(0xFFFF0000u, thread, 20);
  out[5 * 64 + thread] = __any_sync(~0u, thread == 40) + 2 * __syncthreads_or(thread == 50) + 4 * __syncthreads_or(0);
  __shared__ int first, values[64];
  if (thread == 63) first = 1000;
  values[63 - thread] = thread;
  __syncthreads();
  out[6 * 64 + thread] = first + values[thread];
}

// Tiles of a matrix [16][16] of 16 bits by ldmatrix and movmatrix to [3][32][4] registers; by stmatrix to [2][16][16].
__global__ void tiles(const unsigned short* matrix, unsigned* registers, unsigned short* stored) {
  __shared__ __align__(16) unsigned short rows[16 * 16], copies[2][16 * 16];
  const int lane = threadIdx.x;
  for (int i = lane; i < 256; i += 32) rows[i] = matrix[i];
  __syncwarp();
  const int row = lane % 16, column = lane / 16 * 8;
  unsigned r[4], t[4];
  load_tiles(r, shared_address(rows + row * 16 + column));
  load_tiles_transposed(t, shared_address(rows + row * 16 + column));
  store_tiles(shared_address(copies[0] + row * 16 + column), r);
  store_tiles_transposed(shared_address(copies[1] + row * 16 + column), r);
  __syncwarp();
  for (int i = 0; i < 4; ++i) {
    registers[0 * 128 + lane * 4 + i] = r[i];
    registers[1 * 128 + lane * 4 + i] = t[i];
    registers[2 * 128 + lane * 4 + i] = transposed_tile(r[i]);
  }
  for (int i = lane; i < 512; i += 32) stored[i] = copies[i / 256][i % 256];
}

// d [16][8] = a [16][16] b [8][16]^T.
template <typename T>
__global__ void warp_product(const T* a, const T* b, float* d) {
  const int row = threadIdx.x / 4, pair = threadIdx.x % 4 * 2;
  const auto word = [](const T* at) { return *reinterpret_cast<const unsigned*>(at); };
  const unsigned x[4] = {word(a + row * 16 + pair), word(a + (row + 8) * 16 + pair), word(a + row * 16 + pair + 8),
                         word(a + (row + 8) * 16 + pair + 8)};
  float sums[4] = {};
  multiply(sums, x, word(b + row * 16 + pair), word(b + row * 16 + pair + 8), T());
  for (int i = 0; i < 4; ++i) d[(row + i / 2 * 8) * 8 + pair + i % 2] = sums[i];
}

// d [16][8] = a [16][8] b [8][8]^T; the hardware looks at 10 bits of each fraction.
__global__ void warp_product_tf32(const unsigned* a, const unsigned* b, float* d) {
  const int row = threadIdx.x / 4, k = threadIdx.x % 4;
  float s[4] = {};
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, "
      "%3};"
      : "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3])
      : "r"(a[row * 8 + k]), "r"(a[(row + 8) * 8 + k]), "r"(a[row * 8 + k + 4]), "r"(a[(row + 8) * 8 + k + 4]),
        "r"(b[row * 8 + k]), "r"(b[row * 8 + k + 4]));
  for (int i = 0; i < 4; ++i) d[(row + i / 2 * 8) * 8 + 2 * k + i % 2] = s[i];
}

// d [64][N] = a b summed over 64 and then once more over the first 16. a: [64][64], or its transpose if ColumnsA;
// b [N][64], or [64][N] in tiles of 64 columns if ColumnsB; both by maps [1][1][rows][columns] with boxes of 64 x 64.
template <typename T, int N, bool InRegisters, bool ColumnsA, bool ColumnsB, bool Wait>
__global__ void warpgroup_product(const __grid_constant__ TensorMap a, const __grid_constant__ TensorMap b,
                                  const T* a_memory, float* d) {
  constexpr int TILE = 64 * 128, TILES = (N + 63) / 64;
  extern __shared__ __align__(1024) char memory[];
  __shared__ __align__(8) unsigned long long barrier;
  const unsigned shared = shared_address(memory), arrived = shared_address(&barrier), b_at = shared + TILE;
  if (threadIdx.x == 0) {
    barrier_init(arrived, 1);
    fence_barrier_init();
    barrier_expect(arrived, TILE * (1 + TILES));
    copy_in(shared, a, 0, 0, 0, 0, arrived, KEEP_LAST);
    for (int i = 0; i < TILES; ++i) {
      copy_in(b_at + i * TILE, b, ColumnsB ? 64 * i : 0, ColumnsB ? 0 : 64 * i, 0, 0, arrived, KEEP_LAST);
    }
  }
  __syncthreads();
  barrier_wait(arrived, 0);
  float s[N / 2];
  const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, pair = threadIdx.x % 4 * 2;
  wgmma_fence();
  for (int step = 0; step < 5; ++step) {
    const int k = step % 4;
    const unsigned long long y =
        ColumnsB ? advanced(column_descriptor(b_at, TILE), k * 2048) : advanced(row_descriptor(b_at), k * 32);
    if constexpr (InRegisters) {
      unsigned x[4];
      for (int i = 0; i < 4; ++i) {
        x[i] = *reinterpret_cast<const unsigned*>(a_memory + (row + i % 2 * 8) * 64 + k * 16 + pair + i / 2 * 8);
      }
      Wgmma<T, N>::template registers<ColumnsB>(s, x, y, step > 0);
    } else {
      const unsigned long long x =
          ColumnsA ? advanced(column_descriptor(shared, TILE), k * 2048) : advanced(row_descriptor(shared), k * 32);
      Wgmma<T, N>::template shared<ColumnsA, ColumnsB>(s, x, y, step > 0);
    }
  }
  wgmma_commit();
  if (Wait) wgmma_wait<0>();
  pin(s);
  for (int i = 0; i < N / 2; ++i) d[(row + i % 4 / 2 * 8) * N + i / 4 * 8 + pair + i % 2] = s[i];
  if (!Wait) wgmma_wait<0>();
}

// d [64][N] = a b' in TF32, a [64][32] in swizzled rows or registers, b [N][32] in pieces.
template <int N, bool InRegisters>
__global__ void warpgroup_product_tf32(const float* a, const float* b, float* d) {
  constexpr int PIECES = N * 16 + 48, EIGHTS = 128;  // from column to column by fours, from eight rows to the next
  __shared__ __align__(1024) unsigned char a_memory[64 * 128], b_memory[8 * PIECES];
  for (int i = threadIdx.x; i < 64 * 32; i += 128) {
    *reinterpret_cast<float*>(a_memory + swizzled(i / 32, i % 32 / 4) + i % 4 * 4) = a[i];
  }
  for (int i = threadIdx.x; i < N * 32; i += 128) {
    const int row = i / 32, column = i % 32;
    *reinterpret_cast<float*>(b_memory + column / 4 * PIECES + row / 8 * EIGHTS + row % 8 * 16 + column % 4 * 4) = b[i];
  }
  fence_async_proxy();
  __syncthreads();
  float s[N / 2];
  const int row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4, column = threadIdx.x % 4;
  const unsigned long long a_rows = row_descriptor(shared_address(a_memory)),
                           b_pieces = piece_descriptor(shared_address(b_memory), PIECES, EIGHTS);
  unsigned x[4][4];
  for (int i = 0; i < 16; ++i) {
    x[i / 4][i % 4] = __float_as_uint(a[(row + i % 2 * 8) * 32 + i / 4 * 8 + i % 4 / 2 * 4 + column]);
  }
  wgmma_fence();
  for (int k = 0; k < 4; ++k) {
    if constexpr (InRegisters) {
      WgmmaTf32<N>::registers(s, x[k], advanced(b_pieces, 2 * k * PIECES), k > 0);
    } else {
      WgmmaTf32<N>::shared(s, advanced(a_rows, k * 32), advanced(b_pieces, 2 * k * PIECES), k > 0);
    }
  }
  wgmma_commit();
  wgmma_wait<0>();
  pin(s);
  for (int i = 0; i < N / 2; ++i) d[(row + i % 4 / 2 * 8) * N + i / 4 * 8 + 2 * column + i % 2] = s[i];
}

// A box [1][4][1][64] of x [2][6][2][64] from (0, token, head, batch) to y, at the same place, plus one. Without a
// fence the copy out does not see what was added.
template <bool Fence>
__global__ void through_shared_memory(const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap y,
                                      int token, __nv_bfloat16* seen) {
  extern __shared__ __align__(1024) char memory[];
  __shared__ __align__(8) unsigned long long barrier;
  const unsigned shared = shared_address(memory), arrived = shared_address(&barrier);
  if (threadIdx.x == 0) {
    barrier_init(arrived, 1);
    barrier_expect(arrived, 4 * 128);
    copy_in(shared, x, 0, 1, token, 1, arrived, KEEP_FIRST);
  }
  __syncthreads();
  barrier_wait(arrived, 0);
  for (int i = threadIdx.x; i < 4 * 64; i += 32) {
    auto* at = reinterpret_cast<__nv_bfloat16*>(memory + swizzled(i / 64, i % 64 / 8) + i % 8 * 2);
    seen[i] = *at;
    *at = from_float<__nv_bfloat16>(to_float(*at) + 1.0f);
  }
  if (Fence) fence_async_proxy();
  __syncthreads();
  if (threadIdx.x == 0) {
    copy_out(y, 0, 1, token, 1, shared, KEEP_FIRST);
    copies_commit();
    copies_wait<0>();
  }
}

enum Mistake { NONE, FULL_NOT_AWAITED, EMPTY_NOT_AWAITED, TOO_MANY_BYTES, ARRIVES_TWICE, NEVER_AWAITED };

// One warp brings rows of 32 numbers, the other adds them up: out [32].
template <Mistake M>
__global__ void pipeline(const float* rows, float* out, int count) {
  constexpr int STAGES = 2;
  __shared__ __align__(128) float ring[STAGES][32];
  __shared__ __align__(8) unsigned long long full[STAGES], empty[STAGES];
  const int lane = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; ++i) {
      barrier_init(shared_address(full + i), 1);
      barrier_init(shared_address(empty + i), 1);
    }
    fence_barrier_init();
  }
  __syncthreads();
  float sum = 0;
  for (int i = 0; i < count; ++i) {
    const int stage = i % STAGES;
    const unsigned parity = i / STAGES % 2, ready = shared_address(full + stage), free = shared_address(empty + stage);
    if (threadIdx.x == 0) {
      if (M != EMPTY_NOT_AWAITED) barrier_wait(free, parity ^ 1);
      barrier_expect(ready, M == TOO_MANY_BYTES && i == 2 ? 256 : 128);
      if (M == ARRIVES_TWICE) barrier_arrive(ready);
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                       shared_address(ring[stage])),
                   "l"(rows + i * 32), "r"(128), "r"(ready)
                   : "memory");
    } else if (threadIdx.x >= 32) {
      if (M != FULL_NOT_AWAITED && !(M == NEVER_AWAITED && i == count - 1)) barrier_wait(ready, parity);
      sum += ring[stage][lane];
      __syncwarp();
      if (lane == 0) barrier_arrive(free);
    }
  }
  if (threadIdx.x >= 32) out[lane] = sum;
}

// y = x, by cp.async; pieces past `count` numbers are zero.
template <bool Wait>
__global__ void async_copies(const float* x, float* y, int count) {
  __shared__ __align__(16) float memory[128];
  const int at = threadIdx.x * 4, wanted = at < count ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(memory + at)), "l"(x + at),
               "r"(wanted)
               : "memory");
  asm volatile("cp.async.commit_group;" ::: "memory");
  if (Wait) asm volatile("cp.async.wait_group 0;" ::: "memory");
  __syncthreads();
  for (int i = 0; i < 4; ++i) y[i * 32 + threadIdx.x] = memory[i * 32 + threadIdx.x];
}

// Every block adds one to what the next gives it; flags are zero before.
__global__ void chain(int* flags, int* sums) {
  if (threadIdx.x == 0 && blockIdx.x + 1 < gridDim.x) {
    int ready;
    do {
      asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(ready) : "l"(flags + blockIdx.x + 1) : "memory");
    } while (!ready);
  }
  __syncthreads();
  if (threadIdx.x == 1) sums[blockIdx.x] = blockIdx.x + 1 < gridDim.x ? sums[blockIdx.x + 1] + 1 : 1;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) asm volatile("st.release.gpu.global.b32 [%0], 1;" ::"l"(flags + blockIdx.x) : "memory");
}

__global__ void clear(int* flags) { flags[threadIdx.x] = 0; }

// out [blocks][4]: each block's sum of what all blocks of its cluster of four have in shared memory.
__global__ void cluster_sums(float* out) {
  __shared__ __align__(16) float own[4];
  if (threadIdx.x < 4) own[threadIdx.x] = blockIdx.x * 4 + threadIdx.x;
  cluster_barrier();
  float4 sum{0, 0, 0, 0};
  for (int block = 0; block < 4; ++block) {
    const float4 v = load_from_block(shared_address(own), block);
    sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
  }
  if (threadIdx.x == 0) reinterpret_cast<float4*>(out)[blockIdx.x] = sum;
  if (blockIdx.x < 4 || threadIdx.x < 32) cluster_barrier();  // threads that have ended are not waited for
}

// out [blocks][4]: what the blocks of a cluster of four send each other. Bytes: how many each waits for.
template <int Bytes>
__global__ void cluster_sends(int* out) {
  __shared__ int words[4];
  __shared__ unsigned long long barrier;
  const unsigned here = shared_address(&barrier), block = blockIdx.x % 4;
  if (threadIdx.x == 0) {
    barrier_init(here, 1);
    fence_barrier_init();
    barrier_expect(here, Bytes);
  }
  __syncthreads();
  cluster_barrier();
  if (threadIdx.x < 4) {
    const unsigned rank = threadIdx.x, own = shared_address(words + block), word = blockIdx.x * 10 + threadIdx.x;
    unsigned there, barrier_there;
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(own), "r"(rank));
    asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(barrier_there) : "r"(here), "r"(rank));
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(there), "r"(word),
                 "r"(barrier_there)
                 : "memory");
  }
  barrier_wait(here, 0);
  if (threadIdx.x < 4) out[blockIdx.x * 4 + threadIdx.x] = words[threadIdx.x];
}

// The blocks of a cluster that end at once, all but the first.
__global__ void cluster_ends(float* out) {
  __shared__ __align__(16) float own[4];
  cluster_barrier();
  if (blockIdx.x > 0) return;
  for (int i = 0; i < 3; ++i) __syncthreads();
  out[threadIdx.x] = load_from_block(shared_address(own), 1).x;
}

// Two warpgroups take 176 registers a thread where all had 168, the third gives up Given of its.
template <int Given>
__global__ void takes_registers(float* out) {
  if (threadIdx.x < 128) {
    give_registers<168 - Given>();
  } else {
    take_registers<176>();
  }
  out[threadIdx.x] = 0;
}

// What must be found out, by number; out [64].
template <int Number>
__global__ void mistakes(float* out) {
  __shared__ float values[64];
  extern __shared__ __align__(16) char dynamic[];
  const int thread = threadIdx.x;
  values[thread] = thread;
  if (Number == 0) named_barrier(3, 96);                                                 // 64 threads come
  if (Number == 1 && thread < 32) __syncthreads(), named_barrier(1, 64);                 // the others end
  if (Number == 2) thread % 32 == 3 ? __syncwarp() : (void)__shfl_sync(~0u, thread, 0);  // not the same instruction
  if (Number == 3) out[thread + 1] = 0;                                                  // one too far
  if (Number == 4) out[-1 - thread] = 0;
  if (Number == 5) values[thread + 1] = 0;
  if (Number == 6) *reinterpret_cast<float4*>(out + 1 + thread % 4) = float4();
  if (Number == 7) dynamic[1024 + thread] = 0;
  if (Number == 8) asm volatile("st.shared.b32 [%0], %1;" ::"r"(shared_address(dynamic) + 100000), "r"(0));
  if (Number == 9) __shfl_sync(1u, thread, 0);
  if (Number == 10) barrier_arrive(shared_address(values));  // no barrier there
  if (Number == 11) out[thread] = __shfl_sync(0xFFFFu << thread % 32 / 16 * 16, thread, 5);
  if (Number == 12) out[thread] = values[63 - thread];  // no barrier in between
}

__global__ void writes_its_operand(float* x, float* out) { x[threadIdx.x] = out[threadIdx.x] = 0; }

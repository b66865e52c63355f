// Shared memory: addresses, the 128-byte swizzle, fragments of 8 x 8 tiles, barriers of a part of the block, and that
// of other blocks of a cluster.
#pragma once

namespace jax_ssd {

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// Byte offset of a 16-byte piece (0 to 7) of a row of 128 bytes in a tile that starts at a multiple of 1024 bytes.
__device__ __forceinline__ unsigned swizzled(unsigned row, unsigned piece) {
  return row * 128 + ((piece ^ (row & 7)) << 4);
}

// Four 8 x 8 tiles of 16 bits; lane l gives the address of row l % 8 of tile l / 8. Each thread gets, of each tile, the
// pair of columns 2(l%4) of row l/4; transposed, the pair of rows 2(l%4) of column l/4.
__device__ __forceinline__ void load_tiles(unsigned (&r)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void load_tiles_transposed(unsigned (&r)[4], unsigned address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void store_tiles(unsigned address, const unsigned (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
}

__device__ __forceinline__ void store_tiles_transposed(unsigned address, const unsigned (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]),
               "r"(r[1]), "r"(r[2]), "r"(r[3])
               : "memory");
}

// Waits for `threads` threads of the block at barrier `id` (1 to 15; 0 is __syncthreads).
__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// All threads of the cluster that have not ended wait for each other, whole warps at a time.
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_barrier() { cluster_arrive(), cluster_wait(); }

// Four numbers at this address in the shared memory of a block of the cluster.
__device__ __forceinline__ float4 load_from_block(unsigned address, unsigned rank) {
  unsigned there;
  float4 v;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(there)
               : "memory");
  return v;
}

// Makes this thread's writes to shared memory visible to wgmma and TMA, once a barrier has passed as well.
__device__ __forceinline__ void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

}  // namespace jax_ssd

// Copies that run beside the threads: memory barriers, TMA by tensor maps, registers moved between warpgroups.
#pragma once

#include "shared_memory.cuh"

namespace jax_ssd {

struct alignas(64) TensorMap {
  char bytes[128];
};

// A memory barrier is a phase bit that flips when `arrivals` arrivals and all announced bytes have come.
__device__ __forceinline__ void barrier_init(unsigned barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// After all barrier_init, before the __syncthreads that lets other threads use them.
__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and announces so many bytes of copies.
__device__ __forceinline__ void barrier_expect(unsigned barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Waits until the phase of this parity has ended; of a new barrier, the phase of parity 1 has.
__device__ __forceinline__ void barrier_wait(unsigned barrier, unsigned parity) {
  asm volatile(
      "{ .reg .pred p;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
      "@!p bra again; }" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// What the L2 cache should do with the lines of a copy.
constexpr unsigned long long KEEP = 0x1000000000000000ull;        // as it does with others
constexpr unsigned long long KEEP_LAST = 0x14F0000000000000ull;   // evict them last: others will read them
constexpr unsigned long long KEEP_FIRST = 0x12F0000000000000ull;  // evict them first: nobody will

// A box of a 4-d tensor map to shared memory; coordinates innermost first, what is out of bounds is zero.
__device__ __forceinline__ void copy_in(unsigned to, const TensorMap& map, int c0, int c1, int c2, int c3,
                                        unsigned barrier, unsigned long long policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(to),
      "l"(&map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(barrier), "l"(policy)
      : "memory");
}

// The reverse, as part of the thread's current group of copies; what is out of bounds is not written.
__device__ __forceinline__ void copy_out(const TensorMap& map, int c0, int c1, int c2, int c3, unsigned from,
                                         unsigned long long policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.global.shared::cta.tile.bulk_group.L2::cache_hint [%0, {%1, %2, %3, %4}], [%5], "
      "%6;" ::"l"(&map),
      "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(from), "l"(policy)
      : "memory");
}

// So many bytes, a multiple of 16, to shared memory as they lie; the barrier is told.
__device__ __forceinline__ void copy_line_in(unsigned to, const void* from, unsigned bytes, unsigned barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}

__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Until at most `Pending` of this thread's groups still read shared memory.
template <int Pending>
__device__ __forceinline__ void copies_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(Pending) : "memory");
}

// Until at most `Pending` of this thread's groups are unfinished: the others are in memory.
template <int Pending>
__device__ __forceinline__ void copies_wait() {
  asm volatile("cp.async.bulk.wait_group %0;" ::"n"(Pending) : "memory");
}

// All warps of a warpgroup change how many registers each of their threads has (a multiple of 8, 24 to 240).
template <int Registers>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}

template <int Registers>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}

// Until the kernels ahead in the stream have ended (programmatic dependent launch).
__device__ __forceinline__ void wait_for_earlier_kernels() { asm volatile("griddepcontrol.wait;" ::: "memory"); }

// Lets the next kernel in the stream start its launch.
__device__ __forceinline__ void let_next_kernel_start() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace jax_ssd

// PTX instructions, each a function named after its mnemonic with `_` for `.` and `::`; operands in the order of the
// text, vectors flattened. The Python side turns inline PTX into calls of them.
#pragma once

#include "copies.h"
#include "products.h"

namespace emulator::ptx {

// Arithmetic.

inline void ex2_approx_ftz_f32(float& d, float v) { d = flushed(exp2f(flushed(v))); }
inline void ex2_approx_f32(float& d, float v) { d = exp2f(v); }
inline void lg2_approx_ftz_f32(float& d, float v) { d = log2f(flushed(v)); }
inline void lg2_approx_f32(float& d, float v) { d = log2f(v); }
inline void rcp_approx_ftz_f32(float& d, float v) { d = flushed(1.0f / flushed(v)); }
inline void rsqrt_approx_ftz_f32(float& d, float v) { d = flushed(rsqrtf(flushed(v))); }
inline void tanh_approx_f32(float& d, float v) { d = tanhf(v); }

inline unsigned pair_of(unsigned low, unsigned high) { return low | high << 16; }
inline void cvt_rn_bf16x2_f32(unsigned& d, float high, float low) {
  d = pair_of(bfloat16_bits(low), bfloat16_bits(high));
}
inline void cvt_rn_f16x2_f32(unsigned& d, float high, float low) { d = pair_of(half_bits(low), half_bits(high)); }
// To nearest, ties away from zero.
inline void cvt_rna_tf32_f32(unsigned& d, float v) {
  const unsigned bits = bits_as<unsigned>(v);
  d = isfinite(v) ? (bits + 0x1000) & 0xFFFFE000u : bits;
}

template <class Operation>
unsigned bfloat16_each(unsigned a, unsigned b, unsigned c, Operation operation) {
  const auto at = [&](int i) {
    return bfloat16_bits(
        operation(bfloat16_value(a >> i & 0xFFFF), bfloat16_value(b >> i & 0xFFFF), bfloat16_value(c >> i & 0xFFFF)));
  };
  return pair_of(at(0), at(16));
}
template <class Operation>
unsigned half_each(unsigned a, unsigned b, unsigned c, Operation operation) {
  const auto at = [&](int i) {
    return half_bits(operation(half_value(a >> i & 0xFFFF), half_value(b >> i & 0xFFFF), half_value(c >> i & 0xFFFF)));
  };
  return pair_of(at(0), at(16));
}
inline float times_plus(float a, float b, float c) { return fmaf(a, b, c); }
inline float times(float a, float b, float) { return a * b; }
inline float plus(float a, float b, float) { return a + b; }
inline void fma_rn_bf16x2(unsigned& d, unsigned a, unsigned b, unsigned c) { d = bfloat16_each(a, b, c, times_plus); }
inline void fma_rn_f16x2(unsigned& d, unsigned a, unsigned b, unsigned c) { d = half_each(a, b, c, times_plus); }
inline void mul_rn_bf16x2(unsigned& d, unsigned a, unsigned b) { d = bfloat16_each(a, b, 0, times); }
inline void mul_bf16x2(unsigned& d, unsigned a, unsigned b) { d = bfloat16_each(a, b, 0, times); }
inline void mul_f16x2(unsigned& d, unsigned a, unsigned b) { d = half_each(a, b, 0, times); }
inline void mul_rn_f16x2(unsigned& d, unsigned a, unsigned b) { d = half_each(a, b, 0, times); }
inline void add_rn_bf16x2(unsigned& d, unsigned a, unsigned b) { d = bfloat16_each(a, b, 0, plus); }
inline void add_rn_f16x2(unsigned& d, unsigned a, unsigned b) { d = half_each(a, b, 0, plus); }

template <float value(unsigned)>
unsigned equal_halves(unsigned a, unsigned b) {
  const auto at = [&](int i) { return value(a >> i & 0xFFFF) == value(b >> i & 0xFFFF) ? 0xFFFFu : 0u; };
  return pair_of(at(0), at(16));
}
inline void set_eq_u32_bf16x2(unsigned& d, unsigned a, unsigned b) { d = equal_halves<bfloat16_value>(a, b); }
inline void set_eq_u32_f16x2(unsigned& d, unsigned a, unsigned b) { d = equal_halves<half_value>(a, b); }

// Products.

inline void mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(float& d0, float& d1, float& d2, float& d3, unsigned a0,
                                                                unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                                                                unsigned b1, float c0, float c1, float c2, float c3) {
  mma_16<Bfloat16>("mma.m16n8k16 bf16", d0, d1, d2, d3, {a0, a1, a2, a3}, {b0, b1}, {c0, c1, c2, c3});
}
inline void mma_sync_aligned_m16n8k8_row_col_f32_bf16_bf16_f32(float& d0, float& d1, float& d2, float& d3, unsigned a0,
                                                               unsigned a1, unsigned b0, float c0, float c1, float c2,
                                                               float c3) {
  mma_16<Bfloat16>("mma.m16n8k8 bf16", d0, d1, d2, d3, {a0, a1, 0, 0}, {b0, 0}, {c0, c1, c2, c3});
}
inline void mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32(float& d0, float& d1, float& d2, float& d3, unsigned a0,
                                                              unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                                                              unsigned b1, float c0, float c1, float c2, float c3) {
  mma_16<Half>("mma.m16n8k16 f16", d0, d1, d2, d3, {a0, a1, a2, a3}, {b0, b1}, {c0, c1, c2, c3});
}
inline void mma_sync_aligned_m16n8k8_row_col_f32_tf32_tf32_f32(float& d0, float& d1, float& d2, float& d3, unsigned a0,
                                                               unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                                                               unsigned b1, float c0, float c1, float c2, float c3) {
  mma_tf32("mma.m16n8k8 tf32", d0, d1, d2, d3, {a0, a1, a2, a3}, {b0, b1}, {c0, c1, c2, c3});
}

inline void wgmma_fence_sync_aligned() {}
inline void wgmma_commit_group_sync_aligned() { wgmma_commit(); }
inline void wgmma_wait_group_sync_aligned(int pending) { wgmma_wait(pending); }

// 8 x 8 tiles of 16 bits.

struct TileOperands {
  unsigned address, r[4];
};

// Lane l holds elements (l / 4, 2 (l % 4)) and the one after, transposed those at (2 (l % 4), l / 4) and below.
template <bool Load, bool Transposed>
void move_tiles(const char* what, TileOperands& own, int tiles) {
  meet_warp(what, ~0u, own, [=](TileOperands** all) {
    for (int tile = 0; tile < tiles; ++tile) {
      char* rows[8];
      for (int row = 0; row < 8; ++row) rows[row] = shared(all[8 * tile + row]->address, 16, 16);
      for (int lane = 0; lane < WARP; ++lane) {
        unsigned& pair = all[lane]->r[tile];
        for (int e = 0; e < 2; ++e) {
          const int first = lane / 4, second = lane % 4 * 2 + e;
          char* at = Transposed ? rows[second] + 2 * first : rows[first] + 2 * second;
          unsigned short value = static_cast<unsigned short>(pair >> (16 * e));
          if (Load) {
            memcpy(&value, at, 2);
            pair = e ? pair_of(pair & 0xFFFF, value) : value;
          } else {
            memcpy(at, &value, 2);
          }
        }
      }
    }
  });
}

inline void ldmatrix_sync_aligned_m8n8_x4_shared_b16(unsigned& r0, unsigned& r1, unsigned& r2, unsigned& r3,
                                                     unsigned address) {
  TileOperands own{address, {}};
  move_tiles<true, false>("ldmatrix", own, 4);
  r0 = own.r[0], r1 = own.r[1], r2 = own.r[2], r3 = own.r[3];
}
inline void ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(unsigned& r0, unsigned& r1, unsigned& r2, unsigned& r3,
                                                           unsigned address) {
  TileOperands own{address, {}};
  move_tiles<true, true>("ldmatrix.trans", own, 4);
  r0 = own.r[0], r1 = own.r[1], r2 = own.r[2], r3 = own.r[3];
}
inline void ldmatrix_sync_aligned_m8n8_x2_shared_b16(unsigned& r0, unsigned& r1, unsigned address) {
  TileOperands own{address, {}};
  move_tiles<true, false>("ldmatrix.x2", own, 2);
  r0 = own.r[0], r1 = own.r[1];
}
inline void ldmatrix_sync_aligned_m8n8_x2_trans_shared_b16(unsigned& r0, unsigned& r1, unsigned address) {
  TileOperands own{address, {}};
  move_tiles<true, true>("ldmatrix.x2.trans", own, 2);
  r0 = own.r[0], r1 = own.r[1];
}
inline void stmatrix_sync_aligned_m8n8_x4_shared_b16(unsigned address, unsigned r0, unsigned r1, unsigned r2,
                                                     unsigned r3) {
  TileOperands own{address, {r0, r1, r2, r3}};
  move_tiles<false, false>("stmatrix", own, 4);
}
inline void stmatrix_sync_aligned_m8n8_x4_trans_shared_b16(unsigned address, unsigned r0, unsigned r1, unsigned r2,
                                                           unsigned r3) {
  TileOperands own{address, {r0, r1, r2, r3}};
  move_tiles<false, true>("stmatrix.trans", own, 4);
}

inline void movmatrix_sync_aligned_m8n8_trans_b16(unsigned& d, unsigned v) {
  struct Operands {
    unsigned from, to;
  } own{v, 0};
  meet_warp("movmatrix", ~0u, own, [](Operands** all) {
    const auto element = [&](int row, int column) {
      return all[row * 4 + column / 2]->from >> (16 * (column % 2)) & 0xFFFF;
    };
    for (int lane = 0; lane < WARP; ++lane) {
      const int row = lane / 4, column = lane % 4 * 2;
      all[lane]->to = pair_of(element(column, row), element(column + 1, row));
    }
  });
  d = own.to;
}

// Shared memory.

template <class T>
void load_shared(unsigned address, T& d) {
  memcpy(&d, shared(address, sizeof(T), sizeof(T)), sizeof(T));
}
template <class T, int Count>
void store_shared(unsigned address, const T (&values)[Count]) {
  memcpy(shared(address, sizeof values, sizeof values), values, sizeof values);
}
inline void ld_shared_u16(unsigned short& d, unsigned address) { load_shared(address, d); }
inline void ld_shared_b32(unsigned& d, unsigned address) { load_shared(address, d); }
inline void ld_shared_f32(float& d, unsigned address) { load_shared(address, d); }
inline void ld_shared_v4_b32(unsigned& d0, unsigned& d1, unsigned& d2, unsigned& d3, unsigned address) {
  uint4 v;
  load_shared(address, v);
  d0 = v.x, d1 = v.y, d2 = v.z, d3 = v.w;
}
inline void ld_shared_v2_b32(unsigned& d0, unsigned& d1, unsigned address) {
  uint2 v;
  load_shared(address, v);
  d0 = v.x, d1 = v.y;
}
inline void st_shared_u16(unsigned address, unsigned short v) { store_shared(address, {v}); }
inline void st_shared_b16(unsigned address, unsigned short v) { store_shared(address, {v}); }
inline void st_shared_b32(unsigned address, unsigned v) { store_shared(address, {v}); }
inline void st_shared_f32(unsigned address, float v) { store_shared(address, {v}); }
inline void st_shared_v2_b32(unsigned address, unsigned a, unsigned b) { store_shared(address, {a, b}); }
inline void st_shared_v4_b32(unsigned address, unsigned a, unsigned b, unsigned c, unsigned d) {
  store_shared(address, {a, b, c, d});
}

inline void mapa_shared_cluster_u32(unsigned& d, unsigned address, unsigned rank) {
  d = cluster_address(address, rank);
}
inline void ld_shared_cluster_v4_f32(float& d0, float& d1, float& d2, float& d3, unsigned address) {
  float v[4];
  memcpy(v, cluster_shared(address, sizeof v, sizeof v), sizeof v);
  d0 = v[0], d1 = v[1], d2 = v[2], d3 = v[3];
}

// Barriers and flags.

inline void barrier_cluster_arrive_release_aligned() { cluster_arrive(); }
inline void barrier_cluster_wait_acquire_aligned() { cluster_wait(); }

inline void bar_sync(unsigned id, int count) { block_barrier(id, count, 0, "bar.sync"); }

inline void mbarrier_init_shared_cta_b64(unsigned at, int arrivals) { barrier_init(at, arrivals); }
inline void mbarrier_arrive_shared_cta_b64(unsigned at) { barrier_arrive(at, 0); }
inline void mbarrier_arrive_expect_tx_shared_cta_b64(unsigned at, unsigned bytes) { barrier_arrive(at, bytes); }
// In a loop until it is true.
inline void mbarrier_try_wait_parity_shared_cta_b64(unsigned at, unsigned parity) { barrier_wait(at, parity); }

inline void st_global_v4_f32(void* to, float a, float b, float c, float d) {
  const float v[4] = {a, b, c, d};
  memcpy(const_cast<void*>(global(to, 16)), v, sizeof v);
}

template <class T>
void ld_acquire_gpu_global_b32(T& d, const void* from) {
  static_assert(sizeof(T) == 4);
  Fiber& own = *current;
  if (own.polled == from && own.polled_at == releases) wait_for_change(releases, "a flag in global memory");
  memcpy(&d, global(from, 4), 4);
  own.polled = from;
  own.polled_at = releases;
}
inline void st_release_gpu_global_b32(void* to, unsigned v) {
  memcpy(const_cast<void*>(global(to, 4)), &v, 4);
  ++releases;
}

inline void fence_mbarrier_init_release_cluster() {}
inline void fence_proxy_async_shared_cta() { emulator::fence_async_proxy(); }
inline void fence_proxy_async() { emulator::fence_async_proxy(); }

// Copies.

inline void cp_async_bulk_tensor_4d_shared_cluster_global_tile_mbarrier_complete_tx_bytes_L2_cache_hint(
    unsigned to, const void* map, int c0, int c1, int c2, int c3, unsigned barrier, unsigned long long) {
  copy_in(to, map, {c0, c1, c2, c3}, barrier);
}
inline void cp_async_bulk_tensor_4d_global_shared_cta_tile_bulk_group_L2_cache_hint(const void* map, int c0, int c1,
                                                                                    int c2, int c3, unsigned from,
                                                                                    unsigned long long) {
  copy_out(map, {c0, c1, c2, c3}, from);
}
inline void cp_async_bulk_shared_cluster_global_mbarrier_complete_tx_bytes(unsigned to, const void* from,
                                                                           unsigned bytes, unsigned barrier) {
  copy_line_in(to, from, bytes, barrier);
}
inline void cp_async_bulk_global_shared_cta_bulk_group(void* to, unsigned from, unsigned bytes) {
  copy_line_out(to, from, bytes);
}
inline void st_async_shared_cluster_mbarrier_complete_tx_bytes_b32(unsigned to, unsigned word, unsigned barrier) {
  store_async(to, word, barrier);
}

inline void cp_async_bulk_commit_group() { commit(current->bulk_groups); }
inline void cp_async_bulk_wait_group_read(int pending) { wait_for_groups(current->bulk_groups, pending); }
inline void cp_async_bulk_wait_group(int pending) { wait_for_groups(current->bulk_groups, pending); }

inline void cp_async_cg_shared_global(unsigned to, const void* from, unsigned bytes) {
  copy_piece_in(to, from, bytes, bytes);
}
inline void cp_async_cg_shared_global(unsigned to, const void* from, unsigned bytes, unsigned wanted) {
  copy_piece_in(to, from, bytes, wanted);
}
inline void cp_async_ca_shared_global(unsigned to, const void* from, unsigned bytes) {
  copy_piece_in(to, from, bytes, bytes);
}
inline void cp_async_ca_shared_global(unsigned to, const void* from, unsigned bytes, unsigned wanted) {
  copy_piece_in(to, from, bytes, wanted);
}
inline void cp_async_commit_group() { commit(current->async_groups); }
inline void cp_async_wait_group(int pending) { wait_for_groups(current->async_groups, pending); }
inline void cp_async_wait_all() {
  commit(current->async_groups);
  wait_for_groups(current->async_groups, 0);
}

// Registers of a thread: an increase waits until others have given up as many.

inline void setmaxnreg_inc_sync_aligned_u32(int count) { own_block().registers[current->number / WARP] = count; }
inline void setmaxnreg_dec_sync_aligned_u32(int count) { own_block().registers[current->number / WARP] = count; }

// What changes no number.

inline void prefetch_global_L2(const void*) {}
inline void cp_async_bulk_prefetch_L2_global(const void* from, unsigned bytes) {
  if (bytes % 16) fail_f("a bulk prefetch of %u bytes, no multiple of 16", bytes);
  global(from, 16);
}
inline void griddepcontrol_wait() {}
inline void griddepcontrol_launch_dependents() {}

}  // namespace emulator::ptx

inline size_t __cvta_generic_to_shared(const void* pointer) { return emulator::shared_offset(pointer); }
inline void* __cvta_shared_to_generic(size_t address) { return emulator::shared(static_cast<unsigned>(address), 1, 1); }

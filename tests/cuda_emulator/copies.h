// Copies that run beside the threads. What a copy is to bring is poison from its issue until it is waited for; what it
// is to take away is read when it is waited for.
#pragma once

#include "collectives.h"

namespace emulator {

// What the Python side makes of a TensorMapArg, in the 128 bytes of a kernel parameter; innermost dimension first.
struct Map {
  uint64_t base;
  uint32_t magic;
  uint8_t rank, itemsize;
  uint16_t swizzle;
  uint64_t strides[5];  // bytes
  uint32_t shape[5];
  uint16_t box[5];
};
static_assert(sizeof(Map) <= 128);
constexpr uint32_t MAP_MAGIC = 0x7A6D6170;

inline Map read_map(const void* parameter, int rank) {
  Map map;
  memcpy(&map, parameter, sizeof map);
  if (map.magic != MAP_MAGIC) fail("this is no tensor map");
  if (map.rank != rank) fail_f("a copy of %d dimensions by a tensor map of %d", rank, map.rank);
  return map;
}

inline unsigned box_bytes(const Map& map) {
  unsigned bytes = map.itemsize;
  for (int d = 0; d < map.rank; ++d) bytes *= map.box[d];
  return bytes;
}

inline unsigned swizzled_address(const Map& map, unsigned address) {
  if (map.swizzle == 128) return address ^ (address >> 3 & 0x70);
  if (map.swizzle == 64) return address ^ (address >> 3 & 0x30);
  if (map.swizzle == 32) return address ^ (address >> 3 & 0x10);
  return address;
}

// Calls visit(shared address, global address or 0 where it is out of bounds) for every element of a box.
template <class Visit>
void walk_box(const Map& map, const std::vector<int>& at, unsigned shared_at, Visit visit) {
  const unsigned count = box_bytes(map) / map.itemsize;
  for (unsigned i = 0; i < count; ++i) {
    unsigned rest = i;
    uint64_t address = map.base;
    bool inside = true;
    for (int d = 0; d < map.rank; ++d) {
      const long long position = at[d] + (long long)(rest % map.box[d]);
      rest /= map.box[d];
      inside = inside && position >= 0 && position < map.shape[d];
      address += uint64_t(position) * map.strides[d];
    }
    visit(swizzled_address(map, shared_at + i * map.itemsize), inside ? reinterpret_cast<char*>(address) : nullptr);
  }
}

inline Barrier& barrier_at(unsigned address) {
  shared(address, 8, 8);
  const auto found = own_block().barriers.find(address);
  if (found == own_block().barriers.end()) fail_f("the mbarrier at %u was not initialised", address);
  return found->second;
}

inline void settle(Barrier& barrier) {
  if (barrier.pending == 0 && barrier.waiting && barrier.bytes) {
    long long coming = 0;
    for (auto& [bytes, copy] : barrier.copies) coming += bytes;
    if (coming == barrier.bytes) {
      for (auto& [bytes, copy] : barrier.copies) copy();
      barrier.copies.clear();
      barrier.bytes = 0;
    }
  }
  if (barrier.pending == 0 && barrier.bytes == 0) {
    barrier.pending = barrier.arrivals;
    ++barrier.generation;
  }
}

inline void barrier_init(unsigned address, int arrivals) {
  memset(shared(address, 8, 8), 0, 8);
  Barrier& barrier = own_block().barriers[address];
  barrier = Barrier{};
  barrier.arrivals = barrier.pending = arrivals;
}

inline void barrier_arrive(unsigned address, unsigned bytes) {
  Barrier& barrier = barrier_at(address);
  if (barrier.pending == 0) fail_f("more arrivals at the mbarrier at %u than its %d", address, barrier.arrivals);
  barrier.bytes += bytes;
  --barrier.pending;
  settle(barrier);
}

inline void barrier_wait(unsigned address, unsigned parity) {
  Barrier& barrier = barrier_at(address);
  if (parity > 1) fail_f("the parity of a phase is 0 or 1, got %u", parity);
  if ((barrier.generation & 1) != parity) return;
  ++barrier.waiting;
  settle(barrier);
  while ((barrier.generation & 1) == parity) {
    wait_for_change(barrier.generation, parity ? "an mbarrier, parity 1" : "an mbarrier, parity 0", address);
  }
  --barrier.waiting;
}

// A word to the memory of a block of the cluster, and its bytes to a barrier there.
inline void store_async(unsigned to, unsigned word, unsigned barrier) {
  char* target = cluster_shared(to, 4, 4);
  cluster_shared(barrier, 8, 8);
  const unsigned rank = barrier >> RANK_SHIFT, address = barrier & ((1u << RANK_SHIFT) - 1);
  if (to >> RANK_SHIFT != rank)
    fail_f("a store to block %u tells a barrier of block %u", (to >> RANK_SHIFT) - 1, rank - 1);
  auto& barriers = own_block().cluster->blocks[rank - 1]->barriers;
  const auto found = barriers.find(address);
  if (found == barriers.end()) fail_f("the mbarrier at %u of block %u was not initialised", address, rank - 1);
  found->second.copies.emplace_back(4, [=] { memcpy(target, &word, 4); });
  settle(found->second);
}

inline void copy_in(unsigned to, const void* parameter, std::vector<int> at, unsigned barrier) {
  const Map map = read_map(parameter, int(at.size()));
  const unsigned bytes = box_bytes(map);
  async_write(shared(to, bytes, 128), [&](char* there) { memset(there, POISON, bytes); });
  char* arena = own_block().arena;
  barrier_at(barrier).copies.push_back(
      {bytes, [=] {
         walk_box(map, at, to, [&](unsigned address, const char* from) {
           static const char zero[16] = {};
           async_write(arena + address, [&](char* there) { memcpy(there, from ? from : zero, map.itemsize); });
         });
       }});
  settle(barrier_at(barrier));
}

inline void copy_line_in(unsigned to, const void* from, unsigned bytes, unsigned barrier) {
  if (bytes % 16) fail_f("a bulk copy of %u bytes, no multiple of 16", bytes);
  char* target = shared(to, bytes, 16);
  async_write(target, [&](char* there) { memset(there, POISON, bytes); });
  global(from, 16);
  barrier_at(barrier).copies.push_back(
      {bytes, [=] { async_write(target, [&](char* there) { memcpy(there, from, bytes); }); }});
  settle(barrier_at(barrier));
}

inline void copy_out(const void* parameter, std::vector<int> at, unsigned from) {
  const Map map = read_map(parameter, int(at.size()));
  const char* source = async_shared(from, box_bytes(map), 128);
  current->bulk_groups.back().push_back([=] {
    walk_box(map, at, from, [&](unsigned address, char* to) {
      if (to) memcpy(to, source + (address - from), map.itemsize);
    });
  });
}

inline void copy_line_out(void* to, unsigned from, unsigned bytes) {
  if (bytes % 16) fail_f("a bulk copy of %u bytes, no multiple of 16", bytes);
  const char* source = async_shared(from, bytes, 16);
  global(to, 16);
  current->bulk_groups.back().push_back([=] { memcpy(to, source, bytes); });
}

// 4, 8 or 16 bytes by cp.async, of which `wanted` are read and the others are zero.
inline void copy_piece_in(unsigned to, const void* from, unsigned bytes, unsigned wanted) {
  char* target = shared(to, bytes, bytes);
  global(from, bytes);
  memset(target, POISON, bytes);
  current->async_groups.back().push_back([=] {
    memset(target, 0, bytes);
    memcpy(target, from, wanted);
  });
}

inline void commit(std::deque<std::vector<std::function<void()>>>& groups) { groups.emplace_back(); }

inline void wait_for_groups(std::deque<std::vector<std::function<void()>>>& groups, int pending) {
  while (int(groups.size()) > pending + 1) {
    for (auto& copy : groups.front()) copy();
    groups.pop_front();
  }
}

}  // namespace emulator

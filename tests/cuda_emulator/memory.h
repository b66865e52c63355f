// Blocks and their shared memory. A shared address is an offset into the block's arena, whose first bytes are reserved
// as on sm_90; what was never written reads as NaN. A second arena behind the first is what the asynchronous proxy
// (TMA, wgmma) sees: what threads write gets there by fence.proxy.async only.
#pragma once

#include "fibers.h"

namespace emulator {

constexpr unsigned RESERVED = 1024, MOST_SHARED = 227 * 1024, ARENA = 256 * 1024;
constexpr unsigned char POISON = 0xFF;

// A phase ends when `pending` arrivals and `bytes` announced bytes have come; a waiting thread watches `generation`.
struct Barrier {
  int arrivals = 0, pending = 0;
  long long bytes = 0;
  uint32_t generation = 0;
  int waiting = 0;
  std::vector<std::pair<unsigned, std::function<void()>>> copies;  // not yet delivered: bytes, and what to do
};

// A wgmma accumulator that is being computed, [64][columns], and where the registers of its 128 threads are.
struct Accumulator {
  int columns = 0, users = 0;
  std::vector<float> values;
  float* registers[WARPGROUP] = {};
};

struct Warpgroup {
  Meeting meeting;
  std::map<const float*, std::shared_ptr<Accumulator>> accumulators;  // by the registers of its first thread
  std::deque<std::vector<std::function<void()>>> groups{1};           // of products; the last one is open
};

struct Block {
  Index index;
  std::deque<Fiber> fibers;
  std::shared_ptr<Cluster> cluster;
  std::vector<int> order;
  int running = 0;
  char* arena = nullptr;  // twice: as threads see it, and as the asynchronous proxy does
  char* stacks = nullptr;
  unsigned used = RESERVED;  // end of the shared memory that the block has
  std::map<const void*, unsigned> statics;
  struct NamedBarrier {
    int count = 0, arrived = 0;
    unsigned votes = 0, result = 0;
    uint32_t generation = 0;
  } named[16];
  std::map<std::pair<int, unsigned>, Meeting> warps;  // by warp and mask
  std::map<int, Warpgroup> warpgroups;
  std::map<unsigned, Barrier> barriers;  // by shared address
  std::map<int, int> registers;          // of a thread, by warp, where setmaxnreg changed them
};

inline Index block_index_of(const Block* block) { return block->index; }

inline Block& own_block() { return *current->block; }

inline char* shared(unsigned address, unsigned bytes, unsigned alignment) {
  const Block& block = own_block();
  if (address < RESERVED || address + uint64_t(bytes) > block.used) {
    fail_f("shared address %u + %u bytes is outside of the block's %u to %u", address, bytes, RESERVED, block.used);
  }
  if (address % alignment) fail_f("shared address %u is not a multiple of %u", address, alignment);
  return block.arena + address;
}

// Shared memory of a block of the cluster has a number that says which block's.
constexpr unsigned RANK_SHIFT = 24;

inline unsigned cluster_address(unsigned address, unsigned rank) {
  shared(address, 1, 1);
  if (rank >= own_block().cluster->blocks.size()) fail_f("the cluster has no block %u", rank);
  return address | (rank + 1) << RANK_SHIFT;
}

inline char* cluster_shared(unsigned address, unsigned bytes, unsigned alignment) {
  const unsigned rank = (address >> RANK_SHIFT) - 1, at = address & ((1u << RANK_SHIFT) - 1);
  if (rank >= own_block().cluster->blocks.size()) fail_f("address %u is no shared address of a cluster", address);
  const Block* block = own_block().cluster->blocks[rank];
  if (!block) fail_f("block %u of the cluster does not run: its shared memory is not there", rank);
  if (at < RESERVED || at + uint64_t(bytes) > block->used || at % alignment) {
    fail_f("shared address %u + %u bytes of block %u of the cluster is outside or misaligned", at, bytes, rank);
  }
  return block->arena + at;
}

inline const char* async_shared(unsigned address, unsigned bytes, unsigned alignment) {
  return shared(address, bytes, alignment) + ARENA;
}

// Writes of every thread so far, which is more than this thread may know of.
inline void fence_async_proxy() {
  Block& block = own_block();
  memcpy(block.arena + ARENA + RESERVED, block.arena + RESERVED, block.used - RESERVED);
}

// A write of the asynchronous proxy: by `write` to what it is given.
template <class Write>
void async_write(char* at, Write write) {
  write(at);
  write(at + ARENA);
}

inline unsigned shared_offset(const void* pointer) {
  const auto offset = static_cast<const char*>(pointer) - own_block().arena;
  if (offset < 0 || offset > ARENA) fail("this pointer is not into shared memory");
  return static_cast<unsigned>(offset);
}

inline char* dynamic_shared() { return own_block().arena + RESERVED; }

// Static shared memory: a struct of the variables of one declaration.
template <class Variables>
Variables& static_shared() {
  static const char key = 0;
  Block& block = own_block();
  auto found = block.statics.find(&key);
  if (found == block.statics.end()) {
    const unsigned at = (block.used + 127) / 128 * 128;
    block.used = at + sizeof(Variables);
    if (block.used - RESERVED > MOST_SHARED) fail_f("%u bytes of shared memory are too many", block.used - RESERVED);
    found = block.statics.emplace(&key, at).first;
  }
  return *reinterpret_cast<Variables*>(block.arena + found->second);
}

inline const void* global(const void* pointer, unsigned alignment) {
  if (reinterpret_cast<uintptr_t>(pointer) % alignment) fail_f("a global address is not a multiple of %u", alignment);
  return pointer;
}

}  // namespace emulator

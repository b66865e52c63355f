// What threads do together: barriers of a block or a part of it, exchanges inside a warp or a warpgroup.
#pragma once

#include "memory.h"

namespace emulator {

// Leaves `own` operands and waits; the last of `count` threads runs action(operands of all, by position).
template <class Operands, class Action>
void meet(Meeting& meeting, const char* what, int position, int count, Operands& own, Action action) {
  if (meeting.arrived == 0) {
    meeting.what = what;
  } else if (strcmp(meeting.what, what) != 0) {
    fail(std::string("threads of one warp or warpgroup run different instructions: ") + meeting.what + " and " + what);
  }
  if (meeting.operands[position]) fail(std::string("a thread comes twice to ") + what);
  meeting.operands[position] = &own;
  if (++meeting.arrived == count) {
    action(reinterpret_cast<Operands**>(meeting.operands));
    memset(meeting.operands, 0, sizeof meeting.operands);
    meeting.arrived = 0;
    ++meeting.generation;
  } else {
    wait_for_change(meeting.generation, what);
  }
}

inline int threads_of_block() { return static_cast<int>(own_block().fibers.size()); }

// In a warp; threads that are not in the mask have null operands.
template <class Operands, class Action>
void meet_warp(const char* what, unsigned mask, Operands& own, Action action) {
  Block& block = own_block();
  const int warp = current->number / WARP, lane = current->number % WARP, here = threads_of_block() - warp * WARP;
  const unsigned present = here >= WARP ? ~0u : (1u << here) - 1;
  if (!(mask >> lane & 1)) fail_f("%s: lane %d is not in its own mask %08x", what, lane, mask);
  meet(block.warps[{warp, mask}], what, lane, __builtin_popcount(mask & present), own, action);
}

template <class Operands, class Action>
void meet_warpgroup(const char* what, Operands& own, Action action) {
  const int group = current->number / WARPGROUP;
  if (threads_of_block() < (group + 1) * WARPGROUP) fail_f("%s: its warpgroup is not whole", what);
  meet(own_block().warpgroups[group].meeting, what, current->number % WARPGROUP, WARPGROUP, own, action);
}

inline void complete(Block::NamedBarrier& barrier) {
  barrier.result = barrier.votes;
  barrier.votes = 0;
  barrier.arrived = barrier.count = 0;
  ++barrier.generation;
}

// Barrier `id` of `count` threads, 0 for all that still run; the result is the OR of what they bring.
inline unsigned block_barrier(unsigned id, int count, unsigned vote, const char* what) {
  Block& block = own_block();
  if (id >= 16) fail_f("there is no barrier %u", id);
  if (count % WARP) fail_f("barrier %u of %d threads, which are not whole warps", id, count);
  auto& barrier = block.named[id];
  const int expected = count ? count : -1;
  if (barrier.arrived == 0) barrier.count = expected;
  if (barrier.count != expected) fail_f("barrier %u of %d threads and of %d at once", id, barrier.count, expected);
  barrier.votes |= vote;
  if (++barrier.arrived == (count ? count : block.running)) {
    complete(barrier);
  } else {
    wait_for_change(barrier.generation, what, id);
  }
  return barrier.result;
}

inline void cluster_passes(Cluster& cluster) {
  if (cluster.arrived < cluster.running || !cluster.running) return;
  cluster.arrived = 0;
  ++cluster.generation;
}

inline void cluster_arrive() {
  Cluster& cluster = *own_block().cluster;
  current->cluster_seen = cluster.generation;
  ++cluster.arrived;
  cluster_passes(cluster);
}

inline void cluster_wait() {
  Cluster& cluster = *own_block().cluster;
  if (cluster.generation == current->cluster_seen) wait_for_change(cluster.generation, "the cluster's barrier");
}

inline void thread_leaves_barriers() {
  Block& block = own_block();
  --block.running;
  --block.cluster->running;
  cluster_passes(*block.cluster);
  for (auto& barrier : block.named) {
    if (barrier.count < 0 && barrier.arrived == block.running && block.running) complete(barrier);
  }
}

template <class T, class Source>
T shuffle(const char* what, unsigned mask, T value, int width, Source source_of) {
  struct Operands {
    T value, result;
    bool has_result;
    int source;
  };
  const int lane = current->number % WARP, from = source_of(lane);
  Operands own{value, value, true, from >= lane / width * width && from < lane / width * width + width ? from : lane};
  meet_warp(what, mask, own, [](Operands** all) {
    for (int i = 0; i < WARP; ++i) {
      if (!all[i]) continue;
      all[i]->has_result = all[all[i]->source] != nullptr;
      if (all[i]->has_result) all[i]->result = all[all[i]->source]->value;
    }
  });
  if (!own.has_result) fail_f("%s from lane %d, which is not in the mask %08x", what, own.source, mask);
  return own.result;
}

inline unsigned ballot(const char* what, unsigned mask, bool vote) {
  struct Operands {
    bool vote;
    unsigned result;
  } own{vote, 0};
  meet_warp(what, mask, own, [](Operands** all) {
    unsigned votes = 0;
    for (int i = 0; i < WARP; ++i) votes |= unsigned(all[i] && all[i]->vote) << i;
    for (int i = 0; i < WARP; ++i) {
      if (all[i]) all[i]->result = votes;
    }
  });
  return own.result;
}

inline unsigned reduce_or(const char* what, unsigned mask, unsigned value) {
  struct Operands {
    unsigned value, result;
  } own{value, 0};
  meet_warp(what, mask, own, [](Operands** all) {
    unsigned result = 0;
    for (int i = 0; i < WARP; ++i) result |= all[i] ? all[i]->value : 0;
    for (int i = 0; i < WARP; ++i) {
      if (all[i]) all[i]->result = result;
    }
  });
  return own.result;
}

}  // namespace emulator

inline void __syncthreads() { emulator::block_barrier(0, 0, 0, "__syncthreads"); }
inline int __syncthreads_or(int vote) { return emulator::block_barrier(0, 0, vote != 0, "__syncthreads_or") != 0; }
inline int __syncthreads_and(int vote) { return emulator::block_barrier(0, 0, vote == 0, "__syncthreads_and") == 0; }
inline void __syncwarp(unsigned mask = ~0u) {
  int nothing = 0;
  emulator::meet_warp("__syncwarp", mask, nothing, [](int**) {});
}
template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
  return emulator::shuffle("__shfl_sync", mask, value, width,
                           [=](int lane) { return lane / width * width + (source & (width - 1)); });
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned distance, int width = 32) {
  return emulator::shuffle("__shfl_up_sync", mask, value, width, [=](int lane) { return lane - int(distance); });
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned distance, int width = 32) {
  return emulator::shuffle("__shfl_down_sync", mask, value, width, [=](int lane) { return lane + int(distance); });
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32) {
  return emulator::shuffle("__shfl_xor_sync", mask, value, width, [=](int lane) { return lane ^ bits; });
}
inline unsigned __reduce_or_sync(unsigned mask, unsigned value) {
  return emulator::reduce_or("__reduce_or_sync", mask, value);
}
inline unsigned __ballot_sync(unsigned mask, int vote) { return emulator::ballot("__ballot_sync", mask, vote != 0); }
inline int __any_sync(unsigned mask, int vote) { return emulator::ballot("__any_sync", mask, vote != 0) != 0; }
inline int __all_sync(unsigned mask, int vote) { return emulator::ballot("__all_sync", mask, vote == 0) == 0; }

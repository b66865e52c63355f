// Threads as fibers: each runs until it waits for others, the scheduler then runs another one. All blocks of a launch
// share one CPU thread, so nothing here is atomic.
#pragma once

#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

namespace emulator {

constexpr int MOST_THREADS = 1024, WARP = 32, WARPGROUP = 128;
constexpr size_t STACK = 512 * 1024;  // only what is touched takes memory

struct Index {
  unsigned x = 1, y = 1, z = 1;
};

// What threads exchange while they wait for each other: each leaves the address of its operands.
struct Meeting {
  const char* what = nullptr;
  int arrived = 0;
  uint32_t generation = 0;
  void* operands[WARPGROUP] = {};
};

struct Block;

// Neighbouring blocks that see each other's shared memory.
struct Cluster {
  std::vector<Block*> blocks;  // null before they start and after they end
  int running = 0, arrived = 0;
  uint32_t generation = 0;
};

struct Fiber {
  void* stack_pointer = nullptr;
  char* stack = nullptr;  // its lowest byte
  Block* block = nullptr;
  Index thread;
  int number = 0;
  bool done = false;
  // Runs again once *watched differs from `seen`.
  const uint32_t* watched = nullptr;
  uint32_t seen = 0;
  const char* waits_for = "";
  unsigned detail = 0;
  // The last load of a flag that was not set: the next one waits until something is released.
  const void* polled = nullptr;
  uint32_t polled_at = 0;
  uint32_t cluster_seen = 0;  // generation of the cluster's barrier when this thread arrived there
  // Groups of copies by this thread: of cp.async, of bulk copies out; the last one is open.
  std::deque<std::vector<std::function<void()>>> async_groups{1}, bulk_groups{1};
};

inline Fiber* current = nullptr;
inline Index block_size, grid_size;
inline uint32_t releases = 0;  // flags set by any thread
inline jmp_buf outside;
inline std::string failure;
inline void (*thread_body)() = nullptr;

Index block_index_of(const Block*);

// Ends the launch with an error.
[[noreturn]] inline void fail(const std::string& what) {
  failure = what;
  if (current) {
    const Index b = block_index_of(current->block), t = current->thread;
    char where[160];
    snprintf(where, sizeof where, " (block %u,%u,%u thread %u,%u,%u = warp %d lane %d)", b.x, b.y, b.z, t.x, t.y, t.z,
             current->number / WARP, current->number % WARP);
    failure += where;
  }
  longjmp(outside, 1);
}

template <class... A>
[[noreturn]] void fail_f(const char* format, A... values) {
  char text[512];
  snprintf(text, sizeof text, format, values...);
  fail(text);
}

inline void* scheduler_stack_pointer = nullptr;

// Saves where this stack is at *from and goes on at `to`.
__attribute__((naked, noinline, noipa)) static void switch_stack(void** from, void* to) {
  asm volatile(
      "push %%rbp; push %%rbx; push %%r12; push %%r13; push %%r14; push %%r15;"
      "mov %%rsp, (%%rdi); mov %%rsi, %%rsp;"
      "pop %%r15; pop %%r14; pop %%r13; pop %%r12; pop %%rbx; pop %%rbp; ret" ::
          : "memory");
}

inline void suspend() {
  Fiber* own = current;
  if (static_cast<char*>(__builtin_frame_address(0)) < own->stack + STACK / 4)
    fail("the thread's stack is nearly full");
  switch_stack(&own->stack_pointer, scheduler_stack_pointer);
}

// Until `counter` changes.
inline void wait_for_change(const uint32_t& counter, const char* what, unsigned detail = 0) {
  Fiber& own = *current;
  own.watched = &counter;
  own.seen = counter;
  own.waits_for = what;
  own.detail = detail;
  while (*own.watched == own.seen) suspend();
  own.watched = nullptr;
}

void thread_ends();

[[noreturn]] inline void fiber_entry() {
  thread_body();
  thread_ends();
  current->done = true;
  suspend();
  abort();
}

inline void prepare(Fiber& fiber, char* stack) {
  void** top = reinterpret_cast<void**>(stack + STACK - 64);
  *--top = nullptr;  // the return address of fiber_entry, which does not return
  *--top = reinterpret_cast<void*>(&fiber_entry);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  fiber.stack_pointer = top;
  fiber.stack = stack;
}

inline void resume(Fiber& fiber) {
  current = &fiber;
  switch_stack(&scheduler_stack_pointer, fiber.stack_pointer);
  current = nullptr;
}

}  // namespace emulator

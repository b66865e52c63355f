// Runs the blocks of a launch: in order, a block until all its threads have ended or wait, then the next.
#pragma once

#include <dlfcn.h>
#include <xmmintrin.h>

#include <algorithm>
#include <random>
#include <utility>

#include "instructions.h"

namespace emulator {

inline void thread_ends() {
  wait_for_groups(current->async_groups, 0);
  if (current->bulk_groups.size() > 1 || !current->bulk_groups.back().empty()) {
    fail("a thread ends before its bulk copies out of shared memory have");
  }
  thread_leaves_barriers();
}

struct Memory {  // of a resident block
  char *arena, *stacks;
};

inline char* reserve(size_t bytes) {
  void* memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) fail("no memory for a block");
  return static_cast<char*>(memory);
}

class Grid {
 public:
  Grid(unsigned dynamic_shared, unsigned cluster, unsigned seed)
      : dynamic_shared_(dynamic_shared), cluster_(cluster), random_(seed) {}

  void run() {
    const uint64_t all = uint64_t(grid_size.x) * grid_size.y * grid_size.z;
    uint64_t next = 0;
    while (next < all || !active_.empty()) {
      bool moved = false;
      for (size_t i = 0; i < active_.size(); ++i) moved = advance(*active_[i]) || moved;
      for (size_t i = 0; i < active_.size();) {
        if (active_[i]->running == 0) {
          finish(*active_[i]);
          active_.erase(active_.begin() + i);
        } else {
          ++i;
        }
      }
      if (moved) continue;
      if (next == all) report_deadlock();
      start(next++);
    }
    for (const Memory& memory : free_) {
      munmap(memory.arena, 2 * ARENA);
      munmap(memory.stacks, MOST_THREADS * STACK);
    }
  }

 private:
  void start(uint64_t number) {
    auto block = std::make_unique<Block>();
    block->index = {unsigned(number % grid_size.x), unsigned(number / grid_size.x % grid_size.y),
                    unsigned(number / grid_size.x / grid_size.y)};
    if (free_.empty()) free_.push_back({reserve(2 * ARENA), reserve(MOST_THREADS * STACK)});
    block->arena = free_.back().arena;
    block->stacks = free_.back().stacks;
    free_.pop_back();
    memset(block->arena, POISON, 2 * ARENA);
    block->used = RESERVED + dynamic_shared_;
    if (dynamic_shared_ > MOST_SHARED) fail_f("%u bytes of shared memory are too many", dynamic_shared_);
    block->running = int(block_size.x * block_size.y * block_size.z);
    if (number % cluster_ == 0) {
      newest_ = std::make_shared<Cluster>();
      newest_->blocks.resize(cluster_);
      newest_->running = int(cluster_) * block->running;
    }
    block->cluster = newest_;
    newest_->blocks[number % cluster_] = block.get();
    block->fibers.resize(block->running);
    // Warps run in a random order, and so do the lanes of each: what is not ordered by the program is not ordered here.
    block->order.resize(block->running);
    for (int i = 0; i < block->running; ++i) block->order[i] = i;
    std::shuffle(block->order.begin(), block->order.end(), random_);
    for (int i = 0; i < block->running; ++i) {
      Fiber& fiber = block->fibers[i];
      fiber.block = block.get();
      fiber.number = i;
      fiber.thread = {i % block_size.x, i / block_size.x % block_size.y, i / block_size.x / block_size.y};
      prepare(fiber, block->stacks + i * STACK);
    }
    active_.push_back(std::move(block));
  }

  bool advance(Block& block) {
    bool moved = false;
    for (bool any = true; any;) {
      any = false;
      for (int i : block.order) {
        Fiber& fiber = block.fibers[i];
        if (fiber.done || (fiber.watched && *fiber.watched == fiber.seen)) continue;
        resume(fiber);
        any = moved = true;
      }
    }
    return moved;
  }

  void finish(Block& block) {
    current = &block.fibers[0];
    for (auto& [address, barrier] : block.barriers) {
      if (!barrier.copies.empty()) fail_f("the block ends before copies for the mbarrier at %u were awaited", address);
    }
    for (auto& [number, group] : block.warpgroups) {
      if (!group.accumulators.empty()) fail("the block ends before its products (wgmma) were awaited");
    }
    const int warps = int(block.fibers.size() + WARP - 1) / WARP;
    // To each thread of a block that has the multiprocessor, a quarter of whose registers serves a quarter of its
    // warps.
    const int granted = 16 * 1024 / ((warps + 3) / 4 * WARP) / 8 * 8;
    int wanted = (warps - int(block.registers.size())) * granted;
    for (auto& [warp, count] : block.registers) wanted += count;
    if (wanted > warps * granted) {
      fail_f("setmaxnreg waits forever: the warps want %d registers a lane together, and got %d", wanted,
             warps * granted);
    }
    const auto written = [](char byte) { return byte != char(POISON); };
    if (std::any_of(block.arena, block.arena + RESERVED, written) ||
        std::any_of(block.arena + block.used, block.arena + ARENA, written)) {
      fail_f("the block wrote outside of its shared memory, %u to %u", RESERVED, block.used);
    }
    current = nullptr;
    std::replace(block.cluster->blocks.begin(), block.cluster->blocks.end(), &block, static_cast<Block*>(nullptr));
    free_.push_back({block.arena, block.stacks});
  }

  [[noreturn]] void report_deadlock() {
    std::string text = "deadlock: every thread waits";
    for (size_t b = 0; b < active_.size() && b < 4; ++b) {
      const Block& block = *active_[b];
      const int count = int(block.fibers.size());
      text += "; block " + std::to_string(block.index.x) + "," + std::to_string(block.index.y) + "," +
              std::to_string(block.index.z) + ":";
      const auto state = [&](int i) {
        const Fiber& fiber = block.fibers[i];
        return fiber.done ? std::string("ended") : std::string(fiber.waits_for) + " " + std::to_string(fiber.detail);
      };
      for (int i = 0, j; i < count; i = j) {
        for (j = i + 1; j < count && state(j) == state(i);) ++j;
        text += " threads " + std::to_string(i) + "-" + std::to_string(j - 1) + ": " + state(i) + ",";
      }
      for (const auto& [address, barrier] : block.barriers) {
        if (!barrier.waiting) continue;
        long long coming = 0;
        for (auto& copy : barrier.copies) coming += copy.first;
        text += " mbarrier " + std::to_string(address) + " lacks " + std::to_string(barrier.pending) + " of " +
                std::to_string(barrier.arrivals) + " arrivals, expects " + std::to_string(barrier.bytes) +
                " bytes and has " + std::to_string(coming) + ",";
      }
    }
    fail(text);
  }

  unsigned dynamic_shared_, cluster_;  // blocks of a cluster, which are neighbours along x
  std::shared_ptr<Cluster> newest_;
  std::mt19937 random_;
  std::vector<std::unique_ptr<Block>> active_;
  std::vector<Memory> free_;
};

inline uintptr_t fault_offset = 0;

// A bad access in a kernel: says where, and leaves the launch.
inline void on_signal(int number, siginfo_t* info, void* context) {
  const uintptr_t at = static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP];
  Dl_info library;
  fault_offset = dladdr(reinterpret_cast<void*>(at), &library) ? at - uintptr_t(library.dli_fbase) : 0;
  char text[128];
  if (number == SIGILL) {
    snprintf(text, sizeof text, "a misaligned address, or an index outside of its array");
  } else {
    snprintf(text, sizeof text, "an access outside of every buffer, at %p", info->si_addr);
  }
  fail(text);
}

template <class... Parameters, size_t... I>
void call(void (*kernel)(Parameters...), void** arguments, std::index_sequence<I...>) {
  kernel(*static_cast<Parameters*>(arguments[I])...);
}

template <auto Kernel>
struct Caller;
template <class... Parameters, void (*Kernel)(Parameters...)>
struct Caller<Kernel> {
  static inline void** arguments;
  static constexpr size_t COUNT = sizeof...(Parameters);
  static constexpr size_t SIZES[] = {sizeof(Parameters)..., 0};
  static void body() { call(Kernel, arguments, std::index_sequence_for<Parameters...>{}); }
};

struct Launch {
  unsigned grid[3], block[3], shared_memory, cluster, seed, count;
  void** arguments;
  const unsigned* sizes;
};

// 0, or 1 with a text and, for a bad access, where in this library it was.
template <auto Kernel>
int run(const Launch* launch, char* error, size_t size, uint64_t* where) {
  using Call = Caller<Kernel>;
  grid_size = {launch->grid[0], launch->grid[1], launch->grid[2]};
  block_size = {launch->block[0], launch->block[1], launch->block[2]};
  Call::arguments = launch->arguments;
  thread_body = &Call::body;
  current = nullptr;
  fault_offset = 0;

  static char signal_stack[64 * 1024];
  stack_t own_stack{}, old_stack{};
  own_stack.ss_sp = signal_stack;
  own_stack.ss_size = sizeof signal_stack;
  sigaltstack(&own_stack, &old_stack);
  const int signals[] = {SIGSEGV, SIGBUS, SIGILL};
  struct sigaction action{}, old[3];
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  for (int i = 0; i < 3; ++i) sigaction(signals[i], &action, &old[i]);

  const unsigned control = _mm_getcsr();
  _mm_setcsr(0x1F80);  // as C++ has it: a thread of XLA's flushes subnormal numbers to zero

  volatile int result = 0;
  if (setjmp(outside) == 0) {
    if (launch->count != Call::COUNT)
      fail_f("the kernel has %zu parameters, the launch %u", Call::COUNT, launch->count);
    for (unsigned i = 0; i < launch->count; ++i) {
      if (launch->sizes[i] != Call::SIZES[i]) {
        fail_f("parameter %u has %zu bytes, the launch passes %u", i, Call::SIZES[i], launch->sizes[i]);
      }
    }
    Grid(launch->shared_memory, launch->cluster, launch->seed).run();
  } else {
    snprintf(error, size, "%s", failure.c_str());
    *where = fault_offset;
    result = 1;
  }
  current = nullptr;
  _mm_setcsr(control);
  for (int i = 0; i < 3; ++i) sigaction(signals[i], &old[i], nullptr);
  sigaltstack(&old_stack, nullptr);
  return result;
}

}  // namespace emulator

// The C function NAME, which runs the kernel of an expression in parentheses.
#define EMULATOR_KERNEL(...) &__VA_ARGS__
#define EMULATOR_ENTRY(NAME, EXPRESSION)                                                                               \
  extern "C" __attribute__((visibility("default"))) int NAME(const emulator::Launch* launch, char* error, size_t size, \
                                                             uint64_t* where) {                                        \
    return emulator::run<EMULATOR_KERNEL EXPRESSION>(launch, error, size, where);                                      \
  }

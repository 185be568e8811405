// What the shim's own files share: a thread of a block as a fiber, a block, the launch that runs. Knows nothing of kernels.
#pragma once
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "simt.h"

namespace baton::simt {

constexpr int MOST_THREADS = 1024, BARRIERS = 16;
constexpr size_t SHARED_BYTES = 227 * 1024, STATIC_BYTES = 48 * 1024;  // of a block, on sm_90
constexpr size_t WITHOUT_OPT_IN = 48 * 1024;  // static and dynamic together, of a launch with no more dynamic memory than that (device.cuh)
constexpr size_t SHARED_SLOT = 256 * 1024;                              // of the arena, per resident block
constexpr size_t STACK_BYTES = 128 * 1024;

struct Copy {
  void* to;
  const void* from;
  int bytes, filled;
};

struct Block;

struct Fiber {
  void* stack_pointer = nullptr;
  char* stack = nullptr;
  Block* block = nullptr;
  dim3 thread;
  int id = 0;
  bool done = false;
  const char* waits = nullptr;  // for what, while it waits
  Site site{};
  unsigned mask = 0;
  Meeting meeting = nullptr;
  const void* in = nullptr;
  void* out = nullptr;
  std::vector<Copy> copies;               // not committed yet
  std::vector<std::vector<Copy>> groups;  // oldest first
  std::vector<uint32_t> clock;            // race.cpp: per warp, the newest of its accesses that this thread is behind
};

struct Barrier {
  std::vector<Fiber*> waiting;
  int arrived = 0, expected = 0;
  std::vector<Fiber*> all;  // those that came, waiting or not
};

struct Block {
  dim3 index;
  int slot = 0, threads = 0, alive = 0;
  char* shared = nullptr;
  size_t dynamic_bytes = 0, used = 0;  // static memory lies behind the dynamic
  std::map<int, void*> statics;
  Barrier barriers[BARRIERS];
  bool any = false, any_result = false;
  std::vector<Fiber> fibers;
};

struct Launch {
  const char* name = "";
  dim3 grid, block;
  size_t shared = 0;
  void (*body)(void*) = nullptr;
  void* arguments = nullptr;
  std::vector<Block> blocks;  // resident
  std::vector<Fiber*> ready;
  Fiber* now = nullptr;
  bool failed = false;
  bool meeting = false;  // whether a warp's meeting runs: one step, in which nobody steps aside
};

// fibers.cpp: save the running stack's pointer, go on with another; a fresh fiber begins in `main` on stack `number`.
extern "C" void baton_simt_switch(void** save, void* load);
void prepare(Fiber& fiber, size_t number, void (*main)());
bool grow(size_t threads, size_t blocks);
void shrink();  // until the next launch; each stack is two of a process' 65,530 mappings

// While it lives, a fault of a fiber ends the launch (crash.cpp).
class Faults {
 public:
  Faults();
  ~Faults();

 private:
  stack_t before_{};
};

extern Launch* running;
extern std::mt19937_64 random_numbers;  // what schedules are drawn from
extern char* arena;
extern size_t arena_bytes;

// race.cpp, where the kernels are compiled with BATON_SIMT_RACE; else empty.
void race_start(Block& block);
void race_join(const std::vector<Fiber*>& fibers);
void race_access(const void* at, size_t bytes, bool write, bool atomic);
// What the running thread has done is in the clock from here on; it has seen what is in the clock.
void race_release(std::vector<uint32_t>& clock);
void race_acquire(const std::vector<uint32_t>& clock);

void wait_here(const char* what, Site site);  // until somebody makes the running thread ready
void hopper_start(Block& block);              // hopper.cpp: a block begins

}  // namespace baton::simt

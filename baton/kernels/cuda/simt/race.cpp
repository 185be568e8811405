// Races on shared memory: the kernels are compiled with gcc's thread sanitizer, and what it calls before each access is answered
// here instead of by its own runtime. Knows nothing of kernels. Without BATON_SIMT_RACE nothing is checked.
//
// A thread's clock says, per warp, the newest access of that warp which it is behind; threads that meet at a barrier or
// a warp's meeting join clocks. Two accesses of one byte, one of them a write, by threads that neither is behind the
// other's, are a race, whether or not this schedule showed it. So are accesses outside the block's own shared memory.
#include "runtime.h"

#ifdef BATON_SIMT_RACE
#include <dlfcn.h>

namespace baton::simt {

namespace {

struct Access {
  int thread = -1;
  uint32_t clock = 0;
  bool atomic = false;
};

struct Cell {
  uint64_t block = 0;  // which block's life this is of
  Access write, reads[2];
};

std::vector<Cell> cells;
uint64_t lives = 0;
std::vector<uint64_t> life_of_slot;

bool behind(const Fiber& me, const Access& access) {
  return access.thread == me.id || access.thread < 0 || me.clock[size_t(access.thread / 32)] >= access.clock;
}

void report(const char* what, const Access& other, size_t offset, const void* from) {
  Dl_info info{};
  dladdr(from, &info);
  const auto at = reinterpret_cast<uintptr_t>(from) - reinterpret_cast<uintptr_t>(info.dli_fbase) - 1;
  const Fiber& me = *running->now;
  fail("race on byte %zu of shared memory: thread %d %s what thread %d has touched, and no barrier is between them [0x%zx]",
       offset, me.id, what, other.thread, size_t(at));
}

void check(const void* at, size_t bytes, bool write, bool atomic, const void* from) {
  if (!running || !running->now) return;
  const size_t place = size_t(static_cast<const char*>(at) - arena);
  if (static_cast<const char*>(at) < arena || place >= arena_bytes) return;
  Fiber& me = *running->now;
  const size_t slot = place / SHARED_SLOT, offset = place % SHARED_SLOT;
  if (int(slot) != me.block->slot || offset + bytes > me.block->used)
    return fail("thread %d is outside of its block's shared memory: byte %zu of %zu", me.id, offset, me.block->used);
  if (!atomic) maybe_yield();
  const uint32_t now = me.clock[size_t(me.id / 32)] + 1;
  for (size_t i = place; i < place + bytes; i++) {
    Cell& cell = cells[i];
    if (cell.block != life_of_slot[slot]) cell = Cell(), cell.block = life_of_slot[slot];
    if (!behind(me, cell.write) && !(atomic && cell.write.atomic)) return report(write ? "writes" : "reads", cell.write, offset, from);
    if (!write) {
      Access& mine = cell.reads[0].thread == me.id || cell.reads[0].thread < 0 ? cell.reads[0] : cell.reads[1];
      mine = {me.id, now, false};
      continue;
    }
    for (const Access& read : cell.reads)
      if (!behind(me, read)) return report("writes", read, offset, from);
    cell.write = {me.id, now, atomic};
    cell.reads[0] = cell.reads[1] = Access();
  }
}

}  // namespace

void race_start(Block& block) {
  if (cells.size() < arena_bytes) cells.assign(arena_bytes, Cell());
  if (life_of_slot.size() <= size_t(block.slot)) life_of_slot.resize(size_t(block.slot) + 1);
  life_of_slot[size_t(block.slot)] = ++lives;
  for (Fiber& fiber : block.fibers) fiber.clock.assign(size_t(block.threads + 31) / 32, 0);
}

// An access carries its own warp's clock + 1, so that it is behind nobody until they meet.
void race_join(const std::vector<Fiber*>& fibers) {
  static std::vector<uint32_t> joined;
  joined.assign(fibers[0]->clock.size(), 0);
  for (const Fiber* fiber : fibers) {
    for (size_t w = 0; w < joined.size(); w++) joined[w] = std::max(joined[w], fiber->clock[w]);
    const size_t mine = size_t(fiber->id / 32);
    joined[mine] = std::max(joined[mine], fiber->clock[mine] + 1);
  }
  for (Fiber* fiber : fibers) fiber->clock = joined;
}

void race_release(std::vector<uint32_t>& clock) {
  Fiber& me = *running->now;
  const size_t mine = size_t(me.id / 32);
  me.clock[mine]++;
  clock.resize(me.clock.size());
  for (size_t w = 0; w < clock.size(); w++) clock[w] = std::max(clock[w], me.clock[w]);
}

void race_acquire(const std::vector<uint32_t>& clock) {
  Fiber& me = *running->now;
  for (size_t w = 0; w < clock.size(); w++) me.clock[w] = std::max(me.clock[w], clock[w]);
}

void race_access(const void* at, size_t bytes, bool write, bool atomic) {
  check(at, bytes, write, atomic, __builtin_return_address(0));
}

}  // namespace baton::simt

#define BATON_HOOKS(bytes)                                                                                                    \
  extern "C" void __tsan_read##bytes(void* at) { baton::simt::check(at, bytes, false, false, __builtin_return_address(0)); }  \
  extern "C" void __tsan_write##bytes(void* at) { baton::simt::check(at, bytes, true, false, __builtin_return_address(0)); }
#define BATON_UNALIGNED_HOOKS(bytes)                                                                                                    \
  extern "C" void __tsan_unaligned_read##bytes(void* at) { baton::simt::check(at, bytes, false, false, __builtin_return_address(0)); }  \
  extern "C" void __tsan_unaligned_write##bytes(void* at) { baton::simt::check(at, bytes, true, false, __builtin_return_address(0)); }
BATON_HOOKS(1)
BATON_HOOKS(2)
BATON_HOOKS(4)
BATON_HOOKS(8)
BATON_HOOKS(16)
BATON_UNALIGNED_HOOKS(2)
BATON_UNALIGNED_HOOKS(4)
BATON_UNALIGNED_HOOKS(8)
BATON_UNALIGNED_HOOKS(16)
extern "C" {
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
void __tsan_read_range(void* at, size_t bytes) { baton::simt::check(at, bytes, false, false, __builtin_return_address(0)); }
void __tsan_write_range(void* at, size_t bytes) { baton::simt::check(at, bytes, true, false, __builtin_return_address(0)); }
// Only the guards of function-local statics: one OS thread runs everything.
uint8_t __tsan_atomic8_load(const volatile uint8_t* at, int) { return *at; }
}
#else
namespace baton::simt {

void race_start(Block&) {}
void race_join(const std::vector<Fiber*>&) {}
void race_access(const void*, size_t, bool, bool) {}
void race_release(std::vector<uint32_t>&) {}
void race_acquire(const std::vector<uint32_t>&) {}

}  // namespace baton::simt
#endif

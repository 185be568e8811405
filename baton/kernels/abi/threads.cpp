// The pool. A job is published as one word (generation, tasks, next task); claiming a task is one fetch_add on it, so a
// thread that comes late either gets a task of the job that is running now, or none.
//
// A thread without work spins for some microseconds, since a step's ops follow each other closely, then sleeps on
// a futex: an idle worker costs its neighbours on the machine nothing.
#include "threads.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdlib>
#include <mutex>
#include <new>

namespace baton {
namespace {

constexpr int kSpins = 4000;  // about 40 to 100 microseconds of pauses
constexpr uint64_t kField = (1u << 20) - 1;

struct alignas(64) Pool {
  std::atomic<uint64_t> word{0};  // generation << 40 | tasks << 20 | next
  alignas(64) std::atomic<int32_t> done{0};
  alignas(64) std::atomic<uint32_t> posted{0};  // what sleepers wait on: the number of jobs so far
  std::atomic<int32_t> sleepers{0};
  std::atomic<int32_t> wanted{1};  // threads, including the caller
  Task task = nullptr;
  void* context = nullptr;
  int32_t started = 1;
  std::mutex caller;
};
Pool* pool = new Pool;  // never destroyed: its threads outlive static destruction
thread_local bool inside = false;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

void futex(std::atomic<uint32_t>* at, int op, uint32_t value) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(at), op, value, nullptr, nullptr, 0);
}

// Take tasks until there are none left.
void work(Pool& p) {
  for (;;) {
    uint64_t found = p.word.load(std::memory_order_acquire);
    if ((found & kField) >= (found >> 20 & kField)) return;
    found = p.word.fetch_add(1, std::memory_order_acq_rel);
    if ((found & kField) >= (found >> 20 & kField)) return;
#ifdef BATON_MUTATION_THREADS_EARLY
    p.done.fetch_add(1, std::memory_order_release);  // a planted bug: said before it is done
    usleep(found & 1 ? 40000 : 20000);
    p.task(p.context, int32_t(found & kField));
#else
    p.task(p.context, int32_t(found & kField));  // the caller waits for this task, so both fields are the job's
    p.done.fetch_add(1, std::memory_order_release);
#endif
  }
}

void sleep_past(Pool& p, uint32_t seen) {
  for (int spin = 0; spin < kSpins; ++spin) {
    if (p.posted.load(std::memory_order_acquire) != seen) return;
    pause();
  }
  p.sleepers.fetch_add(1, std::memory_order_seq_cst);
  while (p.posted.load(std::memory_order_seq_cst) == seen) futex(&p.posted, FUTEX_WAIT_PRIVATE, seen);
  p.sleepers.fetch_sub(1, std::memory_order_relaxed);
}

void* serve(void* argument) {
  int32_t self = int32_t(reinterpret_cast<intptr_t>(argument));
  Pool& p = *pool;
  inside = true;
  uint32_t seen = 0;
  for (;;) {
    seen = p.posted.load(std::memory_order_acquire);
    if (self < p.wanted.load(std::memory_order_relaxed)) work(p);
    sleep_past(p, seen);
  }
  return nullptr;
}

void start(Pool& p, int32_t wanted) {
  for (; p.started < wanted; ++p.started) {
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_t thread;
    int failed = pthread_create(&thread, &attributes, serve, reinterpret_cast<void*>(intptr_t(p.started)));
    pthread_attr_destroy(&attributes);
    if (failed) return;  // fewer threads: the caller does their share
  }
}

// A forked child has none of the threads.
void forked() {
  int32_t wanted = pool->wanted.load();
  pool = new Pool;
  pool->wanted = wanted;
}
[[maybe_unused]] int registered = pthread_atfork(nullptr, nullptr, forked);

void post(Pool& p, int32_t tasks, Task task, void* context) {
  start(p, p.wanted.load(std::memory_order_relaxed));
  p.task = task, p.context = context;
  p.done.store(0, std::memory_order_relaxed);
  uint64_t generation = (p.word.load(std::memory_order_relaxed) >> 40) + 1;
  p.word.store(generation << 40 | uint64_t(tasks) << 20, std::memory_order_release);
  p.posted.fetch_add(1, std::memory_order_seq_cst);
  if (p.sleepers.load(std::memory_order_seq_cst)) futex(&p.posted, FUTEX_WAKE_PRIVATE, INT_MAX);
}

void wait(Pool& p, int32_t tasks) {
  for (int spin = 0; p.done.load(std::memory_order_acquire) != tasks; ++spin) {
    pause();
    if (spin > kSpins) sched_yield();  // the thread that has the last task was put aside: give it this core
  }
}

}  // namespace

int32_t threads() { return inside ? 1 : pool->wanted.load(std::memory_order_relaxed); }

void run_tasks(int32_t tasks, Task task, void* context) {
  Pool& p = *pool;
  if (tasks > 1 && threads() > 1 && p.caller.try_lock()) {
    inside = true;
    post(p, tasks, task, context);
    work(p);
    wait(p, tasks);
    inside = false;
    p.caller.unlock();
    return;
  }
  for (int32_t i = 0; i < tasks; ++i) task(context, i);
}

namespace {
struct Block {
  void* at = nullptr;
  size_t bytes = 0;
  ~Block() { std::free(at); }
};
thread_local Block blocks[SCRATCH_SLOTS];
}  // namespace

void* scratch(ScratchSlot slot, size_t bytes) {
  Block& block = blocks[slot];
  if (block.bytes < bytes) {
    std::free(block.at);
    block.bytes = (bytes + (bytes >> 2) + 4095) & ~size_t(4095);
    block.at = std::aligned_alloc(4096, block.bytes);
    if (!block.at) std::abort();
  }
  return block.at;
}

}  // namespace baton

// Threads of all ops in this process, the caller included. Takes hold with the next op.
BATON_API void baton_set_threads(int32_t n) { baton::pool->wanted = n < 1 ? 1 : n; }
BATON_API int32_t baton_threads() { return baton::pool->wanted; }

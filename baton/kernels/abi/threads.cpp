// The pool. A job is published as one word (generation, tasks, next task); claiming a task is one fetch_add on it, so a
// thread that comes late either gets a task of the job that is running now, or none.
//
// A thread without work spins for some microseconds, since a step's ops follow each other closely, then sleeps on
// a futex: an idle worker costs its neighbours on the machine nothing.
//
// Cores are lent between the engines of a machine by one shared page with a seat for each. An engine says in its seat
// which share of the cores is its own, and while it computes, that it does; the shares of those that don't are divided
// among those that do. Each op begins with as many threads as its engine may use then; a thread on a lent core goes
// back to sleep before its next piece of work once the core is wanted. An engine that was killed, or stands still,
// wants none: what it says counts for kAliveNs only.
#include "threads.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdlib>
#include <mutex>
#include <new>

namespace baton {
namespace {

constexpr int kSpins = 4000;  // about 40 to 100 microseconds of pauses
constexpr uint64_t kField = (1u << 20) - 1;

constexpr int kSeats = 64;
constexpr int64_t kAliveNs = 500'000'000;  // longer than any task of an op takes, short beside a restart

struct alignas(64) Seat {
  std::atomic<int32_t> pid;     // whose it is; 0: nobody's, nor any after it
  std::atomic<int32_t> share;   // cores that are its own
  std::atomic<int32_t> writes;  // 1: it writes answers, and has what can't be divided
  std::atomic<int32_t> chunk_us;  // microseconds that it takes to read a chunk of prompts; 0: none was read yet
  std::atomic<int64_t> at;      // when it last began a piece of work, nanoseconds of the coarse monotonic clock; 0: it rests
};
static_assert(std::atomic<int64_t>::is_always_lock_free && sizeof(Seat) == 64, "processes share seats");

struct alignas(64) Pool {
  std::atomic<uint64_t> word{0};  // generation << 40 | tasks << 20 | next
  alignas(64) std::atomic<int32_t> done{0};
  alignas(64) std::atomic<uint32_t> posted{0};  // what sleepers wait on: the number of jobs so far
  std::atomic<int32_t> sleepers{0};
  std::atomic<int32_t> wanted{1};  // threads, including the caller
  alignas(64) std::atomic<uint32_t> limit{1};  // of these, that may work now; what parked threads wait on
  std::atomic<int32_t> parked{0};
  std::atomic<Seat*> seats{nullptr};  // the shared page, where cores are lent
  Seat* own = nullptr;
  int32_t all = 0;  // cores that are shared
  Task task = nullptr;
  void* context = nullptr;
  int32_t started = 1;
  std::mutex caller;
};
Pool* pool = new Pool;  // never destroyed: its threads outlive static destruction
thread_local bool inside = false;
thread_local int32_t number = 0;  // of a thread of the pool; 0: a caller

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

int64_t coarse_now() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  return int64_t(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
}

// Threads that this engine may use now: its own share, and its part of the cores that nobody else wants.
int32_t allowed(const Pool& p, const Seat* seats) {
  const int64_t now = coarse_now();
  const int32_t own = p.own->share.load(std::memory_order_relaxed), writes = p.own->writes.load(std::memory_order_relaxed);
  int32_t taken = own, engines = 1, earlier = 0;
  for (const Seat* seat = seats; seat < seats + kSeats && seat->pid.load(std::memory_order_relaxed); ++seat) {
    const int64_t at = seat->at.load(std::memory_order_relaxed);
    if (seat == p.own || !at || now - at > kAliveNs) continue;
    const int32_t also = seat->writes.load(std::memory_order_relaxed);
    taken += seat->share.load(std::memory_order_relaxed), ++engines;
    earlier += also > writes || (also == writes && seat < p.own);
  }
  const int32_t spare = std::max(0, p.all - taken);
  return std::min(p.all, own + spare / engines + (earlier < spare % engines));
}

void say_busy(const Pool& p) {
  if (p.seats.load(std::memory_order_acquire)) p.own->at.store(coarse_now(), std::memory_order_relaxed);
}

void futex(std::atomic<uint32_t>* at, int op, uint32_t value) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(at), op, value, nullptr, nullptr, 0);
}

// Whether this thread has to stop before its next task: there are too many, or another engine wants its core back.
bool stops(Pool& p) {
  const Seat* seats = p.seats.load(std::memory_order_acquire);
  if (!seats || number < p.own->share.load(std::memory_order_relaxed)) return uint32_t(number) >= p.limit.load(std::memory_order_relaxed);
  const int32_t limit = allowed(p, seats);
  if (number < limit) return false;
  p.limit.store(uint32_t(limit), std::memory_order_relaxed);  // the next op asks anew
  return true;
}

// Take tasks until there are none left.
void work(Pool& p) {
  for (;;) {
    if (number && stops(p)) return;
    say_busy(p);
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

// Sleep until this thread may work: jobs come and go meanwhile without waking it.
void park(Pool& p) {
  p.parked.fetch_add(1, std::memory_order_seq_cst);
  for (uint32_t limit; (limit = p.limit.load(std::memory_order_seq_cst)) <= uint32_t(number);) futex(&p.limit, FUTEX_WAIT_PRIVATE, limit);
  p.parked.fetch_sub(1, std::memory_order_relaxed);
}

void* serve(void* argument) {
  number = int32_t(reinterpret_cast<intptr_t>(argument));
  Pool& p = *pool;
  inside = true;
  for (;;) {
    const uint32_t seen = p.posted.load(std::memory_order_acquire);
    work(p);
    if (uint32_t(number) < p.limit.load(std::memory_order_relaxed))
      sleep_past(p, seen);
    else
      park(p);
  }
  return nullptr;
}

// How many threads work on the next job.
void set_limit(Pool& p) {
  const Seat* seats = p.seats.load(std::memory_order_acquire);
  const uint32_t limit = uint32_t(seats ? allowed(p, seats) : p.wanted.load(std::memory_order_relaxed));
  const uint32_t before = p.limit.exchange(limit, std::memory_order_seq_cst);
  if (limit > before && p.parked.load(std::memory_order_seq_cst)) futex(&p.limit, FUTEX_WAKE_PRIVATE, INT_MAX);
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
  int32_t wanted = pool->own ? pool->own->share.load() : pool->wanted.load();  // the seat stays its parent's
  pool = new Pool;
  pool->wanted = wanted, number = 0;
}
[[maybe_unused]] int registered = pthread_atfork(nullptr, nullptr, forked);

void post(Pool& p, int32_t tasks, Task task, void* context) {
  start(p, p.wanted.load(std::memory_order_relaxed));
  set_limit(p);
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
  for (int32_t i = 0; i < tasks; ++i) {
    say_busy(p);
    task(context, i);
  }
}

bool wanted_back() { return number > 0 && stops(*pool); }

namespace {
constexpr size_t kHuge = 2 << 20;  // bytes of a large page: what a step streams would miss the TLB at each small one

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
    const size_t page = bytes < kHuge ? 4096 : kHuge;
    block.bytes = (bytes + (bytes >> 2) + page - 1) & ~(page - 1);
    block.at = std::aligned_alloc(page, block.bytes);
    if (!block.at) std::abort();
    if (page == kHuge) madvise(block.at, block.bytes, MADV_HUGEPAGE);
  }
  return block.at;
}

}  // namespace baton

// Threads of all ops in this process, the caller included. Takes hold with the next op.
BATON_API void baton_set_threads(int32_t n) { baton::pool->wanted = n < 1 ? 1 : n; }
BATON_API int32_t baton_threads() { return baton::pool->wanted; }

// From now on this process's ops share `all` cores with the engines that have a seat in the same memory of 4096 bytes
// (`fd`), `share` of them its own. 0, or an errno; EAGAIN where every seat is taken.
BATON_API int32_t baton_lend_cores(int32_t fd, int32_t share, int32_t all) {
  using namespace baton;
  if (pool->own) return EBUSY;
  void* page = mmap(nullptr, sizeof(Seat) * kSeats, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (page == MAP_FAILED) return errno;
  Seat* seats = static_cast<Seat*>(page);
  for (Seat* seat = seats; seat < seats + kSeats; ++seat) {
    int32_t before = seat->pid;
    if (before && (kill(before, 0) == 0 || errno != ESRCH)) continue;
    if (!seat->pid.compare_exchange_strong(before, int32_t(getpid()))) continue;
    seat->at = 0, seat->writes = 0, seat->chunk_us = 0, seat->share = share;
    pool->own = seat, pool->all = all, pool->wanted = all;
    pool->seats.store(seats, std::memory_order_release);
    return 0;
  }
  munmap(page, sizeof(Seat) * kSeats);
  return EAGAIN;
}

// Whether this engine writes answers: what of spare cores can't be divided goes to one that does.
BATON_API void baton_write_answers(int32_t writes) {
  if (baton::pool->own) baton::pool->own->writes = writes;
}

// It has nothing to compute: its cores may be lent until its next op.
BATON_API void baton_rest() {
  if (baton::pool->own) baton::pool->own->at = 0;
}

// It takes so many microseconds to read a chunk of prompts.
BATON_API void baton_tell_chunk(int32_t us) {
  if (baton::pool->own) baton::pool->own->chunk_us = us;
}

// The microseconds that engines which compute beside this one and don't write answers take for a chunk of prompts: of
// the slowest; INT32_MAX where one has read none yet, 0 where there is no such engine.
BATON_API int32_t baton_prompts_beside() {
  using namespace baton;
  const Seat* seats = pool->seats.load(std::memory_order_acquire);
  const int64_t now = coarse_now();
  int32_t slowest = 0;
  for (const Seat* seat = seats; seat && seat < seats + kSeats && seat->pid.load(std::memory_order_relaxed); ++seat) {
    const int64_t at = seat->at.load(std::memory_order_relaxed);
    if (seat == pool->own || !at || now - at > kAliveNs || seat->writes.load(std::memory_order_relaxed)) continue;
    const int32_t chunk_us = seat->chunk_us.load(std::memory_order_relaxed);
    slowest = std::max(slowest, chunk_us > 0 ? chunk_us : INT32_MAX);
  }
  return slowest;
}

// Threads that an op which begins now may use. Asking counts as computing.
BATON_API int32_t baton_cores() {
  using namespace baton;
  say_busy(*pool);
  const Seat* seats = pool->seats.load(std::memory_order_acquire);
  return seats ? allowed(*pool, seats) : pool->wanted.load();
}

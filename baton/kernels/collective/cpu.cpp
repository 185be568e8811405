// Meetings are one word per rank; data goes through the slots in parts that fit, one meeting each.
#include "links.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <climits>

#include "../abi/vector.h"

namespace baton {
namespace {

constexpr int SPINS = 3000;                  // some 30 to 100 microseconds of pauses
constexpr int YIELD_EVERY = 64;              // pauses between two offers of the core: ranks may be more than cores
constexpr int64_t NAP_NS = 20 * 1000 * 1000; // after which a sleeper looks for what it may have missed

long futex(std::atomic<uint32_t>& word, int op, uint32_t value, const timespec* wait) {
  return syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), op, value, wait, nullptr, 0);
}

int32_t lost(const Group& g) { return int32_t(g.meeting->lost.load(std::memory_order_acquire)); }

bool is_here(const Seat& seat, uint32_t turn) { return int32_t(seat.arrived.load(std::memory_order_acquire) - turn) >= 0; }

// Whom `which` waits for in the end: itself, where it waits for nobody.
int32_t last_awaited(const Meeting& meeting, int32_t which) {
  for (int hops = 0; hops < MOST_RANKS; hops++) {
    const int32_t next = meeting.seats[which].awaits.load() - 1;
    if (next < 0) break;
    which = next;
  }
  return which;
}

// Sleeps until the seat has come, or somebody is lost. Other hosts hear for whom a rank waits once that has lasted: they would call
// it lost in place of the one that is late.
int32_t sleep_until(Group& g, Seat& seat, uint32_t turn, int32_t which, bool& told) {
  for (const int64_t began = now_ns();;) {
    const uint32_t seen = seat.arrived.load(std::memory_order_seq_cst);
    if (int32_t(seen - turn) >= 0) return 0;
    if (const int32_t found = lost(g)) return found;
    const int64_t waited = now_ns() - began;
    if (g.bound_ns && waited > g.bound_ns)
      return declare(*g.meeting, uint32_t(last_awaited(*g.meeting, which) + 1) | RANK_STUCK);
    if (!told && g.bound_ns && waited > g.bound_ns / 4) {
      store_elsewhere(g, other_hosts(g), g.meeting->seats[g.rank].awaits, which + 1);
      told = true;
    }
    sleep_on(seat.arrived, seen);
  }
}

char* slot(const Group& g, int32_t rank, uint32_t turn) { return g.slots + (int64_t(turn & 1) * g.count + rank) * g.slot_bytes; }

// Shows what is in the own slot to the ranks of other hosts, as of the next meeting.
void show_slot(Group& g, uint32_t turn, int64_t bytes) {
  write_elsewhere(g, other_hosts(g), LINK_RANKS, slot(g, g.rank, turn), 1, bytes, bytes);
}

// to = the sum of every rank's slot, in the order of the ranks.
void add_slots(const Group& g, uint32_t turn, int64_t n, float* to) {
  std::memcpy(to, slot(g, 0, turn), size_t(n) * 4);
  for (int32_t rank = 1; rank < g.count; rank++) {
    const float* from = (const float*)slot(g, rank, turn);
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) store(to + i, load(to + i) + load(from + i));
    for (; i < n; i++) to[i] += from[i];
  }
}

// f(from, count) for each part of `n` floats that fits into `most` bytes.
template <class F>
int32_t in_parts(int64_t n, int64_t most, F&& f) {
  const int64_t part = most / 64 * 16;
  for (int64_t at = 0; at < n; at += part)
    if (const int32_t found = f(at, std::min(part, n - at))) return found;
  return 0;
}

}  // namespace

void sleep_on(std::atomic<uint32_t>& word, uint32_t seen) {
  const timespec nap{0, NAP_NS};
  futex(word, FUTEX_WAIT, seen, &nap);
}

int32_t declare(Meeting& meeting, uint32_t who) {
  uint32_t nobody = 0;
  meeting.lost.compare_exchange_strong(nobody, who);
  for (Seat& seat : meeting.seats) wake_all(seat.arrived);
  return int32_t(meeting.lost.load());
}

void wake_all(std::atomic<uint32_t>& word) { futex(word, FUTEX_WAKE, INT_MAX, nullptr); }

int64_t now_ns() {
  timespec at;
  clock_gettime(CLOCK_MONOTONIC, &at);
  return at.tv_sec * 1000000000 + at.tv_nsec;
}

void pause_a_little(int spin) {
  if (spin % YIELD_EVERY == YIELD_EVERY - 1) sched_yield();
#if defined(__x86_64__)
  else __builtin_ia32_pause();
#endif
}

void arrive(Seat& seat, uint32_t turn) {
  seat.arrived.store(turn, std::memory_order_seq_cst);
  if (seat.sleepers.load(std::memory_order_seq_cst)) wake_all(seat.arrived);
}

int32_t await(Group& g, Seat& seat, uint32_t turn, int32_t which) {
  for (int spin = 0; spin < SPINS; spin++) {
    if (is_here(seat, turn)) return 0;
    pause_a_little(spin);
  }
  std::atomic<int32_t>& awaits = g.meeting->seats[g.rank].awaits;
  awaits.store(which + 1);
  seat.sleepers.fetch_add(1, std::memory_order_seq_cst);
  bool told = false;
  const int32_t found = sleep_until(g, seat, turn, which, told);
  seat.sleepers.fetch_sub(1, std::memory_order_relaxed);
  awaits.store(0);
  if (told) store_elsewhere(g, other_hosts(g), awaits, 0);
  return found;
}

int32_t meet(Group& g) {
  if (const int32_t found = lost(g)) return found;
  Seat& own = g.meeting->seats[g.rank];
  arrive(own, ++g.turn);
  raise_elsewhere(g, other_hosts(g), own.arrived, g.turn);
#if !defined(BATON_MUTATION_COLLECTIVE_MEET)
  for (int32_t rank = 0; rank < g.count; rank++)
    if (rank != g.rank)
      if (const int32_t found = await(g, g.meeting->seats[rank], g.turn, rank)) return found;
#endif
  return 0;
}

}  // namespace baton

using namespace baton;

BATON_API int32_t baton_collective_meet(Group* group) { return meet(*group); }

BATON_API int32_t baton_collective_all_reduce(Group* group, float* x, int64_t n) {
  Group& g = *group;
  return in_parts(n, g.slot_bytes, [&](int64_t at, int64_t count) {
    const uint32_t turn = g.turn;
    std::memcpy(slot(g, g.rank, turn), x + at, size_t(count) * 4);
    show_slot(g, turn, count * 4);
    if (const int32_t found = meet(g)) return found;
    add_slots(g, turn, count, x + at);
    return 0;
  });
}

BATON_API int32_t baton_collective_all_gather(Group* group, const float* mine, int64_t n, float* out) {
  Group& g = *group;
  return in_parts(n, g.slot_bytes, [&](int64_t at, int64_t count) {
    const uint32_t turn = g.turn;
    std::memcpy(slot(g, g.rank, turn), mine + at, size_t(count) * 4);
    show_slot(g, turn, count * 4);
    if (const int32_t found = meet(g)) return found;
    for (int32_t rank = 0; rank < g.count; rank++) std::memcpy(out + rank * n + at, slot(g, rank, turn), size_t(count) * 4);
    return 0;
  });
}

BATON_API int32_t baton_collective_all_to_all(Group* group, const float* mine, int64_t n, float* out) {
  Group& g = *group;
  return in_parts(n, g.slot_bytes / g.count, [&](int64_t at, int64_t count) {
    const uint32_t turn = g.turn;
    for (int32_t to = 0; to < g.count; to++)
      std::memcpy(slot(g, g.rank, turn) + to * count * 4, mine + to * n + at, size_t(count) * 4);
    show_slot(g, turn, g.count * count * 4);
    if (const int32_t found = meet(g)) return found;
    for (int32_t from = 0; from < g.count; from++)
      std::memcpy(out + from * n + at, slot(g, from, turn) + g.rank * count * 4, size_t(count) * 4);
    return 0;
  });
}

BATON_API void baton_collective_lose(Meeting* meeting, int32_t rank) { declare(*meeting, uint32_t(rank + 1)); }

BATON_API int64_t baton_collective_meeting_bytes() { return sizeof(Meeting); }

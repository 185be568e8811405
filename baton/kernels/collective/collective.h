// What ranks do together over memory that all those of a host have mapped. Knows nothing of models. Ranks of other hosts have such
// memory of their own, and what is written to one is written to all (links.h).
//
// A rank meets the others by raising its own word and waiting for theirs: it spins for some microseconds, then sleeps on
// the word of the one that is late. What each rank puts into its slot before a meeting the others read behind it; there
// are two slots per rank, so that nobody writes where somebody may still read. Sums run in the order of the ranks.
//
// No wait is without an end. A rank that is lost is written into the page, which wakes everybody; one that is late for
// longer than `bound_ns` is lost, by the word of who waited. From then on every call returns at once.
#pragma once
#include <atomic>

#include "../abi/common.h"

namespace baton {

constexpr int32_t MOST_RANKS = 64;
constexpr int32_t RANK_STUCK = 1 << 16;  // added to a lost rank's number + 1 where it was late, not gone

struct alignas(64) Seat {
  std::atomic<uint32_t> arrived{0};   // meetings so far
  std::atomic<uint32_t> sleepers{0};  // who waits for this seat on a futex
  std::atomic<int32_t> awaits{0};     // of a rank's own seat: for whom it waits, its number + 1; 0: for nobody
};

// At the begin of the shared memory, zeros at first; the ranks' slots follow at `slots`.
struct Meeting {
  alignas(64) std::atomic<uint32_t> lost;  // 0: nobody; else the rank's number + 1, or that and RANK_STUCK
  Seat seats[MOST_RANKS];
};

struct Links;  // links.h

// One rank's view. `slots`: [2][count][slot_bytes], shared.
struct Group {
  Meeting* meeting;
  char* slots;
  int64_t slot_bytes, bound_ns;  // 0 ns: no bound
  int32_t rank, count;
  uint32_t turn, pad;            // meetings so far; the rank's own
  Links* links;                  // null: all ranks are on this host
};

// Sleeps on a shared word while it holds `seen`, a few milliseconds at most; wakes all that sleep on it.
void sleep_on(std::atomic<uint32_t>& word, uint32_t seen);
void wake_all(std::atomic<uint32_t>& word);
int64_t now_ns();
void pause_a_little(int spin);

// Returns when every rank has come as often as this one: 0, or who is lost (see Meeting).
int32_t meet(Group& group);

// Has `seat` come `turn` times, and wakes who waits for that.
void arrive(Seat& seat, uint32_t turn);

// Writes who is lost, a rank's number + 1 with or without RANK_STUCK, and wakes who waits; returns who was the first.
int32_t declare(Meeting& meeting, uint32_t who);

// Returns when rank `which` has had `seat`, its own or another one of it, come `turn` times: 0, or who is lost. Late is whoever
// is at the end of the chain: a rank that is itself waited for in vain isn't called lost.
int32_t await(Group& group, Seat& seat, uint32_t turn, int32_t which);

}  // namespace baton

// All return 0, or who is lost; what was computed is worthless then.
BATON_API int32_t baton_collective_meet(baton::Group* group);
// x (n), summed over the ranks, in the order of the ranks.
BATON_API int32_t baton_collective_all_reduce(baton::Group* group, float* x, int64_t n);
// mine (n) of each rank, one behind the other: out (count x n).
BATON_API int32_t baton_collective_all_gather(baton::Group* group, const float* mine, int64_t n, float* out);
// mine (count x n): part i goes to rank i. out (count x n): part i is what rank i had for this one.
BATON_API int32_t baton_collective_all_to_all(baton::Group* group, const float* mine, int64_t n, float* out);
// Writes that a rank is lost and wakes who waits for it. The first one stays.
BATON_API void baton_collective_lose(baton::Meeting* meeting, int32_t rank);
BATON_API int64_t baton_collective_meeting_bytes();

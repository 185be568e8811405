// Items over threads, each of which has some that lie one after the other: memory that is asked for ahead is then its own. A thread
// that is done takes half of what another has left. Knows nothing of what is done with an item.
#pragma once

#include <algorithm>
#include <atomic>
#include <vector>

#include "threads.h"

namespace baton {

// The items of a thread that nobody has taken yet.
class alignas(64) Share {
 public:
  // For a thread whose share is empty; others may look at it meanwhile.
  void hold(Range items) { left_.store(word(items), std::memory_order_relaxed); }

  // The first items, the fewer the fewer there are; none, if there is none.
  Range first() {
    return take([](Range left) { return left.begin + 1 + (left.end - left.begin) / kAtOnce; }, true);
  }

  // The latter half of them, at least one.
  Range half() {
    return take([](Range left) { return left.begin + (left.end - left.begin) / 2; }, false);
  }

 private:
  static uint64_t word(Range items) { return uint64_t(items.begin) | uint64_t(items.end) << 32; }

  // What lies before the border, or after it.
  template <class F>
  Range take(F&& border, bool before) {
    uint64_t found = left_.load(std::memory_order_relaxed);
    for (;;) {
      const Range left{int64_t(found & 0xffffffffu), int64_t(found >> 32)};
      if (left.begin >= left.end) return {0, 0};
      const int64_t at = border(left);
      const Range former{left.begin, at}, latter{at, left.end};
      if (left_.compare_exchange_weak(found, word(before ? latter : former), std::memory_order_relaxed)) return before ? former : latter;
    }
  }

  // A thread takes such a part of what it has left at once, because a taking keeps what comes after it waiting.
  static constexpr int64_t kAtOnce = 16;

  std::atomic<uint64_t> left_{0};  // begin | end << 32; never the same twice, since an item is taken once
};

// Half of what another thread has left becomes this one's; false: there is nothing.
inline bool take_half(std::vector<Share>& shares, size_t own) {
  for (size_t other = 1; other < shares.size(); ++other)
    if (const Range found = shares[(own + other) % shares.size()].half(); found.end) return shares[own].hold(found), true;
  return false;
}

// A thread's part of each_item; `leaves`: unless its core is wanted back.
template <class F>
inline void work_share(std::vector<Share>& shares, size_t own, bool leaves, F&& f) {
  do
    for (;;) {
      if (leaves && wanted_back()) return;
      const Range items = shares[own].first();
      if (!items.end) break;
      for (int64_t item = items.begin; item < items.end; ++item) f(item);
    }
  while (take_half(shares, own));
}

// A planted bug, which the ops' tests must catch: items are dealt to a thread that isn't there.
#ifdef BATON_MUTATION_LINEAR_SHARE
constexpr int32_t kAbsent = 1;
#else
constexpr int32_t kAbsent = 0;
#endif

// f(item) for each of so many. What threads on lent cores have left is the caller's.
template <class F>
inline void each_item(int64_t items, F&& f) {
  const int32_t parts = int32_t(std::min<int64_t>(items, threads()));
  std::vector<Share> shares(parts);
  for (int32_t p = 0; p < parts; ++p) shares[p].hold(part(items, 1, parts + kAbsent, p));
  parallel_for(parts, [&](int32_t own) { work_share(shares, own, true, f); });
  if (parts > 1) work_share(shares, 0, false, f);
}

}  // namespace baton

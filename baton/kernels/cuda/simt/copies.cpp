// cp.async of simt.h: a copy lands when it is waited for, those of one wait in any order. Knows nothing of who runs when.
#include <algorithm>

#include "runtime.h"

namespace baton::simt {

namespace {

void copy_all(std::vector<Copy>& copies) {
  std::shuffle(copies.begin(), copies.end(), random_numbers);
  for (const Copy& copy : copies) {
    race_access(copy.to, size_t(copy.bytes), true, false);
    std::memset(copy.to, 0, size_t(copy.bytes));
    std::memcpy(copy.to, copy.from, size_t(copy.filled));
  }
  copies.clear();
}

}  // namespace

void copy_later(void* to, const void* from, int bytes, int filled) {
  if (reinterpret_cast<uintptr_t>(to) % size_t(bytes) || (filled && reinterpret_cast<uintptr_t>(from) % size_t(bytes)))
    return fail("cp.async of %d bytes between places that are not aligned to it", bytes);
  race_access(to, size_t(bytes), true, false);
  std::memset(to, 0xff, size_t(bytes));
  running->now->copies.push_back({to, from, bytes, filled});
}

void commit_copies() {
  Fiber& me = *running->now;
  me.groups.push_back(std::move(me.copies));
  me.copies.clear();
}

void wait_copies(int pending) {
  auto& groups = running->now->groups;
  while (int(groups.size()) > pending) {
    copy_all(groups.front());
    groups.erase(groups.begin());
  }
}

}  // namespace baton::simt

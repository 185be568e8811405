// What hopper_twins.h and across_twins.h need of the scheduler: barriers in shared memory, bulk copies, a warp group's products. Knows nothing of
// kernels. A barrier's state is kept here, by its address; nothing is in its eight bytes.
#include "across_twins.h"

#include "runtime.h"

namespace baton::simt {

namespace {

constexpr uint32_t WINDOW = 1024;  // the system's part of a block's shared window

struct Landing {
  void* to;
  const void* from;
  uint32_t bytes;
};

struct Mbarrier {
  int expected = 0, pending = 0;
  int64_t bytes = 0;  // expected and not copied yet; below zero while copies are ahead
  uint32_t phase = 0;
  std::vector<Fiber*> waiting;
  std::vector<Landing> copies;
  std::vector<std::vector<Copy>> arrivals;  // of threads, each once its cp.async's have landed
  bool by_threads = false;                  // something came so: what wgmma reads of it lies behind a proxy fence
  std::vector<uint32_t> clock, ended;  // of those that came; as the last phase ended
};

// A product under way, of so many columns; two sums a lane each.
struct Pending : Product {
  int columns;
  size_t bytes() const { return size_t(columns) * 2; }
};

struct Lane {
  bool fenced = false, unseen = false;  // unseen: what threads copied, by the asynchronous proxy
  size_t issued = 0;                    // of all
  std::vector<Pending> products;
  std::vector<size_t> groups;  // how many of `products` each committed one ends behind, oldest first
};

struct State {
  std::map<const void*, Mbarrier> barriers;
  std::vector<Lane> lanes;
  std::map<int, std::vector<uint64_t>> descriptors;  // by warp group, as its first warp issued them
};

std::vector<State> states;  // by the block's slot

State& state() { return states[size_t(running->now->block->slot)]; }
Lane& mine() { return state().lanes[size_t(running->now->id)]; }

Mbarrier* found(void* barrier, Site site) {
  auto& all = state().barriers;
  const auto at = all.find(barrier);
  if (at == all.end()) fail("mbarrier: it is used before mbarrier_init, %s:%d", site.file, site.line);
  return at == all.end() ? nullptr : &at->second;
}

void end_phase(Mbarrier& b) {
  if (b.pending || b.bytes) return;
  b.phase ^= 1, b.pending = b.expected, b.ended = b.clock;
  for (Fiber* fiber : b.waiting) running->ready.push_back(fiber);
  b.waiting.clear();
}

void land(Mbarrier& b) {
  for (const auto& copies : b.arrivals) {
    for (const Copy& copy : copies) {
      std::memset(copy.to, 0, size_t(copy.bytes));
      std::memcpy(copy.to, copy.from, size_t(copy.filled));
    }
    b.pending--;
  }
  b.arrivals.clear();
  for (const Landing& copy : b.copies) {
    std::memcpy(copy.to, copy.from, copy.bytes);
    b.bytes -= copy.bytes;
  }
  b.copies.clear();
  end_phase(b);
}

void same_descriptor(Lanes& lanes) {
  for (int lane = 1; lane < 32; lane++)
    if (std::memcmp(lanes.in[lane], lanes.in[0], 8)) return fail("wgmma: lanes 0 and %d have different descriptors", lane);
}

void of_the_group(uint64_t descriptor, size_t number, Site site) {
  auto& log = state().descriptors[running->now->id / 128];
  if (number == log.size()) log.push_back(descriptor);
  if (log[number] != descriptor) fail("wgmma: the warps of a group have different descriptors, %s:%d", site.file, site.line);
}

}  // namespace

void hopper_start(Block& block) {
  if (states.size() <= size_t(block.slot)) states.resize(size_t(block.slot) + 1);
  State& fresh = states[size_t(block.slot)];
  fresh.barriers.clear(), fresh.descriptors.clear(), fresh.lanes.clear();
  fresh.lanes.resize(size_t(block.threads));
}

uint32_t shared_offset(const void* at) { return uint32_t(static_cast<const char*>(at) - running->now->block->shared) + WINDOW; }

const char* shared_place(uint32_t at) {
  const Block& block = *running->now->block;
  if (at < WINDOW || at - WINDOW + 16 > block.used) fail("wgmma: its descriptor leads to byte %d of %zu in shared memory", int(at) - int(WINDOW), block.used);
  return block.shared + (at - WINDOW);
}

void mbarrier_begin(void* barrier, int arrivals, Site site) {
  if (reinterpret_cast<uintptr_t>(barrier) % 8) return fail("mbarrier: its address is not a multiple of 8, %s:%d", site.file, site.line);
  touch_atomic(barrier, 8);
  Mbarrier& b = state().barriers[barrier] = Mbarrier();
  b.expected = b.pending = arrivals;
}

void mbarrier_come(void* barrier, int64_t bytes, Site site) {
  maybe_yield();
  touch_atomic(barrier, 8);
  Mbarrier* b = found(barrier, site);
  if (!b) return;
  if (!b->pending) return fail("mbarrier: more arrive than the %d that it expects, %s:%d", b->expected, site.file, site.line);
  b->bytes += bytes, b->pending--;
  race_release(b->clock);
  end_phase(*b);
}

void mbarrier_until(void* barrier, uint32_t parity, Site site) {
  maybe_yield();
  touch_atomic(barrier, 8);
  Mbarrier* b = found(barrier, site);
  if (!b) return;
  while (b->phase == (parity & 1)) {
    if (!b->copies.empty() || !b->arrivals.empty()) {
      land(*b);
      continue;
    }
    b->waiting.push_back(running->now);
    wait_here("an mbarrier", site);
  }
  race_acquire(b->ended);
  mine().unseen |= b->by_threads;
}

void come_with_copies(void* barrier, Site site) {
  maybe_yield();
  touch_atomic(barrier, 8);
  Mbarrier* b = found(barrier, site);
  if (!b) return;
  if (b->pending == int(b->arrivals.size())) land(*b);  // a phase ends here
  if (!b->pending) return fail("mbarrier: more arrive than the %d that it expects, %s:%d", b->expected, site.file, site.line);
  Fiber& me = *running->now;
  std::vector<Copy> mine;
  for (const auto& group : me.groups) mine.insert(mine.end(), group.begin(), group.end());
  mine.insert(mine.end(), me.copies.begin(), me.copies.end());
  me.groups.clear(), me.copies.clear();
  race_release(b->clock);
  b->by_threads = true;
  b->arrivals.push_back(std::move(mine));
  if (!b->waiting.empty()) land(*b);
}

void proxy_fenced() { mine().unseen = false; }

void copy_bulk(void* to, const void* from, uint32_t bytes, void* barrier, Site site) {
  if ((reinterpret_cast<uintptr_t>(to) | reinterpret_cast<uintptr_t>(from) | bytes) % 16)
    return fail("cp.async.bulk: an address or its %u bytes are not multiples of 16, %s:%d", bytes, site.file, site.line);
  const Block& block = *running->now->block;
  const auto* begin = static_cast<const char*>(to);
  if (begin < block.shared || begin + bytes > block.shared + block.used)
    return fail("cp.async.bulk: it leads out of the block's shared memory, %s:%d", site.file, site.line);
  Mbarrier* b = found(barrier, site);
  if (!b) return;
  touch_shared(to, bytes, true);
  std::memset(to, 0xff, bytes);
  race_release(b->clock);
  b->copies.push_back({to, from, bytes});
  if (!b->waiting.empty()) land(*b);
}

namespace {

struct Descriptor {
  uint32_t start, leading, stride, mode;
};

Descriptor read(uint64_t descriptor) {
  if (descriptor >> 49 & 7) fail("wgmma: the shim has no base offset");
  const auto part = [&](int at) { return uint32_t(descriptor >> at & 0x3fff) << 4; };
  return {part(0), part(16), part(32), uint32_t(descriptor >> 62)};
}

// The 16 bytes at `offset` from the start of a matrix under the 128-byte swizzle.
const char* swizzled(const Descriptor& d, uint32_t offset) {
  if (d.mode > 1) fail("wgmma: the shim has no swizzle of 64 or 32 bytes");
  if (d.start & 0x380) fail("wgmma: a matrix under the 128-byte swizzle begins at a multiple of 1024, this one at %u", d.start);
  const uint32_t at = d.start + offset;
  return shared_place(at ^ (at >> 3 & 0x70));
}

void issue(const Product& product, int columns, bool across, Site site) {
  Lane& lane = mine();
  if (!lane.fenced) return fail("wgmma: no wgmma_fence is in front of it, %s:%d", site.file, site.line);
  if (lane.unseen) return fail("wgmma: no async_proxy_fence is between it and what cp.async brought, %s:%d", site.file, site.line);
  meet(WARP, same_descriptor, &product.b, nullptr, site);
  of_the_group(product.b, lane.issued++, site);
  const int chunks = across ? columns / 8 : 2, all = (across ? 16 : columns) * chunks;
  for (int i = running->now->id % 32 * (all / 32), end = i + all / 32; i < end; i++)
    touch_shared(across ? wgmma_columns(product.b, i / chunks, i % chunks) : wgmma_chunk(product.b, i / chunks, i % chunks), 16, false);
  bool first = true;
  for (const Pending& earlier : lane.products) first &= earlier.d != product.d;
  lane.products.push_back({product, columns});
  if (!first) return;
  std::memcpy(lane.products.back().sums, product.d, lane.products.back().bytes());
  std::memset(product.d, 0xff, lane.products.back().bytes());
}

void wait_for_all_but(size_t pending, Site site) {
  auto& all = mine().products;
  auto& groups = mine().groups;
  const size_t ended = groups.size() > pending ? groups.size() - pending : 0, count = ended ? groups[ended - 1] : 0;
  for (size_t i = 0; i < count; i++) {
    Pending& now = all[i];
    for (int j = 0; j < 4; j++)
      if (*now.a[j] != now.held[j]) return fail("wgmma: a register of a was written before wgmma_wait, %s:%d", site.file, site.line);
    Product* of = &now;
    meet(WARP, now.run, of, of, site);
    char* to = static_cast<char*>(now.d);
    for (size_t later = all.size(); --later > i;)
      if (all[later].d == now.d) to = all[later].sums;  // the next one's, in the end
    std::memcpy(to, now.sums, now.bytes());
  }
  all.erase(all.begin(), all.begin() + long(count));
  groups.erase(groups.begin(), groups.begin() + long(ended));
  for (size_t& end : groups) end -= count;
  mine().fenced = false;
}

}  // namespace

const char* wgmma_chunk(uint64_t descriptor, int row, int chunk) {
  const Descriptor d = read(descriptor);
  const uint32_t eight = uint32_t(row / 8) * d.stride, within = uint32_t(row % 8);
  if (d.mode == 0) return shared_place(d.start + eight + uint32_t(chunk) * d.leading + within * 16);
  return swizzled(d, eight + within * 128 + uint32_t(chunk) * 16);
}

const char* wgmma_columns(uint64_t descriptor, int row, int chunk) {
  const Descriptor d = read(descriptor);
  if (d.mode == 0) fail("wgmma: the shim has no columns innermost without a swizzle");
  return swizzled(d, uint32_t(row / 8) * d.stride + uint32_t(row % 8) * 128 + uint32_t(chunk / 8) * d.leading + uint32_t(chunk % 8) * 16);
}

void wgmma_issue(const Product& product, Site site) { issue(product, WGMMA_COLUMNS, false, site); }
void wgmma_issue_across(const Product& product, int columns, Site site) { issue(product, columns, true, site); }
void wgmma_fenced() { mine().fenced = true; }
void wgmma_committed() { mine().groups.push_back(mine().products.size()); }
void wgmma_waited(Site site) { wait_for_all_but(0, site); }
void wgmma_waited_but_one(Site site) { wait_for_all_but(1, site); }

}  // namespace baton::simt

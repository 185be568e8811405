// The scheduler of simt.h: fibers on one OS thread, the next one drawn at random. Knows nothing of kernels.
#include <mutex>

#include "runtime.h"

#define BATON_API extern "C" __attribute__((visibility("default")))

dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace baton::simt {

Launch* running = nullptr;
std::mt19937_64 random_numbers(1);

namespace {

std::mutex one_launch;
uint64_t launches = 0;
int resident = 2, preempt_permille = 0;
std::string error;
void* scheduler_stack = nullptr;
constexpr uint64_t MOST_SPINS = 20'000'000, MOST_RESIDENT = 16;

uint64_t draw(uint64_t below) { return random_numbers() % below; }

void to_scheduler() { baton_simt_switch(&running->now->stack_pointer, scheduler_stack); }

void fiber_main() {
  Fiber* me = running->now;
  running->body(running->arguments);
  if (!me->copies.empty()) fail("thread %d ends with copies (cp.async) that it never committed", me->id);
  me->done = true;
  me->block->alive--;
  to_scheduler();
}

void begin(Block& block, dim3 index) {
  const dim3 shape = running->block;
  const int threads = int(shape.x * shape.y * shape.z);
  block.index = index, block.threads = block.alive = threads;
  block.shared = arena + block.slot * SHARED_SLOT;
  block.dynamic_bytes = running->shared;
  block.used = (running->shared + 127) / 128 * 128;
  std::memset(block.shared, 0xff, block.used);
  block.statics.clear();
  for (Barrier& barrier : block.barriers) barrier = Barrier();
  block.fibers.assign(size_t(threads), Fiber());
  for (int i = 0; i < threads; i++) {
    Fiber& fiber = block.fibers[size_t(i)];
    fiber.block = &block, fiber.id = i;
    fiber.thread = dim3(unsigned(i) % shape.x, unsigned(i) / shape.x % shape.y, unsigned(i) / shape.x / shape.y);
    prepare(fiber, size_t(block.slot) * size_t(threads) + size_t(i), fiber_main);
    running->ready.push_back(&fiber);
  }
  race_start(block);
  hopper_start(block);
}

void run(Fiber* fiber) {
  running->now = fiber;
  threadIdx = fiber->thread, blockIdx = fiber->block->index;
  baton_simt_switch(&scheduler_stack, fiber->stack_pointer);
  running->now = nullptr;
}

void report_deadlock() {
  for (const Block& block : running->blocks) {
    if (!block.alive) continue;
    std::map<std::string, std::vector<int>> by_place;
    for (const Fiber& fiber : block.fibers) {
      char place[512];
      if (fiber.done)
        std::snprintf(place, sizeof place, "ended");
      else
        std::snprintf(place, sizeof place, "waits at %s, %s:%d", fiber.waits, fiber.site.file, fiber.site.line);
      by_place[place].push_back(fiber.id);
    }
    std::string text;
    for (const auto& [place, threads] : by_place) {
      char line[640];
      std::snprintf(line, sizeof line, "; %zu of %d threads (first: %d) %s", threads.size(), block.threads, threads[0], place.c_str());
      text += line;
    }
    return fail("deadlock: a barrier is not reached by all in block (%u, %u, %u)%s", block.index.x, block.index.y, block.index.z, text.c_str());
  }
}

void release(Barrier& barrier) {
  race_join(barrier.all);
  for (Fiber* fiber : barrier.waiting) running->ready.push_back(fiber);
  barrier.waiting.clear(), barrier.all.clear();
  barrier.arrived = 0;
}

void wait(const char* what, Site site) {
  Fiber* me = running->now;
  me->waits = what, me->site = site;
  to_scheduler();
  me->waits = nullptr;
}

}  // namespace

void wait_here(const char* what, Site site) { wait(what, site); }

namespace {

void arrive(int id, int expected, bool waits, const char* what, Site site) {
  Fiber* me = running->now;
  Barrier& barrier = me->block->barriers[id];
  if (barrier.arrived && barrier.expected != expected)
    return fail("barrier %d is used for %d and for %d threads at once, %s:%d", id, barrier.expected, expected, site.file, site.line);
  barrier.expected = expected;
  barrier.all.push_back(me);
  if (waits) barrier.waiting.push_back(me);
  if (++barrier.arrived == expected) release(barrier);
  if (waits) wait(what, site);
}

int run_blocks(uint64_t at_once) {
  Launch& launch = *running;
  const uint64_t total = uint64_t(launch.grid.x) * launch.grid.y * launch.grid.z;
  std::vector<uint64_t> order(total);
  for (uint64_t i = 0; i < total; i++) order[i] = i;
  std::shuffle(order.begin(), order.end(), random_numbers);
  launch.blocks.resize(size_t(std::min(at_once, total)));
  uint64_t next = 0;
  uint64_t spins = 0;
  const auto start = [&](Block& block) {
    const uint64_t i = order[next++];
    begin(block, dim3(unsigned(i % launch.grid.x), unsigned(i / launch.grid.x % launch.grid.y), unsigned(i / launch.grid.x / launch.grid.y)));
  };
  for (size_t i = 0; i < launch.blocks.size(); i++) launch.blocks[i].slot = int(i), start(launch.blocks[i]);
  while (!launch.failed) {
    if (launch.ready.empty()) {
      report_deadlock();
      break;
    }
    const size_t pick = draw(launch.ready.size());
    Fiber* fiber = launch.ready[pick];
    launch.ready[pick] = launch.ready.back();
    launch.ready.pop_back();
    run(fiber);
    spins = fiber->done || fiber->waits ? 0 : spins + 1;
    if (spins > MOST_SPINS) fail("no progress: threads wait for a value that nobody writes (thread %d among them)", fiber->id);
    if (!fiber->done || fiber->block->alive || launch.failed) continue;
    if (next < total) start(*fiber->block);
    else if (std::none_of(launch.blocks.begin(), launch.blocks.end(), [](const Block& b) { return b.alive; })) break;
  }
  return launch.failed ? cudaErrorLaunchFailure : cudaSuccess;
}

}  // namespace

void fail(const char* format, ...) {
  char text[2048];
  va_list list;
  va_start(list, format);
  std::vsnprintf(text, sizeof text, format, list);
  va_end(list);
  if (running && !running->failed) error = std::string(running->name) + ": " + text, running->failed = true;
  if (running && running->now && !running->now->waits && !running->now->done) to_scheduler();
}

int launch(const char* name, bool all_at_once, dim3 grid, dim3 block, size_t shared, void (*body)(void*), void* arguments) {
  const std::lock_guard<std::mutex> guard(one_launch);
  launches++;
  const uint64_t threads = uint64_t(block.x) * block.y * block.z;
  const auto refuse = [&](const char* why) {
    error = std::string(name) + ": " + why;
    return int(cudaErrorInvalidValue);
  };
  if (!threads || threads > MOST_THREADS) return refuse("a block has 1 to 1024 threads");
  if (!grid.x || !grid.y || !grid.z || grid.y > 65535 || grid.z > 65535) return refuse("a grid has 1 to 2^31 - 1, 65535, 65535 blocks");
  if (shared > SHARED_BYTES) return refuse("more shared memory than a block of sm_90 can have");
  const uint64_t total = uint64_t(grid.x) * grid.y * grid.z;
  if (all_at_once && total > MOST_RESIDENT) return refuse("more blocks than can be resident at once");
  const uint64_t at_once = all_at_once ? total : uint64_t(resident);
  if (!grow(size_t(at_once) * threads, size_t(at_once))) return refuse("no memory for the shim's stacks");
  Launch here;
  here.name = name, here.grid = grid, here.block = block, here.shared = shared, here.body = body, here.arguments = arguments;
  blockDim = block, gridDim = grid;
  running = &here;
  const Faults faults;
  const Touchable now;
  const int result = run_blocks(at_once);
  running = nullptr;
  return result;
}

void* dynamic_shared() { return running->now->block->shared; }

int new_site() {
  static int sites = 0;
  return sites++;
}

void* static_shared(int site, size_t bytes) {
  Block& block = *running->now->block;
  const auto found = block.statics.find(site);
  if (found != block.statics.end()) return found->second;
  char* at = block.shared + block.used;
  block.used += (bytes + 15) / 16 * 16;
  if (block.used - (block.dynamic_bytes + 127) / 128 * 128 > STATIC_BYTES) fail("more than 48 KiB of static shared memory");
  if (block.used > WITHOUT_OPT_IN && block.dynamic_bytes <= WITHOUT_OPT_IN)
    fail("%zu bytes of static and dynamic shared memory; a launch that doesn't opt in can have %zu", block.used, WITHOUT_OPT_IN);
  if (block.used > SHARED_BYTES) fail("%zu bytes of shared memory; a block of sm_90 can have %zu", block.used, SHARED_BYTES);
  std::memset(at, 0xff, bytes);
  block.statics[site] = at;
  return at;
}

void sync_threads(Site site) { arrive(0, running->now->block->threads, true, "__syncthreads", site); }

int sync_threads_or(bool yes, Site site) {
  Block& block = *running->now->block;
  block.any |= yes;
  if (block.barriers[0].arrived + 1 == block.threads) block.any_result = block.any, block.any = false;
  sync_threads(site);
  return block.any_result;
}

void named_barrier(int id, int threads, bool waits, Site site) {
  if (id < 1 || id >= BARRIERS) return fail("barrier %d: ids are 1 to 15, %s:%d", id, site.file, site.line);
  if (threads % 32) return fail("barrier %d: %d threads is no number of whole warps, %s:%d", id, threads, site.file, site.line);
  arrive(id, threads, waits, "bar.sync", site);
}

void yield() {
  running->ready.push_back(running->now);
  to_scheduler();
}

void maybe_yield() {
  if (!running->meeting && preempt_permille && int(draw(1000)) < preempt_permille) yield();
}

unsigned lane() { return unsigned(running->now->id) % 32; }

void meet(unsigned mask, Meeting meeting, const void* in, void* out, Site site) {
  Fiber* me = running->now;
  Block& block = *me->block;
  const int warp = me->id / 32, first = warp * 32;
  if (!(mask >> lane() & 1)) return fail("thread %d is not in the mask %08x that it names, %s:%d", me->id, mask, site.file, site.line);
  me->mask = mask, me->meeting = meeting, me->in = in, me->out = out, me->site = site;
  std::vector<Fiber*> here;
  for (int i = 0; i < 32; i++) {
    if (!(mask >> i & 1)) continue;
    if (first + i >= block.threads) return fail("the mask %08x names lane %d; the warp has %d, %s:%d", mask, i, block.threads - first, site.file, site.line);
    Fiber& other = block.fibers[size_t(first + i)];
    if (&other != me && !(other.waits && other.meeting == meeting && other.mask == mask)) return wait("a warp's meeting", site);
    here.push_back(&other);
  }
  Lanes lanes{};
  lanes.mask = mask;
  for (const Fiber* fiber : here) lanes.in[fiber->id % 32] = fiber->in, lanes.out[fiber->id % 32] = fiber->out;
  running->meeting = true;  // what it computes in is static: another warp's would mix with it
  meeting(lanes);
  running->meeting = false;
  race_join(here);
  for (Fiber* fiber : here) {
    fiber->meeting = nullptr;
    running->ready.push_back(fiber);
  }
  wait("its turn", site);
}

void touch_shared(const void* at, size_t bytes, bool write) { race_access(at, bytes, write, false); }
void touch_atomic(void* at, size_t bytes) { race_access(at, bytes, true, true); }

}  // namespace baton::simt

// seed: of every schedule from here on; permille: how often a thread steps aside where it may (atomics, fences and, in a library
// built with race checks, every access of shared memory); blocks: how many are resident at once.
BATON_API void baton_simt_configure(uint64_t seed, int32_t permille, int32_t blocks) {
  const std::lock_guard<std::mutex> guard(baton::simt::one_launch);
  baton::simt::random_numbers.seed(seed);
  baton::simt::preempt_permille = permille;
  baton::simt::resident = blocks < 1 ? 1 : blocks;
}

// Give back what threads and blocks ran in, until the next launch.
BATON_API void baton_simt_rest() {
  const std::lock_guard<std::mutex> guard(baton::simt::one_launch);
  baton::simt::shrink();
}

// What ended the last launch that failed.
BATON_API const char* baton_simt_error() { return baton::simt::error.c_str(); }
BATON_API uint64_t baton_simt_launches() { return baton::simt::launches; }

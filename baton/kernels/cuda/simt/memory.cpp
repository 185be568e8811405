// Device memory as one reserved range, unreadable but for launches and copies; captured graphs as lists. Knows nothing of kernels.
#include "memory.h"

#include <sys/mman.h>

#include <iterator>
#include <map>
#include <set>
#include <utility>

#include "runtime.h"

extern "C" const char* baton_simt_error();
extern "C" uint64_t baton_simt_launches();

namespace baton::simt {

Recording* recording = nullptr;

namespace {

constexpr size_t RANGE = size_t(8) << 30, ALIGN = 4096;
constexpr int OUT_OF_MEMORY = 2, NOT_DURING_CAPTURE = 900;  // cudaErrorMemoryAllocation, …StreamCaptureUnsupported

char* base = nullptr;
size_t used = 0;
int touching = 0;
std::map<size_t, size_t> taken;  // offset -> bytes

void protect() {
  if (used) mprotect(base, used, touching ? PROT_READ | PROT_WRITE : PROT_NONE);
}

// The first gap that is large enough.
size_t place(size_t bytes) {
  size_t at = 0;
  for (const auto& [begin, size] : taken) {
    if (begin - at >= bytes) return at;
    at = begin + size;
  }
  return at;
}

}  // namespace

Touchable::Touchable() {
  if (!touching++) protect();
}
Touchable::~Touchable() {
  if (!--touching) protect();
}

int device_allocate(void** at, size_t bytes) {
  if (recording) return NOT_DURING_CAPTURE;
  if (!base) {
    void* found = mmap(nullptr, RANGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED) return OUT_OF_MEMORY;
    base = static_cast<char*>(found);
  }
  const size_t whole = (bytes + ALIGN) / ALIGN * ALIGN, offset = place(whole);
  if (offset + whole > RANGE) return OUT_OF_MEMORY;
  taken[offset] = whole;
  used = std::max(used, offset + whole);
  const Touchable now;
  std::memset(base + offset, 0xff, whole);
  *at = base + offset;
  return 0;
}

int device_release(void* at) {
  if (!at) return 0;
  if (recording) return NOT_DURING_CAPTURE;
  const auto found = taken.find(size_t(static_cast<char*>(at) - base));
  if (found == taken.end()) return int(cudaErrorInvalidValue);
  const Touchable now;
  std::memset(at, 0xff, found->second);
  taken.erase(found);
  return 0;
}

int device_copy(void* to, const void* from, size_t bytes) {
  const auto run = [=] {
    const Touchable now;
    std::memmove(to, from, bytes);
    return 0;
  };
  return recording ? (recording->push_back(run), 0) : run();
}

int record() {
  if (recording) return NOT_DURING_CAPTURE;
  recording = new Recording;
  return 0;
}

Recording* recorded() { return std::exchange(recording, nullptr); }

int replay(const Recording& graph) {
  for (const auto& each : graph)
    if (const int wrong = each()) return wrong;
  return 0;
}

namespace {

struct Side {
  std::vector<std::function<int()>> waiting;
  uint64_t behind = UINT64_MAX;  // launches that it has waited for
};

std::set<Side*> sides;

Side* side_of(void* stream) {
  const auto found = sides.find(static_cast<Side*>(stream));
  return found == sides.end() ? nullptr : *found;
}

}  // namespace

int side_create(void** stream) {
  auto* made = new Side;
  sides.insert(made);
  *stream = made;
  return 0;
}

int side_release(void* stream) {
  if (Side* side = side_of(stream)) sides.erase(side), delete side;
  return 0;
}

int side_wait(void* stream) {
  Side* side = side_of(stream);
  const auto waiting = side ? std::exchange(side->waiting, {}) : Recording();
  return replay(waiting);
}

bool later(void* stream, const std::function<int()>& run, int& status) {
  Side* side = side_of(stream);
  if (!side) return false;
  status = side->behind == baton_simt_launches() ? 0 : int(cudaErrorInvalidValue);
  if (!status) side->waiting.push_back(run);
  return true;
}

void mark(Mark& event, void* stream) { event = {stream, baton_simt_launches()}; }

int wait_for(void* stream, const Mark& event) {
  if (Side* side = side_of(stream)) return side->behind = event.launches, 0;
  return side_wait(event.stream);
}

const char* last_error() { return baton_simt_error(); }

}  // namespace baton::simt

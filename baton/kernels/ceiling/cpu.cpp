// What this machine can do at all, measured with the pool's own threads: the ceilings beside which ops are reported.
// Not an op: it computes nothing that anyone needs.
#include "../abi/shares.h"

namespace baton {
namespace {

constexpr int64_t kPiece = 1 << 16;
constexpr int64_t kAhead = 12288;  // bytes that are asked for ahead, as ops do: hardware stops at every page

typedef uint64_t Line __attribute__((vector_size(64), aligned(8), may_alias));

// Eight numbers at a time from memory, in as many sums as keep two loads a cycle busy.
uint64_t read(const char* from, int64_t bytes) {
  Line sums[4] = {};
  int64_t at = 0;
  for (; at + 256 <= bytes; at += 256)
    for (int i = 0; i < 4; ++i) {
      sums[i] += *(const Line*)(from + at + 64 * i);
      __builtin_prefetch(from + at + kAhead + 64 * i);
    }
  for (; at < bytes; at += 64) sums[0] += *(const Line*)(from + at);
  const Line all = sums[0] + sums[1] + (sums[2] + sums[3]);
  uint64_t total = 0;
  for (int i = 0; i < 8; ++i) total += all[i];
  return total;
}

}  // namespace
}  // namespace baton

// Reads `bytes` (a multiple of 64) once with all threads; the sum is there so that nothing is left out.
BATON_API uint64_t baton_ceiling_read(const void* from, int64_t bytes) {
  using namespace baton;
  uint64_t total = 0;
  each_item((bytes + kPiece - 1) / kPiece, [&](int64_t piece) {
    const int64_t at = piece * kPiece;
    const uint64_t found = read((const char*)from + at, std::min(kPiece, bytes - at));
    __atomic_fetch_add(&total, found, __ATOMIC_RELAXED);
  });
  return total;
}

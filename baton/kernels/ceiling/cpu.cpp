// What this machine can do at all, measured with the pool's own threads: the ceilings beside which ops are reported.
// Not an op: it computes nothing that anyone needs.
#include "../abi/threads.h"

namespace baton {
namespace {

constexpr int64_t PIECE = 1 << 20;

uint64_t read(const uint64_t* words, int64_t count) {
  uint64_t sums[16] = {};
  for (int64_t i = 0; i + 16 <= count; i += 16)
    for (int k = 0; k < 16; k++) sums[k] += words[i + k];
  uint64_t total = 0;
  for (uint64_t sum : sums) total += sum;
  return total;
}

}  // namespace
}  // namespace baton

// Reads `bytes` (a multiple of 128) once with all threads; the sum is there so that nothing is left out.
BATON_API uint64_t baton_ceiling_read(const void* from, int64_t bytes) {
  using namespace baton;
  const int32_t pieces = int32_t((bytes + PIECE - 1) / PIECE);
  uint64_t total = 0;
  parallel_for(pieces, [&](int32_t piece) {
    const int64_t at = piece * PIECE, end = at + PIECE < bytes ? at + PIECE : bytes;
    const uint64_t found = read((const uint64_t*)((const char*)from + at), (end - at) / 8);
    __atomic_fetch_add(&total, found, __ATOMIC_RELAXED);
  });
  return total;
}

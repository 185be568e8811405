// The most dot products that this machine does: int8 and bf16 pairs, by AMX tiles or by AVX-512, from registers, on all of the
// pool's threads. The ceiling beside which large matrix products are reported. Not an op.
#include "../abi/amx.h"
#include "../abi/threads.h"

namespace baton {
namespace {

#if BATON_AMX
// 2 operations per multiply-add: four independent sums, more than latency over throughput.
template <TileProduct P>
int64_t dots(int64_t rounds) {
  const TileUse tiles(TILE_ROWS);
  for (int64_t round = 0; round < rounds; ++round) {
    BATON_TILE_PRODUCT(P, 0, 4, 6);
    BATON_TILE_PRODUCT(P, 1, 4, 7);
    BATON_TILE_PRODUCT(P, 2, 5, 6);
    BATON_TILE_PRODUCT(P, 3, 5, 7);
  }
  return rounds * 4 * 2 * TILE_ROWS * 16 * (P == TILE_BF16 ? 32 : 64);
}

int64_t dots(bool int8, int64_t rounds) { return int8 ? dots<TILE_S8_U8>(rounds) : dots<TILE_BF16>(rounds); }

#elif BATON_AVX512
constexpr int64_t kDots = 20;  // independent sums: more than latency x units

// 2 operations per multiply-add: 64 int8 or 32 bf16 of them in one instruction.
template <bool Int8>
int64_t dots(int64_t rounds) {
  __m512i sums[kDots], w = _mm512_set1_epi8(3), x = _mm512_set1_epi8(1);
  unroll<kDots>([&](auto i) BATON_LAMBDA { sums[i] = _mm512_setzero_si512(); });
  for (int64_t round = 0; round < rounds; ++round)
    unroll<kDots>([&](auto i) BATON_LAMBDA {
      if constexpr (Int8)
        asm volatile("vpdpbusd %2, %1, %0" : "+v"(sums[i]) : "v"(w), "v"(x));
      else
        asm volatile("vdpbf16ps %2, %1, %0" : "+v"(sums[i]) : "v"(w), "v"(x));
    });
  return rounds * kDots * (Int8 ? 128 : 64);
}

int64_t dots(bool int8, int64_t rounds) { return int8 ? dots<true>(rounds) : dots<false>(rounds); }
#endif

}  // namespace
}  // namespace baton

// Does `tasks` times `rounds` rounds; returns the operations done, 0 where this library has no such instruction.
BATON_API int64_t baton_ceiling_dots(int32_t int8, int32_t tasks, int64_t rounds) {
#if BATON_AMX || BATON_AVX512
  int64_t done = 0;
  baton::parallel_for(tasks, [&](int32_t) { __atomic_fetch_add(&done, baton::dots(int8 != 0, rounds), __ATOMIC_RELAXED); });
  return done;
#else
  (void)int8, (void)tasks, (void)rounds;
  return 0;
#endif
}

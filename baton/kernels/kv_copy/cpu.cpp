// XXH3's eight 64-bit lanes are one register (two with AVX2): a stripe of 64 bytes is loaded, stored and mixed in.
#include "kv_copy.h"
#include "xxh3.h"

namespace {

using namespace baton;

constexpr int64_t AHEAD = 2048;  // bytes; the hardware's own prefetching ends at each 4 KiB page
alignas(64) constexpr uint64_t START[8] = {BATON_XXH3_START};
alignas(64) constexpr uint8_t SECRET[SECRET_BYTES] = {BATON_XXH3_SECRET};

BATON_INLINE uint64_t read64(const uint8_t* at) {
  uint64_t word;
  std::memcpy(&word, at, 8);
  return word;
}

BATON_INLINE uint64_t folded(uint64_t a, uint64_t b) {
  const unsigned __int128 product = static_cast<unsigned __int128>(a) * b;
  return uint64_t(product) ^ uint64_t(product >> 64);
}

BATON_INLINE void prefetch(const uint8_t* at) { __builtin_prefetch(at, 0, 3); }

enum Store { NONE, PLAIN, STREAM };  // STREAM: past the cache; the place is aligned to 64 bytes

#if BATON_AVX512
struct Lanes {
  __m512i acc = _mm512_load_si512(START);

  template <Store S, bool Hash = true>
  BATON_INLINE void stripe(const uint8_t* in, uint8_t* to, const uint8_t* key) {
    const __m512i data = _mm512_loadu_si512(in);
    if (S == PLAIN) _mm512_storeu_si512(to, data);
    if (S == STREAM) _mm512_stream_si512(reinterpret_cast<__m512i*>(to), data);
    if (!Hash) return;
    const __m512i mixed = _mm512_xor_si512(data, _mm512_loadu_si512(key));
    const __m512i product = _mm512_mul_epu32(mixed, _mm512_shuffle_epi32(mixed, _MM_PERM_ENUM(0x31)));
    const __m512i swapped = _mm512_shuffle_epi32(data, _MM_PERM_ENUM(0x4e));
    acc = _mm512_add_epi64(acc, _mm512_add_epi64(product, swapped));
  }

  BATON_INLINE void scramble() {
    acc = _mm512_xor_si512(acc, _mm512_srli_epi64(acc, 47));
    acc = _mm512_xor_si512(acc, _mm512_loadu_si512(SECRET + SECRET_BYTES - STRIPE));
    const __m512i prime = _mm512_set1_epi64(int64_t(P32_1)), high = _mm512_mul_epu32(_mm512_srli_epi64(acc, 32), prime);
    acc = _mm512_add_epi64(_mm512_mul_epu32(acc, prime), _mm512_slli_epi64(high, 32));
  }

  BATON_INLINE void out(uint64_t* to) const { _mm512_storeu_si512(to, acc); }
};
#elif BATON_AVX2
struct Lanes {
  __m256i acc[2] = {_mm256_load_si256(reinterpret_cast<const __m256i*>(START)),
                    _mm256_load_si256(reinterpret_cast<const __m256i*>(START + 4))};

  static BATON_INLINE __m256i load(const uint8_t* at) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)); }

  template <Store S, bool Hash = true>
  BATON_INLINE void stripe(const uint8_t* in, uint8_t* to, const uint8_t* key) {
    for (int half = 0; half < 2; half++) {
      const __m256i data = load(in + 32 * half);
      if (S == PLAIN) _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + 32 * half), data);
      if (S == STREAM) _mm256_stream_si256(reinterpret_cast<__m256i*>(to + 32 * half), data);
      if (!Hash) continue;
      const __m256i mixed = _mm256_xor_si256(data, load(key + 32 * half));
      const __m256i product = _mm256_mul_epu32(mixed, _mm256_shuffle_epi32(mixed, 0x31));
      acc[half] = _mm256_add_epi64(acc[half], _mm256_add_epi64(product, _mm256_shuffle_epi32(data, 0x4e)));
    }
  }

  BATON_INLINE void scramble() {
    const __m256i prime = _mm256_set1_epi64x(int64_t(P32_1));
    for (int half = 0; half < 2; half++) {
      __m256i a = _mm256_xor_si256(acc[half], _mm256_srli_epi64(acc[half], 47));
      a = _mm256_xor_si256(a, load(SECRET + SECRET_BYTES - STRIPE + 32 * half));
      const __m256i high = _mm256_mul_epu32(_mm256_srli_epi64(a, 32), prime);
      acc[half] = _mm256_add_epi64(_mm256_mul_epu32(a, prime), _mm256_slli_epi64(high, 32));
    }
  }

  BATON_INLINE void out(uint64_t* to) const { std::memcpy(to, acc, STRIPE); }
};
#else
struct Lanes {
  uint64_t acc[8];

  Lanes() { std::memcpy(acc, START, STRIPE); }

  template <Store S, bool Hash = true>
  BATON_INLINE void stripe(const uint8_t* in, uint8_t* to, const uint8_t* key) {
    uint64_t data[8];
    std::memcpy(data, in, STRIPE);
    if (S != NONE) std::memcpy(to, data, STRIPE);
    if (!Hash) return;
    for (int lane = 0; lane < 8; lane++) {
      const uint64_t mixed = data[lane] ^ read64(key + 8 * lane);
      acc[lane] += data[lane ^ 1] + (mixed & 0xffffffffu) * (mixed >> 32);
    }
  }

  BATON_INLINE void scramble() {
    for (int lane = 0; lane < 8; lane++)
      acc[lane] = (acc[lane] ^ acc[lane] >> 47 ^ read64(SECRET + SECRET_BYTES - STRIPE + 8 * lane)) * P32_1;
  }

  BATON_INLINE void out(uint64_t* to) const { std::memcpy(to, acc, STRIPE); }
};
#endif

uint64_t merged(const Lanes& lanes, int64_t bytes) {
  uint64_t acc[8], sum = uint64_t(bytes) * P64_1;
  lanes.out(acc);
  for (int pair = 0; pair < 4; pair++)
    sum += folded(acc[2 * pair] ^ read64(SECRET + 11 + 16 * pair), acc[2 * pair + 1] ^ read64(SECRET + 19 + 16 * pair));
  sum ^= sum >> 37;
  sum *= P_AVALANCHE;
  return sum ^ sum >> 32;
}

// One block. The last stripe overlaps the one before unless `bytes` is a multiple of 64: those bytes are read from the copy.
template <Store S, bool Hash = true>
uint64_t block(uint8_t* to, const uint8_t* in, int64_t bytes) {
  Lanes lanes;
  const int64_t last = bytes - STRIPE, stripes = (bytes - 1) / STRIPE;
  int64_t at = 0;
  for (int64_t round = 0; round < stripes / STRIPES; round++) {
    for (int stripe = 0; stripe < STRIPES; stripe++, at += STRIPE) {
      prefetch(in + at + AHEAD);
      lanes.stripe<S, Hash>(in + at, to + at, SECRET + 8 * stripe);
    }
#ifndef BATON_MUTATION_KV_COPY_NO_SCRAMBLE
    lanes.scramble();
#endif
  }
  for (int stripe = 0; stripe < stripes % STRIPES; stripe++, at += STRIPE)
    lanes.stripe<S, Hash>(in + at, to + at, SECRET + 8 * stripe);
  const uint8_t* tail = in + last;
  if (S != NONE) {
#ifdef BATON_MUTATION_KV_COPY_SHORT
    std::memcpy(to + at, in + at, size_t(bytes - at - 1));
#else
    std::memcpy(to + at, in + at, size_t(bytes - at));
#endif
#ifndef BATON_MUTATION_KV_COPY_HASHES_SOURCE
    tail = to + last;
#endif
  }
  if (!Hash) return 0;
  lanes.stripe<NONE>(tail, nullptr, SECRET + SECRET_BYTES - STRIPE - 7);
  return merged(lanes, bytes);
}

template <bool Hash>
void all(const uint64_t* dst, const uint64_t* src, int64_t count, int64_t bytes, uint64_t* sums) {
  for (int64_t i = 0; i < count; i++) {
    const uint8_t* in = reinterpret_cast<const uint8_t*>(src[i]);
    uint8_t* to = reinterpret_cast<uint8_t*>(dst[i]);
    const uint64_t sum = dst[i] % STRIPE ? block<PLAIN, Hash>(to, in, bytes) : block<STREAM, Hash>(to, in, bytes);
    if (Hash) sums[i] = sum;
  }
#if BATON_AVX2
  _mm_sfence();
#endif
}

}  // namespace

BATON_API void baton_kv_copy(const uint64_t* dst, const uint64_t* src, int64_t count, int64_t bytes, uint64_t* sums) {
  if (!sums) return all<false>(dst, src, count, bytes, sums);
  if (dst) return all<true>(dst, src, count, bytes, sums);
  for (int64_t i = 0; i < count; i++) sums[i] = block<NONE>(nullptr, reinterpret_cast<const uint8_t*>(src[i]), bytes);
}

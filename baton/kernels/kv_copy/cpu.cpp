// XXH3's eight 64-bit lanes are one register (two with AVX2): a stripe of 64 bytes is loaded, stored and mixed in.
#include "kv_copy.h"

namespace {

constexpr int64_t STRIPE = 64, STRIPES = 16, ROUND = STRIPE * STRIPES, SECRET_BYTES = 192;
constexpr int64_t AHEAD = 2048;  // bytes; the hardware's own prefetching ends at each 4 KiB page
constexpr uint64_t P32_1 = 0x9E3779B1u, P32_2 = 0x85EBCA77u, P32_3 = 0xC2B2AE3Du;
constexpr uint64_t P64_1 = 0x9E3779B185EBCA87u, P64_2 = 0xC2B2AE3D27D4EB4Fu, P64_3 = 0x165667B19E3779F9u;
constexpr uint64_t P64_4 = 0x85EBCA77C2B2AE63u, P64_5 = 0x27D4EB2F165667C5u, P_AVALANCHE = 0x165667919E3779F9u;
alignas(64) constexpr uint64_t START[8] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};

alignas(64) constexpr uint8_t SECRET[SECRET_BYTES] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c, 0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb,
    0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f, 0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c, 0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb,
    0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3, 0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d, 0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31,
    0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64, 0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e, 0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc,
    0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce, 0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

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

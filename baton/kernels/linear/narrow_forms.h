// Forms of weights that a CPU alone multiplies: codes into a table, e4m3 numbers. A chunk of either becomes what the tiles
// read, bytes or bf16, once for all rows. Knows nothing of rows or threads.
//
//   CODES     as W4 (linear.h), a nibble being a place in the table: 16 int8, to which `mins` of the struct points
//   W8_OUTLIERS  as W8 without groups, `mins` pointing to a float: see outliers.h
//   W8_ORDERED, W4_ORDERED  as W8 and W4, `mins` pointing to an Order: see order.h
//   E4M3_A16  as W8, a byte being a float8_e4m3fn; rows of activations are bf16, sums float; with a group, scales as of integers
#pragma once

#include "tiles.h"

namespace baton {

constexpr int32_t LINEAR_CODES = 4, LINEAR_E4M3_A16 = 5, LINEAR_W8_OUTLIERS = 6;
constexpr int32_t LINEAR_W8_ORDERED = 7, LINEAR_W4_ORDERED = 8;  // PackedLinear.kind; 3 is a GPU's

inline bool is_ordered(int32_t kind) { return kind == LINEAR_W8_ORDERED || kind == LINEAR_W4_ORDERED; }

inline bool is_of_bytes(int32_t kind) {
  return kind == LINEAR_W8 || kind == LINEAR_E4M3_A16 || kind == LINEAR_W8_OUTLIERS || kind == LINEAR_W8_ORDERED;
}

inline int64_t weight_bytes(const PackedLinear& w, int64_t values) {
  return w.kind == LINEAR_BF16 ? 2 * values : is_of_bytes(w.kind) ? values : values / 2;
}

// Whether `mins` are mins: one per group and output.
inline bool has_mins(const PackedLinear& w) {
  return w.mins && w.kind != LINEAR_CODES && w.kind != LINEAR_W8_OUTLIERS && !is_ordered(w.kind);
}

// A planted bug, which the op's tests must catch: the upper half of the table is never read.
#ifdef BATON_MUTATION_LINEAR_TABLE
constexpr uint8_t kPlaces = 7;
#else
constexpr uint8_t kPlaces = 15;
#endif

inline const int8_t* table_of(const PackedLinear& w) { return (const int8_t*)w.mins; }

// `steps` of [64][4] bytes with two nibbles each -> twice as many steps of [64][4] bytes, the table's numbers + 128.
inline void look_up(const uint8_t* w, int64_t steps, const int8_t* numbers, uint8_t* out) {
  alignas(16) uint8_t table[16];
  for (int i = 0; i < 16; ++i) table[i] = uint8_t(numbers[i & kPlaces] + 128);
#if BATON_AVX512
  const __m512i places = _mm512_set1_epi8(15), found = _mm512_broadcast_i32x4(_mm_load_si128((const __m128i*)table));
  for (int64_t s = 0; s < steps; ++s, w += 256, out += 512)
    unroll<4>([&](auto j) BATON_LAMBDA {
      const __m512i both = _mm512_loadu_si512(w + 64 * j);
      const __m512i low = _mm512_and_si512(both, places), high = _mm512_and_si512(_mm512_srli_epi16(both, 4), places);
      _mm512_storeu_si512(out + 64 * j, _mm512_shuffle_epi8(found, low));
      _mm512_storeu_si512(out + 256 + 64 * j, _mm512_shuffle_epi8(found, high));
    });
#elif BATON_AVX2
  const __m256i places = _mm256_set1_epi8(15), found = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)table));
  for (int64_t s = 0; s < steps; ++s, w += 256, out += 512)
    unroll<8>([&](auto j) BATON_LAMBDA {
      const __m256i both = _mm256_loadu_si256((const __m256i*)(w + 32 * j));
      const __m256i low = _mm256_and_si256(both, places), high = _mm256_and_si256(_mm256_srli_epi16(both, 4), places);
      _mm256_storeu_si256((__m256i*)(out + 32 * j), _mm256_shuffle_epi8(found, low));
      _mm256_storeu_si256((__m256i*)(out + 256 + 32 * j), _mm256_shuffle_epi8(found, high));
    });
#else
  for (int64_t s = 0; s < steps; ++s, w += 256, out += 512)
    for (int i = 0; i < 256; ++i) out[i] = table[w[i] & 15], out[256 + i] = table[w[i] >> 4];
#endif
}

// An e4m3 number as bf16, exactly: its exponent counts from 7, bf16's from 127; below 8 it is a count of 2^-9.
constexpr int kExponents = (127 - 7) << 7;
constexpr uint16_t kSubnormal[8] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};

#if BATON_AVX512
// Sixteen-bit lanes with an e4m3 byte each.
BATON_INLINE __m512i e4m3_to_bf16(__m512i bytes, __m512i small) {
  const __m512i size = _mm512_and_si512(bytes, _mm512_set1_epi16(0x7f));
  const __m512i sign = _mm512_slli_epi16(_mm512_and_si512(bytes, _mm512_set1_epi16(0x80)), 8);
  const __m512i normal = _mm512_add_epi16(_mm512_slli_epi16(size, 4), _mm512_set1_epi16(kExponents));
  const __mmask32 below = _mm512_cmplt_epu16_mask(size, _mm512_set1_epi16(8));
  return _mm512_or_si512(_mm512_mask_permutexvar_epi16(normal, below, size, small), sign);
}

// `steps` of [64][4] bytes -> twice as many steps of [64][2] bf16.
inline void widen_e4m3(const uint8_t* w, int64_t steps, uint16_t* out) {
  const __m512i small = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i*)kSubnormal));
  const __m512i pair = _mm512_broadcast_i32x4(_mm_setr_epi8(0, -1, 1, -1, 4, -1, 5, -1, 8, -1, 9, -1, 12, -1, 13, -1));
  const __m512i two = _mm512_set1_epi8(2);
  for (int64_t s = 0; s < steps; ++s, w += 256, out += 256)
    unroll<4>([&](auto j) BATON_LAMBDA {
      const __m512i four = _mm512_loadu_si512(w + 64 * j);  // of sixteen outputs
      const __m512i first = _mm512_shuffle_epi8(four, pair), second = _mm512_shuffle_epi8(four, _mm512_or_si512(pair, two));
      _mm512_storeu_si512(out + 32 * j, e4m3_to_bf16(first, small));
      _mm512_storeu_si512(out + 128 + 32 * j, e4m3_to_bf16(second, small));
    });
}
#elif BATON_AVX2
// `halves`: kSubnormal's low bytes, then its high ones.
BATON_INLINE __m256i e4m3_to_bf16(__m256i bytes, __m256i halves) {
  const __m256i size = _mm256_and_si256(bytes, _mm256_set1_epi16(0x7f));
  const __m256i sign = _mm256_slli_epi16(_mm256_and_si256(bytes, _mm256_set1_epi16(0x80)), 8);
  const __m256i normal = _mm256_add_epi16(_mm256_slli_epi16(size, 4), _mm256_set1_epi16(kExponents));
  const __m256i places = _mm256_or_si256(size, _mm256_slli_epi16(_mm256_or_si256(size, _mm256_set1_epi16(8)), 8));
  const __m256i below = _mm256_cmpgt_epi16(_mm256_set1_epi16(8), size);
  const __m256i small = _mm256_shuffle_epi8(halves, places);
  return _mm256_or_si256(_mm256_blendv_epi8(normal, small, below), sign);
}

inline void widen_e4m3(const uint8_t* w, int64_t steps, uint16_t* out) {
  alignas(16) uint8_t bytes[16];
  for (int i = 0; i < 8; ++i) bytes[i] = uint8_t(kSubnormal[i]), bytes[8 + i] = uint8_t(kSubnormal[i] >> 8);
  const __m256i halves = _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)bytes));
  const __m256i pair = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, -1, 1, -1, 4, -1, 5, -1, 8, -1, 9, -1, 12, -1, 13, -1));
  const __m256i two = _mm256_set1_epi8(2);
  for (int64_t s = 0; s < steps; ++s, w += 256, out += 256)
    unroll<8>([&](auto j) BATON_LAMBDA {
      const __m256i four = _mm256_loadu_si256((const __m256i*)(w + 32 * j));  // of eight outputs
      const __m256i first = _mm256_shuffle_epi8(four, pair), second = _mm256_shuffle_epi8(four, _mm256_or_si256(pair, two));
      _mm256_storeu_si256((__m256i*)(out + 16 * j), e4m3_to_bf16(first, halves));
      _mm256_storeu_si256((__m256i*)(out + 128 + 16 * j), e4m3_to_bf16(second, halves));
    });
}
#else
inline void widen_e4m3(const uint8_t* w, int64_t steps, uint16_t* out) {
  for (int64_t s = 0; s < steps; ++s, w += 256, out += 256)
    for (int i = 0; i < 256; ++i) {
      const uint16_t size = w[i] & 0x7f, sign = uint16_t((w[i] & 0x80) << 8);
      out[i / 4 * 2 + i % 2 + i % 4 / 2 * 128] = uint16_t((size < 8 ? kSubnormal[size] : (size << 4) + kExponents) | sign);
    }
}
#endif

// w: `width` inputs as bf16, in groups under `scales` [group][64]: each group's sum times its scale is added to the rows'.
template <int R>
inline void tile_bf16_groups(const uint16_t* w, int64_t width, int64_t group, const float* scales, TileRows tile) {
  alignas(64) float sums[R * kPanel];
  float* const out = tile.out;
  tile.out = sums;
  for (int64_t at = 0; at < width; at += group, w += group * kPanel, scales += kGroupStride, tile.x += group / 2 * word_bytes(R) * R) {
    std::memset(sums, 0, sizeof sums);
    tile_bf16<R>(w, std::min(group, width - at) / 2, tile);
    for (int64_t r = 0; r < R; ++r)
      for (int64_t n = 0; n < kPanel; ++n) out[r * kPanel + n] += sums[r * kPanel + n] * scales[n];
  }
}

}  // namespace baton

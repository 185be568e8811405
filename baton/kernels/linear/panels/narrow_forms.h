// Forms of weights that a CPU alone multiplies: codes into a table, e4m3 numbers. A chunk of either becomes what the tiles
// read, bytes or bf16, once for all rows. Knows nothing of rows or threads.
//
//   CODES     as W4 (linear.h), a nibble being a place in the table, to which `mins` of the struct points: 16 int8, then 16 bf16,
//             the same numbers as near as either holds them
//   W8_OUTLIERS  as W8 without groups, `mins` pointing to a float: see outliers.h
//   W8_ORDERED, W4_ORDERED  as W8 and W4, `mins` pointing to an Order: see order.h
//   E4M3_A16  as W8, a byte being a float8_e4m3fn; rows of activations are bf16, sums float; with a group, scales as of integers
//   E4M3_A8   as E4M3_A16, rows being rounded to e4m3 first: `mins` points to a float, their scale, 0 for what each row's largest
//             number asks for, or each group's of a row
//   A16 + W8, W4, CODES, W8_ORDERED, W4_ORDERED  the same bytes, rows of activations being bf16: see weight_only.h
#pragma once

#include "tiles.h"

namespace baton {

constexpr int32_t LINEAR_CODES = 4, LINEAR_E4M3_A16 = 5, LINEAR_W8_OUTLIERS = 6;
constexpr int32_t LINEAR_W8_ORDERED = 7, LINEAR_W4_ORDERED = 8, LINEAR_E4M3_A8 = 9;  // PackedLinear.kind; 3 is a GPU's
constexpr int32_t LINEAR_F16 = 101;  // as dense.h's float32, in halves: rows stay float32
constexpr int32_t LINEAR_A16 = 16;  // added to a kind of integers or codes

inline bool is_weight_only(int32_t kind) { return kind >= LINEAR_A16 && kind < 2 * LINEAR_A16; }
// How its bytes lie.
inline int32_t form_of(int32_t kind) { return is_weight_only(kind) ? kind - LINEAR_A16 : kind; }
inline bool is_e4m3(int32_t kind) { return kind == LINEAR_E4M3_A16 || kind == LINEAR_E4M3_A8; }
// Whether weights become bf16 first.
inline bool becomes_bf16(int32_t kind) { return is_e4m3(kind) || is_weight_only(kind); }

inline bool is_ordered(int32_t kind) { return form_of(kind) == LINEAR_W8_ORDERED || form_of(kind) == LINEAR_W4_ORDERED; }

inline bool is_of_bytes(int32_t kind) {
  const int32_t form = form_of(kind);
  return form == LINEAR_W8 || form == LINEAR_W8_OUTLIERS || form == LINEAR_W8_ORDERED || is_e4m3(form);
}

inline int64_t weight_bytes(const PackedLinear& w, int64_t values) {
  return w.kind == LINEAR_BF16 ? 2 * values : is_of_bytes(w.kind) ? values : values / 2;
}

// Whether its nibbles become bf16, which they do by words: rows are dealt for it (swap_middles).
inline bool is_of_wide_nibbles(int32_t kind) { return is_weight_only(kind) && !is_of_bytes(kind); }

// Whether `mins` are mins: one per group and output.
inline bool has_mins(const PackedLinear& w) {
  const int32_t form = form_of(w.kind);
  return w.mins && form != LINEAR_CODES && form != LINEAR_W8_OUTLIERS && !is_e4m3(form) && !is_ordered(form);
}

// A planted bug, which the op's tests must catch: the upper half of the table is never read.
#ifdef BATON_MUTATION_LINEAR_TABLE
constexpr uint8_t kPlaces = 7;
#else
constexpr uint8_t kPlaces = 15;
#endif

inline const int8_t* table_of(const PackedLinear& w) { return (const int8_t*)w.mins; }
inline const bf16* wide_table_of(const PackedLinear& w) { return (const bf16*)(table_of(w) + 16); }

// What W4's nibbles or codes stand for, as bf16, which holds whole numbers up to 256; and its low bytes, its high ones. Made once a
// call, of forms that read it.
struct NibbleTable {
  alignas(32) uint16_t words[16] = {};
  alignas(16) uint8_t low[16] = {}, high[16] = {};

  explicit NibbleTable(const PackedLinear& w) {
    if (!is_of_wide_nibbles(w.kind)) return;
    const bool codes = form_of(w.kind) == LINEAR_CODES;
    for (int i = 0; i < 16; ++i) {
      words[i] = codes ? wide_table_of(w)[i] : to_bf16(float(i - 8));
      low[i] = uint8_t(words[i]), high[i] = uint8_t(words[i] >> 8);
    }
  }
};

// The numbers of a table of codes + 128, as dot products take weights; null: of another form.
struct ByteTable {
  alignas(16) uint8_t at[16] = {};

  explicit ByteTable(const int8_t* numbers) {
    for (int i = 0; numbers && i < 16; ++i) at[i] = uint8_t(numbers[i & kPlaces] + 128);
  }
};

// `steps` of [64][4] bytes with two nibbles each -> twice as many steps of [64][4] bytes, the table's numbers + 128.
inline void look_up(const uint8_t* w, int64_t steps, const int8_t* numbers, uint8_t* out) {
  const ByteTable bytes(numbers);
  const uint8_t* table = bytes.at;
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

}  // namespace baton

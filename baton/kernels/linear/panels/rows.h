// Rows of activations as the inner loops read them: rounded once, then dealt out word by word so that a tile of rows
// streams in. Knows nothing of weights' values.
//
//   [chunk of K][tile of rows][step][row][a word: 4 int8 or 2 bf16, or these widened (tiles.h)]
#pragma once

#include <algorithm>

#include "../../abi/threads.h"
#include "narrow_forms.h"
#include "quantize_rows.h"
#include "tiles.h"
#include "weight_only.h"

namespace baton {

// Inputs per float sum where weights have no groups: one number for all ISAs, so that they come to the same bits.
constexpr int64_t kSum = 1024;
// Inputs at least whose weights a tile goes through at once. With AVX-512 those come from the L2 cache as fast as they are
// used, and what a tile ends with costs more.
constexpr int64_t kChunk = BATON_AVX512 ? 8192 : 384;
constexpr int64_t kHalfChunk = 2048;  // where tiles go through half a panel
constexpr int64_t kPairChunk = 128;   // where they become bf16 first, with AVX-512: 16 KiB
constexpr int64_t kNarrowChunk = 384;  // where weights become wider first, and lie in the nearest caches for it
// Rows from which on int4 with whole scales becomes int8 first: a turn from group to group costs more for small groups.
constexpr int64_t kManyRows = 96, kManyRowsSmall = 24, kManyRowsNarrow = BATON_AVX2 ? 17 : 1;

// A planted bug, which the op's tests must catch: every other step gets the inputs of the one before.
#ifdef BATON_MUTATION_LINEAR_DEAL
constexpr int64_t kStale = 1;
#else
constexpr int64_t kStale = 0;
#endif

inline int64_t up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

// What stored integers are too large by.
#ifdef BATON_MUTATION_LINEAR_ZERO
constexpr int32_t kZero4 = 7;
#else
constexpr int32_t kZero4 = 8;
#endif
constexpr int32_t kZero8 = 128;

inline bool small_groups(const PackedLinear& w) { return w.group && w.group < 128; }

// int4 times its scales, which are whole, is int8: whether a chunk of it is made first.
inline bool widens(const PackedLinear& w, int64_t m) {
  const int64_t many = !BATON_AVX512 ? kManyRowsNarrow : small_groups(w) ? kManyRowsSmall : kManyRows;
  return w.exact && m >= many;
}

// int4 is taken apart in registers, beside the dot products: with AVX-512, and of few rows; else a chunk's bytes are made first.
// So are codes with AVX-512, of at most two tiles' rows: dot products of more are better by tiles of bytes.
inline bool in_registers(const PackedLinear& w, int64_t m) {
  if (w.kind == LINEAR_CODES) return BATON_AVX512 && m <= 2 * kRowsW4;
  return w.kind == LINEAR_W4 && (BATON_AVX512 || m < kManyRowsNarrow) && !widens(w, m);
}

// Tiles go through half a panel each, then all through the other half, if int4 has small groups, whose float sums are better
// in registers. One tile alone reads a panel as one stream.
inline bool by_halves(const PackedLinear& w, int64_t m) {
  return BATON_AVX512 && w.kind == LINEAR_W4 && in_registers(w, m) && small_groups(w) && m > kRowsW4;
}

// A chunk's groups: how many, and the steps of each and of the last one.
struct Steps {
  int64_t groups, each, last;

  Steps(int64_t width, int64_t group, int64_t inputs)
      : groups((width + group - 1) / group), each(std::min(group, width) / inputs), last(((width - 1) % group + 1) / inputs) {}
  Steps() = default;
};

struct Rows {  // what is multiplied, in the calling thread's scratch
  int64_t m, tiles, k, padded, unit;  // unit: inputs in 4 bytes
  int64_t chunk, group, groups;       // inputs per chunk and per sum, sums per row
  int64_t scaled, scales_of;          // inputs per scale, as many as per sum where there are none; scales per output
  Steps steps;                        // of a whole chunk of integers, by scales
  bool halves;                        // of panels
  bool widened, in_registers;         // int4 and codes: see above
  bool made_bf16;                     // weights of a weight-only form are made bf16, with AVX-512, before tiles read them
  bool are_e4m3, summed, by_words;    // rows of bf16: rounded to e4m3; each group's inputs added up; in the order of swap_middles
  float given;                        // e4m3 rows' scale, 0 for their own
  char* x;
  int32_t* starts;  // [tile of rows][group][row], see tiles.h
  int32_t zero;
  float* scales;  // [m]

#ifdef BATON_MUTATION_LINEAR_TILE
  int64_t first(int64_t tile) const { return tile == tiles ? m - (m > kRows) : m * tile / tiles; }  // drops a row
#else
  int64_t first(int64_t tile) const { return tiles == 1 ? m * tile : m * tile / tiles; }  // a division takes as long as a group
#endif
  bool spread() const { return BATON_AVX2 && !BATON_AVX512 && m > kFewRows; }  // what a tile fetches, over its passes
  int64_t width(int64_t from) const { return std::min(chunk, padded - from); }
  static int64_t before(int64_t from, int64_t group) { return from ? from / group : 0; }
  bool is_whole(int64_t width) const { return width == std::min(chunk, padded); }
  int64_t word() const { return in_registers ? 4 : unit == 4 ? integer_word_bytes(m) : word_bytes(m); }
  char* at(int64_t from, int64_t row) const { return x + (from * m + row * width(from)) / unit * word(); }
};

#if BATON_AVX512
// Four words of each of `count` rows to [word][row].
struct Dealer {
  __m512i order[2];
  __mmask16 wanted[2];

  explicit Dealer(int64_t count) {
    alignas(64) int32_t from[32] = {};
    for (int64_t word = 0, i = 0; word < 4; ++word)
      for (int64_t row = 0; row < count; ++row) from[i++] = int32_t(4 * row + word - (word & kStale));
    for (int half = 0; half < 2; ++half) {
      int64_t words = std::min<int64_t>(std::max<int64_t>(4 * count - 16 * half, 0), 16);
      order[half] = _mm512_load_si512(from + 16 * half), wanted[half] = __mmask16((1u << words) - 1);
    }
  }

  BATON_INLINE static __m512i four_rows(const uint32_t* row, int64_t stride, int64_t rows) {
    __m512i words = _mm512_setzero_si512();
    if (rows > 0) words = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i*)row));
    if (rows > 1) words = _mm512_inserti32x4(words, _mm_loadu_si128((const __m128i*)(row + stride)), 1);
    if (rows > 2) words = _mm512_inserti32x4(words, _mm_loadu_si128((const __m128i*)(row + 2 * stride)), 2);
    if (rows > 3) words = _mm512_inserti32x4(words, _mm_loadu_si128((const __m128i*)(row + 3 * stride)), 3);
    return words;
  }

  BATON_INLINE void put(const uint32_t* row, int64_t stride, int64_t count, uint32_t* out) const {
    __m512i low = four_rows(row, stride, count), high = four_rows(row + 4 * stride, stride, count - 4);
    _mm512_mask_storeu_epi32(out, wanted[0], _mm512_permutex2var_epi32(low, order[0], high));
    if (count > 4) _mm512_mask_storeu_epi32(out + 16, wanted[1], _mm512_permutex2var_epi32(low, order[1], high));
  }
};
#endif

#if BATON_AVX2 && !BATON_AVX512
// Two floats for each of four words of a row, or four int16, of inputs 0, 2, 1 and 3 (wide_rows.h), `apart` places from one word's
// to the next one's.
BATON_INLINE void put_wide(const uint32_t* words, bool integers, int64_t apart, uint64_t* out) {
  const __m128i four = _mm_loadu_si128((const __m128i*)words);
  const __m128i dealt = _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
  const __m256i wide = integers ? _mm256_cvtepi8_epi16(_mm_shuffle_epi8(four, dealt)) : _mm256_slli_epi32(_mm256_cvtepu16_epi32(four), 16);
  const __m128i low = _mm256_castsi256_si128(wide), high = _mm256_extracti128_si256(wide, 1);
  out[0] = uint64_t(_mm_cvtsi128_si64(low)), out[apart] = uint64_t(_mm_extract_epi64(low, 1));
  out[2 * apart] = uint64_t(_mm_cvtsi128_si64(high)), out[3 * apart] = uint64_t(_mm_extract_epi64(high, 1));
}

inline uint64_t wide_word(uint32_t word, bool integers) {
  if (!integers) return uint64_t(word << 16) | uint64_t(word & 0xffff0000u) << 32;
  uint64_t wide = 0;
  for (int i = 0; i < 4; ++i) wide |= uint64_t(uint16_t(int8_t(word >> 8 * i))) << 16 * (i == 1 ? 2 : i == 2 ? 1 : i);
  return wide;
}

// As `deal`, widened.
inline void deal_wide(const Rows& rows, int64_t first, int64_t count, const uint32_t* row, int64_t stride) {
  const bool integers = rows.unit == 4;
  for (int64_t from = 0; from < rows.padded; from += rows.chunk) {
    const int64_t steps = rows.width(from) / rows.unit;
    for (int64_t r = 0; r < count; ++r) {
      uint64_t* out = (uint64_t*)rows.at(from, first) + r;
      const uint32_t* words = row + r * stride;
      int64_t s = 0;
      if (!kStale)
        for (; s + 4 <= steps; s += 4, out += 4 * count) put_wide(words + s, integers, count, out);
      for (; s < steps; ++s, out += count) *out = wide_word(words[s - (s & kStale)], integers);
    }
    row += steps;
  }
}
#endif

// `count` rounded rows, `stride` words apart, into the tile's places.
inline void deal(const Rows& rows, int64_t first, int64_t count, const uint32_t* row, int64_t stride) {
#if BATON_AVX512
  const Dealer dealer(count);
#elif BATON_AVX2
  if (rows.word() == 8) return deal_wide(rows, first, count, row, stride);
#endif
  for (int64_t from = 0; from < rows.padded; from += rows.chunk) {
    uint32_t* out = (uint32_t*)rows.at(from, first);
    int64_t steps = rows.width(from) / rows.unit, s = 0;
#if BATON_AVX512
    for (; s + 4 <= steps; s += 4, row += 4, out += 4 * count) dealer.put(row, stride, count, out);
#endif
    for (; s < steps; ++s, ++row)
      for (int64_t r = 0; r < count; ++r) *out++ = row[r * stride - (s & kStale)];
  }
}

inline void prepare_tile(const Rows& rows, int64_t tile, const char* x, int32_t dtype, int64_t x_bytes) {
  int64_t first = rows.first(tile), count = rows.first(tile + 1) - first, stride = up(rows.padded / rows.unit * 4, 64);
  bool alone = rows.m == 1;  // already in place
  char* rounded = alone ? rows.x : (char*)scratch(SCRATCH_TASK, count * stride);
  for (int64_t r = 0; r < count; ++r) {
    const char* from = x + (first + r) * x_bytes;
    char* row = rounded + r * stride;
    const RowGroups own{(float*)rows.starts + first * rows.groups + r, count, rows.group};
    if (rows.are_e4m3)
      rows.scales[first + r] = round_to_e4m3(from, dtype, rows.k, rows.padded, rows.given, own, (bf16*)row);
    else if (rows.unit == 2)
      round_row(from, dtype, rows.k, rows.padded, (bf16*)row);
    else
      rows.scales[first + r] = quantize_row(from, from + count * x_bytes, dtype, rows.k, rows.padded, rows.group, (int8_t*)row,
                                            {rows.starts + first * rows.groups + r, count, rows.zero});
    if (rows.summed) sum_groups((const bf16*)row, rows.padded, own);
    if (rows.by_words) swap_middles((bf16*)row, rows.padded);
  }
  if (!alone) deal(rows, first, count, (const uint32_t*)rounded, stride / 4);
}

inline Rows prepare(const PackedLinear& w, const void* x, int32_t dtype, int64_t x_stride, int64_t m) {
  Rows rows;
  rows.widened = widens(w, m), rows.in_registers = in_registers(w, m);
  int64_t per_tile = rows.in_registers ? kRowsW4 : kRows;
  rows.m = m, rows.tiles = (m + per_tile - 1) / per_tile, rows.k = w.k;
  rows.padded = up(w.k, w.group ? w.group : 8);
  const bool wide = becomes_bf16(w.kind);
  rows.unit = w.kind == LINEAR_BF16 || wide ? 2 : 4;
  rows.made_bf16 = BATON_AVX512 && wide && !lie_as_read(w, m);
  rows.are_e4m3 = w.kind == LINEAR_E4M3_A8, rows.summed = wide && has_mins(w);
  rows.by_words = is_of_wide_nibbles(w.kind);
  rows.given = rows.are_e4m3 ? *(const float*)w.mins : 0;
  rows.group = rows.widened ? 2 * w.exact : w.group ? w.group : wide ? rows.padded : kSum;
  rows.halves = by_halves(w, m);
  if (wide)
    rows.chunk = up(!BATON_AVX512 ? kNarrowChunk : lie_as_read(w, m) ? kChunk : kPairChunk, w.group ? w.group : 8);
  else
    rows.chunk = up(w.kind == LINEAR_CODES && !rows.in_registers ? kNarrowChunk : rows.halves ? kHalfChunk : kChunk,
                    w.exact ? 2 * w.exact : rows.group);
  rows.groups = up(rows.padded, rows.group) / rows.group;
  rows.scaled = w.group ? w.group : rows.group, rows.scales_of = up(rows.padded, rows.scaled) / rows.scaled;
  rows.steps = Steps(rows.width(0), rows.scaled, w.kind == LINEAR_W8 ? 4 : 8);
  int64_t x_bytes = up(m * rows.padded / rows.unit * rows.word(), 64), start_bytes = up(m * rows.groups * 4, 64);
  rows.x = (char*)scratch(SCRATCH_CALLER, x_bytes + start_bytes + m * 4);
  rows.starts = (int32_t*)(rows.x + x_bytes), rows.zero = w.kind == LINEAR_W4 && !rows.widened ? kZero4 : kZero8;
  rows.scales = (float*)(rows.x + x_bytes + start_bytes);
  int32_t parts = m * w.k < 1 << 15 ? 1 : int32_t(std::min<int64_t>(rows.tiles, 4 * threads()));
  parallel_for(parts, [&](int32_t p) {
    Range range = part(rows.tiles, 1, parts, p);
    for (int64_t t = range.begin; t < range.end; ++t)
      prepare_tile(rows, t, (const char*)x, dtype, x_stride * (dtype == BF16 ? 2 : 4));
  });
  return rows;
}

}  // namespace baton

// Integers and codes beside rows of bf16 (W4A16, W8A16), and e4m3 weights beside rows of e4m3 (W8A8-FP8): a chunk of weights
// becomes bf16, exactly, once for all rows; scales and minimums are of groups' float sums. Knows nothing of threads.
//
// A row begins with one float per group and row, where integers have the sum of its integers (tiles.h: `starts`): beside minimums
// the group's inputs added up, beside e4m3 rows their scale.
#pragma once

#include <algorithm>
#include <cmath>

#include "../../abi/elements.h"
#include "../../abi/vector.h"
#include "narrow_floats.h"
#include "narrow_forms.h"
#include "one_row.h"
#include "quantize_rows.h"
#include "register_floats.h"
#include "small_groups.h"

namespace baton {

// Rows up to which weights become floats in registers, for each tile anew: more are bound by products, which e4m3 shares its pipes
// with. With AVX-512 those whose sums leave registers for tables, any form.
constexpr int64_t kRegisterRows = 8, kRegisterE4m3 = 4, kLookedUpRows = 5;

#if BATON_AVX2 && !BATON_AVX512
using Bytes = __m256i;
BATON_INLINE Bytes bytes_at(const uint8_t* at) { return _mm256_loadu_si256((const __m256i*)at); }
BATON_INLINE void put_bytes(uint16_t* at, Bytes x) { _mm256_storeu_si256((__m256i*)at, x); }
BATON_INLINE Bytes sixteen_places(const uint8_t* table) { return _mm256_broadcastsi128_si256(_mm_load_si128((const __m128i*)table)); }
BATON_INLINE Bytes low_nibbles(Bytes x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
BATON_INLINE Bytes high_nibbles(Bytes x) { return low_nibbles(_mm256_srli_epi16(x, 4)); }
BATON_INLINE Bytes looked_up(Bytes table, Bytes places) { return _mm256_shuffle_epi8(table, places); }
BATON_INLINE Bytes low_pairs(Bytes a, Bytes b) { return _mm256_unpacklo_epi8(a, b); }
BATON_INLINE Bytes high_pairs(Bytes a, Bytes b) { return _mm256_unpackhi_epi8(a, b); }
template <int Which>
BATON_INLINE Bytes words_of(Bytes a, Bytes b) {
  return _mm256_castps_si256(_mm256_shuffle_ps(_mm256_castsi256_ps(a), _mm256_castsi256_ps(b), Which));
}
// Of each 32 bits the byte that `left` shifts to the top, as a float.
template <int Left>
BATON_INLINE Bytes byte_as_float(Bytes x) {
  return _mm256_castps_si256(_mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(x, Left), 24)));
}
BATON_INLINE Bytes two_tops(Bytes first, Bytes second) {
  return _mm256_or_si256(_mm256_srli_epi32(first, 16), _mm256_and_si256(second, _mm256_set1_epi32(int(0xffff0000u))));
}
BATON_INLINE Bytes without_zero(Bytes x) { return _mm256_xor_si256(x, _mm256_set1_epi8(-128)); }
#endif

#if !BATON_AVX512
// `steps` of [64][4] bytes with two nibbles each -> four times as many of [64][2] bf16, in the order of swap_middles.
inline void widen_nibbles(const uint8_t* w, int64_t steps, const NibbleTable& table, uint16_t* out) {
#if BATON_AVX2
  constexpr int kWidth = sizeof(Bytes);
  const Bytes lows = sixteen_places(table.low), highs = sixteen_places(table.high);
  const Bytes middles = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15));
  const auto put = [&](Bytes four, uint16_t* to) BATON_LAMBDA {
    const Bytes places = looked_up(four, middles), low = looked_up(lows, places), high = looked_up(highs, places);
    const Bytes first = low_pairs(low, high), second = high_pairs(low, high);
    put_bytes(to, words_of<0x88>(first, second)), put_bytes(to + 128, words_of<0xdd>(first, second));
  };
  for (int64_t s = 0; s < steps; ++s, w += 256, out += 512)
    unroll<256 / kWidth>([&](auto j) BATON_LAMBDA {
      const Bytes both = bytes_at(w + kWidth * j);
      put(low_nibbles(both), out + kWidth / 2 * j), put(high_nibbles(both), out + 256 + kWidth / 2 * j);
    });
#else
  for (int64_t s = 0; s < steps; ++s, w += 256, out += 512)
    for (int i = 0; i < 256; ++i) {
      const int at = i / 4 * 2 + i % 4 / 2 + i % 2 * 128;
      out[at] = table.words[w[i] & 15], out[256 + at] = table.words[w[i] >> 4];
    }
#endif
}

// `steps` of [64][4] bytes, a number + 128 each -> twice as many of [64][2] bf16.
inline void widen_bytes(const uint8_t* w, int64_t steps, uint16_t* out) {
#if BATON_AVX2
  constexpr int kWidth = sizeof(Bytes);
  for (int64_t s = 0; s < steps; ++s, w += 256, out += 256)
    unroll<256 / kWidth>([&](auto j) BATON_LAMBDA {
      const Bytes four = without_zero(bytes_at(w + kWidth * j));
      put_bytes(out + kWidth / 2 * j, two_tops(byte_as_float<24>(four), byte_as_float<16>(four)));
      put_bytes(out + 128 + kWidth / 2 * j, two_tops(byte_as_float<8>(four), byte_as_float<0>(four)));
    });
#else
  for (int64_t s = 0; s < steps; ++s, w += 256, out += 256)
    for (int i = 0; i < 256; ++i) out[i / 4 * 2 + i % 2 + i % 4 / 2 * 128] = to_bf16(float(int(w[i]) - 128));
#endif
}

#endif

#if BATON_AVX512
// f(what looks up weights of this form).
template <class F>
BATON_INLINE void with_lookup(const PackedLinear& w, const NibbleTable& nibbles, F&& f) {
  if (is_e4m3(w.kind)) return f(LookedUpE4m3());
  if (is_of_bytes(w.kind)) return f(LookedUpBytes());
  f(LookedUpNibbles(nibbles));
}
#endif

// `width` inputs of a panel, of any of these forms.
inline void widen_to_bf16(const PackedLinear& w, const NibbleTable& nibbles, const uint8_t* at, int64_t width, uint16_t* out) {
#if BATON_AVX512
  with_lookup(w, nibbles, [&](const auto& form) { look_up_pairs(form, at, width, out); });
#else
  if (is_e4m3(w.kind)) return widen_e4m3(at, width / 4, out);
  if (is_of_bytes(w.kind)) return widen_bytes(at, width / 4, out);
  widen_nibbles(at, width / 8, nibbles, out);
#endif
}

// A chunk's weights that became bf16: [two inputs][64][2].
struct AsBf16 {
  const uint16_t* w;

  // Bytes that are asked for beside so many inputs.
  static constexpr int64_t ahead(int64_t inputs, const Ahead& each) { return BATON_AVX512 ? inputs / 2 * each.bytes : 0; }
#if BATON_AVX512
  template <int R>
  static bool at_once(int64_t group) {
    return R >= kHalvedRows && group <= kSmallGroup;
  }
  template <int R>
  void add(int64_t from, int64_t inputs, const TileRows& tile) const {
    tile_bf16<R, GoesOn, kRows>(w + from * kPanel, inputs / 2, tile);
  }
  template <int R>
  void add_group(int64_t from, int64_t inputs, const TileRows& tile, const OfGroup& sums) const {
    tile_bf16<R, OfGroup, kRows>(w + from * kPanel, inputs / 2, tile, sums);
  }
  template <int R>
  void add_groups(const Groups& groups, const TileRows& tile) const {
    small_groups<R>(w, groups, tile);
  }
#else
  template <int R>
  void add(int64_t from, int64_t inputs, const TileRows& tile) const {
    tile_bf16<R>(w + from * kPanel, inputs / 2, tile);
  }
#endif
};

#if BATON_AVX2 && !BATON_AVX512
// A chunk's weights as they lie.
template <class Form>
struct AsTheyLie {
  const uint8_t* w;

  static constexpr int64_t read(int64_t inputs) { return inputs * kPanel * 4 / Form::kInputs; }
  static constexpr int64_t ahead(int64_t inputs, const Ahead& each) { return read(inputs); }
  template <int R>
  void add(int64_t from, int64_t inputs, const TileRows& tile) const {
    tile_narrow<Form, R>(w + read(from), inputs, tile);
  }
};
#endif

#if BATON_AVX512
// A chunk's weights as they lie.
template <class Form>
struct AsLookedUp {
  const uint8_t* w;
  const Form form;

  static constexpr int64_t ahead(int64_t inputs, const Ahead& each) { return inputs / Form::kInputs * each.bytes; }
  template <int R>
  static constexpr bool at_once(int64_t) {
    return R == 1;
  }
  template <int R>
  void add(int64_t from, int64_t inputs, const TileRows& tile) const {
    tile_looked_up<R>(form, w + from / Form::kInputs * 256, inputs, tile, GoesOn());
  }
  template <int R>
  void add_group(int64_t from, int64_t inputs, const TileRows& tile, const OfGroup& sums) const {
    tile_looked_up<R>(form, w + from / Form::kInputs * 256, inputs, tile, sums);
  }
  template <int R>
  void add_groups(const Groups& groups, const TileRows& tile) const {
    if constexpr (R == 1) groups_of_one_row(form, w, groups, tile);
  }
};
#endif

// Whether weights become floats in registers: where that is no more work than the rows' products leave room for.
inline bool lie_as_read(const PackedLinear& w, int64_t m) {
  const int32_t form = form_of(w.kind);
  if (BATON_AVX512) return m <= kLookedUpRows;
  if (!BATON_AVX2 || w.kind == LINEAR_E4M3_A8 || form == LINEAR_CODES) return false;
  return m <= (is_e4m3(form) ? kRegisterE4m3 : kRegisterRows);
}

// f(the chunk's weights, of any of these forms, as the tiles take them); `memory`: of lie_as_read, or of their bf16.
template <class F>
BATON_INLINE void with_floats(const PackedLinear& w, const NibbleTable& nibbles, const uint8_t* at, int64_t width, int64_t m,
                              uint16_t* memory, F&& f) {
#if BATON_AVX512
  if (lie_as_read(w, m))
    return with_lookup(w, nibbles, [&](const auto& form) { f(AsLookedUp<std::decay_t<decltype(form)>>{at, form}); });
#elif BATON_AVX2
  if (lie_as_read(w, m)) {
    if (is_e4m3(w.kind)) return f(AsTheyLie<WideE4m3>{at});
    return is_of_bytes(w.kind) ? f(AsTheyLie<WideBytes>{at}) : f(AsTheyLie<WideNibbles>{at});
  }
#endif
  widen_to_bf16(w, nibbles, at, width, memory);
  f(AsBf16{memory});
}

// `width` inputs in so many groups: each group's sum times its scale, less its minimum times its inputs, is added to the rows'.
template <int R, class Floats>
inline void tile_groups(const Floats& w, int64_t width, int64_t group, int64_t count, GroupScales of, TileRows tile, bool scaled_rows) {
  const float* own = (const float*)tile.starts;
#if BATON_AVX512
  if (Floats::template at_once<R>(group)) return w.template add_groups<R>({of, own, count, group / 2, scaled_rows}, tile);
  const int64_t share = Floats::ahead(group, tile.ahead);
  for (int64_t at = 0; at < width; at += group, tile.x += group / 2 * word_bytes(R) * R, own += R) {
    fetch_scales(of);
    w.template add_group<R>(at, std::min(group, width - at), tile, OfGroup{of.scales, of.mins, own, scaled_rows});
    of.scales += kGroupStride;
    if (of.mins) of.mins += kGroupStride;
    tile.ahead.at += share;
  }
#else
  const int64_t share = R > kFewRows ? tile.ahead.bytes * group / width : Floats::ahead(group, tile.ahead);
  alignas(64) float sums[R * kPanel];
  float* const out = tile.out;
  tile.out = sums;
  if (R > kFewRows) tile.ahead.bytes = share;
  for (int64_t at = 0; at < width; at += group, tile.x += group / 2 * word_bytes(R) * R, own += R) {
    std::memset(sums, 0, sizeof sums);
    w.template add<R>(at, std::min(group, width - at), tile);
    for (int64_t n = 0; n < kPanel; n += LANES)
      for (int64_t r = 0; r < R; ++r) {
        float* to = out + r * kPanel + n;
        const vf scale = load_halves(of.scales + n) * splat(scaled_rows ? own[r] : 1.0f);
        const vf total = fma(load(sums + r * kPanel + n), scale, load(to));
        store(to, of.mins ? fma(load_halves(of.mins + n), splat(-own[r]), total) : total);
      }
    of.scales += kGroupStride;
    if (of.mins) of.mins += kGroupStride;
    tile.ahead.at += share;
  }
#endif
}

// |x| up to 448 as the nearest e4m3 number, ties to even: three bits behind the first one, below 2^-6 steps of 2^-9.
BATON_INLINE float nearest_e4m3(float x) {
  const uint32_t bits = bits_of(x), sign = bits & 0x80000000u, size = bits ^ sign;
#ifdef BATON_MUTATION_LINEAR_E4M3
  const float large = float_of((size + 0x80000u) & 0xfff00000u);  // ties away from zero
#else
  const float large = float_of((size + 0x7ffffu + ((size >> 20) & 1)) & 0xfff00000u);
#endif
  const float small = (float_of(size) + 24576.0f) - 24576.0f;  // whose last bit is 2^-9
  return float_of(bits_of(float_of(size) < 0x1p-6f ? small : large) | sign);
}

// x times `inverse` as e4m3 numbers in bf16, each up to 448.
inline void e4m3_row(const void* x, int32_t dtype, int64_t begin, int64_t end, float inverse, bf16* out) {
  for (int64_t i = begin; i < end; ++i) {
    const float v = load(x, dtype, i) * inverse;
    const float within = v > 448.0f ? 448.0f + 0.0f * v : v < -448.0f ? -448.0f + 0.0f * v : v;  // infinity becomes NaN
    out[i] = bf16(bits_of(nearest_e4m3(within)) >> 16);
  }
}

// A row's own float of each group, `stride` apart, and the row as bf16 with zeros past k. `group`: of sums; `given`: the scale of
// e4m3 rows, 0 for the largest number's.
struct RowGroups {
  float* at;
  int64_t stride, group;
};

inline float round_to_e4m3(const void* x, int32_t dtype, int64_t k, int64_t padded, float given, RowGroups groups, bf16* out) {
  std::memset(out + k, 0, (padded - k) * 2);
  float scale = given;
  for (int64_t begin = 0; begin < padded; begin += groups.group, groups.at += groups.stride) {
    const int64_t end = std::min(begin + groups.group, k), size = dtype == BF16 ? 2 : 4;
    const char* from = (const char*)x + begin * size;
    const float most = begin < k && given == 0 ? float_of(absmax_bits(from, from, dtype, end - begin)) : 448.0f * given;
    const bool dead = !(most >= kFloor);
    if (given == 0) scale = most != most ? most : dead ? 0.0f : most / 448.0f;
    e4m3_row(x, dtype, begin, end, given != 0 ? 1.0f / given : dead ? 0.0f : 448.0f / most, out);
    *groups.at = scale;
  }
  return scale;
}

// Adds up each group of a row that is bf16 already, input i in lane i % 16.
inline void sum_groups(const bf16* row, int64_t padded, RowGroups groups) {
  for (int64_t begin = 0; begin < padded; begin += groups.group, groups.at += groups.stride) {
    vf lanes{};
    const int64_t end = std::min(begin + groups.group, padded);
    for (int64_t i = begin; i < end; i += LANES) lanes = lanes + elements_at(row + i, end - i);
    *groups.at = sum(lanes);
  }
}

// Of every eight inputs the second and the third change places, and so do the sixth and the seventh: nibbles are looked up by words,
// and words have their bytes' low nibbles as pairs of every other input (linear.h: W4).
inline void swap_middles(bf16* row, int64_t padded) {
#ifndef BATON_MUTATION_LINEAR_MIDDLES
  for (int64_t i = 0; i < padded; i += 4) std::swap(row[i + 1], row[i + 2]);
#endif
}

}  // namespace baton

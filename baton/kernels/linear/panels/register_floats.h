// Integers, codes and e4m3 beside rows of bf16 with AVX-512, looked up as bf16 in registers: so that a weight-only form costs its
// bytes, and what makes floats of them runs beside the products. Sums take their inputs in the order of tile_bf16, with its bits.
// Knows nothing of groups. Included by weight_only.h.
#pragma once

#include "narrow_forms.h"

#if BATON_AVX512

namespace baton {

// The bytes of 128 numbers of bf16, low and high, by place.
struct PlaceTable {
  alignas(64) uint8_t low[128], high[128];

  template <class F>
  explicit PlaceTable(F&& number) {
    for (int i = 0; i < 128; ++i) low[i] = uint8_t(number(i)), high[i] = uint8_t(number(i) >> 8);
  }
};

struct Places {
  __m512i low[2], high[2];

  explicit Places(const PlaceTable& table)
      : low{_mm512_load_si512(table.low), _mm512_load_si512(table.low + 64)},
        high{_mm512_load_si512(table.high), _mm512_load_si512(table.high + 64)} {}
};

// Sixteen outputs' four bytes to the order that unpacking makes pairs of: inputs 0 and 1 of a lane's outputs, then 2 and 3.
BATON_INLINE __m512i by_pairs(__m512i four) {
  return _mm512_shuffle_epi8(four, _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15)));
}

BATON_INLINE void put_pairs(__m512i low, __m512i high, __m512i* pairs) {
  pairs[0] = _mm512_unpacklo_epi8(low, high), pairs[1] = _mm512_unpackhi_epi8(low, high);
}

// A planted bug, which the op's tests must catch: -128 comes to nothing.
#ifdef BATON_MUTATION_LINEAR_LOWEST
constexpr float kPlaceZero = 0.0f;
#else
constexpr float kPlaceZero = 128.0f;
#endif

// A number + 128: a place is its size, 128 being at 0, which no number else is looked up at.
struct LookedUpBytes {
  static constexpr int kInputs = 4;
  const Places places{table()};

  static const PlaceTable& table() {
    static const PlaceTable made([](int i) { return to_bf16(i ? float(i) : kPlaceZero); });
    return made;
  }
  BATON_INLINE void operator()(const uint8_t* w, __m512i* pairs) const {
    const __m512i top = _mm512_set1_epi8(-128), number = _mm512_xor_si512(by_pairs(_mm512_loadu_si512(w)), top);
    const __m512i size = _mm512_abs_epi8(number);
    const __mmask64 some = _mm512_test_epi8_mask(number, number);
    const __m512i low = _mm512_maskz_permutex2var_epi8(some, places.low[0], size, places.low[1]);
    const __m512i high = _mm512_maskz_permutex2var_epi8(some, places.high[0], size, places.high[1]);
    put_pairs(low, _mm512_ternarylogic_epi32(high, number, top, 0xf8), pairs);  // high | number & top
  }
};

struct LookedUpE4m3 {
  static constexpr int kInputs = 4;
  const Places places{table()};

  static const PlaceTable& table() {
    static const PlaceTable made([](int i) { return uint16_t(i < 8 ? kSubnormal[i] : (i << 4) + kExponents); });
    return made;
  }
  BATON_INLINE void operator()(const uint8_t* w, __m512i* pairs) const {
    const __m512i number = by_pairs(_mm512_loadu_si512(w));
    const __m512i low = _mm512_permutex2var_epi8(places.low[0], number, places.low[1]);
    const __m512i high = _mm512_permutex2var_epi8(places.high[0], number, places.high[1]);
    put_pairs(low, _mm512_ternarylogic_epi32(high, number, _mm512_set1_epi8(-128), 0xf8), pairs);
  }
};

// Pairs in the order of swap_middles: a look-up by words reads five bits of each, so that a nibble needs no mask where the table
// stands in its register twice.
struct LookedUpNibbles {
  static constexpr int kInputs = 8;
  const __m512i table;

  explicit LookedUpNibbles(const NibbleTable& of) : table(_mm512_broadcast_i64x4(_mm256_load_si256((const __m256i*)of.words))) {}
  BATON_INLINE void operator()(const uint8_t* w, __m512i* pairs) const {
    const __m512i four = _mm512_loadu_si512(w);
    pairs[0] = _mm512_permutexvar_epi16(four, table), pairs[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(four, 8), table);
    pairs[2] = _mm512_permutexvar_epi16(_mm512_srli_epi16(four, 4), table);
    pairs[3] = _mm512_permutexvar_epi16(_mm512_srli_epi16(four, 12), table);
  }
};

// acc += both products of a pair of bf16, the second one first; a row's pair comes from memory, so that no register holds it.
BATON_INLINE void dot_bf16(__m512& acc, __m512i w, const char* x) {
  asm("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(w), "m"(*(const int32_t(*)[1])x));
}

// `inputs` of a panel -> [two inputs][64][2] bf16.
template <class Form>
inline void look_up_pairs(const Form form, const uint8_t* w, int64_t inputs, uint16_t* out) {
  constexpr int kPairs = Form::kInputs / 2;
  for (int64_t s = 0; s < inputs / Form::kInputs; ++s, w += 256, out += 128 * kPairs)
    unroll<4>([&](auto j) BATON_LAMBDA {
      __m512i pairs[kPairs];
      form(w + 64 * j, pairs);
      unroll<kPairs>([&](auto p) BATON_LAMBDA { _mm512_storeu_si512(out + 128 * p + 32 * j, pairs[p]); });
    });
}

// One chunk's part of `inputs`, from its packed bytes; x: [two inputs][row][2] bf16. Never inlined: beside other loops g++ leaves
// sums on the stack.
template <int R, class Sums, class Form>
__attribute__((noinline)) inline void tile_looked_up(const Form form, const uint8_t* w, int64_t inputs, const TileRows& rows, const Sums sums) {
  constexpr int kPairs = Form::kInputs / 2;
  __m512 acc[R][4];
  const char* x = rows.x;
  Ahead ahead = rows.ahead;
  sums.template begin<R>(acc, rows.out);
  for (int64_t s = 0; s < inputs / Form::kInputs; ++s, w += 256, x += 4 * kPairs * R) {
    unroll<4>([&](auto j) BATON_LAMBDA {
      __m512i pairs[kPairs];
      form(w + 64 * j, pairs);
      unroll<kPairs>([&](auto p) BATON_LAMBDA {
        unroll<R>([&](auto r) BATON_LAMBDA { dot_bf16(acc[r][j], pairs[p], x + 4 * (p * R + r)); });
      });
    });
    ahead.fetch<R>();
  }
  sums.template end<R>(acc, rows.out);
}

}  // namespace baton
#endif

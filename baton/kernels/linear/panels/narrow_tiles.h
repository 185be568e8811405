// The inner loops of linear without AVX-512: with AVX2, beside it with AVX-VNNI, and in plain C++. Included by tiles.h, whose structs
// they take.
#pragma once

#include <cmath>

namespace baton {

#if BATON_AVX2

// Bytes are multiplied in one of three ways, all of which give whole numbers:
//   AVX-VNNI        four weights of an output by four inputs at once, by vpdpbusd: vnni_rows.h
//   1 row, or int4  weights come from memory as one stream; their bytes times the rows' bytes, by vpmaddubsw
//   2 to 6 rows     bytes widen to 16 bits, as the rows did when they were dealt, by vpmaddwd: wide_rows.h
constexpr int kRows = 6, kRowsW4 = 6, kFewRows = 1;

BATON_INLINE __m256i vector_at(const void* at) { return _mm256_loadu_si256((const __m256i*)at); }

BATON_INLINE __m256i four_bytes(const void* at) {
  int32_t bits;
  std::memcpy(&bits, at, 4);
  return _mm256_set1_epi32(bits);
}

BATON_INLINE __m256i eight_bytes(const void* at) {
  int64_t bits;
  std::memcpy(&bits, at, 8);
  return _mm256_set1_epi64x(bits);
}

// acc += w · x by pairs. Written out, since g++ 12 makes all products first, and then has no register for them.
BATON_INLINE void dot(__m256i& acc, __m256i w, __m256i x) {
  __m256i products;
  asm("vpmaddwd %3, %2, %1\n\tvpaddd %1, %0, %0" : "+x"(acc), "=&x"(products) : "x"(w), "x"(x));
}

BATON_INLINE __m256 eight_fp16(const fp16* at) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)at)); }

// `whole` numbers of eight outputs, scaled, on top of `out`. `start`: what the group's sum began with.
template <Scales S>
BATON_INLINE void add_scaled(float* out, __m256i whole, int32_t start, const TileWeights& w, int64_t at) {
  const __m256 exact = _mm256_cvtepi32_ps(whole);
  __m256 total = _mm256_loadu_ps(out);
  total = S == NO_SCALES ? _mm256_add_ps(exact, total) : _mm256_fmadd_ps(exact, eight_fp16(w.scales + at), total);
  if (S == SCALES_AND_MINS)
    total = _mm256_fmadd_ps(eight_fp16(w.mins + at), _mm256_set1_ps(float(start) / float(w.zero)), total);
  _mm256_storeu_ps(out, total);
}

// Of a pair of bf16 in 32 bits: the first, the second.
BATON_INLINE __m256 first_of(__m256i pair) { return _mm256_castsi256_ps(_mm256_slli_epi32(pair, 16)); }
BATON_INLINE __m256 second_of(__m256i pair) {
  return _mm256_castsi256_ps(_mm256_and_si256(pair, _mm256_set1_epi32(int(0xffff0000u))));
}

}  // namespace baton
#include "wide_rows.h"
namespace baton {

#if BATON_AVX_VNNI
}  // namespace baton
#include "vnni_rows.h"
namespace baton {
#endif

// Steps of [64][4] bytes: w - 128 by the row's bytes, the weight's sign put on the row's byte. 128 x 127 twice fits 16 bits.
template <int R, int V>
struct FewBytes {
  static constexpr bool kSigned = true;  // sums need no start
  static constexpr int kRow = 4;         // bytes of a row per step
  const __m256i flip = _mm256_set1_epi8(-128), ones = _mm256_set1_epi16(1);

  BATON_INLINE void operator()(__m256i (&acc)[R][V], const uint8_t* w, const char* x, int64_t steps, Ahead& ahead) const {
    for (int64_t s = 0; s < steps; ++s, w += 256, x += kRow * R) {
      __m256i row[R];
      unroll<R>([&](auto r) BATON_LAMBDA { row[r] = four_bytes(x + 4 * r); });
      unroll<V>([&](auto v) BATON_LAMBDA {
        const __m256i own = _mm256_xor_si256(vector_at(w + 32 * v), flip), size = _mm256_abs_epi8(own);
        unroll<R>([&](auto r) BATON_LAMBDA {
          const __m256i pairs = _mm256_maddubs_epi16(size, _mm256_sign_epi8(row[r], own));
          acc[r][v] = _mm256_add_epi32(acc[r][v], _mm256_madd_epi16(pairs, ones));
        });
      });
      ahead.fetch<R>();
    }
  }
};

// Steps of [64][4] bytes with two nibbles each. Four steps' sums fit 16 bits: 16 x 15 x 127.
template <int R, int V>
struct FewNibbles {
  static constexpr bool kSigned = false;
  static constexpr int kRow = 8;
  const __m256i low = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);

  BATON_INLINE void operator()(__m256i (&acc)[R][V], const uint8_t* w, const char* x, int64_t steps, Ahead& ahead) const {
    for (int64_t s = 0; s < steps; s += 4, w += 1024, x += 4 * kRow * R) {
      const int64_t count = std::min<int64_t>(4, steps - s);
      unroll<V>([&](auto v) BATON_LAMBDA {
        __m256i pairs[R];
        unroll<R>([&](auto r) BATON_LAMBDA { pairs[r] = _mm256_setzero_si256(); });
        for (int64_t i = 0; i < count; ++i) {
          const __m256i both = vector_at(w + 256 * i + 32 * v);
          const __m256i first = _mm256_and_si256(both, low), second = _mm256_and_si256(_mm256_srli_epi16(both, 4), low);
          const char* row = x + i * kRow * R;
          unroll<R>([&](auto r) BATON_LAMBDA {
            const __m256i one = _mm256_maddubs_epi16(first, four_bytes(row + 4 * r));
            const __m256i other = _mm256_maddubs_epi16(second, four_bytes(row + 4 * (R + r)));
            pairs[r] = _mm256_add_epi16(pairs[r], _mm256_add_epi16(one, other));
          });
        }
        unroll<R>([&](auto r) BATON_LAMBDA { acc[r][v] = _mm256_add_epi32(acc[r][v], _mm256_madd_epi16(pairs[r], ones)); });
      });
      for (int64_t i = 0; i < count; ++i) R > kFewRows ? ahead.fetch_lines<(V + 1) / 2>() : ahead.fetch<R>();
    }
  }
};

// out += the exact sums, one or two, which are added first: what integers of both come to is rounded once, too.
template <int R, int V>
BATON_INLINE void add_to(float* out, const float* sums, bool two) {
  unroll<R>([&](auto r) BATON_LAMBDA {
    unroll<V>([&](auto v) BATON_LAMBDA {
      const int at = r * kPanel + 8 * v;
      __m256 sum = _mm256_loadu_ps(sums + at);
      if (two) sum = _mm256_add_ps(sum, _mm256_loadu_ps(sums + R * kPanel + at));
      _mm256_storeu_ps(out + at, _mm256_add_ps(_mm256_loadu_ps(out + at), sum));
    });
  });
}

// A chunk's V vectors of eight outputs from `column` on, group by group.
template <Scales S, int R, int V, class Step>
BATON_INLINE void few_columns(const TileWeights weights, TileRows& given, int column, const Step step) {
  TileRows rows = given;
  const uint8_t* w = weights.w + 4 * column;
  const char* x = rows.x;
  alignas(32) float exact[S == WHOLE_SCALES ? 2 * R * kPanel : 1];
  float* out = rows.out + column;
  int64_t left = 0;  // groups until an exact sum is whole
  bool second = false;
  for (int64_t g = 0; g < weights.groups; ++g) {
    if (S == WHOLE_SCALES && !left) {
      left = std::min(weights.exact, weights.groups - g), out = exact + (second ? R * kPanel : 0);
      std::memset(out, 0, R * kPanel * 4);
    }
    __m256i acc[R][V];
    unroll<R>([&](auto r) BATON_LAMBDA {
      const __m256i start = _mm256_set1_epi32(Step::kSigned ? 0 : rows.starts[g * R + r]);
      unroll<V>([&](auto v) BATON_LAMBDA { acc[r][v] = start; });
    });
    const int64_t steps = g + 1 < weights.groups ? weights.steps : weights.last;
    step(acc, w, x, steps, rows.ahead);
    w += 256 * steps, x += Step::kRow * R * steps;
    unroll<R>([&](auto r) BATON_LAMBDA {
      unroll<V>([&](auto v) BATON_LAMBDA {
        add_scaled<S>(out + r * kPanel + 8 * v, acc[r][v], rows.starts[g * R + r], weights, g * kGroupStride + column + 8 * v);
      });
    });
    if (S == WHOLE_SCALES && !--left) {
      if (second || g + 1 == weights.groups) add_to<R, V>(rows.out + column, exact, second);
      second = !second;
    }
  }
  given.ahead = rows.ahead;
}

// One row's panel at once; of more rows as many columns as sixteen registers hold sums of, pass by pass.
template <Scales S, int R, int V, class Step>
BATON_INLINE void in_passes(const TileWeights& weights, TileRows rows, const Step step) {
  if (R > kFewRows) rows.ahead = spread(rows.ahead, 8 / V * ((weights.groups - 1) * weights.steps + weights.last));
  for (int v = 0; v < 8; v += V) few_columns<S, R, V>(weights, rows, 8 * v, step);
}

template <Scales S, int R>
BATON_INLINE void bytes_with(const TileWeights& weights, TileRows rows) {
#if BATON_AVX_VNNI
  constexpr int V = vnni_vectors(R);
  in_passes<S, R, V>(weights, rows, VnniBytes<R, V>());
#else
  if constexpr (R <= kFewRows)
    few_columns<S, R, 8>(weights, rows, 0, FewBytes<R, 8>());
  else
    wide_rows_of<S, R>(weights, rows);
#endif
}

template <Scales S, int R>
BATON_INLINE void nibbles_with(const TileWeights& weights, const TileRows& rows) {
#if BATON_AVX_VNNI
  constexpr int V = vnni_vectors(R);
  in_passes<S, R, V>(weights, rows, VnniNibbles<R, V>());
#else
  constexpr int V = R == 1 ? 8 : R == 2 ? 4 : R <= 4 ? 2 : 1;
  in_passes<S, R, V>(weights, rows, FewNibbles<R, V>());
#endif
}

template <int R>
inline void tile_w8(const TileWeights& weights, const TileRows& rows) {
  if (weights.mins)
    bytes_with<SCALES_AND_MINS, R>(weights, rows);
  else if (weights.scales)
    bytes_with<SCALES, R>(weights, rows);
  else
    bytes_with<NO_SCALES, R>(weights, rows);
}

template <int R>
inline void tile_w4(const TileWeights& weights, const TileRows& rows) {
  if (weights.mins)
    nibbles_with<SCALES_AND_MINS, R>(weights, rows);
  else if (kExact && weights.exact)
    nibbles_with<WHOLE_SCALES, R>(weights, rows);
  else if (weights.scales)
    nibbles_with<SCALES, R>(weights, rows);
  else
    nibbles_with<NO_SCALES, R>(weights, rows);
}

// One row of [step][2] bf16. A pair's second product is added first, as vdpbf16ps does: so sums have AVX-512's bits.
BATON_INLINE void one_row_of_pairs(const uint16_t* w, int64_t steps, TileRows row) {
  __m256 acc[8];
  unroll<8>([&](auto v) BATON_LAMBDA { acc[v] = _mm256_loadu_ps(row.out + 8 * v); });
  for (int64_t s = 0; s < steps; ++s, w += 128) {
    const __m256i both = four_bytes(row.x + 4 * s);
    const __m256 x0 = first_of(both), x1 = second_of(both);
    unroll<8>([&](auto v) BATON_LAMBDA {
      const __m256i pair = vector_at(w + 16 * v);
      acc[v] = _mm256_fmadd_ps(first_of(pair), x0, _mm256_fmadd_ps(second_of(pair), x1, acc[v]));
    });
    row.ahead.fetch<1>();
  }
  unroll<8>([&](auto v) BATON_LAMBDA { _mm256_storeu_ps(row.out + 8 * v, acc[v]); });
}

template <int R>
inline void tile_bf16(const uint16_t* w, int64_t steps, const TileRows& rows) {
  if constexpr (R <= kFewRows)
    one_row_of_pairs(w, steps, rows);
  else
    wide_pairs<R>(w, steps, rows);
}

#else

constexpr int kRows = 1, kRowsW4 = 1, kFewRows = 0;

template <int R>
inline void tile_w8(const TileWeights& weights, const TileRows& rows) {
  const uint8_t* w = weights.w;
  const int8_t* x = (const int8_t*)rows.x;
  for (int64_t g = 0; g < weights.groups; ++g) {
    int32_t acc[kPanel] = {};
    const int64_t steps = g + 1 < weights.groups ? weights.steps : weights.last;
    for (int64_t s = 0; s < steps; ++s, w += 256, x += 4)
      for (int n = 0; n < kPanel; ++n)
        for (int i = 0; i < 4; ++i) acc[n] += int32_t(w[4 * n + i]) * x[i];
    for (int n = 0; n < kPanel; ++n) {
      int64_t at = g * kGroupStride + n;
      float exact = float(acc[n] + rows.starts[g]);
      // Rounded once, as elsewhere, so that all ISAs come to the same bits.
      float total = weights.scales ? std::fma(exact, from_fp16(weights.scales[at]), rows.out[n]) : rows.out[n] + exact;
      if (weights.mins) total = std::fma(from_fp16(weights.mins[at]), float(rows.starts[g]) / float(weights.zero), total);
      rows.out[n] = total;
    }
  }
}

template <int R>
inline void tile_bf16(const uint16_t* w, int64_t steps, const TileRows& rows) {
  const bf16* x = (const bf16*)rows.x;
  for (int64_t s = 0; s < steps; ++s, w += 128, x += 2) {
    float x0 = from_bf16(x[0]), x1 = from_bf16(x[1]);
    for (int n = 0; n < kPanel; ++n)
      rows.out[n] = rows.out[n] + from_bf16(w[2 * n + 1]) * x1 + from_bf16(w[2 * n]) * x0;  // products are exact
  }
}

#endif

}  // namespace baton

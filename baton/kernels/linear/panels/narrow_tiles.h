// The inner loops of linear without AVX-512: with AVX2, and in plain C++. Included by tiles.h, whose structs they take.
#pragma once

#include <cmath>

namespace baton {

#if BATON_AVX2

// Without VNNI bytes are multiplied in one of two ways, both of which give whole numbers:
//   1 or 2 rows    weights come from memory as one stream; their bytes times the rows' bytes, by vpmaddubsw
//   3 to 6 rows    weights come from a near cache; bytes widen to 16 bits, as the rows did when they were dealt, by vpmaddwd
constexpr int kRows = 6, kRowsW4 = 2, kFewRows = 2;

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

BATON_INLINE __m256i sixteen_bytes(const void* at) { return _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)at)); }

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

// Steps of [64][4] bytes: w - 128 by the row's bytes, the weight's sign put on the row's byte. 128 x 127 twice fits 16 bits.
template <int R, int V, bool Fetch>
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
      if (Fetch) ahead.fetch<R>();
    }
  }
};

// Steps of [64][4] bytes with two nibbles each. Four steps' sums fit 16 bits: 16 x 15 x 127.
template <int R, int V, bool Fetch>
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
      for (int64_t i = 0; Fetch && i < count; ++i) ahead.fetch<R>();
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
BATON_INLINE void few_columns(const TileWeights weights, TileRows rows, int column, const Step step) {
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
}

// Of two rows half a panel at a time: sixteen registers hold no more. What is ahead is fetched beside the first half.
template <Scales S, int R, template <int, int, bool> class Step>
inline void few_rows_of(const TileWeights& weights, const TileRows& rows) {
  if constexpr (R == 1) {
    few_columns<S, 1, 8>(weights, rows, 0, Step<1, 8, true>());
  } else {
    few_columns<S, R, 4>(weights, rows, 0, Step<R, 4, true>());
    few_columns<S, R, 4>(weights, rows, 32, Step<R, 4, false>());
  }
}

// Eight outputs of R rows that were widened, and one group. An accumulator holds two partial sums per output.
template <Scales S, int R>
BATON_INLINE void eight_outputs(const TileWeights& weights, const TileRows& rows, int64_t g, int j) {
  __m256i acc[R][2];
  unroll<R>([&](auto r) BATON_LAMBDA { acc[r][0] = acc[r][1] = _mm256_setzero_si256(); });
  const uint8_t* w = weights.w + g * weights.steps * 256 + 32 * j;
  const char* x = rows.x + g * weights.steps * 8 * R;
  const int64_t steps = g + 1 < weights.groups ? weights.steps : weights.last;
  for (int64_t s = 0; s < steps; ++s, w += 256, x += 8 * R) {
    const __m256i w0 = sixteen_bytes(w), w1 = sixteen_bytes(w + 16);
    unroll<R>([&](auto r) BATON_LAMBDA {
      const __m256i b = eight_bytes(x + 8 * r);
      dot(acc[r][0], w0, b), dot(acc[r][1], w1, b);
    });
  }
  unroll<R>([&](auto r) BATON_LAMBDA {
    const int32_t start = rows.starts[g * R + r];
    const __m256i mixed = _mm256_hadd_epi32(acc[r][0], acc[r][1]);  // outputs 0 1 4 5 | 2 3 6 7
    const __m256i whole = _mm256_permute4x64_epi64(mixed, 0xd8);
    add_scaled<S>(rows.out + r * kPanel + 8 * j, _mm256_add_epi32(whole, _mm256_set1_epi32(start)), start, weights,
                  g * kGroupStride + 8 * j);
  });
}

template <Scales S, int R>
inline void wide_rows_of(const TileWeights& weights, const TileRows& rows) {
  for (int64_t g = 0; g < weights.groups; ++g)
    for (int j = 0; j < 8; ++j) eight_outputs<S, R>(weights, rows, g, j);
}

template <Scales S, int R>
BATON_INLINE void bytes_with(const TileWeights& weights, const TileRows& rows) {
  if constexpr (R <= kFewRows)
    few_rows_of<S, R, FewBytes>(weights, rows);
  else
    wide_rows_of<S, R>(weights, rows);
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
  if constexpr (R <= kFewRows) {
    if (weights.mins)
      few_rows_of<SCALES_AND_MINS, R, FewNibbles>(weights, rows);
    else if (kExact && weights.exact)
      few_rows_of<WHOLE_SCALES, R, FewNibbles>(weights, rows);
    else if (weights.scales)
      few_rows_of<SCALES, R, FewNibbles>(weights, rows);
    else
      few_rows_of<NO_SCALES, R, FewNibbles>(weights, rows);
  }
}

// Of a pair of bf16 in 32 bits: the first, the second.
BATON_INLINE __m256 first_of(__m256i pair) { return _mm256_castsi256_ps(_mm256_slli_epi32(pair, 16)); }
BATON_INLINE __m256 second_of(__m256i pair) {
  return _mm256_castsi256_ps(_mm256_and_si256(pair, _mm256_set1_epi32(int(0xffff0000u))));
}

// V vectors of eight outputs from `column` on; rows of [step][row][2] bf16.
template <int R, int V>
BATON_INLINE void few_pairs(const uint16_t* w, int64_t steps, const TileRows& rows, Ahead ahead, int column) {
  __m256 acc[R][V];
  float* const out = rows.out + column;
  unroll<R>([&](auto r) BATON_LAMBDA {
    unroll<V>([&](auto v) BATON_LAMBDA { acc[r][v] = _mm256_loadu_ps(out + r * kPanel + 8 * v); });
  });
  w += 2 * column;
  const char* x = rows.x;
  for (int64_t s = 0; s < steps; ++s, w += 128, x += 4 * R) {
    __m256 x0[R], x1[R];
    unroll<R>([&](auto r) BATON_LAMBDA { x0[r] = first_of(four_bytes(x + 4 * r)), x1[r] = second_of(four_bytes(x + 4 * r)); });
    unroll<V>([&](auto v) BATON_LAMBDA {
      const __m256i pair = vector_at(w + 16 * v);
      const __m256 w0 = first_of(pair), w1 = second_of(pair);
      unroll<R>([&](auto r) BATON_LAMBDA { acc[r][v] = _mm256_fmadd_ps(w1, x1[r], _mm256_fmadd_ps(w0, x0[r], acc[r][v])); });
    });
    ahead.fetch<R>();
  }
  unroll<R>([&](auto r) BATON_LAMBDA {
    unroll<V>([&](auto v) BATON_LAMBDA { _mm256_storeu_ps(out + r * kPanel + 8 * v, acc[r][v]); });
  });
}

// Sixteen outputs of R rows; rows of [step][row][2] float.
template <int R>
BATON_INLINE void sixteen_outputs(const uint16_t* w, int64_t steps, const TileRows& rows, int j) {
  __m256 acc[R][2];
  float* const out = rows.out + 16 * j;
  unroll<R>([&](auto r) BATON_LAMBDA {
    unroll<2>([&](auto v) BATON_LAMBDA { acc[r][v] = _mm256_loadu_ps(out + r * kPanel + 8 * v); });
  });
  w += 32 * j;
  const float* x = (const float*)rows.x;
  for (int64_t s = 0; s < steps; ++s, w += 128, x += 2 * R) {
    const __m256 low0 = first_of(vector_at(w)), high0 = first_of(vector_at(w + 16));
    unroll<R>([&](auto r) BATON_LAMBDA {
      const __m256 b = _mm256_broadcast_ss(x + 2 * r);
      acc[r][0] = _mm256_fmadd_ps(low0, b, acc[r][0]), acc[r][1] = _mm256_fmadd_ps(high0, b, acc[r][1]);
    });
    const __m256 low1 = second_of(vector_at(w)), high1 = second_of(vector_at(w + 16));
    unroll<R>([&](auto r) BATON_LAMBDA {
      const __m256 b = _mm256_broadcast_ss(x + 2 * r + 1);
      acc[r][0] = _mm256_fmadd_ps(low1, b, acc[r][0]), acc[r][1] = _mm256_fmadd_ps(high1, b, acc[r][1]);
    });
  }
  unroll<R>([&](auto r) BATON_LAMBDA {
    unroll<2>([&](auto v) BATON_LAMBDA { _mm256_storeu_ps(out + r * kPanel + 8 * v, acc[r][v]); });
  });
}

template <int R>
inline void tile_bf16(const uint16_t* w, int64_t steps, const TileRows& rows) {
  if constexpr (R == 1) {
    few_pairs<R, 8>(w, steps, rows, rows.ahead, 0);
  } else if constexpr (R == 2) {
    few_pairs<R, 4>(w, steps, rows, rows.ahead, 0);
    few_pairs<R, 4>(w, steps, rows, Ahead{rows.ahead.at, 0, 0}, 32);
  } else {
    for (int j = 0; j < 4; ++j) sixteen_outputs<R>(w, steps, rows, j);
  }
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
      rows.out[n] = rows.out[n] + from_bf16(w[2 * n]) * x0 + from_bf16(w[2 * n + 1]) * x1;
  }
}

#endif

}  // namespace baton

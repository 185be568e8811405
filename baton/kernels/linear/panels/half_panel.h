// Tiles of int4 with small groups against half a chunk of a panel, with AVX-512. Knows nothing of threads.
#pragma once

#include "tiles.h"

#if BATON_AVX512
namespace baton {

// Half a panel of int4, 32 outputs, so that float sums fit into registers too: with few dot products per group, storing them
// keeps the next group's waiting. Low and high nibbles have sums of their own, so that a dot product needn't wait for the one
// before: 16 integer sums, 8 float ones.
template <Scales S, int R>
BATON_INLINE void half_panel(const TileWeights weights, TileRows rows) {
  const __m512i nibble = _mm512_set1_epi8(15);
  const uint8_t* w = weights.w;
  const char* x = rows.x;
  Ahead ahead = rows.ahead;
  const int32_t* starts = rows.starts;
  __m512 sums[R][2];
  auto load_sums = [&] BATON_LAMBDA {
    unroll<R>([&](auto r) BATON_LAMBDA {
      unroll<2>([&](auto j) BATON_LAMBDA {
        sums[r][j] = S == WHOLE_SCALES ? _mm512_setzero_ps() : _mm512_loadu_ps(rows.out + r * kPanel + 16 * j);
      });
    });
  };
  alignas(64) float first[R][2][16];  // of two exact sums
  bool second = false;
  auto store_sums = [&] BATON_LAMBDA {
    unroll<R>([&](auto r) BATON_LAMBDA {
      unroll<2>([&](auto j) BATON_LAMBDA {
        float* out = rows.out + r * kPanel + 16 * j;
        __m512 sum = sums[r][j];
        if (S == WHOLE_SCALES && second) sum = _mm512_add_ps(_mm512_load_ps(first[r][j]), sum);
        _mm512_storeu_ps(out, S == WHOLE_SCALES ? _mm512_add_ps(_mm512_loadu_ps(out), sum) : sum);
      });
    });
  };
  auto keep_sums = [&] BATON_LAMBDA {
    unroll<R>([&](auto r) BATON_LAMBDA {
      unroll<2>([&](auto j) BATON_LAMBDA { _mm512_store_ps(first[r][j], sums[r][j]); });
    });
  };
  load_sums();
  int64_t left = weights.exact;  // groups until an exact sum is whole
  for (int64_t g = 0; g < weights.groups; ++g, starts += R) {
    if (S == WHOLE_SCALES && !left--) {
      second ? store_sums() : keep_sums();
      second = !second, left = weights.exact - 1, load_sums();
    }
    __m512i low[R][2], high[R][2];
    unroll<R>([&](auto r) BATON_LAMBDA {
      low[r][0] = low[r][1] = broadcast(starts + r), high[r][0] = high[r][1] = _mm512_setzero_si512();
    });
    const int64_t steps = g + 1 < weights.groups ? weights.steps : weights.last;
    for (int64_t s = 0; s < steps; ++s, w += 256, x += 8 * R) {
      __m512i a = _mm512_and_si512(_mm512_loadu_si512(w), nibble), b = _mm512_and_si512(_mm512_loadu_si512(w + 64), nibble);
      unroll<R>([&](auto r) BATON_LAMBDA {
        const __m512i four = broadcast(x + 4 * r);
        dot(low[r][0], a, four), dot(low[r][1], b, four);
      });
      a = _mm512_and_si512(_mm512_srli_epi16(_mm512_loadu_si512(w), 4), nibble);
      b = _mm512_and_si512(_mm512_srli_epi16(_mm512_loadu_si512(w + 64), 4), nibble);
      unroll<R>([&](auto r) BATON_LAMBDA {
        const __m512i four = broadcast(x + 4 * (R + r));
        dot(high[r][0], a, four), dot(high[r][1], b, four);
      });
      ahead.fetch<R>();
    }
    rows.results.fetch();
    unroll<2>([&](auto j) BATON_LAMBDA {
      const int64_t at = g * kGroupStride + 16 * j;
      __m512 scale = _mm512_setzero_ps(), least = scale;
      if (S != NO_SCALES) scale = sixteen_fp16(weights.scales + at);
      if (S == SCALES_AND_MINS) least = sixteen_mins(weights, at);
      unroll<R>([&](auto r) BATON_LAMBDA {
        const __m512 whole = _mm512_cvtepi32_ps(_mm512_add_epi32(low[r][j], high[r][j]));
        sums[r][j] = S == NO_SCALES ? _mm512_add_ps(whole, sums[r][j]) : _mm512_fmadd_ps(whole, scale, sums[r][j]);
        if (S == SCALES_AND_MINS) sums[r][j] = _mm512_fmadd_ps(least, _mm512_cvtepi32_ps(broadcast(starts + r)), sums[r][j]);
      });
    });
  }
  store_sums();
}

template <int R>
inline void half_tile_w4(const TileWeights& weights, const TileRows& rows) {
  if (weights.mins)
    half_panel<SCALES_AND_MINS, R>(weights, rows);
  else if (kExact && weights.exact)
    half_panel<WHOLE_SCALES, R>(weights, rows);
  else if (weights.scales)
    half_panel<SCALES, R>(weights, rows);
  else
    half_panel<NO_SCALES, R>(weights, rows);
}

}  // namespace baton
#endif

// The inner loops of linear without AVX-512: with AVX2, and in plain C++. Included by tiles.h, whose structs they take.
#pragma once

namespace baton {

#if BATON_AVX2

constexpr int kRows = 4, kRowsW4 = 4;

// No VNNI: bytes widen to 16 bits, whose products add up in pairs without saturating. An accumulator holds two partial
// sums per output.
template <int R>
BATON_INLINE void eight_outputs(const TileWeights& weights, const TileRows& rows, int64_t g, int j) {
  const __m256i none = _mm256_setzero_si256();
  __m256i acc[R][2];
  unroll<R>([&](auto r) BATON_LAMBDA { acc[r][0] = acc[r][1] = none; });
  const uint8_t* w = weights.w + g * weights.steps * 256 + 32 * j;
  const char* x = rows.x + g * weights.steps * 4 * R;
  const int64_t steps = g + 1 < weights.groups ? weights.steps : weights.last;
  for (int64_t s = 0; s < steps; ++s, w += 256, x += 4 * R) {
    __m256i bytes = _mm256_loadu_si256((const __m256i*)w);
    __m256i w0 = _mm256_unpacklo_epi8(bytes, none), w1 = _mm256_unpackhi_epi8(bytes, none);
    unroll<R>([&](auto r) BATON_LAMBDA {
      int32_t four;
      std::memcpy(&four, x + 4 * r, 4);
      __m256i b = _mm256_cvtepi8_epi16(_mm_set1_epi32(four));
      acc[r][0] = _mm256_add_epi32(acc[r][0], _mm256_madd_epi16(w0, b));
      acc[r][1] = _mm256_add_epi32(acc[r][1], _mm256_madd_epi16(w1, b));
    });
  }
  int64_t at = g * kGroupStride + 8 * j;
  __m256 scale = weights.scales ? _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(weights.scales + at))) : _mm256_set1_ps(1);
  unroll<R>([&](auto r) BATON_LAMBDA {
    const int32_t start = rows.starts[g * R + r];
    __m256i whole = _mm256_hadd_epi32(acc[r][0], acc[r][1]);  // outputs 0 1 2 3 | 4 5 6 7, as the bytes lie
    __m256 exact = _mm256_cvtepi32_ps(_mm256_add_epi32(whole, _mm256_set1_epi32(start)));
    float* out = rows.out + r * kPanel + 8 * j;
    __m256 total = _mm256_fmadd_ps(exact, scale, _mm256_loadu_ps(out));
    if (weights.mins) {
      __m256 low = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(weights.mins + at)));
      total = _mm256_fmadd_ps(low, _mm256_set1_ps(float(start) / float(weights.zero)), total);
    }
    _mm256_storeu_ps(out, total);
  });
}

template <int R>
inline void tile_w8(const TileWeights& weights, const TileRows& rows) {
  for (int64_t g = 0; g < weights.groups; ++g)
    for (int j = 0; j < 8; ++j) eight_outputs<R>(weights, rows, g, j);
}

template <int R>
inline void tile_bf16(const uint16_t* w, int64_t steps, const TileRows& rows) {
  const __m256i upper = _mm256_set1_epi32(int(0xffff0000u));
  for (int j = 0; j < 8; ++j) {
    __m256 acc[R];
    unroll<R>([&](auto r) BATON_LAMBDA { acc[r] = _mm256_loadu_ps(rows.out + r * kPanel + 8 * j); });
    const bf16* x = (const bf16*)rows.x;
    for (int64_t s = 0; s < steps; ++s, x += 2 * R) {
      __m256i pair = _mm256_loadu_si256((const __m256i*)(w + 128 * s + 16 * j));
      __m256 w0 = _mm256_castsi256_ps(_mm256_slli_epi32(pair, 16)), w1 = _mm256_castsi256_ps(_mm256_and_si256(pair, upper));
      unroll<R>([&](auto r) BATON_LAMBDA {
        acc[r] = _mm256_fmadd_ps(w0, _mm256_set1_ps(from_bf16(x[2 * r])), acc[r]);
        acc[r] = _mm256_fmadd_ps(w1, _mm256_set1_ps(from_bf16(x[2 * r + 1])), acc[r]);
      });
    }
    unroll<R>([&](auto r) BATON_LAMBDA { _mm256_storeu_ps(rows.out + r * kPanel + 8 * j, acc[r]); });
  }
}

#else

constexpr int kRows = 1, kRowsW4 = 1;

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
      float total = rows.out[n] + exact * (weights.scales ? from_fp16(weights.scales[at]) : 1.0f);
      rows.out[n] = weights.mins ? total + from_fp16(weights.mins[at]) * (float(rows.starts[g]) / float(weights.zero)) : total;
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

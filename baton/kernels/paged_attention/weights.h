// int8 values meet a row's weights in integers, with AVX-512: 16 bits of each weight, as two bytes, by four tokens at a time.
// The sums are exact. Knows nothing of keys and scores. Included by splits.h alone.
#pragma once
#include "scores.h"

#if BATON_AVX512
namespace baton {
namespace {

constexpr int BLOCK = 64;      // dims whose sums are together: [high][low][4][16], in the order that bytes are interleaved
constexpr int WORD_ROWS = 3;   // 24 sums, four words of values, two of weights: of 32 registers
constexpr float LEAST = 1e-33f;  // weights below, all of them, come out as zeros: 65535 / LEAST is finite

inline int blocks(const Call& c) { return (c.kv.head_dim + BLOCK - 1) / BLOCK; }

// Columns from … to of a row's weights: weight = step x (256 high + low). A NaN makes all of the row NaN.
float split_weights(const float* weights, int from, int to, uint8_t* high, uint8_t* low) {
  vf peak{};
  __mmask16 numbers = 0xffff;
  for (int at = from; at < to; at += LANES) {
    const vf x = load(weights + at);
    numbers &= _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(INFINITY), _CMP_LT_OQ);
    peak = maximum(x, peak);
  }
  const float most = numbers == 0xffff ? largest(peak) : 0;
  const vf inverse = splat(most > LEAST ? 65535.0f / most : 0);
  for (int at = from; at < to; at += LANES) {
    const __m512i x = _mm512_cvtps_epi32((__m512)(load(weights + at) * inverse));
    _mm_store_si128((__m128i*)(high + at), _mm512_cvtepi32_epi8(_mm512_srli_epi32(x, 8)));
#ifdef BATON_MUTATION_WEIGHTS
    _mm_store_si128((__m128i*)(low + at), _mm_setzero_si128());  // a planted bug: eight bits are left out
#else
    _mm_store_si128((__m128i*)(low + at), _mm512_cvtepi32_epi8(x));
#endif
  }
  return numbers == 0xffff ? most / 65535.0f : NAN;
}

// Four tokens' 64 bytes to four vectors of words, a dim's four bytes each; vector k has dims 4 k … 4 k + 3 of every sixteen.
BATON_INLINE void interleave(const char* v, size_t stride, int bytes, __m512i (&words)[4]) {
  const __m512i a = (__m512i)load_bytes(v, bytes), b = (__m512i)load_bytes(v + stride, bytes);
  const __m512i c = (__m512i)load_bytes(v + 2 * stride, bytes), d = (__m512i)load_bytes(v + 3 * stride, bytes);
  const __m512i ab = _mm512_unpacklo_epi8(a, b), cd = _mm512_unpacklo_epi8(c, d);
  words[0] = _mm512_unpacklo_epi16(ab, cd), words[1] = _mm512_unpackhi_epi16(ab, cd);
  const __m512i ab2 = _mm512_unpackhi_epi8(a, b), cd2 = _mm512_unpackhi_epi8(c, d);
  words[2] = _mm512_unpacklo_epi16(ab2, cd2), words[3] = _mm512_unpackhi_epi16(ab2, cd2);
}

BATON_INLINE __m512i four(const uint8_t* bytes) {
  int32_t word;
  std::memcpy(&word, bytes, 4);
  return _mm512_set1_epi32(word);
}

// A page or two of one head's values, up to 64 bytes of each token, and what is fetched beside them.
struct Values {
  const char *pages[2], *ahead[2];
  int count, bytes;
  size_t stride;
};

template <int R>
void value_words(const Values& v, const uint8_t* high, const uint8_t* low, int32_t* sums, size_t row) {
  __m512i up[R][4], down[R][4];
  unroll<R>([&](auto r) BATON_LAMBDA {
    unroll<4>([&](auto k) BATON_LAMBDA {
      up[r][k] = _mm512_loadu_si512(sums + r * row + 16 * k), down[r][k] = _mm512_loadu_si512(sums + r * row + BLOCK + 16 * k);
    });
  });
  for (int p = 0; p < v.count; p++)
    for (int j = 0; j < PAGE; j += 4) {
      for (int i = 0; i < 4; i++) fetch(v.ahead[p] + (j + i) * 64);
      __m512i words[4];
      interleave(v.pages[p] + j * v.stride, v.stride, v.bytes, words);
      unroll<R>([&](auto r) BATON_LAMBDA {
        const __m512i x = four(high + r * SPLIT + p * PAGE + j), y = four(low + r * SPLIT + p * PAGE + j);
        unroll<4>([&](auto k) BATON_LAMBDA { dot(up[r][k], x, words[k]), dot(down[r][k], y, words[k]); });
      });
    }
  unroll<R>([&](auto r) BATON_LAMBDA {
    unroll<4>([&](auto k) BATON_LAMBDA {
      _mm512_storeu_si512(sums + r * row + 16 * k, up[r][k]), _mm512_storeu_si512(sums + r * row + BLOCK + 16 * k, down[r][k]);
    });
  });
}

template <int R = WORD_ROWS>
void value_word_rows(int rows, const Values& v, const uint8_t* high, const uint8_t* low, int32_t* sums, size_t row) {
  if constexpr (R > 0) {
    for (; rows >= R && !(R == WORD_ROWS && rows == R + 1); rows -= R, high += R * SPLIT, low += R * SPLIT, sums += R * row)
      value_words<R>(v, high, low, sums, row);
    value_word_rows<R - 1>(rows, v, high, low, sums, row);
  }
}

// A row's integer sums to its `acc`, dims in order.
void settle(const Call& c, const int32_t* sums, float step, float* acc) {
  for (int first = 0; first < c.padded; first += BLOCK, sums += 2 * BLOCK) {
    __m512 mixed[4];
    for (int k = 0; k < 4; k++)
      mixed[k] = (__m512)(fma(to_float(load_words(sums + 16 * k)), splat(256.0f), to_float(load_words(sums + BLOCK + 16 * k))) *
                          splat(step));
    const __m512 a = _mm512_shuffle_f32x4(mixed[0], mixed[1], 0x44), b = _mm512_shuffle_f32x4(mixed[2], mixed[3], 0x44);
    const __m512 d = _mm512_shuffle_f32x4(mixed[0], mixed[1], 0xee), e = _mm512_shuffle_f32x4(mixed[2], mixed[3], 0xee);
    const __m512 whole[4] = {_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd),
                             _mm512_shuffle_f32x4(d, e, 0x88), _mm512_shuffle_f32x4(d, e, 0xdd)};
    for (int j = 0; j < 4 && first + j * LANES < c.padded; j++) store(acc + first + j * LANES, (vf)whole[j]);
  }
}

}  // namespace
}  // namespace baton
#endif

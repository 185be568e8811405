// int8 values meet a row's weights in integers, with AVX-512: 16 bits of each weight, as two bytes, by four tokens at a time.
// The sums are exact. Knows nothing of keys and scores. Included by key_splits.h alone.
#pragma once
#include "../scores.h"

#include <algorithm>

#if BATON_AVX512
namespace baton {
namespace {

constexpr int BLOCK = 64;        // dims whose sums are together: [high][low][4][16], in the order that bytes are interleaved
constexpr int WORD_ROWS = 3;     // 24 sums, four words of values, two of weights: of 32 registers
constexpr float LEAST = 1e-33f;  // weights below, all of them, come out as zeros: 65535 / LEAST is finite

// Runs of lines, one as long as another, that are fetched a few at a time.
struct Runs {
  const char* begin[SPLIT / PAGE + AHEAD + 1];
  int count, length, done = 0;  // of lines: the length, and what is done of all

  int left() const { return count * length - done; }
};

// The next lines of runs, at most one run's length of them.
struct Lines {
  const char *at, *then;
  int first, left;  // lines until `then`, and all

  Lines(Runs& runs, int n) {
    const int run = runs.length ? runs.done / runs.length : 0, inside = runs.done - run * runs.length;
    left = std::min({n, runs.left(), runs.length});
    at = runs.begin[run] + inside * 64, then = runs.begin[run + 1], first = runs.length - inside;
    runs.done += left;
  }

  BATON_INLINE void few(int n) {
    for (int i = 0; i < n && left; i++, left--) {
      fetch(at);
      at = --first ? at + 64 : then;
    }
  }
};

inline int blocks(const Call& c) { return (c.kv.head_dim + BLOCK - 1) / BLOCK; }

// Columns from … to of a row's scores, of which `most` is the largest, become weights times their values' scales; the largest of
// those, NaN where one is no number. `total` is of the weights alone.
float weigh(float* scores, const float* scales, int from, int to, float most, float& total, Runs& runs) {
  Lines lines(runs, (to - from) / LANES);
  vf mass{};
  __m512i peak = _mm512_setzero_si512();  // as bits: an infinity and any NaN are above all numbers
  for (int at = from; at < to; at += LANES) {
    const vf p = most == -INFINITY ? vf{} : decay(load(scores + at) - splat(most)), x = p * load(scales + at);
    store(scores + at, x);
    lines.few(1);
    mass = mass + p;
    peak = _mm512_max_epu32(peak, (__m512i)to_bits(x));
  }
  total = sum(mass);
  const uint32_t top = _mm512_reduce_max_epu32(peak);
  return top < bits_of(INFINITY) ? float_of(top) : NAN;
}

// Those, of which `top` is the largest, as step x (256 high + low); the step. A NaN makes all of the row NaN.
float into_words(const float* weights, int from, int to, float top, uint8_t* high, uint8_t* low) {
  const vf inverse = splat(top > LEAST ? 65535.0f / top : 0);
  const __m512i apart = _mm512_castsi256_si512(_mm256_setr_epi8(0, 4, 8, 12, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60, 1, 5, 9, 13,
                                                                17, 21, 25, 29, 33, 37, 41, 45, 49, 53, 57, 61));
  for (int at = from; at < to; at += LANES) {
    const __m512i x = _mm512_cvtps_epi32((__m512)(load(weights + at) * inverse));
    const __m256i parts = _mm512_castsi512_si256(_mm512_permutexvar_epi8(apart, x));  // low bytes, then high ones
    _mm_store_si128((__m128i*)(high + at), _mm256_extracti128_si256(parts, 1));
#ifdef BATON_MUTATION_WEIGHTS
    _mm_store_si128((__m128i*)(low + at), _mm_setzero_si128());  // a planted bug: eight bits are left out
#else
    _mm_store_si128((__m128i*)(low + at), _mm256_castsi256_si128(parts));
#endif
  }
  return top / 65535.0f;
}

// Four tokens' 64 bytes to four vectors of words, a dim's four bytes each; vector k has dims 4 k … 4 k + 3 of every sixteen.
template <bool WHOLE>
BATON_INLINE void interleave(const char* v, size_t stride, int bytes, __m512i (&words)[4]) {
  const int n = WHOLE ? 64 : bytes;
  const __m512i a = (__m512i)load_bytes(v, n), b = (__m512i)load_bytes(v + stride, n);
  __m512i c = (__m512i)load_bytes(v + 2 * stride, n), d = (__m512i)load_bytes(v + 3 * stride, n);
  asm("" : "+v"(c), "+v"(d));  // loaded once: g++ likes to load them again, as operands of two instructions each
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

// A page or two of one head's values, up to 64 bytes of each token.
struct Values {
  const char* pages[2];
  int count, bytes;
  size_t stride;
};

template <int R, bool WHOLE>
void value_words(const Values& v, const uint8_t* high, const uint8_t* low, int32_t* sums, size_t row, int few, Lines& ahead) {
  __m512i up[R][4], down[R][4];
  Lines lines = ahead;
  unroll<R>([&](auto r) BATON_LAMBDA {
    unroll<4>([&](auto k) BATON_LAMBDA {
      up[r][k] = _mm512_loadu_si512(sums + r * row + 16 * k), down[r][k] = _mm512_loadu_si512(sums + r * row + BLOCK + 16 * k);
    });
  });
  for (int p = 0; p < v.count; p++, high += PAGE, low += PAGE) {
    const char* from = v.pages[p];
    unroll<PAGE / 4>([&](auto quad) BATON_LAMBDA {
      lines.few(few);
      __m512i words[4];
      interleave<WHOLE>(from, v.stride, v.bytes, words);
      from += 4 * v.stride;
      unroll<R>([&](auto r) BATON_LAMBDA {
        const __m512i x = four(high + r * SPLIT + 4 * quad), y = four(low + r * SPLIT + 4 * quad);
        unroll<4>([&](auto k) BATON_LAMBDA { dot(up[r][k], x, words[k]), dot(down[r][k], y, words[k]); });
      });
    });
  }
  unroll<R>([&](auto r) BATON_LAMBDA {
    unroll<4>([&](auto k) BATON_LAMBDA {
      _mm512_storeu_si512(sums + r * row + 16 * k, up[r][k]), _mm512_storeu_si512(sums + r * row + BLOCK + 16 * k, down[r][k]);
    });
  });
  ahead = lines;
}

template <int R>
void add_values(int rows, const Values& v, const uint8_t* high, const uint8_t* low, int32_t* sums, size_t row, int few,
                     Lines& lines) {
  if constexpr (R > 0) {
    for (; rows >= R && !(R == WORD_ROWS && rows == R + 1); rows -= R, high += R * SPLIT, low += R * SPLIT, sums += R * row)
      v.bytes < BLOCK ? value_words<R, false>(v, high, low, sums, row, few, lines)
                      : value_words<R, true>(v, high, low, sums, row, few, lines);
    add_values<R - 1>(rows, v, high, low, sums, row, few, lines);
  }
}

// Adds values by the weights of `rows` rows to their sums, and fetches `lines`, evenly.
void value_rows_in_words(int rows, const Values& v, const uint8_t* high, const uint8_t* low, int32_t* sums, size_t row, Lines lines) {
  const int quads = v.count * PAGE / 4 * ((rows + WORD_ROWS - 1) / WORD_ROWS);
  add_values<WORD_ROWS>(rows, v, high, low, sums, row, (lines.left + quads - 1) / quads, lines);
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

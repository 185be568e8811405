// bf16 values meet weights of bf16, two tokens at a time, with AVX-512. Knows nothing of how scores became weights. Included by
// key_splits.h alone.
//
// Pairs begin at even positions, and what a row doesn't see of one weighs zero: so a row's sums are the same in any company.
#pragma once
#include "../values.h"

#if BATON_AVX512
namespace baton {
namespace {

// Of a pair of tokens, keys 2 pair and 2 pair + 1 of a page, the bits of those that lie between from and to: what else is in memory
// may be anything.
BATON_INLINE int32_t kept(int pair, int from, int to) {
#if defined(BATON_MUTATION_PAIRS)
  return -1;  // a planted bug: a token that nobody wrote is read
#else
  return (2 * pair >= from ? 0xffff : 0) | (2 * pair + 1 < to ? int32_t(0xffff0000) : 0);
#endif
}

// Two tokens' numbers of 32 dims as words, a dim's two numbers each.
BATON_INLINE void two_vectors(const char* first, const char* second, __m512i (&words)[2]) {
  const __m512i from = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36, 4, 35, 3,
                                        34, 2, 33, 1, 32, 0);
  const __m512i a = _mm512_loadu_si512(first), b = _mm512_loadu_si512(second);
  words[0] = _mm512_permutex2var_epi16(a, from, b);
  words[1] = _mm512_permutex2var_epi16(a, _mm512_add_epi16(from, _mm512_set1_epi16(16)), b);
}

// The same of sixteen dims, of which n are there; the others are zeros.
BATON_INLINE __m512i one_vector(const char* first, const char* second, int n) {
  const __mmask16 there = n >= LANES ? 0xffff : __mmask16((1u << n) - 1);
  const __m512i a = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(there, first));
  return _mm512_or_si512(a, _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(there, second)), 16));
}

// C vectors of a pair's words; n: dims of the last one, if C is 1.
template <int C>
BATON_INLINE void pair_words(const char* first, size_t stride, int32_t keep, int n, __m512i (&words)[C]) {
  if constexpr (C == 1) {
    words[0] = one_vector(first, first + stride, n);
  } else {
    unroll<C / 2>([&](auto i) BATON_LAMBDA {
      __m512i two[2];
      two_vectors(first + 64 * i, first + 64 * i + stride, two);
      words[2 * i] = two[0], words[2 * i + 1] = two[1];
    });
  }
  if (keep != -1) unroll<C>([&](auto i) BATON_LAMBDA { words[i] = _mm512_and_si512(words[i], _mm512_set1_epi32(keep)); });
}

// acc[r][C vectors] += weights[r] x what `words` makes of pairs from … to, in order, of which there is one at least.
template <int R, int C, typename Make>
BATON_INLINE void meet_pairs(int from, int to, const bf16* weights, float* acc, int padded, const Make& words) {
  __m512i sums[R][C];
  unroll<R>([&](auto r) BATON_LAMBDA {
    unroll<C>([&](auto i) BATON_LAMBDA { sums[r][i] = _mm512_loadu_si512(acc + size_t(r) * padded + i * LANES); });
  });
  int pair = from;
  do {
    __m512i x[C];
    words(pair, x);
    unroll<R>([&](auto r) BATON_LAMBDA {
      int32_t both;
      std::memcpy(&both, weights + r * SPLIT + 2 * pair, 4);
      const __m512i w = _mm512_set1_epi32(both);
      unroll<C>([&](auto i) BATON_LAMBDA { dot_pairs(sums[r][i], x[i], w); });
    });
  } while (++pair < to);
  unroll<R>([&](auto r) BATON_LAMBDA {
    unroll<C>([&](auto i) BATON_LAMBDA { _mm512_storeu_si512(acc + size_t(r) * padded + i * LANES, sums[r][i]); });
  });
}

template <int R, int C, typename Make>
void meet_pair_rows(int rows, int from, int to, const bf16* weights, float* acc, int padded, const Make& words) {
  if constexpr (R > 0) {
    for (; rows >= R; rows -= R, weights += R * SPLIT, acc += size_t(R) * padded)
      meet_pairs<R, C>(from, to, weights, acc, padded, words);
    meet_pair_rows<R - 1, C>(rows, from, to, weights, acc, padded, words);
  }
}

// Where the weights of a block's first key lie, of the first row of head h, and the row's sums.
inline const bf16* pair_weights(const Call& c, const Rows& r, int h, int column) {
  return (const bf16*)r.weight_high + size_t(h - r.head) * r.rows(c) * SPLIT + column;
}
inline float* pair_sums(const Call& c, const Rows& r, int h) { return r.acc + size_t(h - r.head) * r.rows(c) * c.padded; }

// One page's V of one head for few rows, which meet it as it lies.
void pairs_of_page(const Call& c, Rows& r, int h, int block, int key, int begin, int stop) {
  constexpr int C = VALUE_VECTORS;
  const Part part = part_of(block, begin, stop);
  if (part.from >= part.to) return;
  const int d = c.kv.head_dim, rows = r.rows(c), from = part.from / 2, to = (part.to + 1) / 2;
  const KvPlane shape{c.kv.kv_heads, d};
  const char* v = plane<KV_BF16>(c, *r.item, block, true) + shape.row<KV_BF16>(0, h);
  const char* ahead = after_values<KV_BF16>(c, r, block, h, stop).lines;
  const size_t stride = shape.row<KV_BF16>(1, 0);
  const bf16* weights = pair_weights(c, r, h, block * PAGE - key);
  float* acc = pair_sums(c, r, h);
  int i = 0;
  for (; i + C * LANES <= d; i += C * LANES, v += 2 * C * LANES, ahead += 2 * C * LANES * PAGE)
    meet_pair_rows<VALUE_ROWS, C>(rows, from, to, weights, acc + i, c.padded, [&](int pair, __m512i (&x)[C]) BATON_LAMBDA {
      unroll<C>([&](auto line) BATON_LAMBDA { fetch(ahead + (pair * C + line) * 64); });
      pair_words<C>(v + 2 * pair * stride, stride, kept(pair, part.from, part.to), LANES, x);
    });
  for (; i < d; i += LANES, v += 2 * LANES, ahead += 2 * LANES * PAGE)
    meet_pair_rows<VALUE_ROWS, 1>(rows, from, to, weights, acc + i, c.padded, [&](int pair, __m512i (&x)[1]) BATON_LAMBDA {
      fetch(ahead + pair * 64);
      pair_words<1>(v + 2 * pair * stride, stride, kept(pair, part.from, part.to), d - i, x);
    });
}

// One page's V of one head as words, keys from … to of it: wide[pair][dim]. `ahead` is fetched meanwhile.
void lay_pairs(const Call& c, const char* values, int h, Part part, int32_t* wide, const char* ahead) {
  const int d = c.kv.head_dim;
  const KvPlane shape{c.kv.kv_heads, d};
  const size_t stride = shape.row<KV_BF16>(1, 0);
  const char* v = values + shape.row<KV_BF16>(0, h);
  for (int pair = 0; pair < PAGE / 2; pair++, v += 2 * stride, wide += c.padded, ahead += 4 * d) {
    for (int at = 0; at < 4 * d; at += 64) fetch(ahead + at);
    if (2 * pair + 1 < part.from || 2 * pair >= part.to) continue;
    const int32_t keep = kept(pair, part.from, part.to);
    int i = 0;
    for (; i + 2 * LANES <= d; i += 2 * LANES) {
      __m512i words[2];
      pair_words<2>(v + 2 * i, stride, keep, LANES, words);
      _mm512_storeu_si512(wide + i, words[0]), _mm512_storeu_si512(wide + i + LANES, words[1]);
    }
    for (; i < d; i += LANES) {
      __m512i words[1];
      pair_words<1>(v + 2 * i, stride, keep, d - i, words);
      _mm512_storeu_si512(wide + i, words[0]);
    }
  }
}

// The same pairs for many rows: laid out once, a few pages at a time. The sums are pairs_of_page's, in the same order.
void pairs_of_many(const Call& c, Rows& r, int key, int begin, int stop) {
  constexpr int C = VALUE_VECTORS;
  const int each = 2 * wide_pages(c), rows = r.rows(c);
  const auto lying = [&](int i) { return (const int32_t*)r.wide + i; };
  for (int block = begin / PAGE; block * PAGE < stop; block += each)
    for (int h = r.head; h < r.head + r.heads; h++) {
      const int from = part_of(block, begin, stop).from / 2;
      int to = 0;
      for (int p = 0; p < each && (block + p) * PAGE < stop; p++) {
        const Part part = part_of(block + p, begin, stop);
#if defined(BATON_MUTATION_WIDENED)
        int32_t* wide = (int32_t*)r.wide;  // a planted bug: a page lies where the one before it lay
#else
        int32_t* wide = (int32_t*)r.wide + size_t(p) * PAGE / 2 * c.padded;
#endif
        lay_pairs(c, plane<KV_BF16>(c, *r.item, block + p, true), h, part, wide, after_values<KV_BF16>(c, r, block + p, h, stop).lines);
        to = p * PAGE / 2 + (part.to + 1) / 2;
      }
      const bf16* weights = pair_weights(c, r, h, block * PAGE - key);
      float* acc = pair_sums(c, r, h);
      if (from >= to) continue;
      int i = 0;
      for (; i + C * LANES <= c.padded; i += C * LANES)
        meet_pair_rows<VALUE_ROWS, C>(rows, from, to, weights, acc + i, c.padded, [&](int pair, __m512i (&x)[C]) BATON_LAMBDA {
          unroll<C>([&](auto k) BATON_LAMBDA { x[k] = _mm512_loadu_si512(lying(i) + size_t(pair) * c.padded + k * LANES); });
        });
      for (; i < c.padded; i += LANES)
        meet_pair_rows<VALUE_ROWS, 1>(rows, from, to, weights, acc + i, c.padded, [&](int pair, __m512i (&x)[1]) BATON_LAMBDA {
          x[0] = _mm512_loadu_si512(lying(i) + size_t(pair) * c.padded);
        });
    }
}

}  // namespace
}  // namespace baton
#endif

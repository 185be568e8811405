// The scores of a tile of keys: K turned so that keys lie in lanes, then q · k for every row. Included by splits.h alone.
#pragma once
#include "task_rows.h"

namespace baton {
namespace {

#if BATON_AVX512
inline bool has_nan(const float* x, int n) {
  bool found = false;
  for (int i = 0; i < n; i++) found |= x[i] != x[i];
  return found;
}

// int8 keys meet q in integers: 15 bits of q are far finer than the keys' 8, and the sums are exact.
void split_queries(const Call& c, Rows& r) {
  const int d = c.kv.head_dim, words = (d + 3) / 4;
  for (int i = 0; i < r.heads * r.rows(c); i++) {
    const float* q = r.q + size_t(i) * d;
    int8_t *high = (int8_t*)(r.high + size_t(i) * words), *low = (int8_t*)(r.low + size_t(i) * words);
    std::memset(high, 0, size_t(words) * 4), std::memset(low, 0, size_t(words) * 4);
    vf peak{};
    for (int k = 0; k < d; k += LANES) {
      const vf x = load_part(q + k, d - k);
      peak = maximum(maximum(x, vf{} - x), peak);
    }
    const float most = largest(peak);
    r.steps[i] = most / 32512.0f;
    const vf inverse = splat(most > 0 ? 32512.0f / most : 0);
    vi ups{}, lows{};
    for (int k = 0; k < d; k += LANES) {
      const int n = d - k < LANES ? d - k : LANES;
      const vi x = __builtin_convertvector(nearest(load_part(q + k, n) * inverse), vi), up = (x + 128) >> 8;
      const __m128i high8 = _mm512_cvtepi32_epi8((__m512i)up), low8 = _mm512_cvtepi32_epi8((__m512i)(x - 256 * up));
      std::memcpy(high + k, &high8, n), std::memcpy(low + k, &low8, n);
      ups += up, lows += x - 256 * up;
    }
    r.offsets[2 * i] = 128 * _mm512_reduce_add_epi32((__m512i)ups);
    r.offsets[2 * i + 1] = 128 * _mm512_reduce_add_epi32((__m512i)lows);
    if (!(sum(peak) < INFINITY) || has_nan(q, d)) r.steps[i] = NAN;
  }
}

// One page's K of one head as words of four int8 + 128, keys in lanes: turned[word][column …].
void turn_words(const Call& c, const char* keys, int head, int32_t* turned, const char* ahead) {
  const KvPlane shape{c.kv.kv_heads, c.kv.head_dim};
  const int bytes = c.kv.head_dim;
  for (int at = 0; at < bytes; at += 64) {
    vi words[LANES];
    for (int j = 0; j < LANES; j++) {
      words[j] = load_bytes(keys + shape.row<KV_INT8>(j, head) + at, bytes - at) ^ splat_word(int32_t(0x80808080));
      fetch(ahead + at * LANES + j * 64);
    }
    transpose(words);
    for (int w = 0; w < LANES && at + 4 * w < bytes; w++) std::memcpy(turned + (at / 4 + w) * TILE, &words[w], 64);
  }
}

// acc += w · x by fours. Written out, since g++ 12 copies the accumulator around its intrinsic.
BATON_INLINE void dot(__m512i& acc, __m512i w, __m512i x) { asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(w), "v"(x)); }

struct Words {
  const int32_t *high, *low, *offsets;
  const float* steps;
  int count;

  Words past(int rows) const { return {high + rows * count, low + rows * count, offsets + 2 * rows, steps + rows, count}; }
};

template <int R>
void score_words(const int32_t* turned, const Words& q, float* scores) {
  __m512i up[R][2], down[R][2];
  unroll<R>([&](auto r) BATON_LAMBDA { up[r][0] = up[r][1] = down[r][0] = down[r][1] = _mm512_setzero_si512(); });
  for (int w = 0; w < q.count; w++) {
    const __m512i a = _mm512_loadu_si512(turned + w * TILE), b = _mm512_loadu_si512(turned + w * TILE + LANES);
    unroll<R>([&](auto r) BATON_LAMBDA {
      const __m512i x = _mm512_set1_epi32(q.high[r * q.count + w]), y = _mm512_set1_epi32(q.low[r * q.count + w]);
      dot(up[r][0], a, x), dot(up[r][1], b, x);
      dot(down[r][0], a, y), dot(down[r][1], b, y);
    });
  }
  unroll<R>([&](auto r) BATON_LAMBDA {
    unroll<2>([&](auto half) BATON_LAMBDA {
      const vf coarse = to_float((vi)up[r][half] - splat_word(q.offsets[2 * r]));
      const vf fine = to_float((vi)down[r][half] - splat_word(q.offsets[2 * r + 1]));
      store(scores + r * SPLIT + half * LANES, fma(coarse, splat(256.0f), fine) * splat(q.steps[r]));
    });
  });
}

template <int R = 4>
void score_word_rows(int rows, const int32_t* turned, Words q, float* scores) {
  if constexpr (R > 0) {
    for (; rows >= R; rows -= R, q = q.past(R), scores += R * SPLIT) score_words<R>(turned, q, scores);
    score_word_rows<R - 1>(rows, turned, q, scores);
  }
}
#endif

template <int T>
constexpr bool in_words() {
  return BATON_AVX512 && T == KV_INT8;
}

template <int T>
void load_queries(const Call& c, Rows& r) {
  const int d = c.kv.head_dim;
  float* to = r.q;
  for (int h = r.head; h < r.head + r.heads; h++)
    for (int i = 0; i < r.queries; i++)
      for (int g = 0; g < c.group; g++, to += d) {
        const float* from = c.q + (r.item->first + r.query + i) * c.q_stride + (h * c.group + g) * d;
        for (int k = 0; k < d; k++) to[k] = from[k] * kv_unit<T>();
      }
#if BATON_AVX512
  if constexpr (in_words<T>()) split_queries(c, r);
#endif
}

// One page's K of one head, keys in lanes: turned[d][column …] of TILE columns.
template <int T>
void turn_page(const Call& c, const char* keys, int head, float* turned, const char* ahead) {
  constexpr int per = 4 / kv_bytes<T>();
  const KvPlane shape{c.kv.kv_heads, c.kv.head_dim};
  const int d = c.kv.head_dim, bytes = d * kv_bytes<T>();
  for (int at = 0; at < bytes; at += 64) {
    vi words[LANES];
    for (int j = 0; j < LANES; j++) {
      words[j] = load_bytes(keys + shape.row<T>(j, head) + at, bytes - at);
      fetch(ahead + at * LANES + j * 64);
    }
    transpose(words);
    const int first = at / kv_bytes<T>();
    for (int w = 0; w < LANES && first + w * per < d; w++)
      for (int part = 0; part < per; part++) store(turned + (first + w * per + part) * TILE, unpack<T>(words[w], part));
  }
}

// scores[r][0..31] = q[r] · the tile's keys, summed over d in order.
template <int R>
void score(const float* turned, const float* q, int d, float* scores) {
  vf low[R], high[R];
  unroll<R>([&](auto r) BATON_LAMBDA { low[r] = high[r] = vf{}; });
  for (int k = 0; k < d; k++) {
    const vf a = load(turned + k * TILE), b = load(turned + k * TILE + LANES);
    unroll<R>([&](auto r) BATON_LAMBDA {
      const vf x = splat(q[r * d + k]);
      low[r] = fma(x, a, low[r]), high[r] = fma(x, b, high[r]);
    });
  }
  unroll<R>([&](auto r) BATON_LAMBDA { store(scores + r * SPLIT, low[r]), store(scores + r * SPLIT + LANES, high[r]); });
}

template <int R = SCORE_ROWS>
void score_rows(int rows, const float* turned, const float* q, int d, float* scores) {
  if constexpr (R > 0) {
    for (; rows >= R; rows -= R, q += R * d, scores += R * SPLIT) score<R>(turned, q, d, scores);
    score_rows<R - 1>(rows, turned, q, d, scores);
  }
}

// What a head fetches beside one of a split's pages of keys: the page a tile further, after the last one the first values.
template <int T>
Ahead after_keys(const Call& c, const Rows& r, int block, int h, int begin, int end) {
  const int key = (block + AHEAD) * PAGE;
  if (key < end) return share<T>(c, r, block + AHEAD, h, false);
  const bool some = key - end + begin < end;
  return share<T>(c, r, some ? (key - end + begin) / PAGE : block, h, some);
}

// Scores of keys first … first + 31 (of a split's begin … end) for one KV head.
template <int T>
void score_tile(const Call& c, Rows& r, int h, int first, int column, int begin, int end) {
  const int rows = r.rows(c), at = h - r.head;
  float* scores = r.scores + size_t(at) * rows * SPLIT + column;
  const int pages = end - first > PAGE ? 2 : 1;
  for (int p = 0; p < pages; p++) {
    const int block = first / PAGE + p;
    const char* keys = plane<T>(c, r, block, false);
    const Ahead ahead = after_keys<T>(c, r, block, h, begin, end);
#if BATON_AVX512
    if constexpr (in_words<T>()) turn_words(c, keys, h, (int32_t*)r.turned + p * LANES, ahead.lines);
#endif
    if constexpr (!in_words<T>()) turn_page<T>(c, keys, h, r.turned + p * LANES, ahead.lines);
    if constexpr (kv_scaled<T>()) {
      fetch(ahead.scales);
      if constexpr (in_words<T>()) fetch(share<T>(c, r, block, h, true).scales);
      store(r.scales + p * PAGE, page_scales<T>(c, keys, h, 0, PAGE) * splat(c.scale * kv_unit<T>()));
    }
  }
#if BATON_AVX512
  const int words = (c.kv.head_dim + 3) / 4;
  if constexpr (in_words<T>())
    score_word_rows(rows, (const int32_t*)r.turned, Words{r.high, r.low, r.offsets, r.steps, words}.past(at * rows), scores);
#endif
  if constexpr (!in_words<T>())
    score_rows(rows, r.turned, r.q + size_t(at) * rows * c.kv.head_dim, c.kv.head_dim, scores);
  const vf low = kv_scaled<T>() ? load(r.scales) : splat(c.scale), high = kv_scaled<T>() ? load(r.scales + LANES) : low;
  for (int i = 0; i < rows; i++) {
    store(scores + i * SPLIT, load(scores + i * SPLIT) * low);
    store(scores + i * SPLIT + LANES, load(scores + i * SPLIT + LANES) * high);
  }
}

}  // namespace
}  // namespace baton

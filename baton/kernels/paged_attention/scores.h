// The scores of a tile of keys: K transposed so that keys lie in lanes, then q · k for every row. Included by key_splits.h alone.
#pragma once
#include "amx/scores.h"

namespace baton {
namespace {

template <int T>
void load_queries(const Call& c, Rows& r) {
  const int d = c.kv.head_dim;
  float* to = r.q;
  for (int h = r.head; h < r.head + r.heads; h++)
    for (int i = 0; i < r.queries; i++)
      for (int g = 0; g < c.group; g++, to += d) {
        const float* from = c.q + (r.item->first + r.query + i) * c.q_stride + (h * c.group + g) * d;
        for (int k = 0; k < d; k += LANES) store_part(to + k, load_part(from + k, d - k) * splat(kv_unit<T>()), d - k);
      }
#if BATON_AVX512 || BATON_AMX
  if constexpr (in_parts<T>()) split_queries<T>(c, r);
#endif
}

// One page's K of one head, keys in lanes: transposed[d][column …] of TILE columns. `ahead` is fetched meanwhile.
template <int T>
void transpose_page(const Call& c, const char* keys, int head, float* transposed, const char* ahead) {
  constexpr int per = 4 / kv_bytes<T>();
  const KvPlane shape{c.kv.kv_heads, c.kv.head_dim};
  const char* rows = keys + shape.row<T>(0, head);
  int left = c.kv.head_dim * kv_bytes<T>();
  for (; left > 0; left -= 64, rows += 64, ahead += LANES * 64, transposed += LANES * per * TILE) {
    vi words[LANES];
    transpose_rows(rows, shape.row<T>(1, 0), left, words);
    const int count = left < 64 ? (left + 3) / 4 : LANES;
    for (int w = 0; w < count; w++) {
      fetch(ahead + w * 64);
      for (int part = 0; part < per; part++) store(transposed + (w * per + part) * TILE, unpack<T>(words[w], part));
    }
  }
}

// The tile's page `p`, as what multiplies it reads it.
template <int T>
void transpose_keys(const Call& c, Rows& r, const char* keys, int head, int p, const char* ahead) {
#if BATON_AMX
  if constexpr (in_parts<T>())
    if (by_tiles<T>(c, r)) return transpose_for_tiles<T>(c, keys, head, (int32_t*)r.transposed + p * LANES, ahead);
#endif
#if BATON_AVX512
  if constexpr (in_words<T>()) return transpose_words<T>(c, keys, head, (int32_t*)r.transposed + p * LANES, ahead);
#endif
  if constexpr (!in_words<T>()) transpose_page<T>(c, keys, head, r.transposed + p * LANES, ahead);
}

// scores[r][0..31] = q[r] · the tile's keys, summed over d in order, times the keys' scales.
template <int R>
void score(const float* transposed, const float* q, int d, const vf (&scales)[2], float* scores) {
  vf low[R], high[R];
  unroll<R>([&](auto r) BATON_LAMBDA { low[r] = high[r] = vf{}; });
  for (int k = 0; k < d; k++) {
    const vf a = load(transposed + k * TILE), b = load(transposed + k * TILE + LANES);
    unroll<R>([&](auto r) BATON_LAMBDA {
      const vf x = splat(q[r * d + k]);
      low[r] = fma(x, a, low[r]), high[r] = fma(x, b, high[r]);
    });
  }
  unroll<R>([&](auto r) BATON_LAMBDA {
    store(scores + r * SPLIT, low[r] * scales[0]), store(scores + r * SPLIT + LANES, high[r] * scales[1]);
  });
}

template <int R = SCORE_ROWS>
void score_rows(int rows, const float* transposed, const float* q, int d, const vf (&scales)[2], float* scores) {
  if constexpr (R > 0) {
    for (; rows >= R; rows -= R, q += R * d, scores += R * SPLIT) score<R>(transposed, q, d, scales, scores);
    score_rows<R - 1>(rows, transposed, q, d, scales, scores);
  }
}

// What a head fetches beside one of a split's pages of keys: the page a tile further, after the last one the first values.
template <int T>
Ahead after_keys(const Call& c, const Rows& r, int block, int h, int begin, int end) {
  const int key = (block + AHEAD) * PAGE;
  if (key < end) return share<T>(c, *r.item, block + AHEAD, h, false);
  const bool some = key - end + begin < end;
  return share<T>(c, *r.item, some ? (key - end + begin) / PAGE : block, h, some);
}

#if BATON_AVX512
// As score_tile, for few rows.
template <int T>
void near_tile(const Call& c, Rows& r, int h, int first, int column, int begin, int end) {
  const int rows = r.rows(c), at = (h - r.head) * rows;
  const KvPlane shape{c.kv.kv_heads, c.kv.head_dim};
  const int count = part_words(c, kv_bytes<T>());
  const NearRows q{r.high + at * count, r.low + at * count, r.offsets + 3 * at, r.steps + at, count};
  for (int p = 0; p < 2 && first + p * PAGE < end; p++) {
    const int block = first / PAGE + p;
    const char* keys = plane<T>(c, *r.item, block, false);
    const Ahead ahead = after_keys<T>(c, r, block, h, begin, end);
    fetch(ahead.scales), fetch(share<T>(c, *r.item, block, h, true).scales);
    const NearKeys k{keys + shape.row<T>(0, h), ahead.lines, shape.row<T>(1, 0), c.kv.head_dim * kv_bytes<T>()};
    near_scores(rows, k, q, page_scales<T>(c, keys, h, 0, PAGE) * splat(c.scale * kv_unit<T>()),
                   r.scores + size_t(at) * SPLIT + column + p * PAGE);
  }
}
#endif

#if BATON_AMX
// As score_tile, for rows that are_few.
inline void few_tile(const Call& c, Rows& r, int h, int first, int column, int begin, int end) {
  const int rows = r.rows(c), block = first / PAGE, pages = end - first > PAGE ? 2 : 1;
  const char *keys[2] = {}, *ahead[2] = {};
  for (int p = 0; p < pages; p++) {
    keys[p] = plane<KV_BF16>(c, *r.item, block + p, false);
    ahead[p] = after_keys<KV_BF16>(c, r, block + p, h, begin, end).lines;
  }
  float* scores = r.scores + size_t(h - r.head) * rows * SPLIT + column;
  of_few(rows, [&](auto count) { score_few<count()>(c, r, h, keys, pages, ahead, scores); });
}
#endif

// Scores of keys first … first + 31 (of a split's begin … end) for one KV head.
template <int T>
void score_tile(const Call& c, Rows& r, int h, int first, int column, int begin, int end) {
#if BATON_AVX512
  if constexpr (T == KV_INT8) if (is_near(c, r)) return near_tile<T>(c, r, h, first, column, begin, end);
#endif
#if BATON_AMX
  if constexpr (T == KV_BF16) if (are_few(c, r)) return few_tile(c, r, h, first, column, begin, end);
#endif
  const int rows = r.rows(c), at = h - r.head;
  float* scores = r.scores + size_t(at) * rows * SPLIT + column;
  const int pages = end - first > PAGE ? 2 : 1;
  vf scales[2] = {splat(c.scale), splat(c.scale)};
  [[maybe_unused]] const char* lines[2] = {};
  for (int p = 0; p < pages; p++) {
    const int block = first / PAGE + p;
    const char* keys = plane<T>(c, *r.item, block, false);
    const Ahead ahead = after_keys<T>(c, r, block, h, begin, end);
    lines[p] = lines[1] = ahead.lines;
    transpose_keys<T>(c, r, keys, h, p, ahead.lines);
    if constexpr (kv_scaled<T>()) {
      fetch(ahead.scales);
      if constexpr (in_words<T>()) fetch(share<T>(c, *r.item, block, h, true).scales);
      scales[p] = page_scales<T>(c, keys, h, 0, PAGE) * splat(c.scale * kv_unit<T>());
    }
  }
#if BATON_AMX
  if constexpr (in_parts<T>())
    if (by_tiles<T>(c, r)) return score_in_tiles<T>(c, r, at * rows, scales, scores);
#endif
#if BATON_AVX512
  if constexpr (in_words<T>()) {
    const Words q{r.high, r.low, r.offsets, r.steps, part_words(c, kv_bytes<T>()), {lines[0], lines[1]}};
    return score_word_rows<T>(rows, (const int32_t*)r.transposed, q.past(at * rows), scales, scores);
  }
#endif
  score_rows(rows, r.transposed, r.q + size_t(at) * rows * c.kv.head_dim, c.kv.head_dim, scales, scores);
}

}  // namespace
}  // namespace baton

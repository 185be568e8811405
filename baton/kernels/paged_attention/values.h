// A split's weights by its values, in floats. Knows nothing of how scores became weights. Included by key_splits.h alone.
#pragma once
#include "scores.h"

namespace baton {
namespace {

// acc[r][C vectors] += weights[r][j] x V[j], keys from … to in order, of which there is one at least. Without FETCH `ahead` is
// left alone.
template <int T, int R, int C, bool FETCH>
void value(const char* v, size_t stride, int from, int to, const float* weights, float* acc, int padded, int lanes,
           const char* ahead) {
  vf sums[R][C];
  unroll<R>([&](auto r) BATON_LAMBDA {
    unroll<C>([&](auto i) BATON_LAMBDA { sums[r][i] = load(acc + size_t(r) * padded + i * LANES); });
  });
  int j = from;
  do {  // a loop that may have no round has g++ keep the sums on the stack as well
    if constexpr (FETCH)
      for (int at = 0; at < C * LANES * kv_bytes<T>(); at += 64) fetch(ahead + j * C * LANES * kv_bytes<T>() + at);
    vf x[C];
    unroll<C>([&](auto i) BATON_LAMBDA {
      x[i] = widen<T>(v + j * stride + i * LANES * kv_bytes<T>(), C == 1 ? lanes : LANES);
    });
    unroll<R>([&](auto r) BATON_LAMBDA {
      const vf w = splat(weights[r * SPLIT + j]);
      unroll<C>([&](auto i) BATON_LAMBDA { sums[r][i] = fma(w, x[i], sums[r][i]); });
    });
  } while (++j < to);
  unroll<R>([&](auto r) BATON_LAMBDA {
    unroll<C>([&](auto i) BATON_LAMBDA { store(acc + size_t(r) * padded + i * LANES, sums[r][i]); });
  });
}

template <int T, int R, int C, bool FETCH = true>
void value_rows(int rows, const char* v, size_t stride, int from, int to, const float* w, float* acc, int padded, int lanes,
                const char* ahead) {
  if constexpr (R > 0) {
    for (; rows >= R; rows -= R, w += R * SPLIT, acc += size_t(R) * padded)
      value<T, R, C, FETCH>(v, stride, from, to, w, acc, padded, lanes, ahead);
    value_rows<T, R - 1, C, FETCH>(rows, v, stride, from, to, w, acc, padded, lanes, ahead);
  }
}

// The rows' weights of one page of one head, multiplied by the values' scales.
template <int T>
void scale_weights(const Call& c, const char* values, int h, int from, int to, int rows, float* weights) {
#if defined(BATON_MUTATION_SCALE)
  const KvPlane shape{c.kv.kv_heads, c.kv.head_dim};
  const vf scales = splat(scale_at(values + shape.scale<T>(from, h)) * kv_unit<T>());
#else
  const vf scales = page_scales<T>(c, values, h, from, to) * splat(kv_unit<T>());
#endif
  for (int i = 0; i < rows; i++) store(weights + i * SPLIT, load(weights + i * SPLIT) * scales);
}

// One page's V of one head, keys from … to of it.
template <int T>
void value_page(const Call& c, Rows& r, int h, int block, int column, int from, int to, const Ahead& ahead) {
  const int rows = r.rows(c), at = h - r.head, d = c.kv.head_dim;
  const KvPlane shape{c.kv.kv_heads, d};
  const char* values = plane<T>(c, *r.item, block, true);
  float* weights = r.scores + size_t(at) * rows * SPLIT + column;
  if constexpr (kv_scaled<T>()) {
    fetch(ahead.scales);
    scale_weights<T>(c, values, h, from, to, rows, weights);
  }
  const char* v = values + shape.row<T>(0, h);
  const size_t stride = shape.row<T>(1, 0);
  float* acc = r.acc + size_t(at) * rows * c.padded;
  if (from >= to) return;
  int i = 0;
  for (; i + VALUE_VECTORS * LANES <= d; i += VALUE_VECTORS * LANES)
    value_rows<T, VALUE_ROWS, VALUE_VECTORS>(rows, v + i * kv_bytes<T>(), stride, from, to, weights, acc + i, c.padded, LANES,
                                             ahead.lines + i * PAGE * kv_bytes<T>());
  for (; i < d; i += LANES)
    value_rows<T, VALUE_ROWS, 1>(rows, v + i * kv_bytes<T>(), stride, from, to, weights, acc + i, c.padded,
                                 d - i < LANES ? d - i : LANES, ahead.lines + i * PAGE * kv_bytes<T>());
}

// A token's d numbers as floats.
template <int T>
BATON_INLINE void widen_row(const char* v, int d, float* wide) {
  int i = 0;
  for (; i + LANES <= d; i += LANES) store(wide + i, widen<T>(v + i * kv_bytes<T>(), LANES));
  if (i < d) store(wide + i, widen<T>(v + i * kv_bytes<T>(), d - i));
}

// One page's V of one head, keys from … to of it, as floats: its first key's go to `wide`. `ahead` is fetched meanwhile.
template <int T>
void widen_page(const Call& c, const char* values, int h, int from, int to, float* wide, const char* ahead) {
  const int d = c.kv.head_dim, each = (d * kv_bytes<T>() + 63) / 64;
  const size_t apart = size_t(c.padded);
  const KvPlane shape{c.kv.kv_heads, d};
  const size_t stride = shape.row<T>(1, 0);
  const char* v = values + shape.row<T>(0, h);
  for (int j = 0; j < PAGE; j++, v += stride, wide += apart, ahead += 64 * each) {
    for (int line = 0; line < each; line++) fetch(ahead + 64 * line);
    if (j >= from && j < to) widen_row<T>(v, d, wide);
  }
}

// Keys from … to of `wide`, whose weights begin at `column`, for one head.
inline void wide_values(const Call& c, Rows& r, int h, int column, int from, int to) {
  const int rows = r.rows(c), at = h - r.head;
  const float* weights = r.scores + size_t(at) * rows * SPLIT + column;
  float* acc = r.acc + size_t(at) * rows * c.padded;
  const size_t stride = size_t(c.padded) * 4;
  if (from >= to) return;
  int i = 0;
  for (; i + VALUE_VECTORS * LANES <= c.padded; i += VALUE_VECTORS * LANES)
    value_rows<KV_F32, VALUE_ROWS, VALUE_VECTORS, false>(rows, (const char*)(r.wide + i), stride, from, to, weights, acc + i, c.padded,
                                                         LANES, nullptr);
  for (; i < c.padded; i += LANES)
    value_rows<KV_F32, VALUE_ROWS, 1, false>(rows, (const char*)(r.wide + i), stride, from, to, weights, acc + i, c.padded, LANES,
                                             nullptr);
}

// What a head fetches beside one of a split's pages of values: the page a tile further, after the last one the keys that are next.
template <int T>
Ahead after_values(const Call& c, const Rows& r, int block, int h, int stop) {
  const int ahead = block + AHEAD, next = r.next.first + ahead - (stop + PAGE - 1) / PAGE;
  if (ahead * PAGE < stop) return share<T>(c, *r.item, ahead, h, true);
  if (r.next.item && next <= r.next.last) return share<T>(c, *r.next.item, next, h, false);
  return share<T>(c, *r.item, block, h, true);
}

// The keys of a page that lie between begin and stop.
struct Part {
  int from, to;
};

inline Part part_of(int block, int begin, int stop) {
  const int first = block * PAGE;
  return {begin > first ? begin - first : 0, stop - first < PAGE ? stop - first : PAGE};
}

// A split's values, keys begin … stop, for many rows: made floats once, a few pages at a time. The sums are value_page's, and so
// are their bits, since each row adds the same floats in the same order.
template <int T>
void values_widened(const Call& c, Rows& r, int key, int begin, int stop) {
  const int each = wide_pages(c);
  for (int block = begin / PAGE; block * PAGE < stop; block += each)
    for (int h = r.head; h < r.head + r.heads; h++) {
      int to = 0;
      for (int p = 0; p < each && (block + p) * PAGE < stop; p++) {
        const char* values = plane<T>(c, *r.item, block + p, true);
        const Part part = part_of(block + p, begin, stop);
        const Ahead ahead = after_values<T>(c, r, block + p, h, stop);
        if constexpr (kv_scaled<T>()) {
          fetch(ahead.scales);
          scale_weights<T>(c, values, h, part.from, part.to, r.rows(c),
                           r.scores + size_t(h - r.head) * r.rows(c) * SPLIT + (block + p) * PAGE - key);
        }
#if defined(BATON_MUTATION_WIDENED)
        float* wide = r.wide;  // a planted bug: a page lies where the one before it lay
#else
        float* wide = r.wide + size_t(p) * PAGE * c.padded;
#endif
        widen_page<T>(c, values, h, part.from, part.to, wide, ahead.lines);
        to = p * PAGE + part.to;
      }
      wide_values(c, r, h, block * PAGE - key, part_of(block, begin, stop).from, to);
    }
}

}  // namespace
}  // namespace baton

// A split of keys for some rows, and how splits become one: what flat attention and cascades share. Included by cpu.cpp files.
#pragma once
#include "scores.h"

namespace baton {
namespace {

// Columns from … to of one row of scores become weights; hidden keys weigh exactly 0.
void soften(const Call& c, float* scores, int key, int from, int to, int position, float& most, float& total) {
  const vi lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const vf hidden = splat(-INFINITY);
#if defined(BATON_MUTATION_CAUSAL)
  const int last = position + 1;
#else
  const int last = position;
#endif
  const int first = c.window ? position - c.window + 1 : 0;
  vf best = hidden;
  for (int at = from; at < to; at += LANES) {
    const vi keys = lanes + splat_word(key + at);
    const vi seen = (keys <= splat_word(last)) & (keys >= splat_word(first));
    const vf x = select(seen, load(scores + at), hidden);
    store(scores + at, x);
    best = maximum(x, best);
  }
  most = largest(best);
  vf mass{};
  for (int at = from; at < to; at += LANES) {
    const vf p = most == -INFINITY ? vf{} : exponential(load(scores + at) - splat(most));
    store(scores + at, p);
    mass = mass + p;
  }
  total = sum(mass);
}

// acc[r][C vectors] += weights[r][j] x V[j], keys in order.
template <int T, int R, int C>
void value(const char* v, size_t stride, int from, int to, const float* weights, float* acc, int padded, int lanes,
           const char* ahead) {
  vf sums[R][C];
  unroll<R>([&](auto r) BATON_LAMBDA {
    unroll<C>([&](auto i) BATON_LAMBDA { sums[r][i] = load(acc + size_t(r) * padded + i * LANES); });
  });
  for (int j = from; j < to; j++) {
    for (int at = 0; at < C * LANES * kv_bytes<T>(); at += 64) fetch(ahead + j * C * LANES * kv_bytes<T>() + at);
    vf x[C];
    unroll<C>([&](auto i) BATON_LAMBDA {
      x[i] = widen<T>(v + j * stride + i * LANES * kv_bytes<T>(), C == 1 ? lanes : LANES);
    });
    unroll<R>([&](auto r) BATON_LAMBDA {
      const vf w = splat(weights[r * SPLIT + j]);
      unroll<C>([&](auto i) BATON_LAMBDA { sums[r][i] = fma(w, x[i], sums[r][i]); });
    });
  }
  unroll<R>([&](auto r) BATON_LAMBDA {
    unroll<C>([&](auto i) BATON_LAMBDA { store(acc + size_t(r) * padded + i * LANES, sums[r][i]); });
  });
}

template <int T, int R, int C>
void value_rows(int rows, const char* v, size_t stride, int from, int to, const float* w, float* acc, int padded, int lanes,
                const char* ahead) {
  if constexpr (R > 0) {
    for (; rows >= R; rows -= R, w += R * SPLIT, acc += size_t(R) * padded)
      value<T, R, C>(v, stride, from, to, w, acc, padded, lanes, ahead);
    value_rows<T, R - 1, C>(rows, v, stride, from, to, w, acc, padded, lanes, ahead);
  }
}

// One page's V of one head, keys from … to of it.
template <int T>
void value_page(const Call& c, Rows& r, int h, int block, int column, int from, int to, const Ahead& ahead) {
  const int rows = r.rows(c), at = h - r.head, d = c.kv.head_dim;
  const KvPlane shape{c.kv.kv_heads, d};
  const char* values = plane<T>(c, r, block, true);
  float* weights = r.scores + size_t(at) * rows * SPLIT + column;
  if constexpr (kv_scaled<T>()) {
    fetch(ahead.scales);
    float each[PAGE] = {};
#if defined(BATON_MUTATION_SCALE)
    for (int j = from; j < to; j++) each[j] = scale_at(values + shape.scale<T>(from, h)) * kv_unit<T>();
#else
    for (int j = from; j < to; j++) each[j] = scale_at(values + shape.scale<T>(j, h)) * kv_unit<T>();
#endif
    const vf scales = load(each);
    for (int i = 0; i < rows; i++) store(weights + i * SPLIT, load(weights + i * SPLIT) * scales);
  }
  const char* v = values + shape.row<T>(0, h);
  const size_t stride = shape.row<T>(1, 0);
  float* acc = r.acc + size_t(at) * rows * c.padded;
  int i = 0;
  for (; i + VALUE_VECTORS * LANES <= d; i += VALUE_VECTORS * LANES)
    value_rows<T, VALUE_ROWS, VALUE_VECTORS>(rows, v + i * kv_bytes<T>(), stride, from, to, weights, acc + i, c.padded, LANES,
                                             ahead.lines + i * PAGE * kv_bytes<T>());
  for (; i < d; i += LANES)
    value_rows<T, VALUE_ROWS, 1>(rows, v + i * kv_bytes<T>(), stride, from, to, weights, acc + i, c.padded,
                                 d - i < LANES ? d - i : LANES, ahead.lines + i * PAGE * kv_bytes<T>());
}

// The split that begins at `key`: acc, most and total of every row.
template <int T>
void attend_split(const Call& c, Rows& r, int key) {
  const int rows = r.rows(c), end = r.last() + 1 < key + SPLIT ? r.last() + 1 : key + SPLIT;
  const int oldest = c.window ? r.last() - r.queries + 1 - c.window + 1 : 0;
  const int begin = oldest > key ? oldest : key, from = (begin - key) / TILE * TILE;
  for (int at = from; key + at < end; at += TILE)
    for (int h = r.head; h < r.head + r.heads; h++)
      score_tile<T>(c, r, h, key + at, at, begin, end);
  const int to = (end - key + LANES - 1) / LANES * LANES;
  for (int i = 0; i < r.heads * rows; i++)
    soften(c, r.scores + size_t(i) * SPLIT, key, from, to, r.position(i % rows / c.group), r.most[i], r.total[i]);
  std::memset(r.acc, 0, size_t(r.heads) * rows * c.padded * 4);
#if defined(BATON_MUTATION_LAST_PAGE)
  const int stop = end - PAGE < begin + 1 ? end : end / PAGE * PAGE;
#else
  const int stop = end;
#endif
  for (int block = begin / PAGE; block * PAGE < stop; block++) {
    const int first = block * PAGE, low = begin > first ? begin - first : 0, high = stop - first < PAGE ? stop - first : PAGE;
    for (int h = r.head; h < r.head + r.heads; h++) {
      const bool inside = (block + AHEAD) * PAGE < stop, after = r.more && !inside && (block + AHEAD) * PAGE <= r.last();
      const Ahead ahead = share<T>(c, r, inside || after ? block + AHEAD : block, h, !after);
      value_page<T>(c, r, h, block, first - key, low, high, ahead);
    }
  }
}

// Adds a split's (most, total, acc) to a row's; always in the order of splits.
void merge(float& most, float& total, float* acc, float split_most, float split_total, const float* split, int padded) {
  if (split_most == -INFINITY) return;
  if (most == -INFINITY) {
    most = split_most, total = split_total;
    std::memcpy(acc, split, size_t(padded) * 4);
    return;
  }
  const float top = most > split_most ? most : split_most;
#if defined(BATON_MUTATION_MERGE)
  const float keep = 1.0f, add = exponential(split_most - top);
#else
  const float keep = exponential(most - top), add = exponential(split_most - top);
#endif
  most = top, total = total * keep + split_total * add;
  for (int i = 0; i < padded; i += LANES) store(acc + i, load(acc + i) * splat(keep) + load(split + i) * splat(add));
}

template <int T>
void finish(const Call& c, const AttentionItem& item, int query, int head, const float* acc, float total) {
  float* to = c.out + (item.first + query) * c.out_stride + int64_t(head) * c.kv.head_dim;
  for (int i = 0; i < c.kv.head_dim; i += LANES) store_part(to + i, load(acc + i) / splat(total) * splat(kv_unit<T>()), c.kv.head_dim - i);
}

int first_split(const Call& c, int position) {
  return c.window && position >= c.window ? (position - c.window + 1) / SPLIT : 0;
}

}  // namespace
}  // namespace baton

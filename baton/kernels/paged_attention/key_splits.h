// A split of keys for some rows, and how splits become one: what flat attention and cascades share. Included by cpu.cpp files.
#pragma once
#include <optional>

#include "../abi/tanh.h"
#include "avx512/pairs.h"
#include "values.h"
#include "avx512/weights.h"

namespace baton {
namespace {

// Hides what a row at `position` may not see among columns from … to of its scores; the largest of what is left.
float hide(const Call& c, float* scores, int key, int from, int to, int position) {
  const vi lanes = lane_numbers();
  const vf hidden = splat(-INFINITY);
#if defined(BATON_MUTATION_CAUSAL)
  const int last = position + 1;
#else
  const int last = position;
#endif
  const int first = c.window ? position - c.window + 1 : 0;
  vf best = hidden;
  for (int at = from; at < to; at += LANES) {
    vf x = load(scores + at);
    if (key + at < first || key + at + LANES > last + 1) {
      const vi keys = lanes + splat_word(key + at);
      x = select((keys <= splat_word(last)) & (keys >= splat_word(first)), x, hidden);
      store(scores + at, x);
    }
    best = maximum(x, best);
  }
  return largest(best);
}

// Columns from … to of one row of scores become weights; hidden keys weigh exactly 0.
void soften(const Call& c, float* scores, int key, int from, int to, int position, float& most, float& total) {
  most = hide(c, scores, key, from, to, position);
  vf mass{};
  for (int at = from; at < to; at += LANES) {
    const vf p = most == -INFINITY ? vf{} : decay(load(scores + at) - splat(most));
    store(scores + at, p);
    mass = mass + p;
  }
  total = sum(mass);
}

#if BATON_AVX512 || BATON_AMX
// As soften, and the weights are rounded to bf16, in `pairs`. They sum up as they are rounded, so that they come to 1 together.
inline void soften_to_pairs(const Call& c, float* scores, int key, int from, int to, int position, float& most, float& total,
                            bf16* pairs) {
  most = hide(c, scores, key, from, to, position);
  vf mass{};
  for (int at = from; at < to; at += LANES)
    mass = mass + store_rounded(most == -INFINITY ? vf{} : decay(load(scores + at) - splat(most)), pairs + at);
  total = sum(mass);
}
#endif

// The values' scales of a split's columns for one KV head, zeros where no key of it lies.
[[maybe_unused]] void value_scales(const Call& c, Rows& r, int h, int key, int begin, int stop, int from, int to) {
  for (int at = from; at < to; at += PAGE) {
    const int block = (key + at) / PAGE;
    const Part part = part_of(block, begin, stop);
    if (part.from >= PAGE || part.to <= part.from) {
      store(r.scales + at, vf{});
      continue;
    }
    const char* values = plane<KV_INT8>(c, *r.item, block, true);
#if defined(BATON_MUTATION_SCALE)
    const KvPlane shape{c.kv.kv_heads, c.kv.head_dim};
    store(r.scales + at, splat(scale_at(values + shape.scale<KV_INT8>(part.from, h))));
#else
    store(r.scales + at, page_scales<KV_INT8>(c, values, h, part.from, part.to));
#endif
  }
}

}  // namespace
}  // namespace baton
#include "amx/few_values.h"
namespace baton {
namespace {

#if BATON_AVX512
// What is read after a split's first values, in order: its other values, then the first keys of what is next.
Runs runs_ahead(const Call& c, const Rows& r, int begin, int stop) {
  const KvPlane shape{c.kv.kv_heads, c.kv.head_dim};
  const size_t part = r.heads < c.kv.kv_heads ? shape.row<KV_INT8>(PAGE, 0) / c.kv.kv_heads : 0;  // see share
  Runs runs{{}, 0, int(((part ? part : shape.bytes<KV_INT8>()) + 63) / 64)};
  for (int block = begin / PAGE + AHEAD; block * PAGE < stop; block++)
    runs.begin[runs.count++] = plane<KV_INT8>(c, *r.item, block, true) + part * r.head;
  for (int block = r.next.first; r.next.item && block <= r.next.last && block < r.next.first + AHEAD; block++)
    runs.begin[runs.count++] = plane<KV_INT8>(c, *r.next.item, block, false) + part * r.head;
  return runs;
}

// A split's scores become weights, and those times its values, in pairs of bf16: columns from … to.
void values_in_pairs(const Call& c, Rows& r, int key, int begin, int stop, int from, int to) {
  const int rows = r.rows(c);
  for (int i = 0; i < r.heads * rows; i++)
    soften_to_pairs(c, r.scores + size_t(i) * SPLIT, key, from, to, r.position(i % rows / c.group), r.most[i], r.total[i],
                    (bf16*)r.weight_high + size_t(i) * SPLIT);
  std::memset(r.acc, 0, size_t(r.heads) * rows * c.padded * 4);
  if (are_many(c, r)) return pairs_of_many(c, r, key, begin, stop);
  for (int block = begin / PAGE; block * PAGE < stop; block++)
    for (int h = r.head; h < r.head + r.heads; h++) pairs_of_page(c, r, h, block, key, begin, stop);
}

// A split's scores become weights, and those times its values, in integers: columns from … to.
void values_in_words(const Call& c, Rows& r, int key, int begin, int stop, int from, int to) {
  const int rows = r.rows(c), d = c.kv.head_dim, last = (stop + PAGE - 1) / PAGE;
  const KvPlane shape{c.kv.kv_heads, c.kv.head_dim};
  const size_t row = size_t(blocks(c)) * 2 * BLOCK;
  Runs runs = runs_ahead(c, r, begin, stop);
  for (int i = 0; i < r.heads * rows; i++)
    r.most[i] = hide(c, r.scores + size_t(i) * SPLIT, key, from, to, r.position(i % rows / c.group));
  for (int i = 0; i < r.heads * rows; i++) {
    if (i % rows == 0) value_scales(c, r, r.head + i / rows, key, begin, stop, from, to);
    r.weight_steps[i] = weigh(r.scores + size_t(i) * SPLIT, r.scales, from, to, r.most[i], r.total[i], runs);
  }
  for (int i = 0; i < r.heads * rows; i++) {
    const size_t at = size_t(i) * SPLIT;
    r.weight_steps[i] = into_words(r.scores + at, from, to, r.weight_steps[i], r.weight_high + at, r.weight_low + at);
  }
  std::memset(r.sums, 0, size_t(r.heads) * rows * row * 4);
  int calls = (last - begin / PAGE + 1) / 2 * r.heads * blocks(c);
  for (int block = begin / PAGE; block < last; block += 2)
    for (int h = r.head; h < r.head + r.heads; h++) {
      const size_t first = size_t(h - r.head) * rows, column = first * SPLIT + block * PAGE - key;
      Values v{{}, last - block < 2 ? 1 : 2, 0, shape.row<KV_INT8>(1, 0)};
      for (int at = 0; at < d; at += BLOCK) {
        for (int p = 0; p < v.count; p++)
          v.pages[p] = plane<KV_INT8>(c, *r.item, block + p, true) + shape.row<KV_INT8>(0, h) + at;
        v.bytes = d - at;
        Lines lines(runs, (runs.left() + calls - 1) / calls);
        value_rows_in_words(rows, v, r.weight_high + column, r.weight_low + column, r.sums + first * row + at * 2, row, lines);
        calls--;
      }
    }
  for (int i = 0; i < r.heads * rows; i++) settle(c, r.sums + i * row, r.weight_steps[i], r.acc + size_t(i) * c.padded);
}
#endif

// Columns from … to of every row's scores, capped.
inline void cap_scores(const Call& c, Rows& r, int from, int to) {
#if !defined(BATON_MUTATION_SOFTCAP)
  for (int i = 0; i < r.heads * r.rows(c); i++) {
    float* scores = r.scores + size_t(i) * SPLIT;
    for (int at = from; at < to; at += LANES) store(scores + at, capped(load(scores + at), c.form.softcap));
  }
#endif
}

// The first key of a split, counted from `key` in whole tiles, that a query at `position` or after it may see.
inline int first_tile(const Call& c, int position, int key) {
  const int oldest = c.window ? position - c.window + 1 : 0;
  return oldest > key ? (oldest - key) / TILE * TILE : 0;
}

// The split that begins at `key`: acc, most and total of every row.
template <int T>
void attend_split(const Call& c, Rows& r, int key) {
  const int rows = r.rows(c), end = r.last() + 1 < key + SPLIT ? r.last() + 1 : key + SPLIT;
  const int first = r.last() - r.queries + 1, oldest = c.window ? first - c.window + 1 : 0;
  const int begin = oldest > key ? oldest : key, from = first_tile(c, first, key);
#if BATON_AMX
  std::optional<TileUse> tiles;
  if (by_tiles<T>(c, r)) tiles.emplace(rows_of_tile(rows));
#endif
  for (int at = from; key + at < end; at += TILE)
    for (int h = r.head; h < r.head + r.heads; h++)
      score_tile<T>(c, r, h, key + at, at, begin, end);
  const int to = (end - key + LANES - 1) / LANES * LANES;
  if (c.form.softcap > 0) cap_scores(c, r, from, to);
#if defined(BATON_MUTATION_LAST_PAGE)
  const int stop = end - PAGE < begin + 1 ? end : end / PAGE * PAGE;
#else
  const int stop = end;
#endif
#if BATON_AMX
  if constexpr (in_parts<T>())
    if (tiles) return values_in_tiles<T>(c, r, key, begin, stop, from, to);
  if constexpr (T == KV_BF16) return values_of_few(c, r, key, begin, stop, from, to);
#endif
#if BATON_AVX512
  if constexpr (T == KV_INT8) return values_in_words(c, r, key, begin, stop, from, to);
  if constexpr (T == KV_BF16) return values_in_pairs(c, r, key, begin, stop, from, to);
#endif
  for (int i = 0; i < r.heads * rows; i++)
    soften(c, r.scores + size_t(i) * SPLIT, key, from, to, r.position(i % rows / c.group), r.most[i], r.total[i]);
  std::memset(r.acc, 0, size_t(r.heads) * rows * c.padded * 4);
  if (T != KV_F32 && are_many(c, r)) return values_widened<T>(c, r, key, begin, stop);
  for (int block = begin / PAGE; block * PAGE < stop; block++)
    for (int h = r.head; h < r.head + r.heads; h++) {
      const Part part = part_of(block, begin, stop);
      value_page<T>(c, r, h, block, block * PAGE - key, part.from, part.to, after_values<T>(c, r, block, h, stop));
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
  const bool higher = split_most > most;
  const float less = decay(splat(higher ? most - split_most : split_most - most))[0];
#if defined(BATON_MUTATION_MERGE)
  const float keep = 1.0f, add = higher ? 1.0f : less;
#else
  const float keep = higher ? less : 1.0f, add = higher ? 1.0f : less;
#endif
  most = higher ? split_most : most, total = total * keep + split_total * add;
  for (int i = 0; i < padded; i += LANES) store(acc + i, load(acc + i) * splat(keep) + load(split + i) * splat(add));
}

// A head's sink joins its row, whose largest score is `most`: what the values' sum is to be multiplied by.
inline float join_sink(const Call& c, int head, float most, float& total) {
  if (!c.form.sinks) return 1.0f;
  const float sink = c.form.sinks[head];
  const bool higher = sink > most;
  const float less = decay(splat(higher ? most - sink : sink - most))[0], keep = higher ? less : 1.0f;
  total = total * keep + (higher ? 1.0f : less);
#if defined(BATON_MUTATION_SINK)
  return 1.0f;
#else
  return keep;
#endif
}

template <int T>
void finish(const Call& c, const AttentionItem& item, int query, int head, const float* acc, float most, float total) {
  const float keep = join_sink(c, head, most, total);
  float* to = c.out + (item.first + query) * c.out_stride + int64_t(head) * c.kv.head_dim;
  for (int i = 0; i < c.kv.head_dim; i += LANES) store_part(to + i, load(acc + i) * splat(keep) / splat(total) * splat(kv_unit<T>()), c.kv.head_dim - i);
}

int first_split(const Call& c, int position) {
  return c.window && position >= c.window ? (position - c.window + 1) / SPLIT : 0;
}

}  // namespace
}  // namespace baton

// Flash attention over pages. Knows nothing of sequences beyond their block tables.
//
// Keys are taken in splits of 256 at absolute positions. Inside a split a row's scores are all known before its
// softmax; splits are merged in order. A row does the same arithmetic in the same order as a decode (its splits
// spread over threads) and as part of a chunk (all splits by one thread), so its bits depend on its own keys alone:
// what a neighbour needs masked adds exact zeros. (Split-KV: https://arxiv.org/abs/2311.01282; online softmax:
// https://arxiv.org/abs/1805.02867)
#include "attention.h"

#include <atomic>
#include <vector>

#include "../abi/threads.h"
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
void value(const char* v, size_t stride, int from, int to, const float* weights, float* acc, int padded, int lanes) {
  vf sums[R][C];
  for (int r = 0; r < R; r++)
    for (int i = 0; i < C; i++) sums[r][i] = load(acc + size_t(r) * padded + i * LANES);
  for (int j = from; j < to; j++) {
    vf x[C];
    for (int i = 0; i < C; i++) x[i] = widen<T>(v + j * stride + i * LANES * kv_bytes<T>(), C == 1 ? lanes : LANES);
    for (int r = 0; r < R; r++) {
      const vf w = splat(weights[r * SPLIT + j]);
      for (int i = 0; i < C; i++) sums[r][i] = fma(w, x[i], sums[r][i]);
    }
  }
  for (int r = 0; r < R; r++)
    for (int i = 0; i < C; i++) store(acc + size_t(r) * padded + i * LANES, sums[r][i]);
}

template <int T, int R, int C>
void value_rows(int rows, const char* v, size_t stride, int from, int to, const float* w, float* acc, int padded, int lanes) {
  if constexpr (R > 0) {
    for (; rows >= R; rows -= R, w += R * SPLIT, acc += size_t(R) * padded)
      value<T, R, C>(v, stride, from, to, w, acc, padded, lanes);
    value_rows<T, R - 1, C>(rows, v, stride, from, to, w, acc, padded, lanes);
  }
}

// One page's V of one head, keys from … to of it.
template <int T>
void value_page(const Call& c, Rows& r, int h, int block, int column, int from, int to) {
  const int rows = r.rows(c), at = h - r.head, d = c.kv.head_dim;
  const KvPlane shape{c.kv.kv_heads, d};
  const char* values = plane<T>(c, r, block, true);
  float* weights = r.scores + size_t(at) * rows * SPLIT + column;
  if constexpr (kv_scaled<T>()) {
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
    value_rows<T, VALUE_ROWS, VALUE_VECTORS>(rows, v + i * kv_bytes<T>(), stride, from, to, weights, acc + i, c.padded, LANES);
  for (; i < d; i += LANES)
    value_rows<T, VALUE_ROWS, 1>(rows, v + i * kv_bytes<T>(), stride, from, to, weights, acc + i, c.padded, d - i < LANES ? d - i : LANES);
}

// The keys of the next tile; after the last one, the split's first values.
template <int T>
void prefetch_ahead(const Call& c, const Rows& r, int key, int h, int begin, int end) {
  for (int at = key + TILE; at < key + 2 * TILE; at += PAGE)
    if (at < end)
      prefetch<T>(c, r, at / PAGE, h, false);
    else if (at - end + begin < end)
      prefetch<T>(c, r, (at - end + begin) / PAGE, h, true);
}

// The split that begins at `key`: acc, most and total of every row.
template <int T>
void attend_split(const Call& c, Rows& r, int key) {
  const int rows = r.rows(c), end = r.last() + 1 < key + SPLIT ? r.last() + 1 : key + SPLIT;
  const int oldest = c.window ? r.last() - r.queries + 1 - c.window + 1 : 0;
  const int begin = oldest > key ? oldest : key, from = (begin - key) / TILE * TILE;
  for (int at = from; key + at < end; at += TILE)
    for (int h = r.head; h < r.head + r.heads; h++) {
      prefetch_ahead<T>(c, r, key + at, h, begin, end);
      score_tile<T>(c, r, h, key + at, at, end);
    }
  const int to = (end - key + LANES - 1) / LANES * LANES;
  for (int i = 0; i < r.heads * rows; i++)
    soften(c, r.scores + size_t(i) * SPLIT, key, from, to, r.item->start + r.query + i % rows / c.group, r.most[i], r.total[i]);
  std::memset(r.acc, 0, size_t(r.heads) * rows * c.padded * 4);
#if defined(BATON_MUTATION_LAST_PAGE)
  const int stop = end - PAGE < begin + 1 ? end : end / PAGE * PAGE;
#else
  const int stop = end;
#endif
  for (int block = begin / PAGE; block * PAGE < stop; block++) {
    const int first = block * PAGE, low = begin > first ? begin - first : 0, high = stop - first < PAGE ? stop - first : PAGE;
    for (int h = r.head; h < r.head + r.heads; h++) {
      if ((block + AHEAD) * PAGE < stop) prefetch<T>(c, r, block + AHEAD, h, true);
      value_page<T>(c, r, h, block, first - key, low, high);
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

// A few queries of one sequence: one task per split, each for all heads, so that a page is read as one run of bytes.
struct Spread {
  const AttentionItem* item;
  int first, splits;
  float* parts;  // [split][kv_head x query x group] rows of padded + LANES floats: acc, then most, total
  std::atomic<int>* left;
};

struct Chunk {
  const AttentionItem* item;
  int query, queries, head;
};

template <int T>
struct Attention {
  const Call& c;
  std::vector<Spread> spreads;
  std::vector<std::pair<int, int>> splits;  // (spread, split)
  std::vector<Chunk> chunks;

  size_t part_floats(int queries) const { return size_t(queries) * c.heads * (c.padded + LANES); }

  void split(int task) {
    Spread& s = spreads[splits[task].first];
    const int which = splits[task].second;
    Rows r{s.item, 0, s.item->queries, 0, c.kv.kv_heads};
    carve(r, c, (char*)scratch(SCRATCH_ATTENTION, carve(r, c, nullptr)));
    load_queries<T>(c, r);
    attend_split<T>(c, r, (s.first + which) * SPLIT);
    float* part = s.parts + which * part_floats(r.queries);
    for (int i = 0; i < r.heads * r.rows(c); i++, part += c.padded + LANES) {
      std::memcpy(part, r.acc + size_t(i) * c.padded, size_t(c.padded) * 4);
      part[c.padded] = r.most[i], part[c.padded + 1] = r.total[i];
    }
    if (s.left->fetch_sub(1, std::memory_order_acq_rel) == 1) gather(s);
  }

  void gather(Spread& s) {
    const int rows = s.item->queries * c.group;
    for (int i = 0; i < c.kv.kv_heads * rows; i++) {
      float* row = s.parts + size_t(i) * (c.padded + LANES);
      float most = row[c.padded], total = row[c.padded + 1];
      for (int which = 1; which < s.splits; which++) {
        const float* next = row + which * part_floats(s.item->queries);
        merge(most, total, row, next[c.padded], next[c.padded + 1], next, c.padded);
      }
      finish<T>(c, *s.item, i % rows / c.group, i / rows * c.group + i % c.group, row, total);
    }
  }

  void chunk(const Chunk& k) {
    Rows r{k.item, k.query, k.queries, k.head, 1};
    const int rows = r.rows(c), first = first_split(c, r.last() - r.queries + 1);
    const size_t used = carve(r, c, nullptr), whole = size_t(rows) * (c.padded + LANES) * 4;
    char* at = (char*)scratch(SCRATCH_ATTENTION, used + whole);
    carve(r, c, at);
    float* all = (float*)(at + used);
    load_queries<T>(c, r);
    for (int i = 0; i < rows; i++) all[size_t(i) * (c.padded + LANES) + c.padded] = -INFINITY;
    for (int key = first * SPLIT; key <= r.last(); key += SPLIT) {
      attend_split<T>(c, r, key);
      for (int i = 0; i < rows; i++) {
        float* row = all + size_t(i) * (c.padded + LANES);
        merge(row[c.padded], row[c.padded + 1], row, r.most[i], r.total[i], r.acc + size_t(i) * c.padded, c.padded);
      }
    }
    for (int i = 0; i < rows; i++) {
      const float* row = all + size_t(i) * (c.padded + LANES);
      finish<T>(c, *k.item, k.query + i / c.group, k.head * c.group + i % c.group, row, row[c.padded + 1]);
    }
  }

  void plan(const AttentionItem* items, int count) {
    for (const AttentionItem* item = items; item < items + count; item++) {
      if (item->queries <= FEW_QUERIES) {
        const int first = first_split(c, item->start), last = (item->start + item->queries - 1) / SPLIT;
        for (int i = 0; i <= last - first; i++) splits.push_back({int(spreads.size()), i});
        spreads.push_back({item, first, last - first + 1, nullptr, nullptr});
        continue;
      }
      const int most = CHUNK_ROWS / c.group > 1 ? CHUNK_ROWS / c.group : 1;
      for (int query = 0; query < item->queries; query += most)
        for (int head = 0; head < c.kv.kv_heads; head++)
          chunks.push_back({item, query, item->queries - query < most ? item->queries - query : most, head});
    }
  }

  void run(const AttentionItem* items, int count) {
    plan(items, count);
    size_t floats = 0;
    for (const Spread& s : spreads) floats += s.splits * part_floats(s.item->queries);
    float* parts = (float*)scratch(SCRATCH_CALLER, floats * 4 + 64);
    std::vector<std::atomic<int>> left(spreads.size());
    for (size_t i = 0; i < spreads.size(); i++) {
      left[i] = spreads[i].splits;
      spreads[i].parts = parts, spreads[i].left = &left[i];
      parts += spreads[i].splits * part_floats(spreads[i].item->queries);
    }
    const int few = int(splits.size());
    parallel_for(few + int(chunks.size()), [&](int32_t task) { task < few ? split(task) : chunk(chunks[task - few]); });
  }
};

}  // namespace
}  // namespace baton

BATON_API void baton_paged_attention(const baton::PagedKv* kv, const baton::AttentionItem* items, int32_t count,
                   int32_t heads, int32_t window, float scale, const float* q, int64_t q_stride,
                   float* out, int64_t out_stride) {
  using namespace baton;
  const int padded = (kv->head_dim + LANES - 1) / LANES * LANES;
  const Call call{*kv, heads, heads / kv->kv_heads, window, padded, scale, q, q_stride, out, out_stride};
  switch (kv->type) {
    case KV_F32: return Attention<KV_F32>{call}.run(items, count);
    case KV_BF16: return Attention<KV_BF16>{call}.run(items, count);
    case KV_INT8: return Attention<KV_INT8>{call}.run(items, count);
    default: return Attention<KV_FP8>{call}.run(items, count);
  }
}

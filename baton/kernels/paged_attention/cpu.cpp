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

namespace baton {
namespace {

constexpr int SPLIT = 256;
constexpr int TILE = 32;       // keys scored together
constexpr int FEW_QUERIES = 4;   // up to this many, a sequence's splits are spread over threads
constexpr int CHUNK_ROWS = 48;   // query rows (queries x group) of a KV head that a chunk's task takes
constexpr int AHEAD = TILE / PAGE;  // pages whose bytes are fetched before they are needed
constexpr int SCORE_ROWS = 8, VALUE_ROWS = 6, VALUE_VECTORS = 4;

struct Call {
  const PagedKv& kv;
  int heads, group, window, padded;  // padded: head_dim in whole vectors
  float scale;
  const float* q;
  int64_t q_stride;
  float* out;
  int64_t out_stride;
};

// Some queries of one item against some KV heads: the working set of a task.
struct Rows {
  const AttentionItem* item;
  int query, queries, head, heads;  // heads: KV heads
  float *q, *scores, *acc, *most, *total, *turned, *scales, *steps;
  int32_t *high, *low;  // q in 15 bits, four int8 of each half in a word, with q = step x (256 high + low)
  int32_t* offsets;     // per row: what the keys' + 128 adds to the sum with high, and with low

  int rows(const Call& c) const { return queries * c.group; }
  int last() const { return item->start + query + queries - 1; }
};

size_t carve(Rows& r, const Call& c, char* at) {
  const size_t rows = size_t(r.heads) * r.rows(c), d = c.kv.head_dim;
  size_t used = 0;
  auto take = [&](float*& p, size_t floats) {
    p = (float*)(at + used);
    used += (floats * 4 + 63) & ~size_t(63);
  };
  take(r.q, rows * d), take(r.scores, rows * SPLIT), take(r.acc, rows * c.padded);
  take(r.most, rows), take(r.total, rows), take(r.turned, (d + LANES) * TILE), take(r.scales, TILE);
  float *high, *low, *offsets;
  const size_t words = rows * ((d + 3) / 4);
  take(r.steps, rows), take(high, words), take(low, words), take(offsets, 2 * rows);
  r.high = (int32_t*)high, r.low = (int32_t*)low, r.offsets = (int32_t*)offsets;
  return used;
}

template <int T>
const char* plane(const Call& c, const Rows& r, int block, bool values) {
  const KvPlane shape{c.kv.kv_heads, c.kv.head_dim};
  return c.kv.pages + int64_t(r.item->pages[block]) * c.kv.page_bytes + c.kv.layer_offset +
       (values ? shape.bytes<T>() : 0);
}

// A KV head's share of a plane that will be read soon. Shares are runs of bytes, not the head's own rows: taken head
// after head they make one rising stream, which the hardware's prefetcher follows far deeper than we could ask for.
template <int T>
void prefetch(const Call& c, const Rows& r, int block, int head, bool values) {
  const size_t bytes = size_t(PAGE) * c.kv.head_dim * kv_bytes<T>();
  const char* p = plane<T>(c, r, block, values) + head * bytes;
  for (size_t at = 0; at < bytes; at += 64) __builtin_prefetch(p + at, 0, 2);
}

inline float scale_at(const char* p) {
  float x;
  std::memcpy(&x, p, 4);
  return x;
}

#if BATON_AVX512
// int8 keys meet q in integers: 15 bits of q are far finer than the keys' 8, and the sums are exact.
void split_queries(const Call& c, Rows& r) {
  const int d = c.kv.head_dim, words = (d + 3) / 4;
  for (int i = 0; i < r.heads * r.rows(c); i++) {
    const float* q = r.q + size_t(i) * d;
    int8_t *high = (int8_t*)(r.high + size_t(i) * words), *low = (int8_t*)(r.low + size_t(i) * words);
    std::memset(high, 0, size_t(words) * 4), std::memset(low, 0, size_t(words) * 4);
    r.offsets[2 * i] = r.offsets[2 * i + 1] = 0;
    float most = 0;
    bool fine = true;
    for (int k = 0; k < d; k++) {
      const float a = std::fabs(q[k]);
      fine &= a <= 3.4e38f, most = a > most ? a : most;
    }
    r.steps[i] = fine ? most / 32512.0f : NAN;
    const float inverse = fine && most > 0 ? 32512.0f / most : 0;
    for (int k = 0; fine && k < d; k++) {
      const int32_t x = int32_t(std::nearbyint(q[k] * inverse)), up = (x + 128) >> 8;
      high[k] = int8_t(up), low[k] = int8_t(x - 256 * up);
      r.offsets[2 * i] += 128 * high[k], r.offsets[2 * i + 1] += 128 * low[k];
    }
  }
}

// One page's K of one head as words of four int8 + 128, keys in lanes: turned[word][column …].
void turn_words(const Call& c, const char* keys, int head, int32_t* turned) {
  const KvPlane shape{c.kv.kv_heads, c.kv.head_dim};
  const int bytes = c.kv.head_dim;
  for (int at = 0; at < bytes; at += 64) {
    vi words[LANES];
    for (int j = 0; j < LANES; j++)
      words[j] = load_bytes(keys + shape.row<KV_INT8>(j, head) + at, bytes - at) ^ splat_word(int32_t(0x80808080));
    transpose(words);
    for (int w = 0; w < LANES && at + 4 * w < bytes; w++) std::memcpy(turned + (at / 4 + w) * TILE, &words[w], 64);
  }
}

struct Words {
  const int32_t *high, *low, *offsets;
  const float* steps;
  int count;

  Words past(int rows) const { return {high + rows * count, low + rows * count, offsets + 2 * rows, steps + rows, count}; }
};

template <int R>
void score_words(const int32_t* turned, const Words& q, float* scores) {
  __m512i up[R][2], down[R][2];
  for (int r = 0; r < R; r++) up[r][0] = up[r][1] = down[r][0] = down[r][1] = _mm512_setzero_si512();
  for (int w = 0; w < q.count; w++) {
    const __m512i a = _mm512_loadu_si512(turned + w * TILE), b = _mm512_loadu_si512(turned + w * TILE + LANES);
    for (int r = 0; r < R; r++) {
      const __m512i x = _mm512_set1_epi32(q.high[r * q.count + w]), y = _mm512_set1_epi32(q.low[r * q.count + w]);
      up[r][0] = _mm512_dpbusd_epi32(up[r][0], a, x), up[r][1] = _mm512_dpbusd_epi32(up[r][1], b, x);
      down[r][0] = _mm512_dpbusd_epi32(down[r][0], a, y), down[r][1] = _mm512_dpbusd_epi32(down[r][1], b, y);
    }
  }
  for (int r = 0; r < R; r++)
    for (int half = 0; half < 2; half++) {
      const vf coarse = to_float((vi)up[r][half] - splat_word(q.offsets[2 * r]));
      const vf fine = to_float((vi)down[r][half] - splat_word(q.offsets[2 * r + 1]));
      store(scores + r * SPLIT + half * LANES, fma(coarse, splat(256.0f), fine) * splat(q.steps[r]));
    }
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
void turn_page(const Call& c, const char* keys, int head, float* turned) {
  constexpr int per = 4 / kv_bytes<T>();
  const KvPlane shape{c.kv.kv_heads, c.kv.head_dim};
  const int d = c.kv.head_dim, bytes = d * kv_bytes<T>();
  for (int at = 0; at < bytes; at += 64) {
    vi words[LANES];
    for (int j = 0; j < LANES; j++) words[j] = load_bytes(keys + shape.row<T>(j, head) + at, bytes - at);
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
  for (int r = 0; r < R; r++) low[r] = high[r] = vf{};
  for (int k = 0; k < d; k++) {
    const vf a = load(turned + k * TILE), b = load(turned + k * TILE + LANES);
    for (int r = 0; r < R; r++) {
      const vf x = splat(q[r * d + k]);
      low[r] = fma(x, a, low[r]), high[r] = fma(x, b, high[r]);
    }
  }
  for (int r = 0; r < R; r++) store(scores + r * SPLIT, low[r]), store(scores + r * SPLIT + LANES, high[r]);
}

template <int R = SCORE_ROWS>
void score_rows(int rows, const float* turned, const float* q, int d, float* scores) {
  if constexpr (R > 0) {
    for (; rows >= R; rows -= R, q += R * d, scores += R * SPLIT) score<R>(turned, q, d, scores);
    score_rows<R - 1>(rows, turned, q, d, scores);
  }
}

// Scores of keys first … first + 31 (up to `end`) for one KV head.
template <int T>
void score_tile(const Call& c, Rows& r, int h, int first, int column, int end) {
  const int rows = r.rows(c), at = h - r.head;
  const KvPlane shape{c.kv.kv_heads, c.kv.head_dim};
  float* scores = r.scores + size_t(at) * rows * SPLIT + column;
  const int pages = end - first > PAGE ? 2 : 1;
  for (int p = 0; p < pages; p++) {
    const int block = first / PAGE + p;
    const char* keys = plane<T>(c, r, block, false);
#if BATON_AVX512
    if constexpr (in_words<T>()) turn_words(c, keys, h, (int32_t*)r.turned + p * LANES);
#endif
    if constexpr (!in_words<T>()) turn_page<T>(c, keys, h, r.turned + p * LANES);
    if constexpr (kv_scaled<T>())
      for (int j = 0; j < PAGE; j++) r.scales[p * PAGE + j] = scale_at(keys + shape.scale<T>(j, h)) * (c.scale * kv_unit<T>());
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
    vf scales{};
#if defined(BATON_MUTATION_SCALE)
    for (int j = from; j < to; j++) scales[j] = scale_at(values + shape.scale<T>(from, h)) * kv_unit<T>();
#else
    for (int j = from; j < to; j++) scales[j] = scale_at(values + shape.scale<T>(j, h)) * kv_unit<T>();
#endif
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

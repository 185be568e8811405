// Flash attention over pages. Knows nothing of sequences beyond their block tables.
//
// Keys are taken in splits of 256 at absolute positions. Inside a split a row's scores are all known before its
// softmax; splits are merged in order. A row does the same arithmetic in the same order as a decode (its splits
// spread over threads) and as part of a chunk (all splits by one thread), so its bits depend on its own keys alone:
// what a neighbour needs masked adds exact zeros. (Split-KV: https://arxiv.org/abs/2311.01282; online softmax:
// https://arxiv.org/abs/1805.02867)
#include "own_heads.h"

#include <algorithm>
#include <atomic>
#include <vector>

#include "../abi/threads.h"
#include "key_splits.h"

namespace baton {
namespace {

constexpr int TASKS_EACH = 8;  // of a chunk's tasks, per thread: their keys differ in number

// A few queries of one sequence: its splits are tasks, each for all heads, so that a page is read as one run of bytes.
struct Spread {
  const AttentionItem* item;
  int first, splits;
  float* parts;  // [split][kv_head x query x group] rows of padded + LANES floats: acc, then most, total
  std::atomic<int>* left;
};

struct Split {
  Spread* spread;
  int which;
};

struct Chunk {
  const AttentionItem* item;
  int query, queries, head;
};

template <int T>
struct Attention {
  const Call& c;
  const Heads own;
  std::vector<Spread> spreads;
  std::vector<Split> splits;
  std::vector<Chunk> chunks;
  std::atomic<int> taken{0};

  size_t part_floats(int queries) const { return size_t(queries) * c.heads * (c.padded + LANES); }

  // Splits one by one. A thread takes its next one before it works, and so can fetch the first keys of that beside the last
  // values of this.
  void run_splits() {
    Rows r{};
    for (int at = taken++, next; at < int(splits.size()); at = next) {
      Spread& s = *splits[at].spread;
      next = taken++;
      if (!r.item) fetch_keys(keys_of(splits[at]));
      if (r.item != s.item) {
        r = Rows{s.item, 0, s.item->queries, own.first, own.count};
        carve(r, c, (char*)scratch(SCRATCH_ATTENTION, carve(r, c, nullptr)));
        load_queries<T>(c, r);
      }
      r.next = next < int(splits.size()) ? keys_of(splits[next]) : Next{};
      attend_split<T>(c, r, (s.first + splits[at].which) * SPLIT);
      float* part = s.parts + splits[at].which * part_floats(r.queries);
      for (int i = 0; i < r.heads * r.rows(c); i++, part += c.padded + LANES) {
        std::memcpy(part, r.acc + size_t(i) * c.padded, size_t(c.padded) * 4);
        part[c.padded] = r.most[i], part[c.padded + 1] = r.total[i];
      }
      if (s.left->fetch_sub(1, std::memory_order_acq_rel) == 1) gather(s);
    }
  }

  // The first pages of what no thread has fetched.
  void fetch_keys(const Next& keys) const {
    const KvPlane shape{c.kv.kv_heads, c.kv.head_dim};
    for (int block = keys.first; block <= keys.last && block < keys.first + AHEAD; block++)
      for (size_t line = 0; line < shape.bytes<T>(); line += 64) fetch(plane<T>(c, *keys.item, block, false) + line);
  }

  Next keys_of(const Split& split) const {
    const AttentionItem* item = split.spread->item;
    const int key = (split.spread->first + split.which) * SPLIT;
    return {item, (key + first_tile(c, item->start, key)) / PAGE, (item->start + item->queries - 1) / PAGE};
  }

  void gather(Spread& s) {
    const int rows = s.item->queries * c.group;
    for (int i = 0; i < own.count * rows; i++) {
      float* row = s.parts + size_t(i) * (c.padded + LANES);
      float most = row[c.padded], total = row[c.padded + 1];
      for (int which = 1; which < s.splits; which++) {
        const float* next = row + which * part_floats(s.item->queries);
        merge(most, total, row, next[c.padded], next[c.padded + 1], next, c.padded);
      }
      finish<T>(c, *s.item, i % rows / c.group, (own.first + i / rows) * c.group + i % c.group, row, most, total);
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
    std::memset(all, 0, whole);  // a row that sees no number at all comes out as 0 / 0
    for (int i = 0; i < rows; i++) all[size_t(i) * (c.padded + LANES) + c.padded] = -INFINITY;
    for (int key = first * SPLIT; key <= r.last(); key += SPLIT) {
      r.next = {r.item, (key + SPLIT) / PAGE, r.last() / PAGE};
      attend_split<T>(c, r, key);
      for (int i = 0; i < rows; i++) {
        float* row = all + size_t(i) * (c.padded + LANES);
        merge(row[c.padded], row[c.padded + 1], row, r.most[i], r.total[i], r.acc + size_t(i) * c.padded, c.padded);
      }
    }
    for (int i = 0; i < rows; i++) {
      const float* row = all + size_t(i) * (c.padded + LANES);
      finish<T>(c, *k.item, k.query + i / c.group, k.head * c.group + i % c.group, row, row[c.padded], row[c.padded + 1]);
    }
  }

  int most_queries(int rows) const { return std::max(1, rows / c.group); }

  // Queries of a chunk's task: fewer where nothing is made of values for all rows, and where there would be too few tasks for the
  // threads to end together.
  int queries_of_task(const AttentionItem* items, int count) const {
    const int most = most_queries(BATON_AVX512 && T == KV_INT8 ? FEWER_ROWS : CHUNK_ROWS);
    int64_t tasks = 0;
    for (const AttentionItem* item = items; item < items + count; item++)
      if (item->queries > FEW_QUERIES) tasks += int64_t(item->queries + most - 1) / most * own.count;
    return tasks < TASKS_EACH * threads() ? most_queries(FEWER_ROWS) : most;
  }

  void plan(const AttentionItem* items, int count) {
    const int most = queries_of_task(items, count);
    for (const AttentionItem* item = items; item < items + count; item++) {
      if (item->queries <= FEW_QUERIES) {
        const int first = first_split(c, item->start), last = (item->start + item->queries - 1) / SPLIT;
        spreads.push_back({item, first, last - first + 1, nullptr, nullptr});
        continue;
      }
      for (int query = 0; query < item->queries; query += most)
        for (int head = own.first; head < own.first + own.count; head++)
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
      for (int which = 0; which < spreads[i].splits; which++) splits.push_back({&spreads[i], which});
    }
    const int few = std::min(threads(), int(splits.size()));
    parallel_for(few + int(chunks.size()), [&](int32_t task) { task < few ? run_splits() : chunk(chunks[task - few]); });
  }
};

}  // namespace

// Heads are counted from the page's first one, so q, out and sinks begin that much earlier.
void attend(const PagedKv& kv, Heads own, const AttentionItem* items, int32_t count, int32_t heads, int32_t window, float scale,
            const AttentionForm& form, const float* q, int64_t q_stride, float* out, int64_t out_stride) {
  const int padded = (kv.head_dim + LANES - 1) / LANES * LANES, group = heads / own.count;
  const int64_t before = int64_t(own.first) * group, floats = before * kv.head_dim;
  const AttentionForm moved{form.softcap, form.sinks ? form.sinks - before : nullptr};
  const Call call{kv, heads, group, window, padded, scale, q - floats, q_stride, out - floats, out_stride, moved};
  switch (kv.type) {
    case KV_F32: return Attention<KV_F32>{call, own}.run(items, count);
    case KV_BF16: return Attention<KV_BF16>{call, own}.run(items, count);
    case KV_F16: return Attention<KV_F16>{call, own}.run(items, count);
    case KV_INT8: return Attention<KV_INT8>{call, own}.run(items, count);
    default: return Attention<KV_FP8>{call, own}.run(items, count);
  }
}

}  // namespace baton

BATON_API void baton_paged_attention_form(const baton::PagedKv* kv, const baton::AttentionItem* items, int32_t count,
                   int32_t heads, int32_t window, float scale, const baton::AttentionForm* form, const float* q,
                   int64_t q_stride, float* out, int64_t out_stride) {
  baton::attend(*kv, {0, kv->kv_heads}, items, count, heads, window, scale, *form, q, q_stride, out, out_stride);
}

BATON_API void baton_paged_attention(const baton::PagedKv* kv, const baton::AttentionItem* items, int32_t count,
                   int32_t heads, int32_t window, float scale, const float* q, int64_t q_stride,
                   float* out, int64_t out_stride) {
  const baton::AttentionForm plain{};
  baton_paged_attention_form(kv, items, count, heads, window, scale, &plain, q, q_stride, out, out_stride);
}

// Flat attention's own splits and merges in its own order, so that a row has the very bits that it has without a group. What is
// shared are whole splits of 256 keys; the rest of a prefix is read by each sequence.
#include "cascade.h"

#include <vector>

#include "../abi/threads.h"
#include "../paged_attention/key_splits.h"

namespace baton {
namespace {

// Rows of one KV head: of a group, against the keys that it shares, or of one item, against its own.
struct Task {
  AttentionItem item;
  int query, queries, head, from;  // from: the first key
};

template <int T>
struct Cascade {
  const Call& c;
  std::vector<Task> prefixes, suffixes;
  float* states = nullptr;  // per row of q and head: acc, most, total of its splits so far

  int floats() const { return c.padded + LANES; }
  float* state(int64_t row, int head) const { return states + (row * c.heads + head) * floats(); }

  // The splits of `task` in order, each merged into its rows' states.
  void attend(const Task& task, bool shared) {
    Rows r{&task.item, task.query, task.queries, task.head, 1};
    carve(r, c, (char*)scratch(SCRATCH_ATTENTION, carve(r, c, nullptr)));
    r.shared = shared;
    load_queries<T>(c, r);
    for (int key = task.from; key <= r.last(); key += SPLIT) {
      attend_split<T>(c, r, key);
      for (int i = 0; i < r.rows(c); i++) {
        float* to = state(task.item.first + task.query + i / c.group, task.head * c.group + i % c.group);
        merge(to[c.padded], to[c.padded + 1], to, r.most[i], r.total[i], r.acc + size_t(i) * c.padded, c.padded);
      }
    }
  }

  void own(const Task& task) {
    attend(task, false);
    for (int i = 0; i < task.queries * c.group; i++) {
      const int query = task.query + i / c.group, head = task.head * c.group + i % c.group;
      const float* row = state(task.item.first + query, head);
      finish<T>(c, task.item, query, head, row, row[c.padded], row[c.padded + 1]);
    }
  }

  int most_queries() const { return FEWER_ROWS / c.group > 1 ? FEWER_ROWS / c.group : 1; }

  // A group's rows as the queries of one item that ends where the shared keys end.
  void share(const AttentionItem* items, const PrefixGroup& g, int keys) {
    const AttentionItem &first = items[g.first], &last = items[g.first + g.count - 1];
    const int rows = int(last.first + last.queries - first.first);
    for (int row = 0; row < rows; row += most_queries()) {
      const int queries = rows - row < most_queries() ? rows - row : most_queries();
      for (int head = 0; head < c.kv.kv_heads; head++)
        prefixes.push_back({{first.first + row, first.pages, queries, keys - queries}, 0, queries, head, 0});
    }
  }

  void plan(const AttentionItem* items, int count, const PrefixGroup* groups, int group_count) {
    std::vector<int> from(size_t(count), 0);
    for (const PrefixGroup* g = groups; g < groups + group_count; g++) {
      const int keys = g->keys / SPLIT * SPLIT;
#if defined(BATON_MUTATION_CASCADE_TWICE)
      for (int i = 0; i < g->count; i++) from[size_t(g->first + i)] = keys > SPLIT ? keys - SPLIT : keys;
#else
      for (int i = 0; i < g->count; i++) from[size_t(g->first + i)] = keys;
#endif
      if (keys) share(items, *g, keys);
    }
    for (int i = 0; i < count; i++)
      for (int query = 0; query < items[i].queries; query += most_queries())
        for (int head = 0; head < c.kv.kv_heads; head++) {
          const int left = items[i].queries - query;
          suffixes.push_back({items[i], query, left < most_queries() ? left : most_queries(), head, from[size_t(i)]});
        }
  }

  void run(const AttentionItem* items, int count, const PrefixGroup* groups, int group_count, int64_t rows) {
    plan(items, count, groups, group_count);
    states = (float*)scratch(SCRATCH_CALLER, size_t(rows) * c.heads * floats() * 4);
    std::memset(states, 0, size_t(rows) * c.heads * floats() * 4);  // a row that sees no number at all comes out as 0 / 0
    for (int64_t i = 0; i < rows * c.heads; i++) states[i * floats() + c.padded] = -INFINITY;
    parallel_for(int(prefixes.size()), [&](int32_t task) { attend(prefixes[size_t(task)], true); });
#if defined(BATON_MUTATION_CASCADE_MERGE)
    for (int64_t i = 0; i < rows * c.heads; i++) states[i * floats() + c.padded] += 0.5f;
#endif
    parallel_for(int(suffixes.size()), [&](int32_t task) { own(suffixes[size_t(task)]); });
  }
};

}  // namespace
}  // namespace baton

BATON_API void baton_cascade_attention(const baton::PagedKv* kv, const baton::AttentionItem* items, int32_t count,
                                       const baton::PrefixGroup* groups, int32_t group_count, int32_t heads, float scale,
                                       const float* q, int64_t q_stride, int64_t rows, float* out, int64_t out_stride) {
  using namespace baton;
  const int padded = (kv->head_dim + LANES - 1) / LANES * LANES;
  const Call call{*kv, heads, heads / kv->kv_heads, 0, padded, scale, q, q_stride, out, out_stride};
  switch (kv->type) {
    case KV_F32: return Cascade<KV_F32>{call, {}, {}}.run(items, count, groups, group_count, rows);
    case KV_BF16: return Cascade<KV_BF16>{call, {}, {}}.run(items, count, groups, group_count, rows);
    case KV_F16: return Cascade<KV_F16>{call, {}, {}}.run(items, count, groups, group_count, rows);
    case KV_INT8: return Cascade<KV_INT8>{call, {}, {}}.run(items, count, groups, group_count, rows);
    default: return Cascade<KV_FP8>{call, {}, {}}.run(items, count, groups, group_count, rows);
  }
}

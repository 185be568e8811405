// A batch's attention as units of work, spread over all blocks: (item, split of 256 keys, KV head, up to 5 or 8 query rows).
// Lengths are read on the device. A row's splits are merged in order, by whichever block ends last or, where the workspace
// is too small or the rows are many, by one block that does them all: the same bits either way, and whatever the batch.
#pragma once
#include "merge.cuh"

namespace baton {
namespace {
namespace attention {

constexpr int FEW_QUERIES = 8, SLOTS = 8192;

inline size_t workspace_bytes(int d) { return size_t(SLOTS) * (MOST_ROWS * (d + 2) * 4 + 4); }

__device__ __forceinline__ int first_split(int window, int position) {
  return window && position >= window ? (position - window + 1) / SPLIT : 0;
}

// How an item is cut.
struct Cut {
  int rows, tiles, per, splits, first;

  __device__ Cut(const Call& c, const AttentionItem& item, int most) {
    rows = item.queries * c.group;
    tiles = (rows + most - 1) / most;
    per = tiles ? (rows + tiles - 1) / tiles : 0;
    first = first_split(c.window, item.start);
    splits = rows ? (item.start + item.queries - 1) / SPLIT - first + 1 : 0;
  }
};

// ends[i]: units up to item i's last; slots[i]: its first partial result, or -1 where a block does all splits in turn.
template <int T, int MOST>
__device__ int plan(const Call& c, const AttentionItem* items, int count, int* ends, int* slots, int* scratch) {
  constexpr int each = MOST / THREADS;
  const int begin = int(me()) * each;
  int wanted = 0, total = 0;
  for (int i = begin; i < begin + each && i < count; i++) {
    const Cut cut(c, items[i], most_rows<T>());
    if (items[i].queries <= FEW_QUERIES && cut.splits > 1) wanted += cut.splits * cut.tiles * c.kv.kv_heads;
  }
  int slot = scan(wanted, scratch, total), units = 0;
  for (int i = begin; i < begin + each && i < count; i++) {
    const Cut cut(c, items[i], most_rows<T>());
    const int one = cut.tiles * c.kv.kv_heads, spread = cut.splits * one;
    const bool few = items[i].queries <= FEW_QUERIES && cut.splits > 1;
    const bool fits = few && slot + spread <= c.slots;
    slots[i] = fits ? slot : -1;
    slot += few ? spread : 0;
    units += fits ? spread : one;
  }
  int at = scan(units, scratch, total);
  for (int i = begin; i < begin + each && i < count; i++) {
    const Cut cut(c, items[i], most_rows<T>());
    at += (slots[i] >= 0 ? cut.splits : 1) * cut.tiles * c.kv.kv_heads;
    ends[i] = at;
  }
  BATON_TEAM_SYNC();
  return total;
}

__device__ __forceinline__ void finish(const Call& c, const Rows& r, int row, int d, float acc, float total) {
  const int at = r.row + row;
  const int64_t query = r.item.first + at / c.group;
  c.out[query * c.out_stride + int64_t(r.head * c.group + at % c.group) * c.kv.head_dim + d] = acc / total;
}

template <int T, int B>
__device__ void all_splits(const Call& c, const Rows& r, const Shared& s) {
  const int low = first_split(c.window, r.item.start + r.row / c.group), high = r.last(c) / SPLIT;
  load_queries<T>(c, r, s);
  for (int split = low; split <= high; split++) {
    attend_split<T, B>(c, r, s, split * SPLIT);
    merge_shared(c, r, s, split == low);
  }
  const int d = c.kv.head_dim;
  for (int i = me(); i < r.rows * d; i += THREADS) finish(c, r, i / d, i % d, s.whole[i], s.whole_total[i / d]);
  BATON_TEAM_SYNC();
}

// A slot: rows of head_dim floats, then most and total of each row.
__device__ void gather(const Call& c, const Rows& r, const float* slot, int64_t stride, int splits) {
  const int d = c.kv.head_dim;
  for (int i = me(); i < r.rows * d; i += THREADS) {
    const int row = i / d, at = MOST_ROWS * d + 2 * row;
    Merged sum;
    const float* from = slot;
    for (int split = 0; split < splits; split++, from += stride) sum.add(__ldcg(from + at), __ldcg(from + at + 1), __ldcg(from + i));
    finish(c, r, row, i % d, sum.acc, sum.total);
  }
}

template <int T, int B>
__device__ void one_split(const Call& c, const Rows& r, const Shared& s, int split, const Cut& cut, int slot, int place) {
  load_queries<T>(c, r, s);
  attend_split<T, B>(c, r, s, (cut.first + split) * SPLIT);
  const int d = c.kv.head_dim, group = cut.tiles * c.kv.kv_heads;
  const int64_t floats = MOST_ROWS * (d + 2);
  float* mine = c.partial + (slot + split * group + place) * floats;
  for (int i = me(); i < r.rows * d; i += THREADS) __stcg(mine + i, s.result[i]);
  for (int row = me(); row < r.rows; row += THREADS)
    __stcg(mine + MOST_ROWS * d + 2 * row, s.most[row]), __stcg(mine + MOST_ROWS * d + 2 * row + 1, s.total[row]);
  __threadfence();
  BATON_TEAM_SYNC();
  if (me() == 0) {
    const int before = atomicAdd(c.arrived + slot + place, 1);
    *s.flag = before == cut.splits - 1;
    if (*s.flag) c.arrived[slot + place] = 0;  // for the next launch
  }
  BATON_TEAM_SYNC();
  const bool last = *s.flag;
#ifdef BATON_MUTATION_CUDA_LAST
  if (split == cut.splits - 1) {
#else
  if (last) {
#endif
    __threadfence();
    gather(c, r, c.partial + (slot + place) * floats, floats * group, cut.splits);
  }
  BATON_TEAM_SYNC();
  (void)last;
}

// Every `stride`-th unit from `first` on. ends, slots: MOST ints each, scratch: WARPS, of this block's shared memory.
template <int T, int B, int MOST>
__device__ void attend_units(const Call& c, const AttentionItem* items, int count, const Shared& s, int* ends, int* slots,
                             int* scratch, int first, int stride) {
  const int units = plan<T, MOST>(c, items, count, ends, slots, scratch);
  for (int unit = first; unit < units; unit += stride) {
    const int at = first_behind(ends, count, unit);
    const Cut cut(c, items[at], most_rows<T>());
    const int group = cut.tiles * c.kv.kv_heads, within = unit - (at ? ends[at - 1] : 0), place = within % group;
    Rows r;
    r.item = items[at], r.head = place / cut.tiles, r.row = place % cut.tiles * cut.per;
    r.rows = cut.rows - r.row < cut.per ? cut.rows - r.row : cut.per;
    if (slots[at] < 0)
      all_splits<T, B>(c, r, s);
    else
      one_split<T, B>(c, r, s, within / group, cut, slots[at], place);
  }
}

}  // namespace attention
}  // namespace
}  // namespace baton

// Split-KV decode attention on tensor cores, for decodes and prompts' chunks in one launch. Knows nothing of sequences beyond
// their block tables.
//
// A unit of work is (item, split of 256 keys, KV head, up to 5 or 8 query rows); the grid is as large as the device, and blocks
// take units in turn, so that lengths are read on the device and a captured launch serves any. K and V go from memory
// straight to mma's registers. A row's splits are merged in order, by whichever block ends last or, where the workspace
// is too small or the rows are many, by one block that does them all: the same bits either way, and whatever the batch.
#include "../cuda/device.cuh"
#include "../cuda/workspace.cuh"
#include "merge.cuh"
#include "units.cuh"

namespace baton {
namespace {

constexpr int MOST_ITEMS = 1024, FEW_QUERIES = 8, SLOTS = 8192;

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
template <int T>
__device__ int plan(const Call& c, const AttentionItem* items, int count, int* ends, int* slots, int* scratch) {
  constexpr int each = MOST_ITEMS / THREADS;
  const int begin = int(threadIdx.x) * each;
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
  __syncthreads();
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
  for (int i = threadIdx.x; i < r.rows * d; i += THREADS) finish(c, r, i / d, i % d, s.whole[i], s.whole_total[i / d]);
  __syncthreads();
}

// A slot: rows of head_dim floats, then most and total of each row.
__device__ void gather(const Call& c, const Rows& r, const float* slot, int64_t stride, int splits) {
  const int d = c.kv.head_dim;
  for (int i = threadIdx.x; i < r.rows * d; i += THREADS) {
    const int row = i / d, at = MOST_ROWS * d + 2 * row;
    float most = __ldcg(slot + at), total = __ldcg(slot + at + 1), acc = __ldcg(slot + i);
    const float* next = slot;
    for (int split = 1; split < splits; split++) {
      next += stride;
      const float his_most = __ldcg(next + at), his_total = __ldcg(next + at + 1), his = __ldcg(next + i);
      if (his_most == -INFINITY) continue;
      if (most == -INFINITY) {
        most = his_most, total = his_total, acc = his;
        continue;
      }
      const float top = fmaxf(most, his_most);
#ifdef BATON_MUTATION_CUDA_MERGE
      const float keep = 1.0f, add = exp2_fast(his_most - top);
#else
      const float keep = exp2_fast(most - top), add = exp2_fast(his_most - top);
#endif
      acc = acc * keep + his * add, total = total * keep + his_total * add, most = top;
    }
    finish(c, r, row, i % d, acc, total);
  }
}

template <int T, int B>
__device__ void one_split(const Call& c, const Rows& r, const Shared& s, int split, const Cut& cut, int slot, int place) {
  load_queries<T>(c, r, s);
  attend_split<T, B>(c, r, s, (cut.first + split) * SPLIT);
  const int d = c.kv.head_dim, group = cut.tiles * c.kv.kv_heads;
  const int64_t floats = MOST_ROWS * (d + 2);
  float* mine = c.partial + (slot + split * group + place) * floats;
  for (int i = threadIdx.x; i < r.rows * d; i += THREADS) __stcg(mine + i, s.result[i]);
  for (int row = threadIdx.x; row < r.rows; row += THREADS)
    __stcg(mine + MOST_ROWS * d + 2 * row, s.most[row]), __stcg(mine + MOST_ROWS * d + 2 * row + 1, s.total[row]);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    const int before = atomicAdd(c.arrived + slot + place, 1);
    *s.flag = before == cut.splits - 1;
    if (*s.flag) c.arrived[slot + place] = 0;  // for the next launch
  }
  __syncthreads();
  const bool last = *s.flag;
#ifdef BATON_MUTATION_CUDA_LAST
  if (split == cut.splits - 1) {
#else
  if (last) {
#endif
    __threadfence();
    gather(c, r, c.partial + (slot + place) * floats, floats * group, cut.splits);
  }
  __syncthreads();
  (void)last;
}

template <int T, int B>
__global__ void __launch_bounds__(THREADS) attend(Call c, const AttentionItem* items, int count) {
  BATON_SHARED(char, memory);
  BATON_STATIC_SHARED(int, ends, MOST_ITEMS);
  BATON_STATIC_SHARED(int, slots, MOST_ITEMS);
  BATON_STATIC_SHARED(int, scratch, WARPS);
  const Shared s(memory, c.kv.head_dim);
  const int units = plan<T>(c, items, count, ends, slots, scratch);
  for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const int at = item_of(ends, count, unit);
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

template <int T, int B>
int launch(const Call& c, const AttentionItem* items, int32_t count, void* stream) {
  const size_t bytes = Shared::bytes(c.kv.head_dim);
  for (int32_t at = 0; at < count; at += MOST_ITEMS) {
    const int32_t some = count - at < MOST_ITEMS ? count - at : MOST_ITEMS;
    const int wrong = BATON_LAUNCH((attend<T, B>), dim3(processors() * BLOCKS_EACH), dim3(THREADS), bytes, stream, c, items + at, some);
    if (wrong) return wrong;
  }
  return 0;
}

template <int T>
int by_width(const Call& c, const AttentionItem* items, int32_t count, void* stream) {
  const int block = 8 * chunk_elements<T>(), d = c.kv.head_dim;
  if (d <= block) return launch<T, 1>(c, items, count, stream);
  if (d <= 2 * block) return launch<T, 2>(c, items, count, stream);
  if constexpr (T == KV_BF16)
    if (d <= 4 * block) return launch<T, 4>(c, items, count, stream);
  return int(cudaErrorInvalidValue);
}

}  // namespace
}  // namespace baton

// bf16 KV with a head_dim that is a multiple of 8, int8 and fp8 with a multiple of 16, up to 256; else
// cudaErrorInvalidValue. items and what they point to lie in device memory.
BATON_API int baton_paged_attention(const baton::PagedKv* kv, const baton::AttentionItem* items, int32_t count, int32_t heads,
                                    int32_t window, float scale, const float* q, int64_t q_stride, float* out,
                                    int64_t out_stride, void* stream) {
  using namespace baton;
  if (count == 0) return 0;
  const int d = kv->head_dim, step = kv->type == KV_BF16 ? 8 : 16;
  if (kv->type == KV_F32 || d % step || d > 256 || d < step || heads % kv->kv_heads) return int(cudaErrorInvalidValue);
  const size_t floats = size_t(SLOTS) * MOST_ROWS * (d + 2);
  char* memory = (char*)workspace(WORKSPACE_ATTENTION, floats * 4 + SLOTS * 4, stream);
  if (!memory) return int(cudaErrorInvalidValue);
  // The counters come first: they are zero between launches, whatever head_dim the next one has.
  const Call call{*kv, heads, heads / kv->kv_heads, window, scale * 1.44269504088896341f, q, q_stride, out, out_stride,
                  (float*)(memory + SLOTS * 4), (int*)memory, SLOTS};
  switch (kv->type) {
    case KV_BF16: return by_width<KV_BF16>(call, items, count, stream);
    case KV_INT8: return by_width<KV_INT8>(call, items, count, stream);
    default: return by_width<KV_FP8>(call, items, count, stream);
  }
}

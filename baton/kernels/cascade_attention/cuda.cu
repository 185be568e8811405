// Attention of sequences that share a prefix's pages, in one launch. Knows nothing of sequences beyond their block tables.
//
// A unit of work is (group, chunk of its shared keys, KV head, 64 rows) or (item, run of its own splits of 256 keys, KV head, up to
// 5 or 8 rows); blocks take units in turn, chunk by chunk, so that the rows of a group meet a chunk while it is in L2 and
// it comes from memory once. A result is (sums, maximum, total) of a row, and lies in the plane of its chunk or run. Whoever
// brings an item's last one merges its planes in order. How keys are cut depends on their number alone: a row's bits are the same
// whoever else is in its group.
#include "../cuda/device.cuh"
#include "../cuda/workspace.cuh"
#include "../paged_attention/merge.cuh"
#include "prefix.cuh"

namespace baton {
namespace {

constexpr int MOST_ITEMS = 1024, MOST_GROUPS = 256, MOST_ROWS_OF_Q = 1024, MOST_KV_HEADS = 128;
constexpr int CHUNKS = 16, RUNS = 16;  // planes of a group's chunks, then of an item's own runs
constexpr int PAD = 4;                 // floats behind a row's sums: maximum, total

struct Cascade {
  Call call;
  const AttentionItem* items;
  const PrefixGroup* groups;
  int count, group_count;
  int64_t rows;

  __device__ float* place(int plane, int64_t query, int head) const {
    return call.partial + ((plane * rows + query) * call.heads + head) * (call.kv.head_dim + PAD);
  }
};

// How a group is cut.
struct Shape {
  int64_t first;
  int keys, rows, tiles, each, chunks;

  __device__ Shape(const Cascade& a, const PrefixGroup& g) {
    const AttentionItem& last = a.items[g.first + g.count - 1];
    first = a.items[g.first].first, keys = g.keys;
    rows = int(last.first + last.queries - first) * a.call.group;
    tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    each = ((keys + CHUNKS - 1) / CHUNKS + SPLIT - 1) / SPLIT * SPLIT;
    chunks = keys ? (keys + each - 1) / each : 0;
  }
  __device__ int units(const Cascade& a) const { return tiles * chunks * a.call.kv.kv_heads; }
};

// How an item's own keys are cut, and how many results it waits for.
struct Own {
  int keys, rows, tiles, per, splits, each, runs, chunks, shared_tiles;

  __device__ Own(const Cascade& a, const AttentionItem& item, int group, int most) {
    keys = chunks = shared_tiles = 0;
    rows = item.queries * a.call.group;
    if (group >= 0) {
      const Shape shape(a, a.groups[group]);
      const int row = int(item.first - shape.first) * a.call.group;
      keys = shape.keys, chunks = shape.chunks;
#ifdef BATON_MUTATION_CUDA_CASCADE_ARRIVE
      shared_tiles = rows ? 1 : 0;
#else
      shared_tiles = rows ? (row + rows - 1) / TILE_ROWS - row / TILE_ROWS + 1 : 0;
#endif
    }
    tiles = (rows + most - 1) / most;
    per = tiles ? (rows + tiles - 1) / tiles : 0;
    const int left = rows ? item.start + item.queries - keys : 0;
    splits = (left + SPLIT - 1) / SPLIT;
    each = (splits + RUNS - 1) / RUNS;
    runs = splits ? (splits + each - 1) / each : 0;
  }
  __device__ int units(const Cascade& a) const { return tiles * runs * a.call.kv.kv_heads; }
  __device__ int awaited() const { return chunks * shared_tiles + runs * tiles; }
};

struct Plan {
  int *ends, *group_ends, *group_of, *scratch, *ready;  // in shared memory; ready: their number, then items
};

// ends[i], group_ends[i]: units up to the last of item (group) i. Returns how many units groups have, and items.
template <int T>
__device__ int2 plan(const Cascade& a, const Plan& p) {
  constexpr int each = MOST_ITEMS / THREADS, each_group = MOST_GROUPS / THREADS;
  for (int i = threadIdx.x; i < a.count; i += THREADS) p.group_of[i] = -1;
  __syncthreads();
  int2 total;
  int mine = 0, begin = int(threadIdx.x) * each_group;
  for (int g = begin; g < begin + each_group && g < a.group_count; g++) {
    for (int i = 0; i < a.groups[g].count; i++) p.group_of[a.groups[g].first + i] = g;
    mine += Shape(a, a.groups[g]).units(a);
  }
  int at = scan(mine, p.scratch, total.x);
  for (int g = begin; g < begin + each_group && g < a.group_count; g++) p.group_ends[g] = at += Shape(a, a.groups[g]).units(a);
  begin = int(threadIdx.x) * each, mine = 0;
  for (int i = begin; i < begin + each && i < a.count; i++) mine += Own(a, a.items[i], p.group_of[i], most_rows<T>()).units(a);
  at = scan(mine, p.scratch, total.y);
  for (int i = begin; i < begin + each && i < a.count; i++)
    p.ends[i] = at += Own(a, a.items[i], p.group_of[i], most_rows<T>()).units(a);
  __syncthreads();
  return total;
}

// An item's planes of one KV head in order into its rows of out.
__device__ void merge_planes(const Cascade& a, const AttentionItem& item, const Own& own, int kv_head) {
  const Call& c = a.call;
  const int d = c.kv.head_dim;
  for (int i = threadIdx.x; i < own.rows * d; i += THREADS) {
    const int64_t query = item.first + i / d / c.group;
    const int head = kv_head * c.group + i / d % c.group, at = i % d;
    Merged sum;
    for (int n = 0; n < own.chunks + own.runs; n++) {
      const float* from = a.place(n < own.chunks ? n : CHUNKS + n - own.chunks, query, head);
      sum.add(__ldcg(from + d), __ldcg(from + d + 1), __ldcg(from + at));
    }
    c.out[query * c.out_stride + int64_t(head) * d + at] = sum.acc / sum.total;
  }
}

// This block's result lies in its plane: items first … first + count - 1 of those in rows … of q have one more.
template <int T>
__device__ void arrive(const Cascade& a, const Plan& p, int first, int count, int64_t low, int64_t high, int kv_head) {
  __threadfence();
  if (threadIdx.x == 0) p.ready[0] = 0;
  __syncthreads();
  for (int i = first + int(threadIdx.x); i < first + count; i += THREADS) {
    const AttentionItem& item = a.items[i];
    if (!item.queries || item.first >= high || item.first + item.queries <= low) continue;
    int* counter = a.call.arrived + i * a.call.kv.kv_heads + kv_head;
    if (atomicAdd(counter, 1) != Own(a, item, p.group_of[i], most_rows<T>()).awaited() - 1) continue;
    *counter = 0;  // for the next launch
    p.ready[1 + atomicAdd(p.ready, 1)] = i;
  }
  __syncthreads();
  if (p.ready[0]) __threadfence();
  for (int i = 0; i < p.ready[0]; i++) {
    const int at = p.ready[1 + i];
    merge_planes(a, a.items[at], Own(a, a.items[at], p.group_of[at], most_rows<T>()), kv_head);
  }
  __syncthreads();
}

template <int T, int D>
__device__ void shared_keys(const Cascade& a, const Plan& p, int unit, char* memory) {
  const int at = first_behind(p.group_ends, a.group_count, unit);
  const PrefixGroup& g = a.groups[at];
  const Shape shape(a, g);
  const int within = unit - (at ? p.group_ends[at - 1] : 0), tile = within % shape.tiles;
  const int head = within / shape.tiles % a.call.kv.kv_heads, chunk = within / shape.tiles / a.call.kv.kv_heads;
  Block b;
  b.first = shape.first, b.row = tile * TILE_ROWS, b.head = head, b.pages = a.items[g.first].pages;
  b.rows = shape.rows - b.row < TILE_ROWS ? shape.rows - b.row : TILE_ROWS;
  b.begin = chunk * shape.each, b.end = shape.keys - b.begin < shape.each ? shape.keys : b.begin + shape.each;
  attend_chunk<T, D, 2, false>(a.call, b, memory, [&](int row) {
    return a.place(chunk, shape.first + row / a.call.group, head * a.call.group + row % a.call.group);
  });
  const int64_t low = shape.first + b.row / a.call.group, high = shape.first + (b.row + b.rows - 1) / a.call.group + 1;
  arrive<T>(a, p, g.first, g.count, low, high, head);
}

template <int T, int B>
__device__ void own_keys(const Cascade& a, const Plan& p, int unit, const Shared& s) {
  const Call& c = a.call;
  const int at = first_behind(p.ends, a.count, unit), d = c.kv.head_dim;
  const AttentionItem& item = a.items[at];
  const Own own(a, item, p.group_of[at], most_rows<T>());
  const int within = unit - (at ? p.ends[at - 1] : 0), tile = within % own.tiles;
  const int head = within / own.tiles % c.kv.kv_heads, run = within / own.tiles / c.kv.kv_heads;
  Rows r;
  r.item = item, r.head = head, r.row = tile * own.per;
  r.rows = own.rows - r.row < own.per ? own.rows - r.row : own.per;
  const int low = run * own.each, high = low + own.each < own.splits ? low + own.each : own.splits;
  load_queries<T>(c, r, s);
  for (int split = low; split < high; split++) {
    attend_split<T, B>(c, r, s, own.keys + split * SPLIT);
    merge_shared(c, r, s, split == low);
  }
  for (int i = threadIdx.x; i < r.rows * (d + 2); i += THREADS) {
    const int row = i / (d + 2), k = i % (d + 2), of = r.row + row;
    float* to = a.place(CHUNKS + run, item.first + of / c.group, head * c.group + of % c.group);
    __stcg(to + k, k < d ? s.whole[row * d + k] : k == d ? s.whole_most[row] : s.whole_total[row]);
  }
  arrive<T>(a, p, at, 1, item.first, item.first + item.queries, head);
}

template <int T, int D>
constexpr int blocks_of() {
  constexpr int block = 8 * chunk_elements<T>();
  return D > block ? D / block : 1;
}

template <int T, int D>
__global__ void __launch_bounds__(THREADS) cascade(Cascade a) {
  BATON_SHARED(char, memory);
  BATON_STATIC_SHARED(int, ends, MOST_ITEMS);
  BATON_STATIC_SHARED(int, group_of, MOST_ITEMS);
  BATON_STATIC_SHARED(int, group_ends, MOST_GROUPS);
  BATON_STATIC_SHARED(int, scratch, WARPS);
  BATON_STATIC_SHARED(int, ready, 1 + TILE_ROWS);
  const Plan p{ends, group_ends, group_of, scratch, ready};
  grid_wait();
  grid_launch_next();
  const int2 units = plan<T>(a, p);
  for (int unit = blockIdx.x; unit < units.x + units.y; unit += gridDim.x) {
    if (unit < units.x)
      shared_keys<T, D>(a, p, unit, memory);
    else
      own_keys<T, blocks_of<T, D>()>(a, p, unit - units.x, Shared(memory, a.call.kv.head_dim));
  }
}

template <int T, int D>
int launch(const Cascade& a, void* stream) {
  const size_t own = Shared::bytes(a.call.kv.head_dim), bytes = own > Tiles<D>::BYTES ? own : Tiles<D>::BYTES;
  return BATON_LAUNCH_PDL((cascade<T, D>), dim3(processors() * BLOCKS_EACH), dim3(THREADS), bytes, stream, a);
}

template <int T>
int by_width(const Cascade& a, void* stream) {
  if (a.call.kv.head_dim <= 64) return launch<T, 64>(a, stream);
  if (a.call.kv.head_dim <= 128) return launch<T, 128>(a, stream);
  return launch<T, 256>(a, stream);
}

}  // namespace
}  // namespace baton

// bf16, int8 and fp8 KV with a head_dim that is a multiple of 16, up to 256; at most 1,024 items in 1,024 rows and 256 groups; else
// cudaErrorInvalidValue, as where there is no memory for the planes. items, groups and what they point to lie in device memory.
BATON_API int baton_cascade_attention(const baton::PagedKv* kv, const baton::AttentionItem* items, int32_t count,
                                      const baton::PrefixGroup* groups, int32_t group_count, int32_t heads, float scale,
                                      const float* q, int64_t q_stride, int64_t rows, float* out, int64_t out_stride, void* stream) {
  using namespace baton;
  if (count == 0) return 0;
  const int d = kv->head_dim;
  if (kv->type == KV_F32 || d % 16 || d > 256 || d < 16 || heads % kv->kv_heads || kv->kv_heads > MOST_KV_HEADS) return int(cudaErrorInvalidValue);
  if (count > MOST_ITEMS || group_count > MOST_GROUPS || rows > MOST_ROWS_OF_Q) return int(cudaErrorInvalidValue);
  // The counters come first: they are zero between launches, whatever shape the next one has.
  const size_t counters = size_t(MOST_ITEMS) * MOST_KV_HEADS * 4, floats = size_t(CHUNKS + RUNS) * size_t(rows) * heads * (d + PAD);
  char* memory = (char*)workspace(WORKSPACE_CASCADE, counters + floats * 4, stream);
  if (!memory) return int(cudaErrorInvalidValue);
  const Call call{*kv, heads, heads / kv->kv_heads, 0, scale * LOG2_E, q, q_stride, out, out_stride,
                  (float*)(memory + counters), (int*)memory, 0};
  const Cascade all{call, items, groups, count, group_count, rows};
  switch (kv->type) {
    case KV_BF16: return by_width<KV_BF16>(all, stream);
    case KV_INT8: return by_width<KV_INT8>(all, stream);
    default: return by_width<KV_FP8>(all, stream);
  }
}

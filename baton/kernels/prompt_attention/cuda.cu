// Attention of a prompt's long chunks: q and weights rounded to 16 bits once, 64 rows of queries x group a tile, K and V two tiles of
// 32 keys ahead in shared memory. Knows nothing of sequences beyond their block tables.
//
// A unit of work is (item, 64 rows, KV head); blocks take units in turn, an item's last rows first, which see the most keys. Tiles of
// keys begin at key 0 of the sequence, so a row's sums are made in one order, whatever chunk and tile it is in.
#include "../cuda/device.cuh"
#include "../cuda/workspace.cuh"
#include "../cascade_attention/prefix.cuh"
#include "prompt.h"

namespace baton {
namespace {

constexpr int MOST_ITEMS = 1024;

// Blocks per processor: as many as registers let in (records/occupancy.json), so that all of a grid run at once.
template <int T>
constexpr int resident() {
  return scaled<T>() ? 2 : 3;
}

__device__ __forceinline__ int tiles_of(const Call& c, const AttentionItem& item) {
  return item.queries < PROMPT_QUERIES ? 0 : (item.queries * c.group + TILE_ROWS - 1) / TILE_ROWS;
}

// ends[i]: units up to item i's last; returns those of all.
__device__ int plan(const Call& c, const AttentionItem* items, int count, int* ends, int* scratch) {
  constexpr int each = MOST_ITEMS / THREADS;
  const int begin = int(threadIdx.x) * each;
  int mine = 0, total = 0;
  for (int i = begin; i < begin + each && i < count; i++) mine += tiles_of(c, items[i]) * c.kv.kv_heads;
  int at = scan(mine, scratch, total);
  for (int i = begin; i < begin + each && i < count; i++) ends[i] = at += tiles_of(c, items[i]) * c.kv.kv_heads;
  __syncthreads();
  return total;
}

template <int T, int D>
__global__ void __launch_bounds__(THREADS, resident<T>()) prompt(Call c, const AttentionItem* items, int count) {
  BATON_SHARED(char, memory);
  BATON_STATIC_SHARED(int, ends, MOST_ITEMS);
  BATON_STATIC_SHARED(int, scratch, WARPS);
  const int units = plan(c, items, count, ends, scratch);
  for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const int at = first_behind(ends, count, unit), within = unit - (at ? ends[at - 1] : 0);
    const AttentionItem item = items[at];
    Block b;
    b.first = item.first, b.head = within % c.kv.kv_heads, b.pages = item.pages, b.start = item.start;
    b.row = (tiles_of(c, item) - 1 - within / c.kv.kv_heads) * TILE_ROWS;
    b.rows = item.queries * c.group - b.row < TILE_ROWS ? item.queries * c.group - b.row : TILE_ROWS;
    const int low = b.seen(c, 0).x;
    b.begin = low > 0 ? low / KEYS * KEYS : 0, b.end = b.seen(c, b.rows - 1).y + 1;
    attend_chunk<T, D, 1, true>(c, b, memory, [&](int row) {
#ifdef BATON_MUTATION_CUDA_PROMPT_HEAD
      const int head = row % c.group;
#else
      const int head = b.head * c.group + row % c.group;
#endif
      return c.out + (item.first + row / c.group) * c.out_stride + int64_t(head) * c.kv.head_dim;
    });
#ifndef BATON_MUTATION_CUDA_PROMPT_BARRIER
    __syncthreads();  // the next unit's rows lie where this one's tiles do
#endif
  }
}

template <int T, int D>
int launch(const Call& c, const AttentionItem* items, int32_t count, void* stream) {
  const dim3 grid = dim3(unsigned(processors() * resident<T>())), block = dim3(THREADS);
  for (int32_t at = 0; at < count; at += MOST_ITEMS) {
    const int32_t some = count - at < MOST_ITEMS ? count - at : MOST_ITEMS;
    if (const int wrong = BATON_LAUNCH((prompt<T, D>), grid, block, Tiles<D>::BYTES, stream, c, items + at, some)) return wrong;
  }
  return 0;
}

template <int T>
int by_width(const Call& c, const AttentionItem* items, int32_t count, void* stream) {
  return c.kv.head_dim <= 64 ? launch<T, 64>(c, items, count, stream) : launch<T, 128>(c, items, count, stream);
}

}  // namespace
}  // namespace baton

// With KV and heads for which has_prompt_form says no: cudaErrorInvalidValue. items and what they point to lie in device memory; rows of
// out begin at multiples of 8 bytes.
BATON_API int baton_prompt_attention(const baton::PagedKv* kv, const baton::AttentionItem* items, int32_t count, int32_t heads,
                                     int32_t window, float scale, const float* q, int64_t q_stride, float* out, int64_t out_stride,
                                     void* stream) {
  using namespace baton;
  if (count == 0) return 0;
  if (!has_prompt_form(kv->type, kv->head_dim) || heads % kv->kv_heads) return int(cudaErrorInvalidValue);
  const Call call{*kv, heads, heads / kv->kv_heads, window, scale * LOG2_E, q, q_stride, out, out_stride, nullptr, nullptr, 0};
  switch (kv->type) {
    case KV_BF16: return by_width<KV_BF16>(call, items, count, stream);
    case KV_INT8: return by_width<KV_INT8>(call, items, count, stream);
    default: return by_width<KV_FP8>(call, items, count, stream);
  }
}

// Attention of a prompt's long chunks: q and weights rounded to 16 bits once. A unit of work is (item, tile of rows, KV head); blocks
// take units in turn. Knows nothing of sequences beyond their block tables.
//
// Over bf16 KV of heads that nearly fill 64 or 128 numbers by warp-group products (groups.cuh). Else by mma.sync: 64 rows of queries x
// group a tile, K and V two tiles of 32 keys ahead in shared memory (cascade_attention/prefix.cuh).
#include "../cuda/device.cuh"
#include "../cuda/workspace.cuh"
#include "groups.cuh"

namespace baton {
namespace {

// Blocks per processor: as many as registers let in (records/occupancy.json), so that all of a grid run at once.
template <int T>
constexpr int resident() {
  return scaled<T>() ? 2 : 3;
}

template <int T, int D>
__global__ void __launch_bounds__(THREADS, resident<T>()) prompt(Call c, const AttentionItem* items, int count) {
  BATON_SHARED(char, memory);
  BATON_STATIC_SHARED(int, ends, MOST_ITEMS);
  BATON_STATIC_SHARED(int, scratch, WARPS);
  const int units = plan<TILE_ROWS, THREADS>(c, items, count, ends, scratch);
  for (int unit = blockIdx.x; unit < units; unit += gridDim.x) {
    const Block b = unit_of<TILE_ROWS, KEYS>(c, items, ends, count, unit);
    attend_chunk<T, D, 1, true>(c, b, memory, [&](int row) { return place_of(c, b, row); });
#ifndef BATON_MUTATION_CUDA_PROMPT_BARRIER
    __syncthreads();  // the next unit's rows lie where this one's tiles do
#endif
  }
}

// `launch` of up to MOST_ITEMS items at a time.
template <class Launch>
int by_items(const AttentionItem* items, int32_t count, Launch launch) {
  for (int32_t at = 0; at < count; at += MOST_ITEMS)
    if (const int wrong = launch(items + at, count - at < MOST_ITEMS ? count - at : MOST_ITEMS)) return wrong;
  return 0;
}

template <int T, int D>
int launch(const Call& c, const AttentionItem* items, int32_t count, void* stream) {
  const dim3 grid = dim3(unsigned(processors() * resident<T>())), block = dim3(THREADS);
  return by_items(items, count, [&](const AttentionItem* from, int32_t some) {
    return BATON_LAUNCH((prompt<T, D>), grid, block, Tiles<D>::BYTES, stream, c, from, some);
  });
}

template <int D>
int launch_pair(const Call& c, const AttentionItem* items, int32_t count, void* stream) {
  return by_items(items, count, [&](const AttentionItem* from, int32_t some) {
    return BATON_LAUNCH((prompt_pair<D>), dim3(unsigned(processors())), dim3(PAIR_THREADS), TileRing<D>::BYTES, stream, c, from, some);
  });
}

template <int T>
int by_width(const Call& c, const AttentionItem* items, int32_t count, void* stream) {
  return c.kv.head_dim <= 64 ? launch<T, 64>(c, items, count, stream) : launch<T, 128>(c, items, count, stream);
}

int capability() {
#ifdef BATON_SIMT
  return 9;
#else
  static const int found = [] {
    int device = 0, major = 0;
    if (cudaGetDevice(&device) != cudaSuccess) return 0;
    return cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) == cudaSuccess ? major : 0;
  }();
  return found;
#endif
}

bool warp_groups = true;  // false: mma.sync, for a measurement beside it

// Whether warp groups take it: at most a quarter of what they multiply is zeros. It depends on the model and the card alone, so that a
// row has its bits in whatever step.
bool fits_pair(const Call& c) {
  const int d = c.kv.head_dim;
  const bool pairs = reinterpret_cast<uintptr_t>(c.q) % 8 == 0 && c.q_stride % 2 == 0;  // of floats, as rows are read
  return warp_groups && capability() == 9 && (d <= 64 ? d >= 48 : d >= 96) && c.scale > 0 && pairs;
}

int by_bf16(const Call& c, const AttentionItem* items, int32_t count, void* stream) {
  if (!fits_pair(c)) return by_width<KV_BF16>(c, items, count, stream);
  return c.kv.head_dim <= 64 ? launch_pair<64>(c, items, count, stream) : launch_pair<128>(c, items, count, stream);
}

}  // namespace
}  // namespace baton

// For measurements and tests: whether warp groups take what they have a form for, as they do unless this says no.
BATON_API int baton_prompt_warp_groups(int32_t on, void*) { return baton::warp_groups = on != 0, 0; }

// With KV and heads for which has_prompt_form says no: cudaErrorInvalidValue. items and what they point to lie in device memory; rows of
// q and out begin at multiples of 8 bytes.
BATON_API int baton_prompt_attention(const baton::PagedKv* kv, const baton::AttentionItem* items, int32_t count, int32_t heads,
                                     int32_t window, float scale, const float* q, int64_t q_stride, float* out, int64_t out_stride,
                                     void* stream) {
  using namespace baton;
  if (count == 0) return 0;
  if (!has_prompt_form(kv->type, kv->head_dim) || heads % kv->kv_heads) return int(cudaErrorInvalidValue);
  const Call call{*kv, heads, heads / kv->kv_heads, window, scale * LOG2_E, q, q_stride, out, out_stride, nullptr, nullptr, 0};
  switch (kv->type) {
    case KV_BF16: return by_bf16(call, items, count, stream);
    case KV_INT8: return by_width<KV_INT8>(call, items, count, stream);
    default: return by_width<KV_FP8>(call, items, count, stream);
  }
}

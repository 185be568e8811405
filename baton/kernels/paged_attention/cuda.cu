// Split-KV decode attention on tensor cores, for decodes and prompts' chunks in one launch. Knows nothing of sequences beyond
// their block tables.
//
// A unit of work is (item, split of 256 keys, KV head, up to 5 or 8 query rows); the grid is as large as the device, and blocks
// take units in turn, so that lengths are read on the device and a captured launch serves any. K and V go from memory
// straight to mma's registers. A row's splits are merged in order, by whichever block ends last or, where the workspace
// is too small or the rows are many, by one block that does them all: the same bits either way, and whatever the batch.
#include "../cuda/device.cuh"
#include "../cuda/workspace.cuh"
#include "spread.cuh"

namespace baton {
namespace {

using namespace attention;

constexpr int MOST_ITEMS = 1024;

template <int T, int B>
__global__ void __launch_bounds__(THREADS) attend(Call c, const AttentionItem* items, int count) {
  BATON_SHARED(char, memory);
  BATON_STATIC_SHARED(int, ends, MOST_ITEMS);
  BATON_STATIC_SHARED(int, slots, MOST_ITEMS);
  BATON_STATIC_SHARED(int, scratch, WARPS);
  const Shared s(memory, c.kv.head_dim);
  attend_units<T, B, MOST_ITEMS>(c, items, count, s, ends, slots, scratch, blockIdx.x, gridDim.x);
}

// Dynamic memory of a block. Beside the static one it may come to more than 48 KiB, which a launch has to opt in to, as it does by more
// dynamic memory than that (device.cuh).
size_t launched_bytes(int head_dim) {
  constexpr size_t without = 48 * 1024, beside = (2 * MOST_ITEMS + WARPS) * sizeof(int) + 128;
  const size_t bytes = Shared::bytes(head_dim);
#ifdef BATON_MUTATION_CUDA_OPT_IN
  return bytes;
#else
  return bytes + beside > without && bytes <= without ? without + 16 : bytes;
#endif
}

template <int T, int B>
int launch(const Call& c, const AttentionItem* items, int32_t count, void* stream) {
  const size_t bytes = launched_bytes(c.kv.head_dim);
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
  char* memory = (char*)workspace(WORKSPACE_ATTENTION, workspace_bytes(d), stream);
  if (!memory) return int(cudaErrorInvalidValue);
  // The counters come first: they are zero between launches, whatever head_dim the next one has.
  const Call call{*kv, heads, heads / kv->kv_heads, window, scale * LOG2_E, q, q_stride, out, out_stride,
                  (float*)(memory + SLOTS * 4), (int*)memory, SLOTS};
  switch (kv->type) {
    case KV_BF16: return by_width<KV_BF16>(call, items, count, stream);
    case KV_INT8: return by_width<KV_INT8>(call, items, count, stream);
    default: return by_width<KV_FP8>(call, items, count, stream);
  }
}

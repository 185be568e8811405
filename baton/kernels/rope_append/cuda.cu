// A warp to a head: norm and rotate q in place, k and v straight into the page, quantized there. Knows nothing of sequences
// beyond their block tables. The items are read on the device, so that a captured launch serves any batch of their count.
#include "../cuda/device.cuh"
#include "../cuda/scan.cuh"
#include "../cuda/workspace.cuh"
#include "rotate.cuh"

namespace baton {
namespace {

constexpr int THREADS = 256, WARPS = THREADS / 32, PER_DEVICE = 4;

using namespace rope;

// The items are taken THREADS at a time: ends[i] is the number of rows up to item i's last.
template <int T, int PER>
__global__ void __launch_bounds__(THREADS) append(const Call c) {
  BATON_STATIC_SHARED(int, ends, THREADS);
  BATON_STATIC_SHARED(int, sums, WARPS);
  grid_wait();
  grid_launch_next();
  const int me = int(threadIdx.x), heads = c.heads + 2 * c.kv.kv_heads;
  for (int first = 0; first < c.count; first += THREADS) {
    const int queries = first + me < c.count ? c.items[first + me].queries : 0;
    int rows;
    ends[me] = sum_before<WARPS>(queries, me, sums, rows, [] { __syncthreads(); }) + queries;
#ifndef BATON_MUTATION_CUDA_ROPE_BARRIER
    __syncthreads();
#endif
    const int64_t units = int64_t(ends[THREADS - 1]) * heads, stride = int64_t(gridDim.x) * WARPS;
    for (int64_t unit = int64_t(blockIdx.x) * WARPS + me / 32; unit < units; unit += stride) {
      const int row = int(unit / heads);
      const int item = first_behind(ends, THREADS, row);
      head<T, PER>(c, c.items[first + item], row - (item ? ends[item - 1] : 0), int(unit % heads));
    }
  }
}

template <int T>
int launch(const Call& c, void* stream) {
  const dim3 grid = dim3(unsigned(PER_DEVICE * processors()));
  if (c.kv.head_dim <= 128) return BATON_LAUNCH_PDL((append<T, 2>), grid, dim3(THREADS), 0, stream, c);
  if (c.kv.head_dim <= 512) return BATON_LAUNCH_PDL((append<T, 8>), grid, dim3(THREADS), 0, stream, c);
  return cudaErrorInvalidValue;
}

}  // namespace
}  // namespace baton

BATON_API int baton_rope_append(const baton::PagedKv* kv, const baton::AttentionItem* items, int32_t count, int32_t heads,
                                const float* angles, int64_t angles_stride, const float* q_norm, const float* k_norm,
                                float eps, float* qkv, void* stream) {
  using namespace baton;
  if (!count) return 0;
  const Call c{*kv, items, count, heads, angles, angles_stride, q_norm, k_norm, eps, qkv};
  switch (kv->type) {
    case KV_F32: return launch<KV_F32>(c, stream);
    case KV_BF16: return launch<KV_BF16>(c, stream);
    case KV_INT8: return launch<KV_INT8>(c, stream);
    case KV_FP8: return launch<KV_FP8>(c, stream);
    default: return cudaErrorInvalidValue;
  }
}

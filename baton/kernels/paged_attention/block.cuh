// What a block of attention works on, and where in its shared memory. Included by split.cuh.
#pragma once
#include "../cuda/scan.cuh"
#include "stored.cuh"

namespace baton {
namespace {
namespace attention {

constexpr int SPLIT = 256, WARPS = 4, THREADS = 32 * WARPS, BLOCKS_EACH = 4;
constexpr int MOST_ROWS = 8;
constexpr float LOG2_E = 1.44269504088896341f;
constexpr int SCORES = SPLIT + 8;  // floats from row to row
constexpr int WEIGHTS = SPLIT + 8;

// Who a thread is among the THREADS of its block, and their barrier. A megakernel's block holds several such blocks, teams.
#ifdef BATON_MEGAKERNEL
#define BATON_TEAM_SYNC() named_barrier_sync(1 + int(threadIdx.x) / THREADS, THREADS)
__device__ __forceinline__ unsigned me() { return threadIdx.x % THREADS; }
#else
#define BATON_TEAM_SYNC() __syncthreads()
__device__ __forceinline__ unsigned me() { return threadIdx.x; }
#endif

// The sum of x over the threads before this one; `total` over all of them.
__device__ __forceinline__ int scan(int x, int* scratch, int& total) {
  const int before = sum_before<WARPS>(x, me(), scratch, total, [] { BATON_TEAM_SYNC(); });
  BATON_TEAM_SYNC();
  return before;
}

struct Call {
  PagedKv kv;
  int heads, group, window;
  float scale;  // times log2(e)
  const float* q;
  int64_t q_stride;
  float* out;
  int64_t out_stride;
  float* partial;
  int* arrived;
  int slots;
};

struct Rows {
  AttentionItem item;
  int head, row, rows;  // of the item's queries x group

  __device__ int last(const Call& c) const { return item.start + (row + rows - 1) / c.group; }
};

// Where things lie in a block's memory.
struct Shared {
  float *scores, *key_scales, *value_scales, *whole, *most, *total, *whole_most, *whole_total, *query_power, *weight_power, *result;
  uint16_t *q, *weights;
  int *pages, *flag;
  int q_stride;

  __host__ __device__ static size_t stride(int d) { return size_t((d + 63) / 64 * 64 + 8); }
  __host__ __device__ static size_t bytes(int d) {
    return 16 * SCORES * 4 + 2 * SPLIT * 4 + size_t(MOST_ROWS) * d * 4 + 6 * 16 * 4 + 16 * stride(d) * 2 + 16 * WEIGHTS * 2 +
           (SPLIT / PAGE + 4) * 4;
  }

  __device__ Shared(char* at, int d) {
    auto take = [&](int bytes) {
      char* found = at;
      at += bytes;
      return found;
    };
    q_stride = (d + 63) / 64 * 64 + 8;
    scores = (float*)take(16 * SCORES * 4), result = scores;  // scores are done with when results come
    weights = (uint16_t*)take(16 * WEIGHTS * 2), q = (uint16_t*)take(16 * q_stride * 2);
    whole = (float*)take(MOST_ROWS * d * 4);
    key_scales = (float*)take(SPLIT * 4), value_scales = (float*)take(SPLIT * 4);
    most = (float*)take(64), total = (float*)take(64), whole_most = (float*)take(64), whole_total = (float*)take(64);
    query_power = (float*)take(64), weight_power = (float*)take(64);
    pages = (int*)take(SPLIT / PAGE * 4), flag = (int*)take(16);
  }
};

// Of each of several teams in one block.
__host__ __device__ inline size_t team_bytes(int d) { return (Shared::bytes(d) + 127) / 128 * 128; }

}  // namespace attention
}  // namespace
}  // namespace baton

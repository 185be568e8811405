// Who goes to which expert: the choice by row, and a stable sort of (row, rank) by expert without atomics. Included by cuda.cu alone.
#pragma once
#include "adapted.h"

namespace baton {
namespace {

constexpr int THREADS = 128, WARPS = THREADS / 32;
constexpr int MOST_CHOSEN = 16, MOST_EXPERTS = 512;

// What lies in the workspace, by row and rank (n = rows x chosen), by place in the order of experts, or by expert.
struct Routed {
  uint16_t* x;       // (rows, hidden) bf16
  uint16_t* between; // (n, inner) bf16, by place
  float* y;          // (n, hidden), by place
  float* weights;    // by row and rank
  int *experts, *place, *order, *ends;  // by row and rank; the same; by place; by expert
  // Of rows that may have adapters alone, by place: what they have beside its expert's two layers, their sums (adapters.cuh), and
  // what is added to gates and ups, (n, 2 inner), of places that have anything there.
  LoraSite *beside_gates, *beside_down;
  float *sums, *added;
};

// The larger logit, of equal ones the lower expert; -1 is none, a NaN is below everything.
__device__ __forceinline__ bool better(float x, int expert, float y, int other) {
  if (other < 0 || expert < 0) return expert >= 0;
#ifdef BATON_MUTATION_CUDA_MOE_TIES
  return x > y || (x == y && expert > other);
#else
  return x > y || (x == y && expert < other);
#endif
}

// A warp has a row: its best experts, best first, their weights, and the row as bf16.
__global__ void __launch_bounds__(THREADS) route(Moe m, const float* x, int64_t x_stride, const float* logits, int rows, Routed r) {
  const int row = int(blockIdx.x) * WARPS + int(threadIdx.x) / 32, lane = threadIdx.x % 32;
  grid_wait();
  grid_launch_next();
  if (row >= rows) return;  // the whole warp
  const float* from = logits + int64_t(row) * m.experts;
  unsigned taken = 0;  // bit i: expert lane + 32 i
  bool fine = true;
  float top = 0, mine = 0, total = 0;  // lane k keeps the weight of rank k
  int chosen = -1;
  for (int k = 0; k < m.chosen; k++) {
    float best = 0;
    int expert = -1;
    for (int i = 0; 32 * i + lane < m.experts; i++) {
      const float value = from[32 * i + lane], known = value != value ? -INFINITY : value;
      fine &= value == value;
      if (!(taken >> i & 1) && better(known, 32 * i + lane, best, expert)) best = known, expert = 32 * i + lane;
    }
#pragma unroll
    for (int bits = 16; bits; bits /= 2) {
      const float his = __shfl_xor_sync(ALL_LANES, best, bits);
      const int other = __shfl_xor_sync(ALL_LANES, expert, bits);
      if (better(his, other, best, expert)) best = his, expert = other;
    }
    if (k == 0) top = best;
    if (expert % 32 == lane) taken |= 1u << (expert / 32);
    if (lane == k) chosen = expert, mine = expf(best - top);
    total += expf(best - top);
  }
  if (!m.renormalise) {
    total = 0;
    for (int e = lane; e < m.experts; e += 32) total += expf(from[e] - top);
    total = warp_sum(total);
  }
  fine = __all_sync(ALL_LANES, fine);
  if (lane < m.chosen) r.experts[row * m.chosen + lane] = chosen, r.weights[row * m.chosen + lane] = fine ? mine / total : NAN;
  for (int64_t i = 4 * lane; i < m.hidden; i += 128) {
    const float* at = x + row * x_stride + i;
    *reinterpret_cast<uint2*>(r.x + row * m.hidden + i) = make_uint2(to_bf16x2(at[0], at[1]), to_bf16x2(at[2], at[3]));
  }
}

__device__ __forceinline__ int block_count(int x, int* scratch) {
  x = __reduce_add_sync(ALL_LANES, x);
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  int total = 0;
  for (int i = 0; i < WARPS; i++) total += scratch[i];
  __syncthreads();
  return total;
}

// A block has an expert: how many come before its own, then its own in order of rows.
__global__ void __launch_bounds__(THREADS) sort_by_expert(int n, Routed r) {
  BATON_STATIC_SHARED(int, scratch, WARPS);
  const int expert = blockIdx.x, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  grid_wait();
  grid_launch_next();
  int less = 0;
  for (int i = threadIdx.x; i < n; i += THREADS) less += r.experts[i] < expert;
  int at = block_count(less, scratch);
  for (int base = 0; base < n; base += THREADS) {
    const int i = base + int(threadIdx.x);
    const bool is = i < n && r.experts[i] == expert;
    const unsigned those = __ballot_sync(ALL_LANES, is);
    if (lane == 0) scratch[warp] = __popc(those);
    __syncthreads();
    int before = at + __popc(those & ((1u << lane) - 1));
    for (int w = 0; w < WARPS; w++) before += w < warp ? scratch[w] : 0, at += scratch[w];
    if (is) r.order[before] = i, r.place[i] = before;
#ifndef BATON_MUTATION_CUDA_MOE_SORT_BARRIER
    __syncthreads();
#endif
  }
  if (threadIdx.x == 0) r.ends[expert] = at;
}

// A row's outputs by its ranks, in order: out = sum of weight x y.
__global__ void __launch_bounds__(THREADS) add_up(Moe m, Routed r, unsigned chunks, float* out, int64_t out_stride) {
  const int64_t row = blockIdx.x / chunks, i = (int64_t(blockIdx.x % chunks) * THREADS + threadIdx.x) * 4;
  grid_wait();
  grid_launch_next();
  if (i >= m.hidden) return;
  float4 sum = make_float4(0, 0, 0, 0);
  for (int64_t k = row * m.chosen; k < (row + 1) * m.chosen; k++) {
#ifdef BATON_MUTATION_CUDA_MOE_PLACE
    const float4 y = load4(r.y + int64_t(r.order[k]) * m.hidden + i);
#else
    const float4 y = load4(r.y + int64_t(r.place[k]) * m.hidden + i);
#endif
    const float w = r.weights[k];
    sum.x = fmaf(w, y.x, sum.x), sum.y = fmaf(w, y.y, sum.y), sum.z = fmaf(w, y.z, sum.z), sum.w = fmaf(w, y.w, sum.w);
  }
  float* to = out + row * out_stride + i;
  to[0] = sum.x, to[1] = sum.y, to[2] = sum.z, to[3] = sum.w;
}

}  // namespace
}  // namespace baton

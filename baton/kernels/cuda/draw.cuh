// What a block needs to draw one of many by inverse transform. Knows nothing of logits' edits.
//
// Masses are integers in units of 2^-40 of the likeliest one's, so that sums have one value in any order, and a draw is the
// same whatever the schedule.
#pragma once
#include "device.cuh"

namespace baton {

using u64 = unsigned long long;

__device__ __forceinline__ u64 fixed(float mass) { return u64(double(mass) * double(1ull << 40)); }
__device__ __forceinline__ float mass_of(float logit, float most, float warmth) {
  return logit == -INFINITY ? 0.0f : expf(__fmul_rn(__fsub_rn(logit, most), warmth));
}

template <class Join>
__device__ __forceinline__ u64 warp_join(u64 x, Join join) {
#pragma unroll
  for (int bits = 16; bits; bits /= 2) x = join(x, __shfl_xor_sync(ALL_LANES, x, bits));
  return x;
}
__device__ __forceinline__ u64 warp_total(u64 x) {
  return warp_join(x, [](u64 a, u64 b) { return a + b; });
}

// Over the block, every thread gets it; a barrier stands on both sides. `scratch`: a place per warp.
template <class Join>
__device__ __forceinline__ u64 block_join(u64 x, u64* scratch, Join join) {
  x = warp_join(x, join);
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
  __syncthreads();
  x = scratch[0];
  for (int i = 1; i < int(blockDim.x) / 32; i++) x = join(x, scratch[i]);
  __syncthreads();
  return x;
}
__device__ __forceinline__ u64 block_total(u64 x, u64* scratch) {
  return block_join(x, scratch, [](u64 a, u64 b) { return a + b; });
}
__device__ __forceinline__ u64 block_most(u64 x, u64* scratch) {
  return block_join(x, scratch, [](u64 a, u64 b) { return a > b ? a : b; });
}

// The sum over the threads before this one.
__device__ __forceinline__ u64 block_before(u64 x, u64* scratch) {
  const int lane = threadIdx.x % 32;
  u64 sum = x;
  for (int by = 1; by < 32; by *= 2) {
    const u64 other = __shfl_up_sync(ALL_LANES, sum, by);
    if (lane >= by) sum += other;
  }
  if (lane == 31) scratch[threadIdx.x / 32] = sum;
  __syncthreads();
  u64 before = sum - x;
  for (int i = 0; i < int(threadIdx.x) / 32; i++) before += scratch[i];
#ifndef BATON_MUTATION_CUDA_DRAW_BARRIER
  __syncthreads();
#endif
  return before;
}

// uniform x total, always below total.
__device__ __forceinline__ u64 share(double uniform, u64 total) {
  const u64 at = u64(uniform * double(total));
  return at < total ? at : total - 1;
}

// The first of `count` whose cumulative mass passes uniform x total, and where the target lies from its own beginning on;
// by the whole block, `found` in shared memory. Where nothing weighs anything, 0.
struct Drawn {
  int place;
  u64 rest;
};
template <class Mass>
__device__ __forceinline__ Drawn draw(int64_t count, double uniform, u64* scratch, Drawn* found, Mass mass) {
  const int64_t each = (count + blockDim.x - 1) / blockDim.x, begin = threadIdx.x * each;
  const int64_t end = begin + each < count ? begin + each : count;
  if (threadIdx.x == 0) *found = {0, 0};
  u64 mine = 0;
  for (int64_t i = begin; i < end; i++) mine += mass(i);
  const u64 before = block_before(mine, scratch), total = block_total(mine, scratch), target = share(uniform, total);
  if (target >= before && target < before + mine) {
    u64 reached = before;
    int64_t i = begin;
    for (u64 next = mass(i); reached + next <= target; next = mass(++i)) reached += next;
    *found = {int(i), target - reached};
  }
  __syncthreads();
  return *found;
}

// Order of floats as order of integers; among equals, the lower token.
__device__ __forceinline__ u64 rank(float value, int token) {
  const uint32_t bits = __float_as_uint(value + 0.0f), order = bits >> 31 ? ~bits : bits | 0x80000000u;
  return u64(order) << 32 | (0xffffffffu - uint32_t(token));
}
__device__ __forceinline__ float value_of(u64 rank) {
  const uint32_t order = uint32_t(rank >> 32);
  return __uint_as_float(order >> 31 ? order & 0x7fffffffu : ~order);
}
__device__ __forceinline__ int token_of(u64 rank) { return int(0xffffffffu - uint32_t(rank)); }

}  // namespace baton

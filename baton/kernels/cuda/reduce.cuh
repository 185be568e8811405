// Reductions over a warp and over a block, in one order whatever the schedule. Knows nothing of what is reduced.
#pragma once

namespace baton {

constexpr unsigned ALL_LANES = 0xffffffffu;

// Over `width` neighbouring lanes (a power of two); every lane gets the result.
template <int width = 32>
__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int bits = width / 2; bits; bits /= 2) x += __shfl_xor_sync(ALL_LANES, x, bits);
  return x;
}

template <int width = 32>
__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int bits = width / 2; bits; bits /= 2) x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, bits));
  return x;
}

// Over the block of `threads` (a multiple of 32, at most 1024); every thread gets the result. `scratch` holds 32 floats
// and may be used again at once: a barrier stands on both sides.
template <class Warp>
__device__ __forceinline__ float block_reduce(float x, float* scratch, float empty, Warp warp) {
  const int threads = int(blockDim.x), me = int(threadIdx.x);
  x = warp(x);
  if (threads == 32) return x;
  if (me % 32 == 0) scratch[me / 32] = x;
#ifndef BATON_MUTATION_CUDA_REDUCE_BARRIER
  __syncthreads();
#endif
  x = warp(me % 32 < threads / 32 ? scratch[me % 32] : empty);
#ifndef BATON_MUTATION_CUDA_REDUCE_REUSE
  __syncthreads();
#endif
  return x;
}

struct WarpSum {
  __device__ __forceinline__ float operator()(float x) const { return warp_sum(x); }
};
struct WarpMax {
  __device__ __forceinline__ float operator()(float x) const { return warp_max(x); }
};

__device__ __forceinline__ float block_sum(float x, float* scratch) { return block_reduce(x, scratch, 0.0f, WarpSum()); }
__device__ __forceinline__ float block_max(float x, float* scratch) {
  return block_reduce(x, scratch, -INFINITY, WarpMax());
}

}  // namespace baton

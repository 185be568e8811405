// A row of numbers to what tensor cores multiply, by a block of ROUNDERS threads. Knows nothing of layers.
#pragma once
#include "form.cuh"

namespace baton {
namespace {

constexpr int ROUNDERS = 256;
constexpr float FLOOR = 1e-30f;  // as quantize_rows.h
enum Rounding { TO_BF16, TO_BF16_FOR_INT4, TO_INT8, TO_E4M3 };

template <class X>
__device__ __forceinline__ void load_eight(const X* x, int i, int k, bool aligned, float v[8]) {
  if (aligned && i + 8 <= k) {
    const float4 a = load4(x + i), b = load4(x + i + 4);
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
    return;
  }
#pragma unroll
  for (int j = 0; j < 8; j++) {
    if constexpr (sizeof(X) == 2)
      v[j] = i + j < k ? from_bf16(x[i + j]) : 0;
    else
      v[j] = i + j < k ? x[i + j] : 0;
  }
}

// The bits of the block's largest: a NaN beats infinity beats all numbers.
__device__ __forceinline__ uint32_t block_largest(uint32_t x, uint32_t* scratch) {
  x = __reduce_max_sync(ALL_LANES, x);
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = x;
#ifndef BATON_MUTATION_CUDA_LINEAR_ABSMAX
  __syncthreads();
#endif
  return __reduce_max_sync(ALL_LANES, scratch[threadIdx.x % (ROUNDERS / 32)]);
}

// `width` numbers of a row of k, rounded, zeros behind its end; to integers and fp8 by the row's largest magnitude. place(at, i): where
// eight of them go, and i which of the row they are (`at` unless it says otherwise). `scratch`: a word per warp.
template <int R, class X, class Place>
__device__ __forceinline__ void round_row(const X* from, int k, int width, bool aligned, float* scale, uint32_t* scratch, Place place) {
  constexpr bool narrow = R == TO_INT8 || R == TO_E4M3;
  float inverse = 1, v[8];
  if constexpr (narrow) {
    uint32_t most = 0;
    for (int i = int(threadIdx.x) * 8; i < k; i += ROUNDERS * 8) {
      load_eight(from, i, k, aligned, v);
#pragma unroll
      for (int j = 0; j < 8; j++) most = max(most, __float_as_uint(v[j]) & 0x7fffffffu);
    }
    constexpr float top = R == TO_INT8 ? 127.0f : 448.0f;
    const float largest = __uint_as_float(block_largest(most, scratch));
    const bool dead = !(largest >= FLOOR);  // zero, or NaN
    inverse = dead ? 0.0f : __fdiv_rn(top, largest);
    if (threadIdx.x == 0) *scale = largest != largest ? largest : dead ? 0.0f : __fdiv_rn(largest, top);
  }
  for (int at = int(threadIdx.x) * 8; at < width; at += ROUNDERS * 8) {
    int i = at;
    char* to = place(at, i);
    load_eight(from, i, k, aligned, v);
    if constexpr (narrow) {
#pragma unroll
      for (int j = 0; j < 8; j++) v[j] = fminf(fmaxf(v[j] * inverse, -448.0f), R == TO_INT8 ? 127.0f : 448.0f);
      const uint2 eight = R == TO_INT8 ? make_uint2(to_int8x4(v[0], v[1], v[2], v[3]), to_int8x4(v[4], v[5], v[6], v[7]))
                                       : make_uint2(to_e4m3x4(v[0], v[1], v[2], v[3]), to_e4m3x4(v[4], v[5], v[6], v[7]));
      *reinterpret_cast<uint2*>(to) = eight;
    } else if constexpr (R == TO_BF16) {
      *reinterpret_cast<uint4*>(to) =
          make_uint4(to_bf16x2(v[0], v[1]), to_bf16x2(v[2], v[3]), to_bf16x2(v[4], v[5]), to_bf16x2(v[6], v[7]));
    } else {
      *reinterpret_cast<uint4*>(to) =
          make_uint4(to_bf16x2(v[0], v[2]), to_bf16x2(v[1], v[3]), to_bf16x2(v[4], v[6]), to_bf16x2(v[5], v[7]));
    }
  }
}

}  // namespace
}  // namespace baton

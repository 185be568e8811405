// A head by a warp: normed, rotated, and if it is k or v, into its page, quantized there. Knows nothing of who takes which head.
#pragma once
#include "../paged_attention/attention.h"

namespace baton {
namespace {
namespace rope {

struct Call {
  PagedKv kv;
  const AttentionItem* items;
  int32_t count, heads;
  const float* angles;
  int64_t angles_stride;
  const float *q_norm, *k_norm;
  float eps;
  float* qkv;
};

template <int T>
constexpr int element_bytes() {
  return T == KV_F32 ? 4 : T == KV_BF16 ? 2 : 1;
}

// A head's pairs (i, i + half): lane l has pairs 2 l and 2 l + 1 of each 64, so that neighbours load and store together.
template <int PER>
struct Head {
  float low[PER], high[PER];

  static __device__ __forceinline__ int pair(int p) { return p / 2 * 64 + 2 * (int(threadIdx.x) % 32) + p % 2; }

  // Neighbours are read and written together where `half` is even: then both are there or neither, at aligned places.
  __device__ __forceinline__ void read(const float* x, int half) {
#pragma unroll
    for (int p = 0; p < PER; p += 2) {
      const int i = pair(p);
      const bool whole = half % 2 == 0 && i < half;
      const float2 a = whole ? *reinterpret_cast<const float2*>(x + i) : make_float2(i < half ? x[i] : 0, i + 1 < half ? x[i + 1] : 0);
      const float2 b = whole ? *reinterpret_cast<const float2*>(x + half + i)
                             : make_float2(i < half ? x[half + i] : 0, i + 1 < half ? x[half + i + 1] : 0);
      low[p] = a.x, low[p + 1] = a.y, high[p] = b.x, high[p + 1] = b.y;
    }
  }

  __device__ __forceinline__ void write(float* x, int half) const {
#pragma unroll
    for (int p = 0; p < PER; p += 2) {
      const int i = pair(p);
      if (half % 2 == 0 && i < half) {
        *reinterpret_cast<float2*>(x + i) = make_float2(low[p], low[p + 1]);
        *reinterpret_cast<float2*>(x + half + i) = make_float2(high[p], high[p + 1]);
        continue;
      }
      if (i < half) x[i] = low[p], x[half + i] = high[p];
      if (i + 1 < half) x[i + 1] = low[p + 1], x[half + i + 1] = high[p + 1];
    }
  }

  __device__ __forceinline__ void norm(const float* weight, float eps, int half) {
    float squares = 0;
#pragma unroll
    for (int p = 0; p < PER; p++) squares += __fmaf_rn(low[p], low[p], high[p] * high[p]);
    const float scale = 1.0f / __fsqrt_rn(warp_sum(squares) / float(2 * half) + eps);
#pragma unroll
    for (int p = 0; p < PER; p++)
      if (pair(p) < half) low[p] = low[p] * scale * weight[pair(p)], high[p] = high[p] * scale * weight[half + pair(p)];
  }

  // The roundings of x cos - y sin as the reference has them: no fused multiply-add.
  __device__ __forceinline__ void rotate(const float* angles, int half) {
#pragma unroll
    for (int p = 0; p < PER; p++) {
      if (pair(p) >= half) continue;
      const float a = low[p], b = high[p], c = angles[pair(p)], s = angles[half + pair(p)];
#if defined(BATON_MUTATION_ROPE)
      low[p] = __fadd_rn(__fmul_rn(a, c), __fmul_rn(b, s));
#else
      low[p] = __fsub_rn(__fmul_rn(a, c), __fmul_rn(b, s));
#endif
      high[p] = __fadd_rn(__fmul_rn(b, c), __fmul_rn(a, s));
    }
  }

  // A row with a NaN or infinity keeps it in its scale.
  template <int T>
  __device__ __forceinline__ void store(char* row, float* scale_at, int half) const {
    float scale = 1, inverse = 1;
    bool fine = true;
    if constexpr (T == KV_INT8 || T == KV_FP8) {
      constexpr float top = T == KV_INT8 ? 127.0f : 448.0f;
      float most = 0;
#pragma unroll
      for (int p = 0; p < PER; p++) {
        most = fmaxf(most, fmaxf(fabsf(low[p]), fabsf(high[p])));
        fine &= fabsf(low[p]) <= 3.4e38f && fabsf(high[p]) <= 3.4e38f;
      }
      most = warp_max(fine ? most : INFINITY);
      fine = most <= 3.4e38f;
      scale = fine ? most / top : NAN;
      inverse = fine && most > 0 ? top / most : 0;
      if (threadIdx.x % 32 == 0) *scale_at = scale;
    }
#pragma unroll
    for (int p = 0; p < PER; p += 2) {
      const int i = pair(p);
      const float a = fine ? low[p] * inverse : 0, b = fine ? low[p + 1] * inverse : 0;
      const float c = fine ? high[p] * inverse : 0, d = fine ? high[p + 1] * inverse : 0;
      if (half % 2 == 0 && i < half) {
        put_two<T>(row, i, a, b);
        put_two<T>(row, half + i, c, d);
        continue;
      }
      if (i < half) put<T>(row, i, a), put<T>(row, half + i, c);
      if (i + 1 < half) put<T>(row, i + 1, b), put<T>(row, half + i + 1, d);
    }
  }

  static __device__ __forceinline__ int8_t int8(float x) { return int8_t(__float2int_rn(fminf(fmaxf(x, -127.0f), 127.0f))); }

  template <int T>
  static __device__ __forceinline__ void put(char* row, int i, float x) {
    if constexpr (T == KV_F32) reinterpret_cast<float*>(row)[i] = x;
    if constexpr (T == KV_BF16) reinterpret_cast<bf16*>(row)[i] = to_bf16(x);
    if constexpr (T == KV_INT8) row[i] = char(int8(x));
    if constexpr (T == KV_FP8) row[i] = char(to_e4m3x2(x, 0.0f) & 0xff);
  }

  template <int T>
  static __device__ __forceinline__ void put_two(char* row, int i, float x, float y) {
    if constexpr (T == KV_F32) *reinterpret_cast<float2*>(row + 4 * i) = make_float2(x, y);
    if constexpr (T == KV_BF16) *reinterpret_cast<uint32_t*>(row + 2 * i) = to_bf16x2(x, y);
    if constexpr (T == KV_INT8) *reinterpret_cast<uint16_t*>(row + i) = uint16_t(uint8_t(int8(x)) | uint8_t(int8(y)) << 8);
    if constexpr (T == KV_FP8) *reinterpret_cast<uint16_t*>(row + i) = to_e4m3x2(x, y);
  }
};

template <int T, int PER>
__device__ __forceinline__ void head(const Call& c, const AttentionItem& item, int query, int which) {
  const int d = c.kv.head_dim, half = d / 2, kv_heads = c.kv.kv_heads, position = item.start + query;
  const int64_t width = int64_t(c.heads + 2 * kv_heads) * d;
  float* x = c.qkv + (item.first + query) * width + int64_t(which) * d;
  Head<PER> mine;
  mine.read(x, half);
  if (which < c.heads + kv_heads) {
    const float* weight = which < c.heads ? c.q_norm : c.k_norm;
    if (weight) mine.norm(weight, c.eps, half);
    mine.rotate(c.angles + position * c.angles_stride, half);
    mine.write(x, half);
    if (which < c.heads) return;
  }
#if defined(BATON_MUTATION_PAGE)
  const int block = (position + 1) / PAGE < (item.start + item.queries - 1) / PAGE ? (position + 1) / PAGE : position / PAGE;
#else
  const int block = position / PAGE;
#endif
  const int at = which - c.heads, plane = at / kv_heads, token = position % PAGE * kv_heads + at % kv_heads;
  const int64_t elements = int64_t(PAGE) * kv_heads * d * element_bytes<T>();
  const int64_t plane_bytes = elements + (T == KV_INT8 || T == KV_FP8 ? int64_t(PAGE) * kv_heads * 4 : 0);
  char* base = c.kv.pages + int64_t(item.pages[block]) * c.kv.page_bytes + c.kv.layer_offset + plane * plane_bytes;
#if defined(BATON_MUTATION_CUDA_ROPE_SCALE)
  const int scale_at = position % PAGE;
#else
  const int scale_at = token;
#endif
  mine.template store<T>(base + int64_t(token) * d * element_bytes<T>(), reinterpret_cast<float*>(base + elements) + scale_at, half);
}

}  // namespace rope
}  // namespace
}  // namespace baton

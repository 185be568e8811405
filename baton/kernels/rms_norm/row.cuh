// A row's norm, in the one order of sums that all kernels have: the row's length alone decides it. Knows nothing of layers.
#pragma once

namespace baton {
namespace {
namespace norm_row {

constexpr int MOST_THREADS = 1024, QUAD = 4;

// Thread t sums quads t, t + threads, …, `per` of them, the warps by shuffles, then the warps' sums by a warp.
struct Order {
  int per, threads;  // per 0: a row too long for any

  __host__ __device__ explicit Order(int hidden) {
    const int quads = (hidden + QUAD - 1) / QUAD;
    per = quads <= 256 ? 1 : quads <= 2 * MOST_THREADS ? 2 : quads <= 4 * MOST_THREADS ? 4 : 0;
    threads = per ? (quads + 32 * per - 1) / (32 * per) * 32 : 0;
  }
};

__device__ __forceinline__ float4 read(const float* p, int i, int n, bool quads) {
  if (quads) return i < n ? load4(p + i) : make_float4(0, 0, 0, 0);
  return make_float4(i < n ? p[i] : 0, i + 1 < n ? p[i + 1] : 0, i + 2 < n ? p[i + 2] : 0, i + 3 < n ? p[i + 3] : 0);
}

__device__ __forceinline__ void write(float* p, int i, int n, bool quads, float4 v) {
  if (i >= n) return;
  if (quads) return store4(p + i, v);
  p[i] = v.x;
  if (i + 1 < n) p[i + 1] = v.y;
  if (i + 2 < n) p[i + 2] = v.z;
  if (i + 3 < n) p[i + 3] = v.w;
}

__device__ __forceinline__ float4 sum_of(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }
__device__ __forceinline__ float squares_of(float4 v) {
  return __fmaf_rn(v.x, v.x, v.y * v.y) + __fmaf_rn(v.z, v.z, v.w * v.w);
}
__device__ __forceinline__ float scale_of(float squares, int hidden, float eps) {
  const float mean = squares / float(hidden);
#if defined(BATON_MUTATION_NORM)
  return 1.0f / __fsqrt_rn(mean);
#else
  return 1.0f / __fsqrt_rn(mean + eps);
#endif
}
__device__ __forceinline__ float4 normed(float4 v, float scale, float4 weight) {
  return make_float4(v.x * scale * weight.x, v.y * scale * weight.y, v.z * scale * weight.z, v.w * scale * weight.w);
}

}  // namespace norm_row
}  // namespace
}  // namespace baton

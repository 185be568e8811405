// Pages of float KV into 8 bits for the wire and back, all layers in one launch: a warp to a row (one head of one token of one
// plane of one layer). Knows nothing of frames. The wire of a page, as kv/bridge.py has it: a float32 scale per row, then
// the rows' bytes. A row's scale is its largest magnitude over 127 or 448, 1 where that is zero.
#pragma once
#include "../abi/paged.h"

namespace baton {
namespace {

constexpr int CODEC_THREADS = 256, CODEC_WARPS = CODEC_THREADS / 32, CODEC_QUADS = 4;  // rows of up to 512

struct Coding {
  const uint64_t *dst, *src;
  int64_t count, rows;
  int head_dim;
};

__device__ __forceinline__ float largest(float4 v) {
  return fmaxf(fmaxf(fabsf(v.x), fabsf(v.y)), fmaxf(fabsf(v.z), fabsf(v.w)));
}

__device__ __forceinline__ int8_t whole(float x) { return int8_t(__float2int_rn(fminf(fmaxf(x, -127.0f), 127.0f))); }

template <int C>
__device__ __forceinline__ uint32_t coded(float4 v) {
  if constexpr (C == KV_FP8) return to_e4m3x4(v.x, v.y, v.z, v.w);
  return uint32_t(uint8_t(whole(v.x))) | uint32_t(uint8_t(whole(v.y))) << 8 | uint32_t(uint8_t(whole(v.z))) << 16 |
         uint32_t(uint8_t(whole(v.w))) << 24;
}

template <int C>
__device__ __forceinline__ float4 decoded(uint32_t word) {
  if constexpr (C == KV_INT8) return make_float4(int8_at(word, 0), int8_at(word, 1), int8_at(word, 2), int8_at(word, 3));
  const float2 low = from_e4m3x2(uint16_t(word)), high = from_e4m3x2(uint16_t(word >> 16));
  return make_float4(low.x, low.y, high.x, high.y);
}

// T: what the page holds; Back: from the wire to the page.
template <class T, int C, bool Back>
__global__ void __launch_bounds__(CODEC_THREADS) code(const Coding job) {
  grid_wait();
  grid_launch_next();
  const int lane = int(threadIdx.x) % 32, d = job.head_dim;
  const int64_t stride = int64_t(gridDim.x) * CODEC_WARPS;
  for (int64_t unit = int64_t(blockIdx.x) * CODEC_WARPS + threadIdx.x / 32; unit < job.count * job.rows; unit += stride) {
    const int64_t block = unit / job.rows, row = unit % job.rows;
    auto* page = reinterpret_cast<T*>(Back ? job.dst[block] : job.src[block]) + row * d;
    auto* wire = reinterpret_cast<char*>(Back ? job.src[block] : job.dst[block]);
    auto* scale_at = reinterpret_cast<float*>(wire) + row;
    auto* bytes = reinterpret_cast<uint32_t*>(wire + job.rows * 4 + row * d);
    float4 v[CODEC_QUADS];
    float scale = Back ? *scale_at : 0.0f;
#pragma unroll
    for (int k = 0; k < CODEC_QUADS; k++) {
      const int quad = lane + 32 * k;
      if (4 * quad >= d) continue;
      v[k] = Back ? decoded<C>(bytes[quad]) : load4(page + 4 * quad);
      if (!Back) scale = fmaxf(scale, largest(v[k]));
    }
    if (!Back) {
#ifdef BATON_MUTATION_CUDA_CODEC_LANE
      scale = __fdiv_rn(scale, C == KV_INT8 ? 127.0f : 448.0f);
#else
      scale = __fdiv_rn(warp_max(scale), C == KV_INT8 ? 127.0f : 448.0f);
#endif
      scale = scale == 0 ? 1.0f : scale;
      if (lane == 0) *scale_at = scale;
    }
#pragma unroll
    for (int k = 0; k < CODEC_QUADS; k++) {
      const int quad = lane + 32 * k;
      if (4 * quad >= d) continue;
      if (Back)
        store4(page + 4 * quad, make_float4(v[k].x * scale, v[k].y * scale, v[k].z * scale, v[k].w * scale));
      else
        bytes[quad] = coded<C>(make_float4(__fdiv_rn(v[k].x, scale), __fdiv_rn(v[k].y, scale), __fdiv_rn(v[k].z, scale),
                                           __fdiv_rn(v[k].w, scale)));
    }
  }
}

template <bool Back>
int launch_codec(const Coding& job, int32_t type, int32_t codec, void* stream) {
  if (!job.count || !job.rows) return 0;
  if (job.head_dim % 4 || job.head_dim > 128 * CODEC_QUADS) return cudaErrorInvalidValue;
  const int64_t blocks = (job.count * job.rows + CODEC_WARPS - 1) / CODEC_WARPS, most = 8 * processors();
  const dim3 grid = dim3(unsigned(blocks < most ? blocks : most));
  if (type == KV_F32 && codec == KV_INT8) return BATON_LAUNCH_PDL((code<float, KV_INT8, Back>), grid, dim3(CODEC_THREADS), 0, stream, job);
  if (type == KV_F32 && codec == KV_FP8) return BATON_LAUNCH_PDL((code<float, KV_FP8, Back>), grid, dim3(CODEC_THREADS), 0, stream, job);
  if (type == KV_BF16 && codec == KV_INT8) return BATON_LAUNCH_PDL((code<bf16, KV_INT8, Back>), grid, dim3(CODEC_THREADS), 0, stream, job);
  if (type == KV_BF16 && codec == KV_FP8) return BATON_LAUNCH_PDL((code<bf16, KV_FP8, Back>), grid, dim3(CODEC_THREADS), 0, stream, job);
  return cudaErrorInvalidValue;
}

}  // namespace
}  // namespace baton

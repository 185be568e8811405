// Multi-head latent attention over paged latents, with absorbed projections (https://arxiv.org/abs/2405.04434, 2.1).
// Knows nothing of models.
//
//   a token's latent in a page: [rank normed numbers][rotary rotated numbers], float32, bf16 or fp16
//   per row and head:  absorbed = key part of `expand`, transposed, times q  ->  softmax over tokens  ->  value part of `expand`
//
// A row's bits are its own: its sums have one order, whatever is beside it.
#pragma once
#include "../abi/paged.h"
#include "../abi/kv.h"

namespace baton {

constexpr int32_t EXPAND_F16 = 2;  // beside common.h's Dtype

struct LatentAttention {
  const float* norm;    // (rank)
  const void* expand;   // (heads x (plain + value), rank)
  int64_t place;        // bytes from a page's begin to the layer's latents
  int32_t expand_dtype; // common.h: Dtype, or EXPAND_F16
  int32_t kv_type;      // KV_F32, KV_BF16 or KV_F16
  int32_t heads, plain, rotary, value, rank, paired;
  float eps, scale;
};

struct LatentRows {  // with strides in elements
  const float *q, *latent;
  int64_t q_stride, latent_stride;
  float* out;
  int64_t out_stride;
};

}  // namespace baton

// angles: of each position `rotary` / 2 cosines, then as many sines; `angles_stride` floats apart.
BATON_API void baton_latent_attention(const baton::LatentAttention* op, const baton::AttentionItem* items, int32_t count, char* pages,
                                      int64_t page_bytes, const float* angles, int64_t angles_stride, const baton::LatentRows* rows);

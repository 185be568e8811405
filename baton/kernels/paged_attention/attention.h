// Grouped-query attention over paged K and V, decodes and prompts' chunks mixed. Knows nothing of models.
#pragma once
#include "../abi/paged.h"
#ifndef BATON_DEVICE  // a cuda.cu exports the same symbols, with a stream
#include "../abi/kv.h"

// q and out: rows of heads x head_dim floats with strides in elements. A row sees keys up to its own position, the
// last `window` of them (0: all).
BATON_API void baton_paged_attention(const baton::PagedKv* kv, const baton::AttentionItem* items, int32_t count,
                   int32_t heads, int32_t window, float scale, const float* q, int64_t q_stride,
                   float* out, int64_t out_stride);
#endif

// Grouped-query attention over paged K and V, decodes and prompts' chunks mixed. Knows nothing of models.
#pragma once
#include "../abi/kv.h"

namespace baton {

// Query rows first … first + queries - 1, at positions start, start + 1, …; pages[i] holds keys 16 i … 16 i + 15.
struct AttentionItem {
  int64_t first;
  const int32_t* pages;
  int32_t queries, start;
};

}  // namespace baton

// q and out: rows of heads x head_dim floats with strides in elements. A row sees keys up to its own position, the
// last `window` of them (0: all).
BATON_API void baton_paged_attention(const baton::PagedKv* kv, const baton::AttentionItem* items, int32_t count,
                   int32_t heads, int32_t window, float scale, const float* q, int64_t q_stride,
                   float* out, int64_t out_stride);

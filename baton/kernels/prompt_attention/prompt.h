// Attention of a prompt's long chunks over paged K and V, on a GPU. Knows nothing of models.
#pragma once
#include "../abi/paged.h"

namespace baton {

constexpr int PROMPT_QUERIES = 64;  // of an item at least: fewer are paged attention's

inline bool has_prompt_form(int32_t kv_type, int32_t head_dim) {
  return kv_type != KV_F32 && head_dim % 16 == 0 && head_dim >= 16 && head_dim <= 128;
}

}  // namespace baton

// As baton_paged_attention, of the items with PROMPT_QUERIES or more; others' rows stay as they are. q and weights are rounded to
// 16 bits. A row's bits are the same in any such item that has it.
BATON_API int baton_prompt_attention(const baton::PagedKv* kv, const baton::AttentionItem* items, int32_t count, int32_t heads,
                                     int32_t window, float scale, const float* q, int64_t q_stride, float* out, int64_t out_stride,
                                     void* stream);

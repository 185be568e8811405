// Rotates and appends some of a page's KV heads, on a CPU alone. Knows nothing of ranks.
#pragma once
#include "../abi/heads.h"
#include "form.h"

namespace baton {

// As baton_rope_append_part, with rows of `heads` query heads and of k and v of `own` alone; kv.kv_heads counts the page's.
void append_heads(const PagedKv& kv, Heads own, const AttentionItem* items, int32_t count, int32_t heads, const float* angles,
                  int64_t angles_stride, int32_t rotated, const float* q_norm, const float* k_norm, float eps, float* qkv);

}  // namespace baton

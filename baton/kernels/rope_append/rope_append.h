// Norm and rotate q and k, store k and v in their pages. Knows nothing of sequences beyond their block tables.
#pragma once
#include "../paged_attention/attention.h"

// qkv (rows, (heads + 2 kv_heads) x head_dim), q rotated in place; angles: cos (head_dim / 2) then sin of each
// position, `angles_stride` floats per position. The items' rows go to their own positions in their own pages.
BATON_API void baton_rope_append(const baton::PagedKv* kv, const baton::AttentionItem* items, int32_t count,
                                 int32_t heads, const float* angles, int64_t angles_stride, const float* q_norm,
                                 const float* k_norm, float eps, float* qkv);

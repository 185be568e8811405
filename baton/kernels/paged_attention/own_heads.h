// Attention of some of a page's KV heads, on a CPU alone. Knows nothing of ranks.
#pragma once
#include "../abi/heads.h"
#include "form.h"

namespace baton {

// As baton_paged_attention_form, with the queries of `own` KV heads alone: `heads` counts those query heads, and q, out and the
// form's sinks begin with the first of them. kv.kv_heads counts the page's. The bits of a head are those that it has among all heads.
void attend(const PagedKv& kv, Heads own, const AttentionItem* items, int32_t count, int32_t heads, int32_t window, float scale,
            const AttentionForm& form, const float* q, int64_t q_stride, float* out, int64_t out_stride);

}  // namespace baton

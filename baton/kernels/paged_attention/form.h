// Attention whose scores are capped, or whose rows see a sink beside their keys. On a CPU alone.
#pragma once
#include "attention.h"

namespace baton {

struct AttentionForm {
  float softcap;       // a score s becomes softcap x tanh(s / softcap); 0: as it is
  const float* sinks;  // of each head, a score beside those of its keys, with no value; or null
};

}  // namespace baton

BATON_API void baton_paged_attention_form(const baton::PagedKv* kv, const baton::AttentionItem* items, int32_t count,
                   int32_t heads, int32_t window, float scale, const baton::AttentionForm* form, const float* q,
                   int64_t q_stride, float* out, int64_t out_stride);

// Attention of sequences that begin with the same pages: those are read once for all their queries. Knows nothing of models.
#pragma once
#include "../paged_attention/attention.h"

namespace baton {

// Items first … first + count - 1: their block tables begin with the same keys / 16 pages, each has start + 1 >= keys, and their
// rows of q lie one behind the other. `keys` is a multiple of 16. Items of no group have nothing to share.
struct PrefixGroup {
  int32_t first, count, keys;
};

}  // namespace baton

#ifndef BATON_DEVICE  // a cuda.cu exports the same symbol, with a stream
// As baton_paged_attention without a window; `rows` is how many rows q and out have.
BATON_API void baton_cascade_attention(const baton::PagedKv* kv, const baton::AttentionItem* items, int32_t count,
                                       const baton::PrefixGroup* groups, int32_t group_count, int32_t heads, float scale,
                                       const float* q, int64_t q_stride, int64_t rows, float* out, int64_t out_stride);
#endif

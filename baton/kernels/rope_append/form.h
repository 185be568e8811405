// rope_append with the first dims of a head rotated and the others left as they are. On a CPU alone.
#pragma once
#include "rope_append.h"

// As baton_rope_append; `rotated` of a head's dims (0: none) rotate, i with i + rotated / 2. A position's angles are
// rotated / 2 cosines, then as many sines.
BATON_API void baton_rope_append_part(const baton::PagedKv* kv, const baton::AttentionItem* items, int32_t count,
                                      int32_t heads, const float* angles, int64_t angles_stride, int32_t rotated,
                                      const float* q_norm, const float* k_norm, float eps, float* qkv);

// Rotates heads without storing them, on a CPU alone. Knows nothing of layers.
#pragma once
#include "../abi/common.h"
#include "../abi/paged.h"

// x, rows of `total` floats that begin with `heads` heads of `width`, of which `rotated` floats rotate as in form.h, in place.
BATON_API void baton_rotate_heads(const baton::AttentionItem* items, int32_t count, int64_t heads, int64_t width, int64_t total,
                                  const float* angles, int64_t angles_stride, int32_t rotated, float* x);

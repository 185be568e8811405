// The head whose logits are capped before anything else is done with them. On a CPU alone.
#pragma once
#include "lm_head.h"

// As baton_lm_head; a logit l becomes softcap x tanh(l / softcap).
BATON_API void baton_lm_head_capped(const baton::PackedLinear* w, const float* x, int64_t x_stride, int32_t rows,
                                    float softcap, baton::Choice* choices);

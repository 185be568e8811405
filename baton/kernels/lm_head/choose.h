// The choice of tokens from logits that are there, on a CPU alone. Knows nothing of who computed them.
#pragma once
#include "capped.h"

namespace baton {

// logits (rows, vocab) float, contiguous: what baton_lm_head chooses where its product comes to them.
void choose_tokens(const float* logits, int64_t vocab, int32_t rows, Choice* choices);

}  // namespace baton

// An adapter's pair of matrices over rows that lie anywhere. On a CPU alone.
#pragma once
#include "lora.h"

namespace baton {

// Adds B · (A · x[i]), scaled, to out[i] from output `part.first` on, for `count` rows. No embedding's part.
void lora_rows(const LoraPart& part, const float* const* x, int64_t count, float* const* out);

}  // namespace baton

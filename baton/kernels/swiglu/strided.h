// The gated activation into rows of a wider register, on a CPU alone. Knows nothing of layers.
#pragma once
#include "swiglu.h"

namespace baton {

// As baton_swiglu, with the rows of `out` `stride` elements apart.
void swiglu_into(const float* gate_up, int64_t rows, int64_t inner, float* out, int64_t stride);

}  // namespace baton

// silu(gate) x up, float rows. Knows nothing of weights.
#pragma once
#include "../abi/common.h"

// gate_up (rows, 2 x inner), gate first -> out (rows, inner).
BATON_API void baton_swiglu(const float* gate_up, int64_t rows, int64_t inner, float* out);

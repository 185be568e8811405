// gelu(gate) x up, float rows. Knows nothing of weights. On a CPU alone.
#pragma once
#include "../abi/common.h"

// gate_up (rows, 2 x inner), gate first -> out (rows, inner); gelu by its tanh approximation.
BATON_API void baton_geglu(const float* gate_up, int64_t rows, int64_t inner, float* out);

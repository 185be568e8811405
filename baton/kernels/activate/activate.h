// Activations of MLPs without a gate. Knows nothing of layers. On a CPU alone.
#pragma once
#include "../abi/common.h"

// x (rows, n), out: its activation, rows `stride` floats apart. `kind` is one of cpu.cpp's Activation; out may be x.
BATON_API void baton_activate(int32_t kind, const float* x, int64_t rows, int64_t n, float* out, int64_t stride);

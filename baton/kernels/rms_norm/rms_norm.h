// Residual add and root-mean-square norm, float rows. Knows nothing of layers.
#pragma once
#include "../abi/common.h"

// x (rows, hidden) += delta unless it is null; out = x / sqrt(mean(x²) + eps) x weight. out may be null: only the sum.
BATON_API void baton_rms_norm(float* x, const float* delta, const float* weight, float eps, int64_t rows,
                              int64_t hidden, float* out);

// Norms by mean and variance, and the mean alone taken off, of float rows. Knows nothing of layers. On a CPU alone.
#pragma once
#include "../abi/common.h"

// x (rows, n) += delta unless it is null; out = (x - mean) / sqrt(variance + eps) x weight + bias. bias may be null, out may be x.
BATON_API void baton_layer_norm(float* x, const float* delta, const float* weight, const float* bias, float eps, int64_t rows, int64_t n,
                                float* out);
// out = x - its row's mean, (rows, n); out may be x.
BATON_API void baton_center(const float* x, int64_t rows, int64_t n, float* out);

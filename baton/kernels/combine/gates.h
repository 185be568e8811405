// Rows that gates weigh: shared experts beside routed ones, heads with a gate each. Knows nothing of models.
#pragma once
#include "../abi/common.h"

// out = factor (rows) x mixed + sigmoid(gate (rows)) x shared, rows of n floats; a null factor or gate counts as 1.
BATON_API void baton_combine(const float* mixed, const float* factor, const float* shared, const float* gate, int64_t rows, int64_t n,
                             float* out);
// out = sigmoid(gate) x x, rows of n floats.
BATON_API void baton_gate(const float* x, const float* gate, int64_t rows, int64_t n, float* out);
// x, rows of `heads` x (q, gate), each of `width` floats, then `rest` others -> out: q of all heads, then the others; gate.
BATON_API void baton_gated_heads(const float* x, int64_t rows, int64_t heads, int64_t width, int64_t rest, float* out, float* gate);
// out = x, rows of n floats, each times its number in factor (rows).
BATON_API void baton_scale_rows(const float* x, const float* factor, int64_t rows, int64_t n, float* out);

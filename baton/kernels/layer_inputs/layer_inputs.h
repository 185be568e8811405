// Inputs of each layer's own, and gates of which few are kept (reference.py). Knows nothing of layers. On a CPU alone.
#pragma once
#include "../abi/common.h"

namespace baton {

// `table` (table_rows, layers x width) of `dtype`; `norm` (width).
struct LayerInputs {
  const void* table;
  const float* norm;
  int64_t table_rows, layers, width;
  int32_t dtype;
  float eps, scale;
};

}  // namespace baton

// x, out (rows, layers x width); out may be x.
BATON_API void baton_layer_inputs(const baton::LayerInputs* op, const int32_t* tokens, int64_t rows, const float* x, float* out);
// out (rows, n): gelu(x) by the n floats of each row of `inputs`, `total` apart, from `first` on; out may be x.
BATON_API void baton_gate_inputs(const float* x, int64_t rows, int64_t n, const float* inputs, int64_t total, int64_t first, float* out);
// x, out (rows, 2 x inner): the first half lowered by its mean and `deviations` standard deviations, 0 where that is below; out may
// be x.
BATON_API void baton_sparsen(const float* x, int64_t rows, int64_t inner, float deviations, float* out);

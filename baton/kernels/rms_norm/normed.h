// A product whose rows are normed as it rounds them, on a CPU alone. Knows nothing of layers.
#pragma once
#include "../linear/linear.h"

namespace baton {

// Rows of floats, side by side; each gets what lies in `delta` added, unless that is null, and the product takes its norm.
struct NormedRows {
  float* x;
  const float *delta, *weight;
  float eps;
};

}  // namespace baton

// As baton_rms_norm and then baton_linear, or baton_linear_gated where `gated`, with their bits; no row of norms is written. Returns 0,
// and computes nothing, where those two are to do it: by other instructions than tiles, for few rows, or where the weights are
// multiplied in parts.
BATON_API int32_t baton_linear_normed(const baton::PackedLinear* w, const baton::NormedRows* rows, int64_t m, const float* bias,
                                      int32_t gated, void* out, int32_t out_dtype, int64_t out_stride);

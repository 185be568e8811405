// A product with the gated activation in its epilogue, on a CPU alone. Knows nothing of layers.
#pragma once
#include "../linear/linear.h"

namespace baton {

// Whether the rows that such weights multiply are rounded to bf16 first: a row that comes in bf16 gives the same bits.
bool rounds_to_bf16(const PackedLinear& w);

}  // namespace baton

// The outputs of w are a gate's, n / 2, and as many others. out (m, n / 2) = silu(gate) x the others, with the bits of baton_linear and
// baton_swiglu one after the other (in bf16 those of their result rounded). Returns 0, and computes nothing, where rows are few or
// the weights aren't halves of whole panels.
BATON_API int32_t baton_linear_gated(const baton::PackedLinear* w, const void* x, int32_t x_dtype, int64_t x_stride, int64_t m,
                                     const float* bias, void* out, int32_t out_dtype, int64_t out_stride);

// A layer of experts behind a router: each row goes through its top few and their outputs are added by weight. Knows nothing of
// models; the router's own product is a dense layer.
#pragma once
#include <cstdint>

namespace baton {

// gate_up (experts, 2 inner, hidden), gate first, and down (experts, hidden, inner): rows of inputs, one per output, of `dtype`
// (common.h: Dtype; a GPU takes BF16 alone, and hidden and inner that are multiples of 8). chosen <= 16, experts <= 512.
// `renormalise`: the chosen weights sum to 1, else softmax over all.
struct Moe {
  const uint16_t *gate_up, *down;
  int64_t hidden, inner;
  int32_t experts, chosen, renormalise, dtype;
};

}  // namespace baton

#ifndef BATON_DEVICE  // a cuda.cu exports the same symbol, with a stream
#include "../abi/common.h"
// x (rows, hidden) and out (rows, hidden) float with strides in elements, logits (rows, experts). Beside bf16 weights
// rows of x and what is between the two layers are rounded to bf16. Of equal logits the lower expert is chosen; a row with a NaN among its logits is NaN.
BATON_API void baton_moe(const baton::Moe* moe, const float* x, int64_t x_stride, const float* logits, int64_t rows, float* out,
                         int64_t out_stride);
#endif

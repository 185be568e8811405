// Experts with biases and gpt-oss's gate. On a CPU alone.
#pragma once
#include "moe.h"

namespace baton {

// Biases of each expert's outputs: gate_up's (experts, 2 inner), gate first, and down's (experts, hidden). With g and u
// limited to `limit` (g from above alone), g x sigmoid(alpha g) x (u + 1) is in SwiGLU's place.
struct BiasedMoe {
  Moe moe;
  const float *gate_up_bias, *down_bias;
  float alpha, limit;
};

}  // namespace baton

#ifndef BATON_DEVICE
BATON_API void baton_biased_moe(const baton::BiasedMoe* moe, const float* x, int64_t x_stride, const float* logits, int64_t rows,
                                float* out, int64_t out_stride);
#endif

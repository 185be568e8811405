// Chooses experts in groups, by softmax or sigmoid, with a bias for the choice alone. Knows nothing of experts.
#pragma once
#include "../abi/common.h"

namespace baton {

struct Route {
  const float* bias;  // (experts), added to choose and never to weigh; or null
  int32_t experts, chosen, groups, kept, best, sigmoid, renormalise;
  float scale;
};

}  // namespace baton

// logits (rows, experts) -> out, as many: the chosen scores' logarithms, -inf elsewhere; factor (rows).
BATON_API void baton_route(const baton::Route* op, const float* logits, int64_t rows, float* out, float* factor);

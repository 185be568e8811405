// Chooses two experts as SparseMixer does (https://arxiv.org/abs/2409.12136). Knows nothing of experts. On a CPU alone.
#pragma once
#include "../abi/common.h"

// logits (rows, experts) -> out, as many: the logarithms of both experts' weights, -inf elsewhere; factor (rows), the weights' sum.
// A weight is that of a softmax over experts whose distance from the best, by the larger of both sizes, is 2 x jitter at most.
BATON_API void baton_route_two(const float* logits, int64_t rows, int32_t experts, float jitter, float* out, float* factor);

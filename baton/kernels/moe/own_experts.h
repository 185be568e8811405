// A layer of experts of which a caller has some, on a CPU alone: their outputs, then everybody's mixed. Knows nothing of ranks.
#pragma once
#include <atomic>

#include "form.h"

namespace baton {

struct OwnExperts {
  int32_t first, count;
};

// y (rows, chosen, hidden): the outputs of the rows' chosen experts that are among `own`; what others' are stays as it is.
// moe.gate_up and moe.down begin with the first own expert, as the biases of `biased` do where it isn't null; moe.experts counts
// all that logits (rows, experts) rank. `loads`, by expert of all, gets the rows that went to each own one added; null: nobody asks.
void run_own_experts(const Moe& moe, const BiasedMoe* biased, OwnExperts own, const float* x, int64_t x_stride, const float* logits,
                     int64_t rows, float* y, std::atomic<int64_t>* loads);

// out (rows, hidden) of y with every expert's output in it: the bits of baton_moe.
void mix_experts(const Moe& moe, const float* logits, int64_t rows, const float* y, float* out, int64_t out_stride);

}  // namespace baton

// A layer of experts of which a caller has some, on a CPU alone: their outputs, then everybody's mixed. Knows nothing of ranks.
#pragma once
#include <atomic>
#include <vector>

#include "adapted.h"

namespace baton {

constexpr int32_t EXPERT_SHARES = 16;  // an expert's rows are dealt in sixteenths, by their numbers, among those who have it

// The experts whose weights a caller has, in `slots` places, and the rows that it computes of each.
struct OwnExperts {
  const int16_t* slot_of;  // by expert: its place among the weights; -1: not there
  const uint8_t* owners;   // (experts, EXPERT_SHARES): who computes the rows of such a number
  int32_t slots, owner;    // `owner`: the caller's own number
  int32_t layer, pad;      // number of this layer of experts
};

// y (rows, chosen, hidden): the outputs of the rows' chosen experts that `own` computes; what others' are stays as it is. moe.gate_up
// and moe.down have the experts of `own` by slot, as the biases of `biased` where it isn't null; moe.experts counts all that logits
// (rows, experts) rank. Adapters' parts beside experts that aren't here are passed over. `loads`, by expert, gets the rows added that
// went to each here. Returns how many outputs were computed, and where `places` isn't null adds their places (row x chosen + rank) to it.
int64_t run_own_experts(const Moe& moe, const BiasedMoe* biased, const OwnExperts& own, const ExpertAdapters& adapters, const float* x,
                        int64_t x_stride, const float* logits, int64_t rows, float* y, std::atomic<int64_t>* loads, std::vector<int64_t>* places);

// out (rows, hidden) of y with every expert's output in it: the bits of baton_moe.
void mix_experts(const Moe& moe, const float* logits, int64_t rows, const float* y, float* out, int64_t out_stride);

}  // namespace baton

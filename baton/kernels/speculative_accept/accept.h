// How many drafted tokens stand, and the token behind them. Knows nothing of who drafted, of seeds or of KV.
#pragma once
#ifdef BATON_DEVICE
#include <cstdint>
#else
#include "../abi/common.h"
#endif

namespace baton {

constexpr int32_t MOST_DRAFTS = 16;  // of one sequence; those behind are left out, which changes no token

// One sequence. Either `chosen`: the target's own choice at count + 1 places, each drawn by its place's own number; a draft
// stands while it is that choice, so that tokens are those of a run without drafts. Or `target`: rejection sampling, by which
// a token's distribution is the target's whatever the drafts'; a draft stands where accept < p / q.
struct Draft {
  const int32_t* tokens;   // count drafted
  const int32_t* chosen;   // count + 1, chosen_stride bytes apart: Choice.token of the verified rows will do; or null
  const float* target;     // count + 1 rows of vocab edited logits, target_stride floats apart
  const float* proposed;   // count rows of the probabilities that the drafts were drawn from; null: each was certain
  const double* accept;    // count uniform numbers
  const double* draw;      // count + 1
  int32_t* emitted;        // out, count + 1: the drafts that stand, then one of the target's, then -1
  int64_t chosen_stride, target_stride, proposed_stride;
  float temperature;       // 0: the likeliest token alone stands
  int32_t count;
  int32_t accepted;        // out: how many stand; the token behind is -1 where its row has no finite largest logit
};

}  // namespace baton

#ifndef BATON_DEVICE  // a cuda.cu exports the same symbol, with a stream
BATON_API void baton_speculative_accept(baton::Draft* drafts, int32_t count, int64_t vocab);
#endif

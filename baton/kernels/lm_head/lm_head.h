// The projection to the vocabulary and the choice of each row's token in one go. Knows nothing of seeds or text.
#pragma once
#include "../dense/dense.h"

namespace baton {

// How a row's token is chosen. Edits come in the reference's order: repetition, frequency and presence penalties,
// biases, the mask, bans; then temperature (0: the likeliest token), top_k, top_p, min_p; `uniform` decides.
struct Choice {
  float* logits;            // where the row's raw logits go (vocab floats); then nothing is chosen. Else null
  double uniform;
  const int32_t* history;   // all tokens so far; penalties need them
  const int32_t* bias_ids;
  const float* bias;
  const uint8_t* allowed;   // vocab bytes, 0: may not be chosen; or null
  const int32_t* banned;
  int32_t history_count, prompt_count, bias_count, banned_count;
  float temperature, repetition, frequency, presence;
  int32_t top_k;            // 0: all
  float top_p, min_p;
  int32_t token;            // out; -1: no finite logit, or logits were asked for
};

}  // namespace baton

#ifndef BATON_DEVICE  // a cuda.cu exports the same symbol, with a stream
// x (rows, k) float, normed. The same choice whatever the rows beside it.
BATON_API void baton_lm_head(const baton::PackedLinear* w, const float* x, int64_t x_stride, int32_t rows,
                             baton::Choice* choices);
#endif

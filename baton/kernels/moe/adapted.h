// A layer of experts with low-rank adapters beside each expert's matrices. Knows nothing of who loads them.
#pragma once
#include "../lora/lora.h"
#include "form.h"

namespace baton {

constexpr int32_t OP_MOE_ADAPTED = 98;  // Op.kind: OP_MOE or OP_BIASED_MOE; `table`: AdaptedMoe

// Which rows have which adapter, and the numbers of the two layers' sites. A part's `first` counts the outputs of all experts'
// matrices, stacked as Moe has them (gate first), and a site's parts lie in its order.
struct ExpertAdapters {
  const LoraGroup* groups = nullptr;
  int64_t count = 0, gate_up = 0, down = 0;
};

struct AdaptedMoe {
  const Moe* moe;
  const BiasedMoe* biased;  // or null, as it always is on a GPU
  const LoraStep* lora;
  int64_t gate_up, down;  // sites
};

}  // namespace baton

#ifndef BATON_DEVICE  // a cuda.cu exports the same symbol, with a stream
// As baton_moe, or baton_biased_moe where `moe->biased` isn't null, with what the rows' adapters of `of` have beside the chosen
// experts added to their gates, ups and outputs, of the inputs that the experts' own matrices read. `moe->lora` isn't read.
BATON_API void baton_adapted_moe(const baton::AdaptedMoe* moe, const baton::ExpertAdapters* of, const float* x, int64_t x_stride,
                                 const float* logits, int64_t rows, float* out, int64_t out_stride);
#endif

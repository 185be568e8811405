// The head with a bias and for rows with adapters beside it. Knows nothing of who loads them.
#pragma once
#include "../lora/lora.h"
#include "capped.h"

namespace baton {

constexpr int32_t OP_LM_HEAD_ADAPTED = 97;  // Op.kind: OP_LM_HEAD; `table`: AdaptedHead

struct AdaptedHead {
  const LoraStep* lora;
  int64_t site;
  float softcap;  // or 0
};

// As baton_lm_head_capped. To each row's product comes `bias` (vocab), unless it is null, and to row i's what adapters[i]'s first part
// gives, unless that or `adapters` is null or it has none; then the cap. On a CPU alone.
void adapted_head(const PackedLinear& w, const float* bias, const float* x, int64_t x_stride, int32_t rows, float softcap,
                  Choice* choices, const LoraSite* const* adapters);

}  // namespace baton

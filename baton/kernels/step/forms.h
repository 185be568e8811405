// Ops that a CPU's step alone has: forms of step.h's, and what stands between them. Knows nothing of models.
#pragma once
#include "step.h"

namespace baton {

// Numbers of their own, so that a step that lacks one refuses the program instead of computing something else.
enum FormKind : int32_t {
  OP_EMBED_SCALED = 64,  // OP_EMBED; `eps` is the factor on its rows
  OP_ADD,                // `in` += `delta`, nothing else
  OP_NORM_PART,          // columns `layer` … `layer` + `window` - 1 of `in`, in place
  OP_ROPE_PART,          // OP_ROPE_APPEND; `window` dims of a head rotate, by angles `delta` floats into a position's
  OP_ATTENTION_FORM,     // OP_ATTENTION; `table`: AttentionForm
  OP_GEGLU,              // OP_SWIGLU with gelu
  OP_BIASED_MOE,         // OP_MOE; `table`: BiasedMoe
  OP_LM_HEAD_CAPPED,     // OP_LM_HEAD; `table`: the cap, a float
};

}  // namespace baton

// Ops of latent attention, grouped routing and recurrent states as a CPU's step runs them. Knows nothing of models.
#pragma once
#include "../combine/gates.h"
#include "../gated_delta/gated_delta.h"
#include "../latent_attention/latent.h"
#include "../route/route.h"
#include "../state_space/state_space.h"
#include "step.h"

namespace baton {

// Numbers of their own beside step.h's, forms.h's, lora.h's and ranks.h's; `table` has the op's own struct.
enum SpanOpKind : int32_t {
  OP_NORM_ROWS = 160,  // OP_RMS_NORM of rows of any width, `in` alone
  OP_LATENT,           // q in `in`, latents in `delta`
  OP_ROUTE,            // factors to `delta`
  OP_COMBINE,          // `in` and, in `delta`, what is shared; registers of factors in `layer`, of gates in `window`, or -1
  OP_GATED_HEADS,      // gates to `delta`; `layer` heads of `window` floats
  OP_GATE,             // `in` by the gates in `delta`
  OP_GATED_DELTA,      // mixed in `in`, gates in `delta`
  OP_STATE_SPACE,
};

}  // namespace baton

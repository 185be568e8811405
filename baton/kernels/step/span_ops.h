// Ops of latent attention, routing, recurrent states and further norms as a CPU's step runs them. Knows nothing of models.
#pragma once
#include "../activate/activate.h"
#include "../combine/gates.h"
#include "../gated_delta/gated_delta.h"
#include "../halve_heads/halve_heads.h"
#include "../latent_attention/latent.h"
#include "../layer_inputs/layer_inputs.h"
#include "../layer_norm/layer_norm.h"
#include "../predict_streams/streams.h"
#include "../rope_append/rotate_heads.h"
#include "../route/route.h"
#include "../route_two/route_two.h"
#include "../selective_scan/selective_scan.h"
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
  OP_LAYER_NORM,       // `in` += `delta` unless that is -1; weight in `norm`
  OP_CENTER,
  OP_SCALE_ROWS,       // factors in `delta`
  OP_ACTIVATE,         // by the activation of number `layer`
  OP_HALVE_HEADS,      // the first `window` floats of each head
  OP_TEMPER_QUERIES,   // by the Tempering in `table`
  OP_ROTATE_HEADS,     // `window` floats of a head, by angles `delta` floats into a position's
  OP_ROUTE_TWO,        // `eps` is the jitter; factors to `delta`
  OP_DIVIDE,           // `in` to the Registers in `table`, side by side
  OP_CONVOLVE,         // the first columns of `in`
  OP_SELECTIVE_SCAN,   // `table`: ScanOp
  OP_LAYER_INPUTS,     // `table`: LayerInputs
  OP_GATE_INPUTS,      // by the columns of `delta` from `layer` on
  OP_SPARSEN,          // `eps`: standard deviations
  OP_MATCH_SIZE,       // the streams in `delta`, to the size of `in`
  OP_SUM_ROWS,         // the Registers in `table`, times `eps`
  OP_PREDICT_STREAMS,  // `in` is the first one, `delta` the others; `table`: StreamMix
  OP_CORRECT_STREAMS,  // by `in`: the first one in `delta`, the others in `layer`
  OP_ADD_TO_EACH,      // `delta` to each in `in`
  OP_ROTATE_QUERIES,   // normed by `norm` unless null; `window` floats of a head, by angles `delta` floats into a position's
};

struct Registers {
  const int32_t* numbers;
  int64_t count;
};

// The scan, and the registers of its rows: x in `in`; `x_first` and `gate_first` are the first columns of x and of the gate.
struct ScanOp {
  SelectiveScan scan;
  int32_t dt, b, c, gated;
  int64_t x_first, gate_first;
};

}  // namespace baton

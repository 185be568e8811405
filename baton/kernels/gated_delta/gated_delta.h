// The gated delta rule (https://arxiv.org/abs/2412.06464) over sequences' own states, token by token. Knows nothing of models.
//
//   state of a head (key_dim, value_dim):  S = g S + k (beta (v - g k S))      out = q S, normed head by head, times silu(z)
//
// Rows lie item by item; a row's bits are its own, however its sequence was cut.
#pragma once
#include "../abi/common.h"
#include "../abi/paged.h"
#include "../abi/states.h"

namespace baton {

struct GatedDelta {
  const SequenceStates* states;
  const float *taps;                      // (taps, channels): q and k of all key heads, then v of all value heads
  const float *fade, *dt_bias, *norm;     // (value_heads), the exponential of a_log; (value_heads); (value_dim)
  int64_t past, state;                    // bytes into a sequence's states: (channels, taps - 1), (value_heads, key_dim, value_dim)
  int32_t tap_count, key_heads, value_heads, key_dim, value_dim, grouped;
  float eps;
  int64_t out_stride;                     // floats between two rows of out
  ChannelPlaces places;                   // of a rank's own heads: `past` and `state` count from the begin of all heads'
};

}  // namespace baton

// mixed (rows, channels and z) and gates (rows, 2 x value_heads), as program/ops/recurrent.py has them; out (rows, value_heads x
// value_dim). States are changed in place.
BATON_API void baton_gated_delta(const baton::GatedDelta* op, const baton::AttentionItem* items, int32_t count, int64_t rows,
                                 const float* mixed, const float* gates, float* out);

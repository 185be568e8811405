// Mamba-2's recurrence (https://arxiv.org/abs/2405.21060) over sequences' own states, token by token. Knows nothing of models.
//
//   state of a head (head_dim, size):  h = e^(dt A) h + dt x B      out = h C + D x, times silu(gate), normed group by group
//
// Rows lie item by item; a row's bits are its own, however its sequence was cut.
#pragma once
#include "../abi/common.h"
#include "../abi/paged.h"
#include "../abi/states.h"

namespace baton {

struct StateSpace {
  const SequenceStates* states;
  const float *taps, *bias;                  // (taps, channels): x of all heads, B and C of all groups; (channels), or null
  const float *fade, *skip, *dt_bias, *norm; // (heads), A above; (heads), D; (heads); (heads x head_dim), or null: isn't normed
  int64_t past, state;                       // bytes into a sequence's states: (channels, taps - 1), (heads, head_dim, size)
  int32_t tap_count, heads, head_dim, groups, size;
  float eps;
  int64_t out_stride;                        // floats between two rows of out
  ChannelPlaces places;                      // of a rank's own heads
};

}  // namespace baton

// mixed (rows, gate, channels and dt side by side); out (rows, heads x head_dim). States are changed in place.
BATON_API void baton_state_space(const baton::StateSpace* op, const baton::AttentionItem* items, int32_t count, int64_t rows,
                                 const float* mixed, float* out);

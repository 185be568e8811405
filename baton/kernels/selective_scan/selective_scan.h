// Mamba's selective scan (https://arxiv.org/abs/2312.00752) and the convolution before it, over sequences' own states. Knows nothing of
// models. On a CPU alone.
//
//   state of a channel (size):  S = e^(dt A) S + dt B x      out = S C + D x, times silu(gate)
//
// Rows lie item by item; a row's bits are its own, however its sequence was cut.
#pragma once
#include "../abi/common.h"
#include "../abi/paged.h"
#include "../abi/states.h"

namespace baton {

struct SelectiveScan {
  const SequenceStates* states;
  const float *fade, *skip;  // (channels, size), A above; (channels), D
  int64_t state;             // bytes into a sequence's states: (channels, size)
  int64_t channels, size;
};

// Rows of a step, `…_stride` floats apart; those of dt, b and c lie side by side. dt is before its softplus, gate before its silu.
struct ScanRows {
  const float *x, *dt, *b, *c, *gate;
  int64_t x_stride, gate_stride, out_stride;
  float* out;
};

struct ShortConvolution {
  const SequenceStates* states;
  const float *taps, *bias;  // (taps, channels); (channels), or null
  int64_t past;              // bytes into a sequence's states: (channels, taps - 1)
  int64_t tap_count, channels;
};

}  // namespace baton

// out (rows, channels). States are changed in place.
BATON_API void baton_selective_scan(const baton::SelectiveScan* op, const baton::AttentionItem* items, int32_t count,
                                    const baton::ScanRows* rows);
// The first columns of x, rows `stride` floats apart, convolved over time, through silu: out, rows `out_stride` floats apart.
BATON_API void baton_convolve(const baton::ShortConvolution* op, const baton::AttentionItem* items, int32_t count, const float* x,
                              int64_t stride, float* out, int64_t out_stride);

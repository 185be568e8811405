// A dense layer over packed weights: out = x · wᵀ + bias. Knows nothing of models.
//
// Weights lie in panels of 64 outputs (the last one padded), a panel contiguous through all of K, in steps of
// 64 outputs x a few inputs, so that a panel is read as one stream (linear/packed.py writes it):
//   BF16  step of 2 inputs:  [n 64][k 2] uint16                                 256 bytes
//   W8    step of 4 inputs:  [n 64][k 4] uint8, the value + 128                 256 bytes
//   W4    step of 8 inputs:  [n 64][k 4] uint8, the value + 8: low nibble input k, high nibble input k + 4
// W8, W4: value = row_scale[n] * (scales[n's panel][k / group][n % 64] * (q - zero) - mins[…]), without scales
// (group 0) just row_scale[n] * (q - zero). Activations are quantized per row to int8, symmetric, scale = absmax / 127.
//
// A row's result has the same bits whatever m, the row's place and the number of threads: sums run over K in
// fixed chunks; where they are exact, in any way that comes to the same whole number.
#pragma once

#ifdef BATON_DEVICE
#include <cstdint>
namespace baton {
using fp16 = uint16_t;
}
#else
#include "../abi/common.h"
#endif

namespace baton {

enum LinearKind : int32_t { LINEAR_BF16 = 0, LINEAR_W8 = 1, LINEAR_W4 = 2 };

struct PackedLinear {
  int32_t kind;
  int32_t group;           // inputs per scale, a multiple of 16; 0: row_scale alone
  int64_t n, k;            // data covers k rounded up to a multiple of the group (of 8 without one), zeros there
  const void* data;
  const fp16* scales;      // [n / 64 up][k / group][64], or null
  const fp16* mins;        // the same, or null: symmetric
  const float* row_scale;  // [n up to a multiple of 64]; BF16: or null
  int64_t exact;           // W4: inputs whose sum is a whole number below 2^24, all scales being whole and up to 15; or 0
};

}  // namespace baton

#ifndef BATON_DEVICE  // a cuda.cu exports the same symbol, with a stream
// x (m, k) and out (m, n) with row strides in elements; bias (n) float or null.
BATON_API void baton_linear(const baton::PackedLinear* w, const void* x, int32_t x_dtype, int64_t x_stride, int64_t m,
                            const float* bias, void* out, int32_t out_dtype, int64_t out_stride);
#endif

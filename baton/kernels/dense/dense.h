// A dense layer over float32 weights, next to linear.h's bfloat16 and quantized ones. Knows nothing of models.
//
// Weights lie in panels of 64 outputs (the last one padded with zeros): [n / 64 up][k][64] floats. A result is its
// bias plus chains of fused multiply-adds over at most 192 inputs each, in order, whatever m, the row's place and the
// threads.
#pragma once
#include "../linear/linear.h"

namespace baton {

constexpr int32_t LINEAR_F32 = 100;  // PackedLinear.kind that `dense` takes itself
constexpr int PANEL = 64;

// The layer's panels first … first + count - 1 as a layer of their own.
PackedLinear panels(const PackedLinear& w, int64_t first, int64_t count);

// x (m, k) float with a row stride -> out (m, n) float, any kind.
void dense(const PackedLinear& w, const float* x, int64_t x_stride, int64_t m, const float* bias, float* out,
           int64_t out_stride);

}  // namespace baton

#ifndef BATON_DEVICE  // a cuda.cu exports the same symbol, with a stream
BATON_API void baton_dense(const baton::PackedLinear* w, const float* x, int64_t x_stride, int64_t m,
                           const float* bias, float* out, int64_t out_stride);
#endif

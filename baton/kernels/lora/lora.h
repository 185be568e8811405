// Low-rank adapters beside a layer (https://arxiv.org/abs/2106.09685): out += scale · B · (A · x), for rows that have one.
// Knows nothing of checkpoints or of who loads what.
//
// A row's result depends on its own adapter and inputs alone: A · x is a sum of 16 lanes over k, in order, and B's a chain
// over the ranks, whatever rows are beside it. Rows of no group cost nothing.
#pragma once
#include <cstdint>

namespace baton {

constexpr int32_t OP_LORA = 96;  // Op.kind: `layer` is the site, `table` the step's LoraStep, `in` -1 where tokens are looked up
constexpr int64_t LORA_PANEL = 64;

// A pair of matrices beside some of a layer's outputs.
struct LoraPart {
  const void* a;           // (rank, k) row by row; where `looked_up` (k, rank): a row per token
  const void* b;           // [n / 64 up][rank][64], zeros in the last panel's padding
  int64_t k, first, n;     // inputs; outputs first … first + n - 1 of the layer's
  int32_t rank, dtype;     // of both matrices (common.h: Dtype)
  float scale;
  int32_t looked_up;
};

struct LoraSite {  // what one adapter has beside one layer
  const LoraPart* parts;
  int64_t count;
};

struct LoraGroup {  // rows that share an adapter
  const LoraSite* sites;  // of the adapter, by number
  const int32_t* rows;
  int64_t count;
};

struct LoraStep {
  const LoraGroup* groups;
  int64_t count;
};

}  // namespace baton

#ifndef BATON_DEVICE
#include "../abi/common.h"

namespace baton {

// One row's A · x times the scale, `rank` numbers.
void lora_shrink(const LoraPart& part, const float* x, float* t);

// Adds B · t to out[0 … n - 1], which are the part's outputs from `begin`, a multiple of 64, on.
void lora_expand(const LoraPart& part, const float* t, int64_t begin, int64_t n, float* out);

}  // namespace baton

// x (rows, k) and out (rows, outputs) float with row strides in elements; a site that looks tokens up reads `tokens` (rows).
BATON_API void baton_lora(const baton::LoraGroup* groups, int64_t count, int64_t site, const float* x, int64_t x_stride,
                          const int32_t* tokens, float* out, int64_t out_stride);
#endif

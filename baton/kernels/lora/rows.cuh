// What the step calls of lora on a GPU, and how much room it needs. Knows nothing of kernels.
#pragma once
#include "lora.h"

namespace baton {

constexpr int64_t LORA_TILE = 8;     // rows of one adapter that share what is read of its matrices
constexpr int64_t LORA_SUMS = 1024;  // ranks of all parts of one site together: structs.py has the same

// The most tiles that `rows` rows in `groups` groups can need.
inline int64_t lora_tiles(int64_t groups, int64_t rows) { return groups + rows / LORA_TILE; }

}  // namespace baton

// Groups, what they point at, x, tokens and out lie in device memory. `rows`: at least as many as the groups hold together;
// `sums`: floats, lora_tiles(count, rows) x LORA_TILE x LORA_SUMS, whose content is free before and behind the call.
BATON_API int baton_lora_rows(const baton::LoraGroup* groups, int64_t count, int64_t rows, int64_t site, const float* x,
                              int64_t x_stride, const int32_t* tokens, float* out, int64_t out_stride, float* sums, void* stream);

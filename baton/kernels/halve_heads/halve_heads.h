// Rows of q, k and v before they are rotated. Knows nothing of layers. On a CPU alone.
#pragma once
#include "../abi/common.h"
#include "../abi/paged.h"

namespace baton {

// A query at position p is multiplied by 1 + scale x ln(1 + the whole part of (p + shift) / floor).
struct Tempering {
  float scale, floor;
  int64_t shift;
};

}  // namespace baton

// x, rows of `total` floats that begin with `heads` heads of `width`; out: the same with the first `paired` floats of each in halves,
// the rest as it is. out may be x.
BATON_API void baton_halve_heads(const float* x, int64_t rows, int64_t total, int64_t heads, int64_t width, int64_t paired, float* out);
// The first `queries` floats of x's rows, which are `total` apart, by their positions, in place.
BATON_API void baton_temper_queries(const baton::Tempering* op, const baton::AttentionItem* items, int32_t count, int64_t total,
                                    int64_t queries, float* x);

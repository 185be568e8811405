// Several residual streams of which a layer computes one (reference.py). Knows nothing of layers. On a CPU alone.
#pragma once
#include "../abi/common.h"

namespace baton {

constexpr int64_t MOST_STREAMS = 16;

// What mixes `count` streams of `width` floats: `router` (count, width), and `mix`, (count x count, count) to predict and
// (count, count) to correct. `gain` (width) is for correcting, or null.
struct StreamMix {
  const float *norm, *router, *mix, *gain;
  int64_t count, width;
  float eps;
};

}  // namespace baton

// x (rows, width) is the first stream, `streams` (rows, (count - 1) x width) are the others; both are changed in place.
BATON_API void baton_predict_streams(const baton::StreamMix* op, int64_t rows, float* x, float* streams);
// By y (rows, width), what was made of x. out (rows, width): x by the gain afterwards.
BATON_API void baton_correct_streams(const baton::StreamMix* op, int64_t rows, const float* y, float* x, float* streams, float* out);
// out (rows, total): each `width` floats of `streams` scaled to the root mean square of x (rows, width); out may be streams.
BATON_API void baton_match_size(const float* x, int64_t rows, int64_t width, const float* streams, int64_t total, float* out);
// `delta` (rows, width) added to each `width` floats of `streams` (rows, total), in place.
BATON_API void baton_add_to_each(const float* delta, int64_t rows, int64_t width, float* streams, int64_t total);
// out (n): `scale` times the sum of `count` arrays; out may be the first.
BATON_API void baton_sum_rows(const float* const* xs, int64_t count, int64_t n, float scale, float* out);

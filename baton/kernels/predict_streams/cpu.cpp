// A row at a time, each by itself. Lanes are summed in one order, without fused multiply-adds, so that each ISA comes to the
// same bits.
#include "streams.h"

#include <algorithm>

#include "../abi/rows.h"
#include "../abi/tanh.h"
#include "../rms_norm/norm_row.h"

namespace baton {
namespace {

constexpr float LEAST_SQUARE = 1e-5f;  // a stream's mean square counts as this where it is less

int lanes_left(int64_t n, int64_t at) { return int(std::min<int64_t>(n - at, LANES)); }

float dot(const float* a, const float* b, int64_t n) {
  vf sums{};
  for (int64_t i = 0; i < n; i += LANES) {
    const int left = lanes_left(n, i);
    sums = sums + load_part(a + i, left) * load_part(b + i, left);
  }
  return sum(sums);
}

float mean_square(const float* x, int64_t n) { return sum_of_squares(x, int(n)) / float(n); }

// tanh(router · normed x / width), one per stream.
void modes(const StreamMix& op, const float* x, float* out) {
  float* normed = (float*)scratch(SCRATCH_TASK, size_t(op.width) * 4);
  norm_row(x, op.norm, op.eps, int(op.width), normed);
  for (int64_t k = 0; k < op.count; k++) {
    const vf mode = hyperbolic_tangent(splat(dot(op.router + k * op.width, normed, op.width) / float(op.width)));
    store_part(out + k, mode, 1);
  }
}

// Row `row` of the mix by the modes.
float factor(const StreamMix& op, int64_t row, const float* modes) {
  float found = 0;
  for (int64_t i = 0; i < op.count; i++) found += op.mix[row * op.count + i] * modes[i];
  return found;
}

void predict(const StreamMix& op, float* const* streams) {
  const int64_t n = op.count;
  float mode[MOST_STREAMS], factors[MOST_STREAMS * MOST_STREAMS];
  modes(op, streams[0], mode);
  for (int64_t i = 0; i < n * n; i++) factors[i] = factor(op, i, mode);
  for (int64_t at = 0; at < op.width; at += LANES) {
    const int left = lanes_left(op.width, at);
    vf before[MOST_STREAMS];
    for (int64_t j = 0; j < n; j++) before[j] = load_part(streams[j] + at, left);
    for (int64_t k = 0; k < n; k++) {
      vf mixed{};
#if defined(BATON_MUTATION_STREAMS_TURNED)
      for (int64_t j = 0; j < n; j++) mixed = mixed + splat(factors[j * n + k]) * before[j];
#else
      for (int64_t j = 0; j < n; j++) mixed = mixed + splat(factors[k * n + j]) * before[j];
#endif
      store_part(streams[k] + at, before[k] + mixed, left);
    }
  }
}

void correct(const StreamMix& op, const float* y, float* const* streams, float* out) {
  float mode[MOST_STREAMS], factors[MOST_STREAMS];
  modes(op, y, mode);
#if defined(BATON_MUTATION_STREAMS_ONE)
  for (int64_t k = 0; k < op.count; k++) factors[k] = factor(op, k, mode);
#else
  for (int64_t k = 0; k < op.count; k++) factors[k] = 1.0f + factor(op, k, mode);
#endif
  for (int64_t at = 0; at < op.width; at += LANES) {
    const int left = lanes_left(op.width, at);
    const vf more = load_part(y + at, left) - load_part(streams[0] + at, left);
    for (int64_t k = 0; k < op.count; k++)
      store_part(streams[k] + at, load_part(streams[k] + at, left) + splat(factors[k]) * more, left);
    const vf first = load_part(streams[0] + at, left);
    store_part(out + at, op.gain ? first * load_part(op.gain + at, left) : first, left);
  }
}

// f(each stream's place in a row), for all rows.
template <class F>
void for_streams(const StreamMix& op, int64_t rows, float* x, float* streams, F&& f) {
  for_rows(rows, op.count * op.width, [&](int64_t row) {
    float* each[MOST_STREAMS] = {x + row * op.width};
    for (int64_t k = 1; k < op.count; k++) each[k] = streams + (row * (op.count - 1) + k - 1) * op.width;
    f(row, each);
  });
}

}  // namespace
}  // namespace baton

BATON_API void baton_predict_streams(const baton::StreamMix* op, int64_t rows, float* x, float* streams) {
  baton::for_streams(*op, rows, x, streams, [&](int64_t, float* const* each) { baton::predict(*op, each); });
}

BATON_API void baton_correct_streams(const baton::StreamMix* op, int64_t rows, const float* y, float* x, float* streams, float* out) {
  baton::for_streams(*op, rows, x, streams, [&](int64_t row, float* const* each) {
    baton::correct(*op, y + row * op->width, each, out + row * op->width);
  });
}

BATON_API void baton_match_size(const float* x, int64_t rows, int64_t width, const float* streams, int64_t total, float* out) {
  using namespace baton;
  for_rows(rows, total, [&](int64_t row) {
    const float size = std::sqrt(mean_square(x + row * width, width));
    for (int64_t first = row * total; first < (row + 1) * total; first += width) {
#if defined(BATON_MUTATION_MATCH_LEAST)
      const float own = std::sqrt(mean_square(streams + first, width));
#else
      const float own = std::sqrt(std::max(mean_square(streams + first, width), LEAST_SQUARE));
#endif
      for (int64_t i = first; i < first + width; i++) out[i] = streams[i] * size / own;
    }
  });
}

BATON_API void baton_add_to_each(const float* delta, int64_t rows, int64_t width, float* streams, int64_t total) {
  using namespace baton;
  for_rows(rows, total, [&](int64_t row) {
    for (int64_t first = row * total; first < (row + 1) * total; first += width)
      for (int64_t i = 0; i < width; i++) streams[first + i] += delta[row * width + i];
  });
}

BATON_API void baton_sum_rows(const float* const* xs, int64_t count, int64_t n, float scale, float* out) {
  using namespace baton;
  for_rows((n + LANES - 1) / LANES, count * LANES, [&](int64_t block) {
    const int64_t at = block * LANES;
    const int left = lanes_left(n, at);
    vf sums = load_part(xs[0] + at, left);
    for (int64_t k = 1; k < count; k++) sums = sums + load_part(xs[k] + at, left);
    store_part(out + at, sums * splat(scale), left);
  });
}

// Channels don't meet: a task takes some through all tokens of a sequence, so that their states stay in the nearest cache and rows are
// read side by side.
#include "selective_scan.h"

#include <algorithm>

#include "../gated_delta/convolve.h"

namespace baton {
namespace {

constexpr int64_t SCANNED = 64;  // channels of a task

// ln(1 + e^x), from u = e^-|x|: ln(1 + u) is twice the series of atanh(u / (2 + u)), which is 1/3 at most.
BATON_INLINE vf softplus_of(vf x) {
  const vf size = select(x < vf{}, vf{} - x, x), u = exponential(vf{} - size), f = u / (splat(2.0f) + u), z = f * f;
  vf p = splat(1.0f / 15);
  p = fma(p, z, splat(1.0f / 13));
  p = fma(p, z, splat(1.0f / 11));
  p = fma(p, z, splat(1.0f / 9));
  p = fma(p, z, splat(1.0f / 7));
  p = fma(p, z, splat(1.0f / 5));
  p = fma(p, z, splat(1.0f / 3));
  p = fma(p, z, splat(1.0f));
  return select(x < vf{}, vf{}, x) + splat(2.0f) * f * p;
}

// One channel's state through one token; returns what is read from it.
BATON_INLINE float advance(const float* fade, float step, float fed, const float* b, const float* c, int64_t size, float* state) {
  const vf by = splat(step), in = splat(step * fed);
  vf read{};
  for (int64_t s = 0; s < size; s += LANES) {
    const int n = int(std::min<int64_t>(size - s, LANES));
#if defined(BATON_MUTATION_SCAN_FADE)
    const vf kept = load_part(state + s, n);
#else
    const vf kept = exponential(by * load_part(fade + s, n)) * load_part(state + s, n);
#endif
    const vf now = fma(in, load_part(b + s, n), kept);
    store_part(state + s, now, n), read = fma(now, load_part(c + s, n), read);
  }
  return sum(read);
}

// `width` channels from `first` on of one sequence.
void scan_some(const SelectiveScan& op, const ScanRows& rows, const AttentionItem& item, int64_t first, int64_t width, float* state) {
  float steps[SCANNED], read[SCANNED];
  for (int64_t row = item.first; row < item.first + item.queries; row++) {
    const float *x = rows.x + row * rows.x_stride + first, *dt = rows.dt + row * op.channels + first;
    const float *b = rows.b + row * op.size, *c = rows.c + row * op.size, *gate = rows.gate + row * rows.gate_stride + first;
    float* out = rows.out + row * rows.out_stride + first;
    for (int64_t i = 0; i < width; i += LANES) store(steps + i, softplus_of(load_part(dt + i, int(std::min<int64_t>(width - i, LANES)))));
    for (int64_t i = 0; i < width; i++)
      read[i] = advance(op.fade + (first + i) * op.size, steps[i], x[i], b, c, op.size, state + i * op.size);
    for (int64_t i = 0; i < width; i += LANES) {
      const int n = int(std::min<int64_t>(width - i, LANES));
      const vf found = fma(load_part(op.skip + first + i, n), load_part(x + i, n), load_part(read + i, n));
      store_part(out + i, found * silu(load_part(gate + i, n)), n);
    }
  }
}

}  // namespace
}  // namespace baton

BATON_API void baton_selective_scan(const baton::SelectiveScan* op, const baton::AttentionItem* items, int32_t count,
                                    const baton::ScanRows* rows) {
  using namespace baton;
  const int64_t parts = (op->channels + SCANNED - 1) / SCANNED;
  parallel_for(int32_t(count * parts), [&](int32_t task) {
    const int64_t item = task / parts, first = task % parts * SCANNED, width = std::min(SCANNED, op->channels - first);
    float* state = op->states->moved(item, op->state + first * op->size * 4, width * op->size * 4);
    scan_some(*op, *rows, items[item], first, width, state);
  });
}

BATON_API void baton_convolve(const baton::ShortConvolution* op, const baton::AttentionItem* items, int32_t count, const float* x,
                              int64_t stride, float* out, int64_t out_stride) {
  using namespace baton;
  convolve({op->taps, op->bias, op->tap_count, op->channels, out_stride, {}}, items, count,
           [&](int64_t row) { return x + row * stride; }, *op->states, op->past, out);
}

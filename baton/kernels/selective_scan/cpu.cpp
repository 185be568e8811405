// Channels don't meet: a task takes some, one after the other, through all tokens of a sequence.
#include <algorithm>
#include <cmath>

#include "../abi/common.h"
#include "../abi/threads.h"
#include "../abi/vector.h"

namespace baton {
namespace {

constexpr int64_t CHANNELS = 64;  // of a task

struct Scan {
  const float *x, *dt, *b, *c, *fade, *skip;
  int64_t tokens, channels, size;
};

inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

// One channel's state, `size` numbers, through tokens from row `first` on.
void advance(const Scan& op, int64_t first, int64_t channel, float* state, float* out) {
  const float* fade = op.fade + channel * op.size;
  for (int64_t row = first; row < first + op.tokens; row++) {
    const float fed = op.x[row * op.channels + channel], step = softplus(op.dt[row * op.channels + channel]);
    const vf by = splat(step), in = splat(step * fed);
    vf read{};
    for (int64_t s = 0; s < op.size; s += LANES) {
      const int n = int(std::min<int64_t>(op.size - s, LANES));
      const vf kept = exponential(by * load_part(fade + s, n)) * load_part(state + s, n);
      const vf now = fma(in, load_part(op.b + row * op.size + s, n), kept);
      store_part(state + s, now, n), read = fma(now, load_part(op.c + row * op.size + s, n), read);
    }
    out[row * op.channels + channel] = std::fma(op.skip[channel], fed, sum(read));
  }
}

}  // namespace
}  // namespace baton

// x, dt, out (sequences x tokens, channels), dt before softplus; b, c (sequences x tokens, size); fade (channels, size); skip
// (channels); state: of each sequence (channels, size), `stride` floats apart, changed in place.
BATON_API void baton_selective_scan(const float* x, const float* dt, const float* b, const float* c, const float* fade, const float* skip,
                                    float* state, int64_t stride, int64_t sequences, int64_t tokens, int64_t channels, int64_t size,
                                    float* out) {
  using namespace baton;
  const Scan op{x, dt, b, c, fade, skip, tokens, channels, size};
  const int64_t parts = (channels + CHANNELS - 1) / CHANNELS;
  parallel_for(int32_t(sequences * parts), [&](int32_t task) {
    const int64_t sequence = task / parts, first = task % parts * CHANNELS, end = std::min(first + CHANNELS, channels);
    for (int64_t channel = first; channel < end; channel++)
      advance(op, sequence * tokens, channel, state + sequence * stride + channel * size, out);
  });
}

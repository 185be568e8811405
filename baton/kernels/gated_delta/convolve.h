// A short causal convolution over time of each channel, then silu, as layers with a state begin. Knows nothing of what follows.
#pragma once
#include <vector>

#include "../abi/elements.h"
#include "../abi/paged.h"
#include "../abi/states.h"
#include "../abi/threads.h"

namespace baton {
namespace {

struct Convolution {
  const float* taps;  // (taps, channels)
  const float* bias;  // (channels), or null
  int64_t count;      // taps
  int64_t channels;
  int64_t out_stride;    // floats between two rows of out
  ChannelPlaces places;  // of the channels in a state
};

constexpr int64_t CHANNELS = 256;  // of a task

// One sequence's rows: in(row) has the channels side by side; `past` (channels, taps - 1) are the rows before; the last ones go to
// `now`. out (rows, channels).
template <class In>
void convolve_some(const Convolution& c, int64_t rows, int64_t first, int64_t end, const float* past, float* now, In&& in, float* out) {
  const int64_t before = c.count - 1, width = end - first;
  float* line = (float*)scratch(SCRATCH_TASK, size_t((before + rows) * width) * 4);  // by time
  for (int64_t t = 0; t < before; t++)
    for (int64_t i = 0; i < width; i++) line[t * width + i] = past[c.places(first + i) * before + t];
  for (int64_t t = 0; t < rows; t++) std::memcpy(line + (before + t) * width, in(t) + first, size_t(width) * 4);
  for (int64_t t = 0; t < rows; t++)
    for (int64_t i = 0; i < width; i += LANES) {
      const int n = int(width - i < LANES ? width - i : LANES);
      vf total = c.bias ? load_part(c.bias + first + i, n) : vf{};
#if defined(BATON_MUTATION_CONVOLVE_PAST)
      for (int64_t j = before; j < c.count; j++)
#else
      for (int64_t j = 0; j < c.count; j++)
#endif
        total = fma(load_part(c.taps + j * c.channels + first + i, n), load_part(line + (t + j) * width + i, n), total);
      store_part(out + t * c.out_stride + first + i, silu(total), n);
    }
  for (int64_t t = 0; t < before; t++)
    for (int64_t i = 0; i < width; i++) now[c.places(first + i) * before + t] = line[(rows + t) * width + i];
}

// All items' rows. in(row of the step) -> its channels; `past`: where the rows before lie in `states`.
template <class In>
void convolve(const Convolution& c, const AttentionItem* items, int32_t count, In&& in, const SequenceStates& states, int64_t past, float* out) {
  const int64_t parts = (c.channels + CHANNELS - 1) / CHANNELS;
  parallel_for(int32_t(count * parts), [&](int32_t task) {
    const AttentionItem& item = items[task / parts];
    const int64_t first = task % parts * CHANNELS, end = first + CHANNELS < c.channels ? first + CHANNELS : c.channels;
    convolve_some(c, item.queries, first, end, states.before(task / parts, past), states.after(task / parts, past), [&](int64_t t) { return in(item.first + t); },
                  out + item.first * c.out_stride);
  });
}

inline float softplus(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }

}  // namespace
}  // namespace baton

// AMX's inner loops of linear: two tiles of rows by half a panel, or one by a whole one. Knows nothing of threads, of where weights
// come from or of what becomes of the sums.
#pragma once
#include "amx_rows.h"

#if BATON_AMX
#include "../../abi/vector.h"

namespace baton {

constexpr int64_t kStepBytes = TILE_ROWS * kPanel * 4;  // a step's weights: sixteen words of 64 outputs, as panels have them

// What is fetched beside the products: so many lines a step, and a row of the results.
struct AmxAhead {
  const char* at;
  int64_t lines;
  ResultRows results;

  BATON_INLINE void fetch() {
    for (int64_t line = 0; line < lines; ++line) __builtin_prefetch(at + 64 * line, 0, 2);
    at += 64 * lines;
    results.fetch();
  }
};

// Where rows of sums, 64 apart, begin of the four tiles: of two tiles of rows sixteen columns each and the next sixteen, or four
// times sixteen columns of one.
template <bool Pair>
struct AmxSums {
  static constexpr int64_t columns = Pair ? kPanel / 2 : kPanel;
  static int64_t rows(int64_t per_tile) { return (Pair ? 2 : 1) * per_tile; }

  char* at[4];

  AmxSums(void* sums, int64_t per_tile, int64_t column) {
    for (int64_t i = 0; i < 4; ++i)
      at[i] = (char*)sums + 4 * (Pair ? i / 2 * per_tile * kPanel + column + i % 2 * 16 : 16 * i);
  }
  BATON_INLINE void load() const {
    tile_fence();
    _tile_loadd(0, at[0], 4 * kPanel);
    _tile_loadd(1, at[1], 4 * kPanel);
    _tile_loadd(2, at[2], 4 * kPanel);
    _tile_loadd(3, at[3], 4 * kPanel);
  }
  BATON_INLINE void store() const {
    _tile_stored(0, at[0], 4 * kPanel);
    _tile_stored(1, at[1], 4 * kPanel);
    _tile_stored(2, at[2], 4 * kPanel);
    _tile_stored(3, at[3], 4 * kPanel);
    tile_fence();
  }
};

BATON_INLINE void zero_tiles() {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

// The sums' tiles += `steps` of rows, tile `first` (and the next one) from `step` on, by weights from `w` on. Beside two tiles of rows
// weights pass by the nearest cache, which is the rows', and a step's loads are under way before its first product.
template <TileProduct P, bool Pair>
BATON_INLINE void add_products(const AmxRows& rows, int64_t first, int64_t step, const uint8_t* w, int64_t steps, AmxAhead& ahead) {
  const char *x = rows.at(first, step), *next = Pair ? rows.at(first + 1, step) : x;
  const int64_t apart = rows.apart();
  tile_fence();
  for (int64_t s = 0; s < steps; ++s, x += apart, next += apart, w += kStepBytes) {
    _tile_loadd(4, x, TILE_BYTES);
    if constexpr (Pair) {
      _tile_stream_loadd(6, w, 4 * kPanel);
      _tile_stream_loadd(7, w + 64, 4 * kPanel);
      _tile_loadd(5, next, TILE_BYTES);
      BATON_TILE_PRODUCT(P, 0, 4, 6);
      BATON_TILE_PRODUCT(P, 1, 4, 7);
      BATON_TILE_PRODUCT(P, 2, 5, 6);
      BATON_TILE_PRODUCT(P, 3, 5, 7);
    } else {
      _tile_loadd(6, w, 4 * kPanel);
      BATON_TILE_PRODUCT(P, 0, 4, 6);
      _tile_loadd(7, w + 64, 4 * kPanel);
      BATON_TILE_PRODUCT(P, 1, 4, 7);
      _tile_loadd(6, w + 128, 4 * kPanel);
      BATON_TILE_PRODUCT(P, 2, 4, 6);
      _tile_loadd(7, w + 192, 4 * kPanel);
      BATON_TILE_PRODUCT(P, 3, 4, 7);
    }
    ahead.fetch();
  }
}

// A chunk of a panel's weights in whole steps; `tail`: one more, with zeros behind its inputs, or none.
struct AmxWeights {
  const uint8_t *w, *tail;
  int64_t first, steps, tails;  // the first step's number among the row's; tails: 0 or 1

  // f(weights, first step, steps) for steps begin … end - 1 of the chunk.
  template <class F>
  BATON_INLINE void each_run(int64_t begin, int64_t end, F&& f) const {
    if (begin < std::min(end, steps)) f(w + begin * kStepBytes, first + begin, std::min(end, steps) - begin);
#ifndef BATON_MUTATION_AMX_TAIL
    if (end > steps) f(tail, first + steps, tails);
#endif
  }
  int64_t all() const { return steps + tails; }
};

BATON_INLINE vf halves(const fp16* at) {
#if BATON_AVX512
  return (vf)sixteen_fp16(at);
#elif BATON_AVX2
  return {eight_fp16(at), eight_fp16(at + 8)};
#else
  float each[LANES];
  for (int i = 0; i < LANES; ++i) each[i] = from_fp16(at[i]);
  return load(each);
#endif
}

// A group's integers of `rows` rows and columns begin … end - 1, with their starts, scaled on top of the float sums (nothing at the
// `first` group): rounded as other ISAs round them. `at`: where the group's scales lie.
template <Scales S>
inline void add_group(const int32_t* whole, const int32_t* starts, int64_t groups, int64_t rows, int64_t begin, int64_t end,
                      const TileWeights& w, int64_t at, bool first, float* out) {
  for (int64_t n = begin; n < end; n += LANES) {
    const vf scale = S == NO_SCALES ? vf{} : halves(w.scales + at + n);
    const vf low = S == SCALES_AND_MINS ? halves(w.mins + at + n) / splat(float(w.zero)) : vf{};
    for (int64_t r = 0; r < rows; ++r) {
#ifdef BATON_MUTATION_AMX_START
      const int32_t start = starts[0];  // a planted bug: every row takes the first one's
#else
      const int32_t start = starts[r * groups];
#endif
      float* to = out + r * kPanel + n;
      const vf exact = to_float(load_words(whole + r * kPanel + n) + splat_word(start)), before = first ? vf{} : load(to);
      vf total = S == NO_SCALES ? exact + before : fma(exact, scale, before);
      if (S == SCALES_AND_MINS) total = fma(low, splat(float(start)), total);
      store(to, total);
    }
  }
}

}  // namespace baton
#endif

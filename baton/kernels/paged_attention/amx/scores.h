// Scores by AMX tiles: rows of q, in words (words.h), by the words of 32 keys. Knows nothing of values. Included by the
// folder's scores.h alone.
#pragma once
#include "few_scores.h"

#if BATON_AMX

namespace baton {
namespace {

constexpr int kAmxQueries = 8;  // rows from which on int8 goes by tiles; fewer wait for memory, and are read by VNNI as they lie

// Rows beside bf16 go by tiles or by what comes to the same bits (few_scores.h); sums of int8 are exact, by tiles or not.
template <int T>
bool by_tiles(const Call& c, const Rows& r) {
  if constexpr (!in_parts<T>()) return false;
  if constexpr (T == KV_BF16) return !are_few(c, r);
  return !BATON_AVX512 || r.rows(c) >= kAmxQueries;
}

// Rows of a tile: all tiles have as many.
inline int rows_of_tile(int rows) {
  const int tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
  return (rows + tiles - 1) / tiles;
}

// One page's K of one head, keys in lanes: transposed[word][column …] of TILE columns, in whole steps of 16 words.
template <int T>
void transpose_for_tiles(const Call& c, const char* keys, int head, int32_t* transposed, const char* ahead) {
  const KvPlane shape{c.kv.kv_heads, c.kv.head_dim};
  const char* rows = keys + shape.row<T>(0, head);
  for (int left = c.kv.head_dim * kv_bytes<T>(); left > 0; left -= 64, rows += 64, ahead += LANES * 64, transposed += LANES * TILE) {
    vi words[LANES];
    transpose_rows(rows, shape.row<T>(1, 0), left, words);
    for (int w = 0; w < LANES; w++) {
      if (4 * w < left) fetch(ahead + w * 64);
      std::memcpy(transposed + w * TILE, &words[w], 64);
    }
  }
}

BATON_INLINE void zero_tiles() {
  tile_fence();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

// Adds `steps` of two parts of rows, 64 bytes each, by two times sixteen columns to tiles 0 and 1 (of the high part), 2 and 3 (of the
// low one). `row`: bytes from row to row; `step`, `columns`: bytes from a step's columns to the next one's, and to the others.
template <TileProduct P>
BATON_INLINE void add_parts(const char* high, const char* low, int64_t row, const char* by, int64_t word, int64_t step, int64_t columns,
                            int steps) {
  zero_tiles();
  for (int s = 0; s < steps; s++, high += TILE_BYTES, low += TILE_BYTES, by += step) {
    _tile_loadd(4, high, row);
    _tile_loadd(6, by, word);
    BATON_TILE_PRODUCT(P, 0, 4, 6);
    _tile_loadd(7, by + columns, word);
    BATON_TILE_PRODUCT(P, 1, 4, 7);
#ifdef BATON_MUTATION_AMX_LOW
    _tile_loadd(5, high, row);  // a planted bug: the low part is the high one's
#else
    _tile_loadd(5, low, row);
#endif
    BATON_TILE_PRODUCT(P, 2, 5, 6);
    BATON_TILE_PRODUCT(P, 3, 5, 7);
  }
}

// Adds the same of rows of one part: every other step to tiles 0 and 1, those between to 2 and 3, since four sums wait less for each
// other than two. Both are added at the end, so it is the same which of them begins.
BATON_INLINE void add_steps_in_turn(const char* rows, int64_t row, const char* by, int64_t word, int64_t step, int64_t columns,
                                    int steps) {
  zero_tiles();
  const auto odd = [&] {
    _tile_loadd(5, rows, row);
    _tile_loadd(6, by, word);
    BATON_TILE_PRODUCT(TILE_BF16, 2, 5, 6);
    _tile_loadd(7, by + columns, word);
    BATON_TILE_PRODUCT(TILE_BF16, 3, 5, 7);
    rows += TILE_BYTES, by += step;
  };
  const auto even = [&] {
    _tile_loadd(4, rows, row);
    _tile_loadd(6, by, word);
    BATON_TILE_PRODUCT(TILE_BF16, 0, 4, 6);
    _tile_loadd(7, by + columns, word);
    BATON_TILE_PRODUCT(TILE_BF16, 1, 4, 7);
    rows += TILE_BYTES, by += step;
  };
  for (int s = 0; s < steps; s += 2) {
    even();
    if (s + 1 < steps) odd();
  }
}

// The four tiles, 1,024 bytes apart.
BATON_INLINE void store_parts(char* products) {
  _tile_stored(0, products, TILE_BYTES);
  _tile_stored(1, products + 1024, TILE_BYTES);
  _tile_stored(2, products + 2048, TILE_BYTES);
  _tile_stored(3, products + 3072, TILE_BYTES);
  tile_fence();
}

// Both parts' products, or both sums, of one row with sixteen columns, as `joined` and `settle` have them.
template <int T>
BATON_INLINE vf both_parts(const char* products, int row, int columns, float step) {
  const char *up = products + columns * 1024 + row * TILE_BYTES, *down = up + 2048;
  if constexpr (T == KV_BF16) return load(up) + load(down);
  return fma(to_float(load_words(up)), splat(256.0f), to_float(load_words(down))) * splat(step);
}

// scores[r][0..31] = q[r] · the tile's keys, times the keys' scales, for all rows of one head, the first being `first`.
template <int T>
void score_in_tiles(const Call& c, Rows& r, int first, const vf (&scales)[2], float* scores) {
  const int rows = r.rows(c), each = rows_of_tile(rows), words = part_words(c, kv_bytes<T>());
  for (int at = 0; at < rows; at += each) {
    const int64_t begin = int64_t(first + at) * words;
    const char *high = (const char*)(r.high + begin), *keys = (const char*)r.transposed;
    if constexpr (T == KV_BF16)
      add_steps_in_turn(high, words * 4, keys, TILE * 4, LANES * TILE * 4, 64, words / LANES);
    else
      add_parts<TILE_S8_S8>(high, (const char*)(r.low + begin), words * 4, keys, TILE * 4, LANES * TILE * 4, 64, words / LANES);
    store_parts(r.products);
    for (int i = 0; i < each && at + i < rows; i++)
      for (int half = 0; half < 2; half++)
        store(scores + (at + i) * SPLIT + half * LANES,
              both_parts<T>(r.products, i, half, T == KV_INT8 ? r.steps[first + at + i] : 0) * scales[half]);
  }
}

}  // namespace
}  // namespace baton
#endif

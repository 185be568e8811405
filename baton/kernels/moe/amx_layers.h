// The layers of bf16 experts by AMX tiles, whatever the rows: sixteen outputs' weights as they lie by sixteen rows of one expert.
// Knows nothing of routes. Included by cpu.cpp alone.
//
//   rows for tiles:  [sixteen places of an expert][step of 32 inputs][pair of inputs][place] of two bf16, zeros past k and the last
#pragma once
#include <algorithm>
#include <vector>

#include "../abi/amx.h"
#include "../abi/threads.h"

#if BATON_AMX
namespace baton {
namespace {

constexpr int64_t AMX_INPUTS = 32;  // of a step

// Rows at the places begin … begin + count - 1, which are one expert's.
struct ExpertRows {
  int32_t expert;
  int64_t begin, count, tile;  // tile: the number of its first sixteen

  int64_t tiles() const { return (count + TILE_ROWS - 1) / TILE_ROWS; }
};

struct AmxPlaces {
  int64_t k, steps;
  char* at;

  int64_t bytes() const { return steps * TILE_ROWS * TILE_BYTES; }  // of sixteen places
  const char* tile(int64_t which) const { return at + which * bytes(); }

  // A row, to one of a tile's places; null: nothing is there.
  void deal(const float* row, char* to) const {
    for (int64_t i = 0; i < steps * AMX_INPUTS; i += 2, to += TILE_BYTES) {
      const uint32_t low = row && i < k ? to_bf16(row[i]) : 0, high = row && i + 1 < k ? to_bf16(row[i + 1]) : 0;
      const uint32_t pair = low | high << 16;
      std::memcpy(to, &pair, 4);
    }
  }
};

// Sixteen rows of weights, of which `count` are there.
struct WeightRows {
  const char* at;
  int64_t stride, count;  // bytes from row to row

  // A step's 64 bytes of each; where they don't all belong to it, copied, with zeros beside them.
  const char* step(int64_t s, int64_t k, char* copy, int64_t& apart) const {
    const char* from = at + s * TILE_BYTES;
    const int64_t bytes = std::min<int64_t>(TILE_BYTES, (k - s * AMX_INPUTS) * 2);
    apart = stride;
    if (count == TILE_ROWS && bytes == TILE_BYTES) return from;
    apart = TILE_BYTES;
    std::memset(copy, 0, TILE_ROWS * TILE_BYTES);
#ifdef BATON_MUTATION_AMX_EXPERT
    for (int64_t r = 0; r < count && bytes == TILE_BYTES; ++r) std::memcpy(copy + r * TILE_BYTES, from + r * stride, size_t(bytes));
#else
    for (int64_t r = 0; r < count; ++r) std::memcpy(copy + r * TILE_BYTES, from + r * stride, size_t(bytes));
#endif
    return copy;
  }
};

// Two times sixteen outputs by two tiles of places: sums [output][place] of 1,024 bytes each, the second tile's behind the first's.
inline void expert_products(const WeightRows& first, const WeightRows& second, const AmxPlaces& places, const char* x, const char* next,
                            float* sums) {
  alignas(64) char copies[2][TILE_ROWS * TILE_BYTES];
  int64_t apart, other;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t s = 0; s < places.steps; ++s, x += TILE_ROWS * TILE_BYTES, next += TILE_ROWS * TILE_BYTES) {
    const char *a = first.step(s, places.k, copies[0], apart), *b = second.step(s, places.k, copies[1], other);
    asm volatile("" ::"r"(copies) : "memory");
    _tile_loadd(4, a, apart);
    _tile_loadd(6, x, TILE_BYTES);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, next, TILE_BYTES);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, b, other);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
    tile_fence();
  }
  _tile_stored(0, sums, TILE_BYTES);
  _tile_stored(1, sums + 256, TILE_BYTES);
  _tile_stored(2, sums + 512, TILE_BYTES);
  _tile_stored(3, sums + 768, TILE_BYTES);
  tile_fence();
}

// Deals the experts' rows, row_of(place), and calls put(rows of an expert, output's number among a task's 16, sums of the first
// weights, of the second ones, place) for every output of `outputs` and place. weights(expert, first output) are two times sixteen.
template <class RowOf, class Weights, class Put>
void expert_layer(const std::vector<ExpertRows>& all, int64_t k, int64_t tasks_each, RowOf&& row_of, Weights&& weights, Put&& put) {
  AmxPlaces places{k, (k + AMX_INPUTS - 1) / AMX_INPUTS, nullptr};
  const int64_t tiles = all.empty() ? 0 : all.back().tile + all.back().tiles();
  places.at = (char*)scratch(SCRATCH_STEP, size_t(tiles * places.bytes() + 64));
  parallel_for(int32_t(all.size()), [&](int32_t which) {
    const ExpertRows& e = all[size_t(which)];
    for (int64_t i = 0; i < e.tiles() * TILE_ROWS; ++i)
      places.deal(i < e.count ? row_of(e.begin + i) : nullptr, places.at + (e.tile + i / TILE_ROWS) * places.bytes() + i % TILE_ROWS * 4);
  });
  parallel_for(int32_t(int64_t(all.size()) * tasks_each), [&](int32_t task) {
    const ExpertRows& e = all[size_t(task / tasks_each)];
    const TileUse tiles_of_thread(TILE_ROWS);
    alignas(64) float sums[4 * 256];
    const auto pair = weights(e.expert, task % tasks_each);
    for (int64_t t = 0; t < e.tiles(); t += 2) {
      const bool two = t + 1 < e.tiles();
      expert_products(pair.first, pair.second, places, places.tile(e.tile + t), places.tile(e.tile + t + two), sums);
      for (int64_t i = t * TILE_ROWS; i < std::min(e.count, (t + 1 + two) * TILE_ROWS); ++i) {
        const int64_t side = i / TILE_ROWS - t, lane = i % TILE_ROWS;
        for (int64_t n = 0; n < TILE_ROWS; ++n)
          put(e, task % tasks_each, n, sums[side * 256 + n * 16 + lane], sums[512 + side * 256 + n * 16 + lane], e.begin + i);
      }
    }
  });
}

}  // namespace
}  // namespace baton
#endif

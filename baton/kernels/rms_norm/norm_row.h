// The norm of one row or head. Knows nothing of where it lies.
#pragma once
#include "../abi/vector.h"

namespace baton {

// Eight squares at a time.
constexpr int SQUARES = 8, COLUMNS = 4, LEVELS = 4, RUN = 16;
typedef float vs __attribute__((vector_size(32)));

BATON_INLINE vs squares_at(const float* x) {
  vs v;
  std::memcpy(&v, x, sizeof v);
  return v * v;
}

// The squares summed where torch's `pow(2).sum(-1)` rounds (SumKernel.cpp): four columns of vectors; a level takes
// sixteen of the level below before it moves up; then the columns, the tail and the lanes, each in order. A row's norm
// scales all of it, so a last bit here would part every value from theirs.
BATON_INLINE float sum_of_squares(const float* x, int n) {
  const int vectors = n / SQUARES, rows = vectors / COLUMNS;
  vs sums[LEVELS][COLUMNS] = {};
  int row = 0;
  while (row + RUN <= rows) {
    for (int i = 0; i < RUN; i++, row++)
      for (int c = 0; c < COLUMNS; c++) sums[0][c] += squares_at(x + (row * COLUMNS + c) * SQUARES);
    for (int level = 1, full = 0; level < LEVELS && !full; level++) {
      for (int c = 0; c < COLUMNS; c++) sums[level][c] += sums[level - 1][c], sums[level - 1][c] = vs{};
      full = row & ((RUN - 1) << (4 * level));
    }
  }
  for (; row < rows; row++)
    for (int c = 0; c < COLUMNS; c++) sums[0][c] += squares_at(x + (row * COLUMNS + c) * SQUARES);
  for (int level = 1; level < LEVELS; level++)
    for (int c = 0; c < COLUMNS; c++) sums[0][c] += sums[level][c];
  for (int i = rows * COLUMNS; i < vectors; i++) sums[0][0] += squares_at(x + i * SQUARES);
  for (int c = 1; c < COLUMNS; c++) sums[0][0] += sums[0][c];
  float total = 0;
  for (int i = vectors * SQUARES; i < n; i++) total += x[i] * x[i];
  for (int lane = 0; lane < SQUARES; lane++) total += sums[0][0][lane];
  return total;
}

// to = x / sqrt(mean(x²) + eps) x weight; to may be x.
BATON_INLINE void norm_row(const float* x, const float* weight, float eps, int n, float* to) {
  const float mean = sum_of_squares(x, n) / float(n);
#if defined(BATON_MUTATION_NORM)
  const vf scale = splat(1.0f / std::sqrt(mean));
#else
  const vf scale = splat(1.0f / std::sqrt(mean + eps));
#endif
  for (int i = 0; i < n; i += LANES)
    store_part(to + i, load_part(x + i, n - i) * scale * load_part(weight + i, n - i), n - i);
}

// x += delta unless that is null; to = the norm of it, unless `to` is null.
BATON_INLINE void add_and_norm(float* x, const float* delta, const float* weight, float eps, int64_t n, float* to) {
  if (delta)
    for (int64_t i = 0; i < n; i++) x[i] += delta[i];
  if (to) norm_row(x, weight, eps, int(n), to);
}

}  // namespace baton

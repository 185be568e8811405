// Rows dealt out among threads. Knows nothing of what is done with them. On a CPU alone.
#pragma once
#include "threads.h"

namespace baton {

constexpr int64_t FEW_FLOATS = 16384;  // to wake a thread for fewer takes longer than they do

// f(row) for each of `rows` rows of about `n` floats: on the caller's thread alone where they are few.
template <class F>
inline void for_rows(int64_t rows, int64_t n, F&& f) {
  const int32_t parts = rows * n < FEW_FLOATS ? 1 : int32_t(rows < 4 * threads() ? rows : 4 * threads());
  parallel_for(parts, [&](int32_t task) {
    const Range range = part(rows, 1, parts, task);
    for (int64_t row = range.begin; row < range.end; row++) f(row);
  });
}

}  // namespace baton

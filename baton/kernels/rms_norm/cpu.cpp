// One pass for the sum and its mean square, one for the scale; a row's lanes are summed in one order.
#include "rms_norm.h"

#include "../abi/threads.h"
#include "norm_row.h"
#include "part.h"

BATON_API void baton_rms_norm(float* x, const float* delta, const float* weight, float eps, int64_t rows,
                              int64_t hidden, float* out) {
  using namespace baton;
  const int32_t parts = rows * hidden < 16384 ? 1 : int32_t(rows < 4 * threads() ? rows : 4 * threads());
  parallel_for(parts, [&](int32_t task) {
    const Range range = part(rows, 1, parts, task);
    for (int64_t at = range.begin * hidden; at < range.end * hidden; at += hidden)
      add_and_norm(x + at, delta ? delta + at : nullptr, weight, eps, hidden, out ? out + at : nullptr);
  });
}

BATON_API void baton_norm_part(float* x, int64_t stride, int64_t rows, int64_t n, const float* weight, float eps) {
  using namespace baton;
  const int32_t parts = rows * n < 16384 ? 1 : int32_t(rows < 4 * threads() ? rows : 4 * threads());
  parallel_for(parts, [&](int32_t task) {
    const Range range = part(rows, 1, parts, task);
#if defined(BATON_MUTATION_NORM_PART)
    for (int64_t row = range.begin; row < range.end; row++) norm_row(x + row * n, weight, eps, int(n), x + row * n);
#else
    for (int64_t row = range.begin; row < range.end; row++) norm_row(x + row * stride, weight, eps, int(n), x + row * stride);
#endif
  });
}

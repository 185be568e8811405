// One pass for the sum and its mean square, one for the scale; a row's lanes are summed in one order.
#include "rms_norm.h"

#include "../abi/threads.h"
#include "norm_row.h"

BATON_API void baton_rms_norm(float* x, const float* delta, const float* weight, float eps, int64_t rows,
                              int64_t hidden, float* out) {
  using namespace baton;
  const int32_t parts = rows * hidden < 16384 ? 1 : int32_t(rows < 4 * threads() ? rows : 4 * threads());
  parallel_for(parts, [&](int32_t task) {
    const Range range = part(rows, 1, parts, task);
    for (int64_t row = range.begin; row < range.end; row++) {
      float* to = x + row * hidden;
      if (delta)
        for (int64_t i = 0; i < hidden; i++) to[i] += delta[row * hidden + i];
      if (out) norm_row(to, weight, eps, int(hidden), out + row * hidden);
    }
  });
}

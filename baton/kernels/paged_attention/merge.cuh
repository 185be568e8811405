// A block's splits, one after the other, to one result. Included by cuda.cu files.
#pragma once
#include "split.cuh"

namespace baton {
namespace {
namespace attention {

// Splits in order into one: what a block holds in shared memory so far, and its next split.
__device__ void merge_shared(const Call& c, const Rows& r, const Shared& s, bool first) {
  const int d = c.kv.head_dim;
  for (int i = me(); i < r.rows * d; i += THREADS) {
    const int row = i / d;
    const float most = s.whole_most[row], next = s.most[row];
    if (first || most == -INFINITY)
      s.whole[i] = s.result[i];
    else if (next != -INFINITY) {
      const float top = fmaxf(most, next);
      s.whole[i] = s.whole[i] * exp2_fast(most - top) + s.result[i] * exp2_fast(next - top);
    }
  }
  BATON_TEAM_SYNC();
  for (int row = me(); row < r.rows; row += THREADS) {
    const float most = s.whole_most[row], next = s.most[row];
    if (first || most == -INFINITY)
      s.whole_most[row] = next, s.whole_total[row] = s.total[row];
    else if (next != -INFINITY) {
      const float top = fmaxf(most, next);
      s.whole_total[row] = s.whole_total[row] * exp2_fast(most - top) + s.total[row] * exp2_fast(next - top);
      s.whole_most[row] = top;
    }
  }
  BATON_TEAM_SYNC();
}

}  // namespace attention
}  // namespace
}  // namespace baton

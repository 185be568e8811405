// Splits, one after the other, to one result. Included by cuda.cu files.
#pragma once
#include "split.cuh"

namespace baton {
namespace {
namespace attention {

// An element of a row over the splits so far: their largest score, the weights' sum below it, the weighted values' sum.
struct Merged {
  float most = -INFINITY, total = 0, acc = 0;

  __device__ __forceinline__ void add(float his_most, float his_total, float his) {
    if (his_most == -INFINITY && his_total == 0) return;  // it sees none of those keys
    if (most == -INFINITY && total == 0) {
      most = his_most, total = his_total, acc = his;
      return;
    }
    const float top = fmaxf(most, his_most);
#ifdef BATON_MUTATION_CUDA_MERGE
    const float keep = 1.0f, more = exp2_fast(his_most - top);
#else
    const float keep = exp2_fast(most - top), more = exp2_fast(his_most - top);
#endif
    acc = acc * keep + his * more, total = total * keep + his_total * more, most = top;
  }
};

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

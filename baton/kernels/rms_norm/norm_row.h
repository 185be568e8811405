// The norm of one row or head. Knows nothing of where it lies.
#pragma once
#include "../abi/vector.h"

namespace baton {

// to = x / sqrt(mean(x²) + eps) x weight; to may be x.
BATON_INLINE void norm_row(const float* x, const float* weight, float eps, int n, float* to) {
  vf squares{};
  for (int i = 0; i < n; i += LANES) {
    const vf v = load_part(x + i, n - i);
    squares = fma(v, v, squares);
  }
#if defined(BATON_MUTATION_NORM)
  const vf scale = splat(1.0f / std::sqrt(sum(squares) / float(n)));
#else
  const vf scale = splat(1.0f / std::sqrt(sum(squares) / float(n) + eps));
#endif
  for (int i = 0; i < n; i += LANES)
    store_part(to + i, load_part(x + i, n - i) * scale * load_part(weight + i, n - i), n - i);
}

}  // namespace baton

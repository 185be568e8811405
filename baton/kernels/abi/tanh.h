// tanh, and logits and scores capped by it. Knows nothing of ops.
#pragma once
#include "vector.h"

namespace baton {

// tanh x, about two units in the last place: a polynomial near 0 (Cephes' tanhf), else by e^2|x|.
BATON_INLINE vf hyperbolic_tangent(vf x) {
  const vf plain = select(x < vf{}, vf{} - x, x), size = select(plain > splat(10.0f), splat(10.0f), plain), z = x * x;
  const vf far = splat(1.0f) - splat(2.0f) / (exponential(size + size) + splat(1.0f));
  vf p = splat(-5.70498872745e-3f);
  p = fma(p, z, splat(2.06390887954e-2f));
  p = fma(p, z, splat(-5.37397155531e-2f));
  p = fma(p, z, splat(1.33314422036e-1f));
  p = fma(p, z, splat(-3.33332819422e-1f));
  return select(size < splat(0.625f), fma(p * z, x, x), select(x < vf{}, vf{} - far, far));
}

// `cap` x tanh(x / cap): a logit that nears ±cap instead of passing it.
BATON_INLINE vf capped(vf x, float cap) { return hyperbolic_tangent(x / splat(cap)) * splat(cap); }

}  // namespace baton

// Activations of MLPs without a gate, elementwise: a lane's value depends on neither its place nor the rows beside it.
#include "activate.h"

#include "../abi/elements.h"
#include "../abi/rows.h"
#include "../abi/tanh.h"

namespace baton {
namespace {

enum Activation : int32_t { GELU_TANH, RELU, RELU_SQUARED, SILU };

BATON_INLINE vf activated(int32_t kind, vf x) {
  switch (kind) {
    case GELU_TANH: {
      const vf inner = splat(0.79788456080286536f) * (x + splat(0.044715f) * (x * x * x));
      return splat(0.5f) * x * (splat(1.0f) + hyperbolic_tangent(inner));
    }
    case SILU: return silu(x);
    default: {
      const vf most = select(x < vf{}, vf{}, x);
#if defined(BATON_MUTATION_RELU_SQUARED)
      return most;
#else
      return kind == RELU ? most : most * most;
#endif
    }
  }
}

}  // namespace
}  // namespace baton

BATON_API void baton_activate(int32_t kind, const float* x, int64_t rows, int64_t n, float* out, int64_t stride) {
  using namespace baton;
  for_rows(rows, n, [&](int64_t row) {
    for (int64_t i = 0; i < n; i += LANES) {
      const int left = int(n - i < LANES ? n - i : LANES);
      store_part(out + row * stride + i, activated(kind, load_part(x + row * n + i, left)), left);
    }
  });
}

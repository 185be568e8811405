// Activations of MLPs without a gate, elementwise: a lane's value depends on neither its place nor the rows beside it.
#include "../abi/common.h"
#include "../abi/elements.h"
#include "../abi/tanh.h"
#include "../abi/threads.h"

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
      return kind == RELU ? most : most * most;
    }
  }
}

}  // namespace
}  // namespace baton

// out = the activation of x, each (rows, n).
BATON_API void baton_activate(int32_t kind, const float* x, int64_t rows, int64_t n, float* out) {
  using namespace baton;
  const int32_t parts = rows * n < 8192 ? 1 : int32_t(rows < 4 * threads() ? rows : 4 * threads());
  parallel_for(parts, [&](int32_t task) {
    const Range range = part(rows, 1, parts, task);
    for (int64_t i = range.begin * n; i < range.end * n; i += LANES) {
      const int left = int(range.end * n - i < LANES ? range.end * n - i : LANES);
      store_part(out + i, activated(kind, load_part(x + i, left)), left);
    }
  });
}

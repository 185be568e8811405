// Elementwise; a lane's value doesn't depend on its place.
#include "geglu.h"

#include "../abi/tanh.h"
#include "../abi/threads.h"

namespace baton {
namespace {

// x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x³)))
BATON_INLINE vf gelu(vf x) {
#if defined(BATON_MUTATION_GEGLU_CUBE)
  const vf inner = splat(0.79788456080286536f) * x;
#else
  const vf inner = splat(0.79788456080286536f) * (x + splat(0.044715f) * (x * x * x));
#endif
  return splat(0.5f) * x * (splat(1.0f) + hyperbolic_tangent(inner));
}

void row(const float* gate, int64_t inner, float* out) {
  const float* up = gate + inner;
  for (int64_t i = 0; i < inner; i += LANES) {
    const int n = int(inner - i < LANES ? inner - i : LANES);
    store_part(out + i, gelu(load_part(gate + i, n)) * load_part(up + i, n), n);
  }
}

}  // namespace
}  // namespace baton

BATON_API void baton_geglu(const float* gate_up, int64_t rows, int64_t inner, float* out) {
  using namespace baton;
  const int32_t parts = rows * inner < 8192 ? 1 : int32_t(rows < 4 * threads() ? rows : 4 * threads());
  parallel_for(parts, [&](int32_t task) {
    const Range range = part(rows, 1, parts, task);
    for (int64_t i = range.begin; i < range.end; i++) row(gate_up + 2 * i * inner, inner, out + i * inner);
  });
}

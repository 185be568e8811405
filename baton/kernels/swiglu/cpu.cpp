// Elementwise; a lane's value doesn't depend on its place.
#include "strided.h"

#include "../abi/threads.h"
#include "../abi/vector.h"

namespace baton {
namespace {

// x / (1 + e^-x), from e^-|x| so that nothing overflows.
BATON_INLINE vf silu(vf x) {
  const vi negative = x < vf{};
  const vf small = exponential(select(negative, x, vf{} - x));
  return x * select(negative, small, splat(1.0f)) / (splat(1.0f) + small);
}

void row(const float* gate, int64_t inner, float* out) {
  const float* up = gate + inner;
  for (int64_t i = 0; i < inner; i += LANES) {
#if defined(BATON_MUTATION_SWIGLU_TAIL)
    const int n = inner - i < LANES && inner > LANES ? 1 : int(inner - i < LANES ? inner - i : LANES);
#else
    const int n = int(inner - i < LANES ? inner - i : LANES);
#endif
    store_part(out + i, silu(load_part(gate + i, n)) * load_part(up + i, n), n);
  }
}

}  // namespace

void swiglu_into(const float* gate_up, int64_t rows, int64_t inner, float* out, int64_t stride) {
  const int32_t parts = rows * inner < 8192 ? 1 : int32_t(rows < 4 * threads() ? rows : 4 * threads());
  parallel_for(parts, [&](int32_t task) {
    const Range range = part(rows, 1, parts, task);
    for (int64_t i = range.begin; i < range.end; i++) row(gate_up + 2 * i * inner, inner, out + i * stride);
  });
}

}  // namespace baton

BATON_API void baton_swiglu(const float* gate_up, int64_t rows, int64_t inner, float* out) {
  baton::swiglu_into(gate_up, rows, inner, out, inner);
}

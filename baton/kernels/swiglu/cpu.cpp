// Elementwise; a lane's value doesn't depend on its place.
#include "strided.h"

#include "../abi/threads.h"
#include "lanes.h"

namespace baton {
namespace {

void row(const float* gate, int64_t inner, float* out) {
  const float* up = gate + inner;
  for (int64_t i = 0; i < inner; i += LANES) {
#if defined(BATON_MUTATION_SWIGLU_TAIL)
    const int n = inner - i < LANES && inner > LANES ? 1 : int(inner - i < LANES ? inner - i : LANES);
#else
    const int n = int(inner - i < LANES ? inner - i : LANES);
#endif
    store_part(out + i, gated_by(load_part(gate + i, n), load_part(up + i, n)), n);
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

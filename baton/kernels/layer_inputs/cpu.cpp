// A row at a time, each by itself. Lanes are summed in one order, without fused multiply-adds, so that each ISA comes to the
// same bits.
#include "layer_inputs.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "../abi/rows.h"
#include "../abi/tanh.h"
#include "../embedding/embedding.h"
#include "../rms_norm/norm_row.h"

namespace baton {
namespace {

constexpr float HALF_ROOT = 0.70710678118654752f;  // 1 / sqrt(2)

int lanes_left(int64_t n, int64_t at) { return int(std::min<int64_t>(n - at, LANES)); }

BATON_INLINE vf gelu(vf x) {
  const vf inner = splat(0.79788456080286536f) * (x + splat(0.044715f) * (x * x * x));
  return splat(0.5f) * x * (splat(1.0f) + hyperbolic_tangent(inner));
}

float mean_of(const float* x, int64_t n) {
  vf sums{};
  for (int64_t i = 0; i < n; i += LANES) sums = sums + load_part(x + i, lanes_left(n, i));
  return sum(sums) / float(n);
}

float deviation_of(const float* x, int64_t n, float mean) {
  vf sums{};
  for (int64_t i = 0; i < n; i += LANES) {
    const vf off = load_part(x + i, lanes_left(n, i), mean) - splat(mean);
    sums = sums + off * off;
  }
  return std::sqrt(sum(sums) / float(n));
}

}  // namespace
}  // namespace baton

BATON_API void baton_layer_inputs(const baton::LayerInputs* op, const int32_t* tokens, int64_t rows, const float* x, float* out) {
  using namespace baton;
  const int64_t total = op->layers * op->width;
  for_rows(rows, total, [&](int64_t row) {
#if defined(BATON_MUTATION_INPUTS_UNKNOWN)
    const int32_t token = std::min<int32_t>(tokens[row], int32_t(op->table_rows) - 1);
#else
    const int32_t token = tokens[row] < op->table_rows ? tokens[row] : 0;
#endif
    float* looked_up = (float*)scratch(SCRATCH_TASK, size_t(total) * 4);
    baton_embedding(&token, 1, op->table, op->dtype, total, looked_up);
    for (int64_t first = 0; first < total; first += op->width)
      norm_row(x + row * total + first, op->norm, op->eps, int(op->width), out + row * total + first);
    for (int64_t i = 0; i < total; i++) out[row * total + i] = (out[row * total + i] + looked_up[i] * op->scale) * HALF_ROOT;
  });
}

BATON_API void baton_gate_inputs(const float* x, int64_t rows, int64_t n, const float* inputs, int64_t total, int64_t first, float* out) {
  using namespace baton;
  for_rows(rows, n, [&](int64_t row) {
    for (int64_t i = 0; i < n; i += LANES) {
      const int left = lanes_left(n, i);
      store_part(out + row * n + i, gelu(load_part(x + row * n + i, left)) * load_part(inputs + row * total + first + i, left), left);
    }
  });
}

BATON_API void baton_sparsen(const float* x, int64_t rows, int64_t inner, float deviations, float* out) {
  using namespace baton;
  for_rows(rows, 2 * inner, [&](int64_t row) {
    const float *gate = x + row * 2 * inner, mean = mean_of(gate, inner);
#if defined(BATON_MUTATION_SPARSEN_MEAN)
    const vf cut = splat(deviations * deviation_of(gate, inner, mean));
#else
    const vf cut = splat(mean + deviations * deviation_of(gate, inner, mean));
#endif
    float* to = out + row * 2 * inner;
    for (int64_t i = 0; i < inner; i += LANES) {
      const int left = lanes_left(inner, i);
      const vf over = load_part(gate + i, left) - cut;
      store_part(to + i, select(over < vf{}, vf{}, over), left);
    }
    if (to != gate) std::memcpy(to + inner, gate + inner, size_t(inner) * 4);
  });
}

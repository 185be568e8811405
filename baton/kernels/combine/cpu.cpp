#include "gates.h"

#include "../abi/elements.h"
#include "../abi/rows.h"

BATON_API void baton_combine(const float* mixed, const float* factor, const float* shared, const float* gate, int64_t rows, int64_t n,
                             float* out) {
  using namespace baton;
  parallel_for(int32_t(rows), [&](int32_t row) {
    const vf by = splat(factor ? factor[row] : 1.0f), open = gate ? sigmoid(splat(gate[row])) : splat(1.0f);
    const float *a = mixed + row * n, *b = shared + row * n;
    for (int64_t i = 0; i < n; i += LANES) {
      const int left = int(n - i < LANES ? n - i : LANES);
#if defined(BATON_MUTATION_COMBINE_GATE)
      const vf other = load_part(b + i, left);
#else
      const vf other = load_part(b + i, left) * open;
#endif
      store_part(out + row * n + i, load_part(a + i, left) * by + other, left);
    }
  });
}

BATON_API void baton_gate(const float* x, const float* gate, int64_t rows, int64_t n, float* out) {
  using namespace baton;
  parallel_for(int32_t(rows), [&](int32_t row) {
    for (int64_t at = row * n, i = 0; i < n; i += LANES) {
      const int left = int(n - i < LANES ? n - i : LANES);
      store_part(out + at + i, sigmoid(load_part(gate + at + i, left)) * load_part(x + at + i, left), left);
    }
  });
}

BATON_API void baton_gated_heads(const float* x, int64_t rows, int64_t heads, int64_t width, int64_t rest, float* out, float* gate) {
  using namespace baton;
  parallel_for(int32_t(rows), [&](int32_t row) {
    const float* from = x + row * (2 * heads * width + rest);
    float *to = out + row * (heads * width + rest), *beside = gate + row * heads * width;
    for (int64_t h = 0; h < heads; h++) {
      std::memcpy(to + h * width, from + 2 * h * width, size_t(width) * 4);
      std::memcpy(beside + h * width, from + (2 * h + 1) * width, size_t(width) * 4);
    }
    std::memcpy(to + heads * width, from + 2 * heads * width, size_t(rest) * 4);
  });
}

BATON_API void baton_scale_rows(const float* x, const float* factor, int64_t rows, int64_t n, float* out) {
  using namespace baton;
  for_rows(rows, n, [&](int64_t row) {
    for (int64_t i = row * n; i < (row + 1) * n; i++) out[i] = x[i] * factor[row];
  });
}

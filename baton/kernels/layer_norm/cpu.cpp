// A row is read for its mean, then for its variance, then to be written. Its lanes are summed in one order, without fused
// multiply-adds, so that each ISA comes to the same bits.
#include "layer_norm.h"

#include <algorithm>

#include "../abi/rows.h"
#include "../abi/vector.h"

namespace baton {
namespace {

constexpr int CHAINS = 4;  // sums side by side, none of which waits for another

int lanes_left(int64_t n, int64_t at) { return int(std::min<int64_t>(n - at, LANES)); }

// Sums term(i), the lanes of places i … i + 15, over a row of n.
template <class Term>
float total(int64_t n, Term&& term) {
  vf sums[CHAINS] = {};
  int64_t i = 0;
  for (; i + CHAINS * LANES <= n; i += CHAINS * LANES)
    for (int c = 0; c < CHAINS; c++) sums[c] = sums[c] + term(i + c * LANES);
  for (int c = 0; i < n; i += LANES, c++) sums[c] = sums[c] + term(i);
  return sum((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

float mean_of(const float* x, int64_t n) {
  return total(n, [&](int64_t i) { return load_part(x + i, lanes_left(n, i)); }) / float(n);
}

float variance_of(const float* x, int64_t n, float mean) {
  const vf by = splat(mean);
  return total(n, [&](int64_t i) {
           const vf off = load_part(x + i, lanes_left(n, i), mean) - by;
           return off * off;
         }) / float(n);
}

void norm(const float* x, int64_t n, const float* weight, const float* bias, float eps, float* out) {
  const float mean = mean_of(x, n);
#if defined(BATON_MUTATION_LAYER_NORM_EPS)
  const vf by = splat(mean), scale = splat(1.0f / std::sqrt(variance_of(x, n, mean)));
#else
  const vf by = splat(mean), scale = splat(1.0f / std::sqrt(variance_of(x, n, mean) + eps));
#endif
  for (int64_t i = 0; i < n; i += LANES) {
    const int left = lanes_left(n, i);
    const vf normed = (load_part(x + i, left) - by) * scale * load_part(weight + i, left);
    store_part(out + i, bias ? normed + load_part(bias + i, left) : normed, left);
  }
}

}  // namespace
}  // namespace baton

BATON_API void baton_layer_norm(float* x, const float* delta, const float* weight, const float* bias, float eps, int64_t rows, int64_t n,
                                float* out) {
  using namespace baton;
  for_rows(rows, n, [&](int64_t row) {
    float* own = x + row * n;
    for (int64_t i = 0; delta && i < n; i++) own[i] += delta[row * n + i];
    norm(own, n, weight, bias, eps, out + row * n);
  });
}

BATON_API void baton_center(const float* x, int64_t rows, int64_t n, float* out) {
  using namespace baton;
  for_rows(rows, n, [&](int64_t row) {
    const vf mean = splat(mean_of(x + row * n, n));
    for (int64_t i = row * n; i < (row + 1) * n; i += LANES) {
      const int left = lanes_left((row + 1) * n, i);
#if defined(BATON_MUTATION_CENTER_TAIL)
      store_part(out + i, left < LANES ? load_part(x + i, left) : load_part(x + i, left) - mean, left);
#else
      store_part(out + i, load_part(x + i, left) - mean, left);
#endif
    }
  });
}

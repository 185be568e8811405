// A row at a time. Ties go to the expert with the lower number.
#include "route_two.h"

#include <algorithm>
#include <cmath>

#include "../abi/rows.h"

namespace baton {
namespace {

// The best expert but `without` (-1: none), and its weight among those near it.
int32_t best_of(const float* logits, int32_t experts, float jitter, int32_t without, float* weight) {
  int32_t best = -1;
  for (int32_t e = 0; e < experts; e++)
    if (e != without && (best < 0 || logits[e] > logits[best])) best = e;
  const float most = logits[best];
  float total = 0;
  for (int32_t e = 0; e < experts; e++) {
#if defined(BATON_MUTATION_ROUTE_TWO_FAR)
    const bool far = false;
#else
    const bool far = (most - logits[e]) / std::max(std::fabs(logits[e]), most) > 2 * jitter;
#endif
    if (e != without && !far) total += std::exp(logits[e] - most);
  }
  *weight = 1.0f / total;
  return best;
}

}  // namespace
}  // namespace baton

BATON_API void baton_route_two(const float* logits, int64_t rows, int32_t experts, float jitter, float* out, float* factor) {
  using namespace baton;
  for_rows(rows, experts, [&](int64_t row) {
    const float* own = logits + row * experts;
    float* to = out + row * experts;
    float first, second;
    const int32_t one = best_of(own, experts, jitter, -1, &first), two = best_of(own, experts, jitter, one, &second);
    std::fill_n(to, experts, -INFINITY);
    to[one] = std::log(first), to[two] = std::log(second), factor[row] = first + second;
  });
}

// A row at a time: experts are few beside what they compute. Ties go to the expert with the lower number.
#include "route.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "../abi/threads.h"

namespace baton {
namespace {

std::vector<float> scores_of(const Route& op, const float* logits) {
  std::vector<float> scores(size_t(op.experts));
  if (op.sigmoid) {
    for (int32_t e = 0; e < op.experts; e++) scores[size_t(e)] = 1.0f / (1.0f + std::exp(-logits[e]));
    return scores;
  }
  const float most = *std::max_element(logits, logits + op.experts);
  float total = 0;
  for (int32_t e = 0; e < op.experts; e++) total += scores[size_t(e)] = std::exp(logits[e] - most);
  for (float& score : scores) score /= total;
  return scores;
}

// The numbers 0 … n - 1, the `first` ones by value before the others.
std::vector<int32_t> best_of(const float* values, int32_t n, int32_t first) {
  std::vector<int32_t> order(static_cast<size_t>(n));
  std::iota(order.begin(), order.end(), 0);
  std::partial_sort(order.begin(), order.begin() + first, order.end(),
                    [&](int32_t a, int32_t b) { return values[a] > values[b] || (values[a] == values[b] && a < b); });
  return order;
}

// -inf outside of the best groups.
void hide_groups(const Route& op, std::vector<float>& ranked) {
  const int32_t each = op.experts / op.groups;
  std::vector<float> merits;
  for (int32_t g = 0; g < op.groups; g++) {
    const float* own = ranked.data() + g * each;
    const std::vector<int32_t> order = best_of(own, each, op.best);
    float merit = 0;
    for (int32_t i = 0; i < op.best; i++) merit += own[order[size_t(i)]];
    merits.push_back(merit);
  }
  const std::vector<int32_t> order = best_of(merits.data(), op.groups, op.kept);
  for (int32_t i = op.kept; i < op.groups; i++)
    std::fill_n(ranked.begin() + order[size_t(i)] * each, each, -INFINITY);
}

float route_row(const Route& op, const float* logits, float* out) {
  const std::vector<float> scores = scores_of(op, logits);
  std::vector<float> ranked = scores;
  for (int32_t e = 0; op.bias && e < op.experts; e++) ranked[size_t(e)] += op.bias[e];
#if !defined(BATON_MUTATION_ROUTE_GROUPS)
  if (op.groups > 1) hide_groups(op, ranked);
#endif
  const std::vector<int32_t> order = best_of(ranked.data(), op.experts, op.chosen);
  std::fill_n(out, op.experts, -INFINITY);
  float total = 0;
  for (int32_t i = 0; i < op.chosen; i++) {
    const int32_t e = order[size_t(i)];
#if defined(BATON_MUTATION_ROUTE_BIAS)
    const float score = ranked[size_t(e)];
#else
    const float score = scores[size_t(e)];
#endif
    out[e] = std::log(score), total += score;
  }
  return (op.renormalise ? 1.0f : total) * op.scale;
}

}  // namespace
}  // namespace baton

BATON_API void baton_route(const baton::Route* op, const float* logits, int64_t rows, float* out, float* factor) {
  using namespace baton;
  parallel_for(int32_t(rows), [&](int32_t row) {
    factor[row] = route_row(*op, logits + int64_t(row) * op->experts, out + int64_t(row) * op->experts);
  });
}

// A row at a time, each by itself.
#include "halve_heads.h"

#include <cmath>
#include <cstring>

#include "../abi/rows.h"

namespace baton {
namespace {

// The even ones of `paired` numbers, then the odd ones; out may be x.
void halve(const float* x, int64_t paired, float* out) {
  float* pairs = (float*)scratch(SCRATCH_TASK, size_t(paired) * 4);
  std::memcpy(pairs, x, size_t(paired) * 4);
#if defined(BATON_MUTATION_HALVE_ODD)
  for (int64_t i = 0; i < paired / 2; i++) out[i] = pairs[2 * i], out[paired / 2 + i] = pairs[2 * i];
#else
  for (int64_t i = 0; i < paired / 2; i++) out[i] = pairs[2 * i], out[paired / 2 + i] = pairs[2 * i + 1];
#endif
}

}  // namespace
}  // namespace baton

BATON_API void baton_halve_heads(const float* x, int64_t rows, int64_t total, int64_t heads, int64_t width, int64_t paired, float* out) {
  using namespace baton;
  for_rows(rows, total, [&](int64_t row) {
    const float* from = x + row * total;
    float* to = out + row * total;
    if (to != from) std::memcpy(to, from, size_t(total) * 4);
    for (int64_t h = 0; h < heads; h++) halve(to + h * width, paired, to + h * width);
  });
}

BATON_API void baton_temper_queries(const baton::Tempering* op, const baton::AttentionItem* items, int32_t count, int64_t total,
                                    int64_t queries, float* x) {
  for (int32_t item = 0; item < count; item++)
    for (int32_t at = 0; at < items[item].queries; at++) {
#if defined(BATON_MUTATION_TEMPER_SHIFT)
      const float steps = std::floor(float(items[item].start + at) / op->floor);
#else
      const float steps = std::floor(float(items[item].start + at + op->shift) / op->floor);
#endif
      const float factor = 1.0f + op->scale * std::log1p(steps);
      float* row = x + (items[item].first + at) * total;
      for (int64_t i = 0; i < queries && factor != 1.0f; i++) row[i] *= factor;
    }
}

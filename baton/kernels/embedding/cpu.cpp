// A copy, widened.
#include "embedding.h"

namespace {

constexpr int32_t F16 = 2;  // of a table on a CPU, beside common.h's Dtype

float element(const void* table, int32_t dtype, size_t at) {
  return dtype == F16 ? baton::from_fp16(static_cast<const baton::fp16*>(table)[at]) : baton::load(table, dtype, at);
}

}  // namespace

BATON_API void baton_embedding(const int32_t* tokens, int64_t rows, const void* table, int32_t dtype, int64_t hidden,
                               float* out) {
  for (int64_t row = 0; row < rows; row++)
#if defined(BATON_MUTATION_EMBEDDING_DTYPE)
    for (int64_t i = 0; i < hidden; i++) out[row * hidden + i] = baton::load(table, baton::F32, tokens[row] * hidden / 2 + i);
#else
    for (int64_t i = 0; i < hidden; i++) out[row * hidden + i] = element(table, dtype, tokens[row] * hidden + i);
#endif
}

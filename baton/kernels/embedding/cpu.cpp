// A copy, widened.
#include "embedding.h"

BATON_API void baton_embedding(const int32_t* tokens, int64_t rows, const void* table, int32_t dtype, int64_t hidden,
                               float* out) {
  for (int64_t row = 0; row < rows; row++)
#if defined(BATON_MUTATION_EMBEDDING_DTYPE)
    for (int64_t i = 0; i < hidden; i++) out[row * hidden + i] = baton::load(table, baton::F32, tokens[row] * hidden / 2 + i);
#else
    for (int64_t i = 0; i < hidden; i++) out[row * hidden + i] = baton::load(table, dtype, tokens[row] * hidden + i);
#endif
}

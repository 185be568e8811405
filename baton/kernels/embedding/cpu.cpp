// A copy, widened.
#include "embedding.h"

BATON_API void baton_embedding(const int32_t* tokens, int64_t rows, const void* table, int32_t dtype, int64_t hidden,
                               float* out) {
  for (int64_t row = 0; row < rows; row++)
    for (int64_t i = 0; i < hidden; i++) out[row * hidden + i] = baton::load(table, dtype, tokens[row] * hidden + i);
}

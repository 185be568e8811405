// Token ids to rows of a table. Knows nothing of vocabularies' meaning.
#pragma once
#include "../abi/common.h"

// table (vocab, hidden) of `dtype` -> out (rows, hidden) float. Ids are in range: the caller has checked.
BATON_API void baton_embedding(const int32_t* tokens, int64_t rows, const void* table, int32_t dtype, int64_t hidden,
                               float* out);

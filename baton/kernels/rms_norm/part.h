// The norm of some columns of each row, in place. Knows nothing of what they are. On a CPU alone.
#pragma once
#include "../abi/common.h"

// x: the first row's first column of the n; rows are `stride` floats apart.
BATON_API void baton_norm_part(float* x, int64_t stride, int64_t rows, int64_t n, const float* weight, float eps);

// Experts whose matrices are packed (../linear/linear.h), on a CPU alone. Knows nothing of rows.
#pragma once
#include "../dense/dense.h"
#include "moe.h"

namespace baton {

// Moe.dtype. gate_up and down then point to a PackedLinear each, that of all experts: each expert begins with a panel.
constexpr int32_t MOE_PACKED = 100;

// One expert's, which has `rows` outputs.
inline PackedLinear expert_of(const uint16_t* all, int32_t expert, int64_t rows) {
  const int64_t count = (rows + 63) / 64;
  PackedLinear found = panels(*(const PackedLinear*)all, expert * count, count);
  found.n = rows;
  return found;
}

}  // namespace baton

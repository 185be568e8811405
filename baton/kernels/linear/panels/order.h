// Integers whose inputs lie in another order (GPTQ's act-order): rows of activations are put into it first. Knows nothing of
// tiles.
#pragma once

#include <vector>

#include "../../abi/threads.h"
#include "narrow_forms.h"

namespace baton {

// What `mins` of the struct points to.
struct Order {
  const fp16* mins;       // as of W8 and W4
  const int32_t* inputs;  // [k]: which input each column multiplies
};

inline const Order& order_of(const PackedLinear& w) { return *(const Order*)w.mins; }

// x (m, k) -> rows of floats in the weight's order.
inline std::vector<float> in_order(const PackedLinear& w, const void* x, int32_t dtype, int64_t stride, int64_t m) {
  const int32_t* inputs = order_of(w).inputs;
  std::vector<float> rows(size_t(m * w.k));
  parallel_for(int32_t(m), [&](int32_t r) {
    const char* row = (const char*)x + r * stride * (dtype == BF16 ? 2 : 4);
#ifdef BATON_MUTATION_LINEAR_ORDER
    for (int64_t i = 0; i < w.k; ++i) rows[size_t(r * w.k + i)] = load(row, dtype, r ? i : inputs[i]);  // the first row alone
#else
    for (int64_t i = 0; i < w.k; ++i) rows[size_t(r * w.k + i)] = load(row, dtype, inputs[i]);
#endif
  });
  return rows;
}

}  // namespace baton

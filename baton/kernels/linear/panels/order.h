// Integers whose inputs lie in another order (GPTQ's act-order): rows of activations are put into it first. Knows nothing of
// tiles.
#pragma once

#include <vector>

#include "../../abi/threads.h"
#include "narrow_forms.h"

namespace baton {

// Of so many outputs, a panel's or fewer than lie in one order; `mins` of the struct points to the first.
struct Order {
  const fp16* mins;       // as of W8 and W4, from the panel on in which its outputs begin
  const int32_t* inputs;  // [k]: which input each column multiplies
  int64_t rows;           // outputs that have it; of the last one maybe fewer
};

inline const Order* orders_of(const PackedLinear& w) { return (const Order*)w.mins; }

inline bool is_same(const Order& a, const Order& b, int64_t k) {
#ifdef BATON_MUTATION_LINEAR_ORDERS
  return true;  // all outputs have the last one's
#endif
  return a.inputs == b.inputs || !std::memcmp(a.inputs, b.inputs, size_t(k) * 4);
}

// The panels from `first` on, which begins an order.
inline PackedLinear from_panel(PackedLinear w, int64_t first) {
  const int64_t step = w.group ? w.group : 8, width = (w.k + step - 1) / step * step;
  const int64_t numbers = w.group ? first * (width / w.group) * kPanel : 0;
  w.data = (const char*)w.data + weight_bytes(w, first * kPanel * width);
  if (w.scales) w.scales += numbers;
  if (has_mins(w)) w.mins += numbers;
  if (is_ordered(w.kind)) w.mins = (const fp16*)(orders_of(w) + first * kPanel / orders_of(w)->rows);
  if (w.row_scale) w.row_scale += first * kPanel;
  w.n -= first * kPanel;
  return w;
}

// x (m, k) -> rows of floats in the order.
inline std::vector<float> in_order(const Order& order, int64_t k, const void* x, int32_t dtype, int64_t stride, int64_t m) {
  std::vector<float> rows(size_t(m * k));
  parallel_for(int32_t(m), [&](int32_t r) {
    const char* row = (const char*)x + r * stride * (dtype == BF16 ? 2 : 4);
#ifdef BATON_MUTATION_LINEAR_ORDER
    for (int64_t i = 0; i < k; ++i) rows[size_t(r * k + i)] = load(row, dtype, r ? i : order.inputs[i]);  // the first row alone
#else
    for (int64_t i = 0; i < k; ++i) rows[size_t(r * k + i)] = load(row, dtype, order.inputs[i]);
#endif
  });
  return rows;
}

}  // namespace baton

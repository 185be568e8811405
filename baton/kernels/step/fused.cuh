// Which neighbours of an op program share a launch, and in what form a register's rows go from one to the next. Knows nothing of
// addresses or streams.
//
//   norm, linear        the norm writes rows as the product takes them (bf16, or int8 or e4m3 with a scale each): nobody rounds them
//   linear, SwiGLU      the product's epilogue; its result in bf16 where a product of bf16 weights alone reads it
//
// Only where nobody else reads the register in between: the bits are those of the ops one by one (tests/kernels/cuda/test_fused_step.py).
#pragma once
#include "../moe/adapted.h"
#include "step.h"

namespace baton {

enum RowForm : int32_t { ROWS_F32 = 0, ROWS_INT8 = 1, ROWS_E4M3 = 2, ROWS_BF16 = 3 };  // 1, 2, 3: rms_norm's roundings

constexpr int64_t MOST_ROUNDED_ROWS = 64;  // of more rows the product has its own order for what it rounds

class Fused {
 public:
  // Of ops up to `to` - 1.
  Fused(const Model& model, int64_t rows, int32_t to) : m_(model), rows_(rows), to_(to) {}

  // How the rows that norm `i` writes are to lie for the linear behind it.
  RowForm after_norm(int32_t i) const {
    const Op& norm = m_.ops[i];
    if (!linear_of(i + 1, norm.out) || !is_over(norm.out, i + 2)) return ROWS_F32;
    return form_for(*m_.ops[i + 1].weight, true);
  }

  // Whether linear `i` and the SwiGLU behind it are one launch.
  bool gated(int32_t i) const {
    if (i + 1 >= to_ || m_.ops[i + 1].kind != OP_SWIGLU || m_.ops[i + 1].in != m_.ops[i].out) return false;
    const PackedLinear& w = *m_.ops[i].weight;
    return known(w) && w.n % 32 == 0 && is_over(m_.ops[i].out, i + 2);
  }

  // How the result of a gated linear `i` is to lie for the linear behind both.
  RowForm after_gate(int32_t i) const {
    const int32_t out = m_.ops[i + 1].out;
    if (!linear_of(i + 2, out) || !is_over(out, i + 3)) return ROWS_F32;
    return form_for(*m_.ops[i + 2].weight, false);
  }

 private:
  static constexpr int32_t E4M3_WEIGHTS = 3;  // linear/form.cuh: LINEAR_E4M3

  static bool known(const PackedLinear& w) {
    return w.kind == LINEAR_BF16 || w.kind == LINEAR_W8 || w.kind == LINEAR_W4 || w.kind == E4M3_WEIGHTS;
  }
  bool linear_of(int32_t i, int32_t reg) const { return i < to_ && m_.ops[i].kind == OP_LINEAR && m_.ops[i].in == reg; }

  RowForm form_for(const PackedLinear& w, bool by_norm) const {
    if (w.kind == LINEAR_BF16) return w.k % 8 ? ROWS_F32 : ROWS_BF16;
    if (!known(w) || !by_norm || w.k % 16 || rows_ > MOST_ROUNDED_ROWS) return ROWS_F32;
    return w.kind == E4M3_WEIGHTS ? ROWS_E4M3 : ROWS_INT8;
  }

  static bool reads(const Op& o, int32_t reg) {
    if (o.kind == OP_LORA && o.out == reg) return true;  // it adds
    const bool two = o.kind == OP_RMS_NORM || o.kind == OP_LM_HEAD || o.kind == OP_MOE || o.kind == OP_MOE_ADAPTED;
    return o.kind != OP_EMBED && (o.in == reg || (o.delta == reg && two));
  }
  static bool writes(const Op& o, int32_t reg) { return o.kind != OP_LM_HEAD && o.out == reg; }

  // Whether nobody from op `i` on reads what a register holds. Behind a program's last op, its head, nobody does.
  bool is_over(int32_t reg, int32_t i) const {
#if !defined(BATON_MUTATION_CUDA_STEP_READERS)
    for (; i < to_; i++) {
      if (reads(m_.ops[i], reg)) return false;
      if (writes(m_.ops[i], reg)) return true;
    }
#endif
    return m_.ops[to_ - 1].kind == OP_LM_HEAD;
  }

  const Model& m_;
  const int64_t rows_;
  const int32_t to_;
};

}  // namespace baton

// The interpreter, in C: what engine/interpreter.py does op by op, with no Python between the ops.
#include "forms.h"

#include <vector>

#include "../abi/threads.h"
#include "../embedding/embedding.h"
#include "../geglu/geglu.h"
#include "../lm_head/adapted.h"
#include "../moe/form.h"
#include "../paged_attention/form.h"
#include "../rms_norm/part.h"
#include "../rms_norm/rms_norm.h"
#include "../rope_append/form.h"
#include "../swiglu/swiglu.h"

namespace baton {
namespace {

class Run {
 public:
  Run(const Model& model, const Step& step) : m_(model), s_(step) {
    int64_t at = 0;
    for (int32_t i = 0; i < m_.registers; i++) starts_.push_back(at), at += step.rows * m_.widths[i];
  }

  void op(const Op& o) {
    switch (o.kind) {
      case OP_EMBED: return baton_embedding(s_.tokens, s_.rows, o.table, o.table_dtype, m_.hidden, at(o.out));
      case OP_RMS_NORM:
        return baton_rms_norm(at(o.in), o.delta < 0 ? nullptr : at(o.delta), o.norm, o.eps, s_.rows, m_.hidden, at(o.out));
      case OP_LINEAR: return dense(*o.weight, at(o.in), width(o.in), s_.rows, o.bias, at(o.out), width(o.out));
      case OP_ROPE_APPEND: return rope_append(o);
      case OP_ATTENTION: return attention(o);
      case OP_MOE:
        return baton_moe((const Moe*)o.table, at(o.in), width(o.in), at(o.delta), s_.rows, at(o.out), width(o.out));
      case OP_SWIGLU: return baton_swiglu(at(o.in), s_.rows, width(o.out), at(o.out));
      case OP_LM_HEAD: return head(o, 0);
      default: return form(o);
    }
  }

 private:
  void form(const Op& o) {
    switch (o.kind) {
      case OP_EMBED_SCALED: return scaled_embedding(o);
      case OP_ADD: return baton_rms_norm(at(o.in), at(o.delta), nullptr, 0, s_.rows, m_.hidden, nullptr);
      case OP_NORM_PART: return baton_norm_part(at(o.in) + o.layer, width(o.in), s_.rows, o.window, o.norm, o.eps);
      case OP_ROPE_PART: return rope_part(o);
      case OP_ATTENTION_FORM: return attention_form(o);
      case OP_GEGLU: return baton_geglu(at(o.in), s_.rows, width(o.out), at(o.out));
      case OP_BIASED_MOE:
        return baton_biased_moe((const BiasedMoe*)o.table, at(o.in), width(o.in), at(o.delta), s_.rows, at(o.out), width(o.out));
      case OP_LORA: return adapt(o);
      case OP_LM_HEAD_ADAPTED: return adapted(o);
      default: return head(o, *(const float*)o.table);
    }
  }

  void scaled_embedding(const Op& o) {
    float* out = at(o.out);
    baton_embedding(s_.tokens, s_.rows, o.table, o.table_dtype, m_.hidden, out);
    for (int64_t i = 0; i < s_.rows * m_.hidden; i++) out[i] *= o.eps;
  }

  void rope_part(const Op& o) {
    const PagedKv pages = kv(o);
    baton_rope_append_part(&pages, s_.items, s_.item_count, m_.heads, s_.turns + o.delta, s_.turns_stride, o.window, o.q_norm,
                           o.k_norm, o.eps, at(o.in));
  }

  void attention_form(const Op& o) {
    const PagedKv pages = kv(o);
    baton_paged_attention_form(&pages, s_.items, s_.item_count, m_.heads, o.window, m_.scale, (const AttentionForm*)o.table,
                               at(o.in), width(o.in), at(o.out), width(o.out));
  }

  float* at(int32_t reg) const { return s_.arena + starts_[reg]; }
  int64_t width(int32_t reg) const { return m_.widths[reg]; }

  PagedKv kv(const Op& o) const {
    return {s_.pages, s_.page_bytes, o.layer * s_.layer_bytes, s_.kv_type, m_.kv_heads, m_.head_dim};
  }

  void rope_append(const Op& o) {
    const PagedKv pages = kv(o);
    baton_rope_append(&pages, s_.items, s_.item_count, m_.heads, s_.turns, s_.turns_stride, o.q_norm, o.k_norm, o.eps, at(o.in));
  }

  void attention(const Op& o) {
    const PagedKv pages = kv(o);
    baton_paged_attention(&pages, s_.items, s_.item_count, m_.heads, o.window, m_.scale, at(o.in), width(o.in), at(o.out), width(o.out));
  }

  void adapt(const Op& o) {
    const LoraStep& lora = *(const LoraStep*)o.table;
    if (!lora.count) return;
    const bool tokens = o.in < 0;
    baton_lora(lora.groups, lora.count, o.layer, tokens ? nullptr : at(o.in), tokens ? 0 : width(o.in), s_.tokens, at(o.out),
               width(o.out));
  }

  // What the sampled rows' adapters have beside the head, null where nothing; empty where no row has an adapter.
  std::vector<const LoraSite*> beside_head(const AdaptedHead& h) const {
    if (!h.lora->count) return {};
    std::vector<const LoraSite*> by_row(s_.rows, nullptr), found;
    for (int64_t g = 0; g < h.lora->count; g++)
      for (int64_t i = 0; i < h.lora->groups[g].count; i++) by_row[h.lora->groups[g].rows[i]] = h.lora->groups[g].sites + h.site;
    for (int32_t i = 0; i < s_.sampled_count; i++) found.push_back(by_row[s_.sampled[i]]);
    return found;
  }

  // Only the sampled rows are normed and projected.
  void head(const Op& o, float softcap) {
    const float* normed = last_norm(o);
    baton_lm_head_capped(o.weight, normed, m_.hidden, s_.sampled_count, softcap, s_.choices);
  }

  void adapted(const Op& o) {
    const AdaptedHead& h = *(const AdaptedHead*)o.table;
    const std::vector<const LoraSite*> beside = beside_head(h);
    if (beside.empty()) return head(o, h.softcap);
    adapted_head(*o.weight, last_norm(o), m_.hidden, s_.sampled_count, h.softcap, s_.choices, beside.data());
  }

  const float* last_norm(const Op& o) const {
    const int64_t n = m_.hidden;
    float* sum = (float*)scratch(SCRATCH_STEP, size_t(s_.sampled_count) * n * 8 + 64);
    float* normed = sum + s_.sampled_count * n;
    for (int32_t i = 0; i < s_.sampled_count; i++) {
      const float *x = at(o.in) + s_.sampled[i] * n, *delta = at(o.delta) + s_.sampled[i] * n;
      for (int64_t k = 0; k < n; k++) sum[i * n + k] = x[k] + delta[k];
    }
    baton_rms_norm(sum, nullptr, o.norm, o.eps, s_.sampled_count, n, normed);
    return normed;
  }

  const Model& m_;
  const Step& s_;
  std::vector<int64_t> starts_;
};

}  // namespace
}  // namespace baton

BATON_API void baton_step(const baton::Model* model, const baton::Step* step, int32_t from, int32_t to) {
  baton::Run run(*model, *step);
  for (int32_t i = from; i < to; i++) run.op(model->ops[i]);
}

// The interpreter of a step's ops, for one process or as one of several ranks. Knows nothing of where a plan comes from.
#pragma once
#include <algorithm>
#include <vector>

#include "../abi/threads.h"
#include "../embedding/embedding.h"
#include "../geglu/geglu.h"
#include "../lm_head/adapted.h"
#include "../lm_head/choose.h"
#include "../moe/adapted.h"
#include "../moe/own_experts.h"
#include "../paged_attention/own_heads.h"
#include "../rms_norm/normed.h"
#include "../rms_norm/part.h"
#include "../rms_norm/rms_norm.h"
#include "../rope_append/own_heads.h"
#include "../swiglu/product.h"
#include "../swiglu/strided.h"
#include "ranks/elsewhere.h"
#include "forms.h"
#include "ranks/ranks.h"
#include "registers.h"
#include "span_ops.h"

namespace baton {
namespace {

class Run : public StepRegisters {
 public:
  Run(const Model& model, const Step& step) : Run(model, step, nullptr, nullptr, {nullptr, step.rows, 0}) {}

  // `numbers`: of one of several ranks that share rows, the step's rows' numbers among those of all ranks.
  Run(const Model& model, const Step& step, Ranks* ranks, const int32_t* numbers = nullptr)
      : Run(model, step, ranks, numbers, {ranks->is_shared, ranks->plan->rows, 0}) {}

  Run(const Model& model, const Step& step, Ranks* ranks, const int32_t* numbers, const SharedRows& of_all)
      : StepRegisters(model, step, ranks, of_all), numbers_(numbers) {}

  void op(const Op& o) {
    switch (o.kind) {
      case OP_EMBED: return embed(o, 1);
      case OP_RMS_NORM:
        return baton_rms_norm(at(o.in), o.delta < 0 ? nullptr : at(o.delta), o.norm, o.eps, s_.rows, m_.hidden, at(o.out));
      case OP_LINEAR: return dense(*o.weight, at(o.in), width(o.in), s_.rows, o.bias, part(o), width(o.out));
      case OP_ROPE_APPEND: return rope(o, 0, m_.head_dim);
      case OP_ATTENTION: return attention(o, {});
      case OP_MOE:
        return baton_moe((const Moe*)o.table, at(o.in), width(o.in), at(o.delta), s_.rows, at(o.out), width(o.out));
      case OP_SWIGLU: return swiglu_into(at(o.in), s_.rows, width(o.in) / 2, part(o), width(o.out));
      case OP_LM_HEAD: return head(o, 0, s_.choices);
      default: return form(o);
    }
  }

  // Runs the first of `count` ops, with those behind it that go into its epilogue; returns how many.
  int32_t some(const Op* ops, int32_t count) {
    if (ops->kind == OP_RMS_NORM && ops->window && count > 1)
      if (const int32_t found = normed(ops, count)) return found;
    if (const int32_t found = gated(ops, count, nullptr)) return found;
    return op(*ops), 1;
  }

  // Who is lost among the ranks; 0: nobody.
  int32_t lost() const { return lost_; }

  // The sampled rows' logits of the rank's own part of the vocabulary, to where all ranks' lie; `wanted` are their places
  // there, null: as they come.
  void own_logits(const Op& o, const int32_t* wanted = nullptr) {
    if (!s_.sampled_count) return;
    std::vector<Choice> choices(size_t(s_.sampled_count), Choice{});
    for (int32_t i = 0; i < s_.sampled_count; i++)
      choices[size_t(i)].logits = r_->logits + (wanted ? wanted[i] : i) * r_->vocab + r_->first_token;
    if (o.kind == OP_LM_HEAD_ADAPTED) adapted(o, choices.data());
    else head(o, o.kind == OP_LM_HEAD_CAPPED ? *(const float*)o.table : 0, choices.data());
    for (int32_t i = 0; i < s_.sampled_count; i++) show_logits(*r_, wanted ? wanted[i] : i);
  }

 private:
  // Runs a product with its gate where `window` says that nobody else reads what is between them. Runs the product behind both, too, by
  // rows in bf16, if it alone reads them and would round them so. Returns how many ops that were.
  // `rows`: those of the product are the norms of these.
  int32_t gated(const Op* ops, int32_t count, const NormedRows* rows) const {
    if (count < 2 || ops->kind != OP_LINEAR || !ops->window) return 0;
    const Op &o = ops[0], &gate = ops[1], *behind = count > 2 && gate.window && rounds_to_bf16(*ops[2].weight) ? ops + 2 : nullptr;
    const int32_t dtype = behind ? BF16 : F32;
    if (!(rows ? baton_linear_normed(o.weight, rows, s_.rows, o.bias, 1, at(gate.out), dtype, width(gate.out))
               : baton_linear_gated(o.weight, at(o.in), F32, width(o.in), s_.rows, o.bias, at(gate.out), dtype, width(gate.out))))
      return 0;
    if (!behind) return 2;
    baton_linear(behind->weight, at(gate.out), BF16, width(gate.out), s_.rows, behind->bias, at(behind->out), F32, width(behind->out));
    return 3;
  }

  // Runs a norm with the product that alone reads it, and with what goes into its epilogue; returns how many ops that were.
  int32_t normed(const Op* ops, int32_t count) const {
    const Op &norm = ops[0], &o = ops[1];
    const NormedRows rows{at(norm.in), norm.delta < 0 ? nullptr : at(norm.delta), norm.norm, norm.eps};
    if (const int32_t found = gated(ops + 1, count - 1, &rows)) return 1 + found;
    return baton_linear_normed(o.weight, &rows, s_.rows, o.bias, 0, at(o.out), F32, width(o.out)) ? 2 : 0;
  }

  void form(const Op& o) {
    switch (o.kind) {
      case OP_EMBED_SCALED: return embed(o, o.eps);
      case OP_ADD: return baton_rms_norm(at(o.in), at(o.delta), nullptr, 0, s_.rows, m_.hidden, nullptr);
      case OP_NORM_PART: return baton_norm_part(at(o.in) + o.layer, width(o.in), s_.rows, o.window, o.norm, o.eps);
      case OP_ROPE_PART: return rope(o, o.delta, o.window);
      case OP_ATTENTION_FORM: return attention(o, *(const AttentionForm*)o.table);
      case OP_GEGLU: return geglu(o);
      case OP_BIASED_MOE:
        return baton_biased_moe((const BiasedMoe*)o.table, at(o.in), width(o.in), at(o.delta), s_.rows, at(o.out), width(o.out));
      case OP_LORA: return adapt(o);
      case OP_MOE_ADAPTED: return adapted_experts(o);
      case OP_LM_HEAD_ADAPTED: return adapted(o, s_.choices);
      case OP_LM_HEAD_CAPPED: return head(o, *(const float*)o.table, s_.choices);
      default: return o.kind >= OP_NORM_ROWS ? span(o) : of_ranks(o);
    }
  }

  void span(const Op& o) {
    switch (o.kind) {
      case OP_NORM_ROWS: return baton_rms_norm(at(o.in), nullptr, o.norm, o.eps, s_.rows, width(o.in), at(o.out));
      case OP_LATENT: return latent(o);
      case OP_ROUTE: return baton_route((const Route*)o.table, at(o.in), s_.rows, at(o.out), at(o.delta));
      case OP_COMBINE:
        return baton_combine(at(o.in), o.layer < 0 ? nullptr : at(o.layer), at(o.delta), o.window < 0 ? nullptr : at(o.window), s_.rows,
                             width(o.out), at(o.out));
      case OP_GATED_HEADS:
        return baton_gated_heads(at(o.in), s_.rows, o.layer, o.window, width(o.out) - int64_t(o.layer) * o.window, at(o.out),
                                 at(o.delta));
      case OP_GATE: return gate(o);
      case OP_GATED_DELTA:
        return baton_gated_delta((const GatedDelta*)o.table, s_.items, s_.item_count, s_.rows, at(o.in), at(o.delta), own_columns(o));
      case OP_STATE_SPACE:
        return baton_state_space((const StateSpace*)o.table, s_.items, s_.item_count, s_.rows, at(o.in), own_columns(o));
      default: return row(o);
    }
  }

  void row(const Op& o) {
    const int64_t n = width(o.in), dim = m_.head_dim;
    switch (o.kind) {
      case OP_LAYER_NORM:
        return baton_layer_norm(at(o.in), o.delta < 0 ? nullptr : at(o.delta), o.norm, o.bias, o.eps, s_.rows, n, at(o.out));
      case OP_CENTER: return baton_center(at(o.in), s_.rows, n, at(o.out));
      case OP_SCALE_ROWS: return baton_scale_rows(at(o.in), at(o.delta), s_.rows, n, at(o.out));
      case OP_ACTIVATE: return baton_activate(o.layer, at(o.in), s_.rows, n, part(o), width(o.out));
      case OP_HALVE_HEADS:
        return baton_halve_heads(at(o.in), s_.rows, n, m_.heads + own().count, dim, o.window, at(o.out));
      case OP_TEMPER_QUERIES:
        return baton_temper_queries((const Tempering*)o.table, s_.items, s_.item_count, n, m_.heads * dim, copied(o));
      case OP_ROTATE_HEADS:
        return baton_rotate_heads(s_.items, s_.item_count, m_.heads + own().count, dim, n, s_.angles + o.delta, s_.angles_stride, o.window,
                                copied(o));
      case OP_ROUTE_TWO: return baton_route_two(at(o.in), s_.rows, int32_t(n), o.eps, at(o.out), at(o.delta));
      case OP_DIVIDE: return divide(o, *(const Registers*)o.table);
      case OP_CONVOLVE:
        return baton_convolve((const ShortConvolution*)o.table, s_.items, s_.item_count, at(o.in), n, part(o), width(o.out));
      case OP_SELECTIVE_SCAN: return scan(o, *(const ScanOp*)o.table);
      default: return stream(o);
    }
  }

  void stream(const Op& o) {
    switch (o.kind) {
      case OP_LAYER_INPUTS: return baton_layer_inputs((const LayerInputs*)o.table, s_.tokens, s_.rows, at(o.in), at(o.out));
      case OP_GATE_INPUTS:
        return baton_gate_inputs(at(o.in), s_.rows, width(o.in), at(o.delta), width(o.delta), o.layer, at(o.out));
      case OP_SPARSEN: return baton_sparsen(at(o.in), s_.rows, width(o.in) / 2, o.eps, at(o.out));
      case OP_MATCH_SIZE:
        return baton_match_size(at(o.in), s_.rows, width(o.in), at(o.delta), width(o.delta), at(o.out));
      case OP_SUM_ROWS: return sum_rows(o, *(const Registers*)o.table);
      case OP_PREDICT_STREAMS: return baton_predict_streams((const StreamMix*)o.table, s_.rows, at(o.in), at(o.delta));
      case OP_CORRECT_STREAMS:
        return baton_correct_streams((const StreamMix*)o.table, s_.rows, at(o.in), at(o.delta), at(o.layer), at(o.out));
      case OP_ADD_TO_EACH: return baton_add_to_each(at(o.delta), s_.rows, width(o.delta), at(o.in), width(o.in));
      default: return rotate_queries(o);
    }
  }

  void sum_rows(const Op& o, const Registers& of) const {
    std::vector<const float*> each;
    for (int64_t i = 0; i < of.count; i++) each.push_back(at(of.numbers[i]));
    baton_sum_rows(each.data(), of.count, s_.rows * width(o.out), o.eps, at(o.out));
  }

  void rotate_queries(const Op& o) const {
    float* q = copied(o);
    const int64_t dim = m_.head_dim;
    if (o.norm) baton_rms_norm(q, nullptr, o.norm, o.eps, s_.rows * m_.heads, dim, q);
    baton_rotate_heads(s_.items, s_.item_count, m_.heads, dim, width(o.out), s_.angles + o.delta, s_.angles_stride, o.window, q);
  }

  void divide(const Op& o, const Registers& to) const {
    int64_t first = 0;
    for (int64_t i = 0; i < to.count; first += width(to.numbers[i++])) {
      const int64_t n = width(to.numbers[i]);
      for (int64_t row = 0; row < s_.rows; row++)
        std::memcpy(at(to.numbers[i]) + row * n, at(o.in) + row * width(o.in) + first, size_t(n) * 4);
    }
  }

  void scan(const Op& o, const ScanOp& op) const {
    const ScanRows rows{at(o.in) + op.x_first, at(op.dt), at(op.b), at(op.c), at(op.gated) + op.gate_first,
                        width(o.in), width(op.gated), width(o.out), part(o)};
    baton_selective_scan(&op.scan, s_.items, s_.item_count, &rows);
  }

  void gate(const Op& o) {
    const int64_t n = width(o.in), apart = width(o.out);
    if (n == apart) return baton_gate(at(o.in), at(o.delta), s_.rows, n, at(o.out));
    parallel_for(int32_t(s_.rows), [&](int32_t row) {
      baton_gate(at(o.in) + row * n, at(o.delta) + row * n, 1, n, own_columns(o) + row * apart);
    });
  }

  void latent(const Op& o) {
    const LatentAttention& op = *(const LatentAttention*)o.table;
    const LatentRows rows{at(o.in), at(o.delta), width(o.in), width(o.delta), own_columns(o), width(o.out)};
    baton_latent_attention(&op, s_.items, s_.item_count, s_.pages, s_.page_bytes, s_.angles, s_.angles_stride, &rows);
    if (r_) show_latents(*r_, op, s_.pages, s_.page_bytes, s_.items, s_.item_count);
  }

  void of_ranks(const Op& o) {
    const RankExperts* experts_here = (const RankExperts*)o.table;
    switch (o.kind) {
      case OP_EXPERTS: return experts(o, *experts_here, nullptr);
      case OP_BIASED_EXPERTS: return experts(o, *experts_here, &experts_here->layer);
      case OP_MIX: return mix(o);
      case OP_EXCHANGE: return exchange(o);
      default: return gather(o);
    }
  }

  void embed(const Op& o, float scale) {
    if (!r_) baton_embedding(s_.tokens, s_.rows, o.table, o.table_dtype, m_.hidden, at(o.out));
    for (int64_t i = 0; i < s_.rows && (r_ || scale != 1); i++) {
      float* out = at(o.out) + i * m_.hidden;
      if (r_) {
        const int32_t own = s_.tokens[i] - o.delta;
        if (own < 0 || own >= o.layer) continue;
        baton_embedding(&own, 1, o.table, o.table_dtype, m_.hidden, out);
      }
      for (int64_t k = 0; k < m_.hidden && scale != 1; k++) out[k] *= scale;
    }
  }

  void gather(const Op& o) {
    show_part(o);
    if (!lost_) lost_ = meet_stage(*r_);
    if (o.in != o.out) std::memcpy(at(o.out), at(o.in), size_t(s_.rows * width(o.in)) * 4);
  }

  // The rank's part of a register that ranks fill together, to those of its stage on other hosts.
  void show_part(const Op& o) {
    const Hosts to = o.layer ? stage_hosts(*r_) : 0;
    if (!to) return;
    const int64_t n = width(o.in);
    const float* own = at(o.in) + o.delta;
    if (!o.window) return write_elsewhere(r_->group, to, LINK_RANKS, own, s_.rows, o.layer * 4, n * 4);
    for (int64_t row = 0; row < s_.rows; row++)
      if (const int64_t token = s_.tokens[row] - r_->first_token; token >= 0 && token < r_->own_tokens)
        write_elsewhere(r_->group, to, LINK_RANKS, own + row * n, 1, n * 4, n * 4);
  }

  void experts(const Op& o, const RankExperts& here, const BiasedMoe* biased) {
    const Moe& moe = *(const Moe*)o.table;
    const OwnExperts& own = here.own;
    const int64_t rows = rows_of(o.in);
    const LoraStep& lora = is_shared(o.in) ? r_->everyones : *r_->lora;
    const ExpertAdapters adapters = here.gate_up < 0 ? ExpertAdapters{} : ExpertAdapters{lora.groups, lora.count, here.gate_up, here.down};
    const Hosts to = stage_hosts(*r_);
    std::vector<int64_t> places;
    const int64_t computed = run_own_experts(moe, biased, own, adapters, at(o.in), width(o.in), at(o.delta), rows, at(o.out),
                                             r_->plan->expert_rows + own.layer * MOST_EXPERTS, to ? &places : nullptr);
    r_->plan->rank_rows[r_->group.rank].fetch_add(computed, std::memory_order_relaxed);
    std::sort(places.begin(), places.end());
    show_rows(*r_, to, at(o.out), places.data(), int64_t(places.size()), moe.hidden);
  }

  // To every rank's rows: each reads those that its own experts are chosen for, on other hosts too.
  void exchange(const Op& o) {
    copy_to_all(o.in, o.out), copy_to_all(o.delta, o.layer);
    if (!lost_) lost_ = meet(r_->group);
  }

  void copy_to_all(int32_t from, int32_t to) {
    const size_t n = size_t(width(from));
    for (int64_t row = 0; row < s_.rows; row++) std::memcpy(at(to) + numbers_[row] * n, at(from) + row * n, n * 4);
    show_rows(*r_, other_hosts(r_->group), at(to), numbers_, s_.rows, int64_t(n));
  }

  // Rows that lie side by side among all ranks' are mixed together.
  void mix(const Op& o) {
    const Moe& moe = *(const Moe*)o.table;
    for (int64_t row = 0, end; row < s_.rows; row = end) {
      for (end = row + 1; end < s_.rows && number(end) == number(row) + (end - row);) end++;
      mix_experts(moe, at(o.delta) + row * width(o.delta), end - row, at(o.in) + number(row) * width(o.in), at(o.out) + row * width(o.out), width(o.out));
    }
  }

  int64_t number(int64_t row) const { return numbers_ ? numbers_[row] : row; }

  void geglu(const Op& o) {
    const int64_t inner = width(o.in) / 2;
    if (inner == width(o.out)) return baton_geglu(at(o.in), s_.rows, inner, at(o.out));
    parallel_for(int32_t(s_.rows), [&](int32_t row) {
      baton_geglu(at(o.in) + 2 * row * inner, 1, inner, part(o) + row * width(o.out));
    });
  }

  PagedKv kv(const Op& o) const {
    return {s_.pages, s_.page_bytes, o.layer * s_.layer_bytes, s_.kv_type, r_ ? r_->page_heads : m_.kv_heads, m_.head_dim};
  }

  Heads own() const { return r_ ? r_->own : Heads{0, m_.kv_heads}; }

  void rope(const Op& o, int32_t first, int32_t rotated) {
    append_heads(kv(o), own(), s_.items, s_.item_count, m_.heads, s_.angles + first, s_.angles_stride, rotated, o.q_norm, o.k_norm,
                 o.eps, at(o.in));
    if (r_) show_kv(*r_, kv(o), s_.items, s_.item_count);
  }

  void attention(const Op& o, const AttentionForm& form) {
    attend(kv(o), own(), s_.items, s_.item_count, m_.heads, o.window, m_.scale, form, at(o.in), width(o.in), part(o), width(o.out));
  }

  void adapt(const Op& o) {
    const LoraStep& lora = *(const LoraStep*)o.table;
    if (!lora.count) return;
    const bool tokens = o.in < 0;
    baton_lora(lora.groups, lora.count, o.layer, tokens ? nullptr : at(o.in), tokens ? 0 : width(o.in), s_.tokens, part(o),
               width(o.out));
  }

  void adapted_experts(const Op& o) {
    const AdaptedMoe& moe = *(const AdaptedMoe*)o.table;
    const ExpertAdapters of{moe.lora->groups, moe.lora->count, moe.gate_up, moe.down};
    baton_adapted_moe(&moe, &of, at(o.in), width(o.in), at(o.delta), s_.rows, at(o.out), width(o.out));
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
  void head(const Op& o, float softcap, Choice* choices) {
    adapted_head(*o.weight, o.bias, last_norm(o), m_.hidden, s_.sampled_count, softcap, choices, nullptr);
  }

  void adapted(const Op& o, Choice* choices) {
    const AdaptedHead& h = *(const AdaptedHead*)o.table;
    const std::vector<const LoraSite*> beside = beside_head(h);
    if (beside.empty()) return head(o, h.softcap, choices);
    adapted_head(*o.weight, o.bias, last_norm(o), m_.hidden, s_.sampled_count, h.softcap, choices, beside.data());
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

  const int32_t* numbers_;
  int32_t lost_ = 0;
};

}  // namespace
}  // namespace baton

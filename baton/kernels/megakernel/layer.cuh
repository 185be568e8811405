// A layer as the kernel reads it from device memory, and on the host how it comes from a program's ops: the one place that says
// which programs are a Llama. Knows nothing of how a layer runs.
#pragma once
#include "../linear/prepare.cuh"
#include "mega.h"

namespace baton {
namespace {

enum MatrixOf { QKV, ATTENTION_OUT, GATE_UP, DOWN, MATRICES };
constexpr int OPS_OF_LAYER = 9;
// Where a layer's ops lie, from its first one.
enum OpOf { NORM_AT, QKV_AT, ROPE_AT, ATTENTION_AT, OUT_AT, MLP_NORM_AT, GATE_UP_AT, SWIGLU_AT, DOWN_AT };

struct alignas(16) Layer {
  Call matrices[MATRICES];  // of weights alone
  const float *norm, *mlp_norm, *q_norm, *k_norm;
  float eps, mlp_eps, head_eps;
  int32_t window, layer;
};

struct Misfit {
  int32_t op = -1;
  const char* why = "";
};

constexpr int MOST_HIDDEN = 16384, MOST_HEAD = 128, MOST_HEADS = 1024;

inline int layers_of(const Model& m, int32_t ops) { return (ops - 2) / OPS_OF_LAYER; }

// A program ends with its LM head.
inline int32_t ops_of(const Model& m) {
  int32_t count = 0;
  while (m.ops[count].kind != OP_LM_HEAD) count++;
  return count + 1;
}

// bf16; int8 by rows; int4 in groups of whole blocks.
inline bool has_form(const PackedLinear& w) {
  if (w.kind == LINEAR_BF16) return true;
  if (w.mins) return false;
  return w.kind == LINEAR_W8 ? w.group == 0 : w.kind == LINEAR_W4 && w.group && w.group % 32 == 0;
}

inline const char* misfit_of_matrix(const Model& m, const Op& op, const PackedLinear& first) {
  const PackedLinear& w = *op.weight;
  if (!has_form(w)) return "its weights are not bf16, int8 with a scale per row, or int4 in groups of a multiple of 32 inputs without minimums";
  if (w.kind != first.kind) return "its weights are of another kind than the first matrix's";
  if (w.k % 8 || w.n % 8) return "its sizes are not multiples of 8";
  if (w.k != m.widths[op.in]) return "its input has another width than its weights";
  return nullptr;
}

// What is wrong with op `at` of a layer, or null. in_front: the ops of the layer in front, or null. Layers share their registers.
inline const char* misfit_of(const Model& m, const Op* ops, int at, const Op* in_front, const PackedLinear& first) {
  static constexpr int32_t kinds[OPS_OF_LAYER] = {OP_RMS_NORM, OP_LINEAR, OP_ROPE_APPEND, OP_ATTENTION, OP_LINEAR,
                                                  OP_RMS_NORM, OP_LINEAR, OP_SWIGLU,      OP_LINEAR};
  const Op& op = ops[at];
  if (op.kind != kinds[at]) return "a Llama's layer has another op in its place";
  if (in_front && (op.in != in_front[at].in || op.out != in_front[at].out)) return "it has other registers than in the layer in front";
  switch (at) {
    case NORM_AT: return op.delta == (in_front ? in_front[DOWN_AT].out : -1) ? nullptr : "what it adds is not the layer in front's output";
    case MLP_NORM_AT: return op.in == ops[NORM_AT].in && op.delta == ops[OUT_AT].out ? nullptr : "it does not add the attention's output";
    case ROPE_AT: return op.in == ops[QKV_AT].out ? nullptr : "it does not rotate the layer's own q and k";
    case ATTENTION_AT: return op.in == ops[QKV_AT].out ? nullptr : "it does not read the layer's own q";
    case SWIGLU_AT: return op.in == ops[GATE_UP_AT].out && m.widths[op.out] % 16 == 0 ? nullptr : "its width is not a multiple of 16";
    case QKV_AT:
      if (op.in != ops[NORM_AT].out || op.weight->n != int64_t(m.heads + 2 * m.kv_heads) * m.head_dim)
        return "its output is not q, k and v of every head";
      break;
    case OUT_AT:
      if (op.in != ops[ATTENTION_AT].out || op.weight->n != m.hidden) return "it does not bring attention back to the hidden size";
      break;
    case GATE_UP_AT:
      if (op.in != ops[MLP_NORM_AT].out) return "it does not read the normed rows";
      break;
    default:
      if (op.in != ops[SWIGLU_AT].out || op.weight->n != m.hidden) return "it does not bring the MLP back to the hidden size";
  }
  return misfit_of_matrix(m, op, first);
}

inline Misfit misfit(const Model& m, int32_t kv_type) {
  const int32_t count = ops_of(m), step = kv_type == KV_BF16 ? 8 : 16;
  if (m.ops[0].kind != OP_EMBED) return {0, "a Llama begins with its embedding"};
  if (m.hidden % 8 || m.hidden > MOST_HIDDEN) return {0, "rows are not a multiple of 8 floats up to 16,384"};
  if (count < 2 + OPS_OF_LAYER || (count - 2) % OPS_OF_LAYER) return {count - 1, "the ops in front of it are not whole layers of a Llama"};
  if (m.ops[1 + QKV_AT].kind != OP_LINEAR) return {1 + QKV_AT, "a Llama's layer has another op in its place"};
  if (m.heads + 2 * m.kv_heads > MOST_HEADS) return {0, "it has more than 1,024 heads"};
  if (m.ops[1].in != m.ops[0].out) return {1, "it does not norm the embedding's rows"};
  for (int32_t at = 1; at < count - 1; at++) {
    const int32_t begin = 1 + (at - 1) / OPS_OF_LAYER * OPS_OF_LAYER;
    if (const char* why = misfit_of(m, m.ops + begin, at - begin, begin == 1 ? nullptr : m.ops + begin - OPS_OF_LAYER, *m.ops[1 + QKV_AT].weight))
      return {at, why};
    if (m.ops[at].kind == OP_ATTENTION && (kv_type == KV_F32 || m.head_dim % step || m.head_dim > MOST_HEAD || m.heads % m.kv_heads))
      return {at, "KV is not bf16, int8 or fp8 with a head size of up to 128 in multiples of 8 (of 8-bit KV 16)"};
  }
  if (m.ops[count - 1].in != m.ops[0].out || m.ops[count - 1].delta != m.ops[count - 2].out)
    return {count - 1, "it does not read the last layer's output"};
  return {};
}

inline Layer layer_of(const Op* ops) {
  Layer l{};
  const int32_t at[MATRICES] = {QKV_AT, OUT_AT, GATE_UP_AT, DOWN_AT};
  for (int i = 0; i < MATRICES; i++) {
    const Op& op = ops[at[i]];
    prepare(l.matrices[i], *op.weight, MEGA_ROWS, op.bias, {nullptr, F32, 0}, i == GATE_UP);
  }
  l.norm = ops[NORM_AT].norm, l.mlp_norm = ops[MLP_NORM_AT].norm, l.eps = ops[NORM_AT].eps, l.mlp_eps = ops[MLP_NORM_AT].eps;
  l.q_norm = ops[ROPE_AT].q_norm, l.k_norm = ops[ROPE_AT].k_norm, l.head_eps = ops[ROPE_AT].eps;
  l.window = ops[ATTENTION_AT].window, l.layer = ops[ATTENTION_AT].layer;
  return l;
}

}  // namespace
}  // namespace baton

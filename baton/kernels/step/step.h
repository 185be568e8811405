// A whole step in one call: a model's ops over registers. Knows nothing of checkpoints, plans' owners or time.
#pragma once
#include "../lm_head/lm_head.h"
#include "../paged_attention/attention.h"

namespace baton {

enum OpKind : int32_t { OP_EMBED, OP_RMS_NORM, OP_LINEAR, OP_ROPE_APPEND, OP_ATTENTION, OP_SWIGLU, OP_LM_HEAD, OP_MOE };

// One op. Registers are numbers; -1 is none. What an op doesn't use is 0.
struct Op {
  int32_t kind, in, delta, out;
  int32_t layer, window;
  int32_t table_dtype;         // of an embedding's table
  float eps;
  const void* table;           // an embedding's, or the Moe of a layer of experts, whose router's logits are in `delta`
  const PackedLinear* weight;
  const float *norm, *bias, *q_norm, *k_norm;
};

struct Model {
  const Op* ops;
  const int64_t* widths;       // floats per row of each register
  int32_t registers, heads, kv_heads, head_dim;
  int64_t hidden;
  float scale;
};

struct PrefixGroup;  // ../cascade_attention/cascade.h

// Rows lie item by item. The arena holds register after register, each rows x its width.
struct Step {
  const int32_t* tokens;
  const AttentionItem* items;
  const int32_t* sampled;      // row numbers
  Choice* choices;             // one per sampled row
  const float* angles;         // cos and sin by position, see rope_append.h
  char* pages;
  float* arena;
  int64_t rows, page_bytes, layer_bytes, angles_stride;
  int32_t item_count, sampled_count, kv_type;
  int32_t group_count;         // of a GPU alone: sequences that begin with the same pages
  const PrefixGroup* groups;
};

}  // namespace baton

#ifndef BATON_DEVICE  // a cuda.cu exports the same symbol, with a stream
// Runs ops from … to - 1. The arena's registers stay readable until the next call.
BATON_API void baton_step(const baton::Model* model, const baton::Step* step, int32_t from, int32_t to);
#endif

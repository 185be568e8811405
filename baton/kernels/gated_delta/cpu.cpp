// Columns of a state don't meet: a task takes some of one head's through all tokens of a sequence, so that they stay in the nearest
// cache.
#include "gated_delta.h"

#include <algorithm>
#include <cmath>

#include "../rms_norm/norm_row.h"
#include "convolve.h"

namespace baton {
namespace {

constexpr float LEAST_SQUARE = 1e-6f;  // added to the squared length of q and k

// Where things lie in rows: side by side, or key head by key head.
struct Columns {
  const GatedDelta& op;
  int64_t each() const { return op.value_heads / op.key_heads; }
  int64_t groups() const { return op.grouped ? op.key_heads : 1; }
  int64_t keys() const { return op.key_heads / groups() * int64_t(op.key_dim); }  // of a group
  int64_t values() const { return op.key_heads / groups() * each() * op.value_dim; }
  int64_t group() const { return 2 * keys() + 2 * values(); }
  int64_t width() const { return groups() * group(); }
  int64_t channels() const { return 2 * int64_t(op.key_heads) * op.key_dim + int64_t(op.value_heads) * op.value_dim; }

  // q, k and v of all groups side by side.
  void gather(const float* row, float* to) const {
    const int64_t sizes[3] = {keys(), keys(), values()};
    for (int64_t part = 0, at = 0; part < 3; at += sizes[part++])
      for (int64_t g = 0; g < groups(); g++, to += sizes[part]) std::memcpy(to, row + g * group() + at, size_t(sizes[part]) * 4);
  }
  const float* z(const float* row, int64_t head) const {
    const int64_t own = op.value_heads / groups();
    return row + head / own * group() + 2 * keys() + values() + head % own * op.value_dim;
  }
  // Of a row of gates: b, or a where `second`.
  float gate(const float* row, int64_t head, bool second) const {
    const int64_t own = op.value_heads / groups();
    return row[head / own * 2 * own + (second ? own : 0) + head % own];
  }
};

struct Token {
  float beta, fade;
};

// to = x / |x| x scale.
void unit(const float* x, int64_t n, float scale, float* to) {
  vf squares{};
  for (int64_t i = 0; i < n; i += LANES) {
    const vf part = load_part(x + i, int(std::min<int64_t>(n - i, LANES)));
    squares = fma(part, part, squares);
  }
  const vf by = splat(scale / std::sqrt(sum(squares) + LEAST_SQUARE));
  for (int64_t i = 0; i < n; i += LANES) {
    const int left = int(std::min<int64_t>(n - i, LANES));
    store_part(to + i, load_part(x + i, left) * by, left);
  }
}

// Up to sixteen columns of a head's state through `tokens` tokens: q, k (tokens, key_dim), v and out at `stride`.
void advance(const GatedDelta& op, int64_t tokens, int n, const float* q, const float* k, const Token* gates, const float* v,
             int64_t v_stride, float* state, float* out, int64_t out_stride) {
  const int64_t keys = op.key_dim, apart = op.value_dim;
  float* own = (float*)scratch(SCRATCH_ATTENTION, size_t(keys) * LANES * 4);
  for (int64_t i = 0; i < keys; i++) store(own + i * LANES, load_part(state + i * apart, n));
  for (int64_t t = 0; t < tokens; t++, q += keys, k += keys) {
    vf known{};
    for (int64_t i = 0; i < keys; i++) known = fma(splat(k[i]), load(own + i * LANES), known);
    const vf fade = splat(gates[t].fade);
#if defined(BATON_MUTATION_DELTA_FADE)
    const vf added = splat(gates[t].beta) * (load_part(v + t * v_stride, n) - known);
#else
    const vf added = splat(gates[t].beta) * (load_part(v + t * v_stride, n) - fade * known);
#endif
    vf read{};
    for (int64_t i = 0; i < keys; i++) {
      const vf now = fma(splat(k[i]), added, fade * load(own + i * LANES));
      store(own + i * LANES, now), read = fma(splat(q[i]), now, read);
    }
    store_part(out + t * out_stride, read, n);
  }
  for (int64_t i = 0; i < keys; i++) store_part(state + i * apart, load(own + i * LANES), n);
}

// One value head of one sequence.
void head_of(const GatedDelta& op, const Columns& columns, const AttentionItem& item, float* state, int64_t head, const float* mixed,
             const float* gates, const float* rows, float* out) {
  const int64_t tokens = item.queries, keys = op.key_dim, values = op.value_dim, channels = columns.channels();
  const int64_t key_head = head / columns.each(), width = op.out_stride;
  float* q = (float*)scratch(SCRATCH_TASK, size_t(tokens) * (2 * keys * 4 + sizeof(Token)) + size_t(values) * 4);
  float *k = q + tokens * keys, *normed = k + tokens * keys;
  Token* each = (Token*)(normed + values);
  for (int64_t t = 0; t < tokens; t++) {
    const float *row = rows + (item.first + t) * channels, *gate = gates + (item.first + t) * 2 * op.value_heads;
    unit(row + key_head * keys, keys, 1.0f / std::sqrt(float(keys)), q + t * keys);
    unit(row + (op.key_heads + key_head) * keys, keys, 1.0f, k + t * keys);
    each[t].beta = 1.0f / (1.0f + std::exp(-columns.gate(gate, head, false)));
    each[t].fade = std::exp(-op.fade[head] * softplus(columns.gate(gate, head, true) + op.dt_bias[head]));
  }
  const float* v = rows + item.first * channels + 2 * op.key_heads * keys + head * values;
  float* to = out + item.first * width + head * values;
  for (int64_t j = 0; j < values; j += LANES)
    advance(op, tokens, int(std::min<int64_t>(values - j, LANES)), q, k, each, v + j, channels, state + j, to + j, width);
  for (int64_t t = 0; t < tokens; t++) {
    const float* z = columns.z(mixed + (item.first + t) * columns.width(), head);
    norm_row(to + t * width, op.norm, op.eps, int(values), normed);
    for (int64_t j = 0; j < values; j += LANES) {
      const int n = int(std::min<int64_t>(values - j, LANES));
      store_part(to + t * width + j, load_part(normed + j, n) * silu(load_part(z + j, n)), n);
    }
  }
}

}  // namespace
}  // namespace baton

BATON_API void baton_gated_delta(const baton::GatedDelta* op, const baton::AttentionItem* items, int32_t count, int64_t rows,
                                 const float* mixed, const float* gates, float* out) {
  using namespace baton;
  const Columns columns{*op};
  const int64_t channels = columns.channels();
  float* gathered = (float*)scratch(SCRATCH_STEP, size_t(rows * channels) * 8);
  float* convolved = gathered + rows * channels;
  parallel_for(int32_t(rows), [&](int32_t row) { columns.gather(mixed + row * columns.width(), gathered + row * channels); });
  convolve({op->taps, nullptr, op->tap_count, channels, channels, op->places}, items, count,
           [&](int64_t row) { return gathered + row * channels; }, *op->states, op->past, convolved);
  const int64_t each = int64_t(op->key_dim) * op->value_dim * 4;  // bytes of a head's state
  parallel_for(count * op->value_heads, [&](int32_t task) {
    const int32_t item = task / op->value_heads, head = task % op->value_heads;
    float* state = op->states->moved(item, op->state + head * each, each);
    head_of(*op, columns, items[item], state, head, mixed, gates, convolved, out);
  });
}

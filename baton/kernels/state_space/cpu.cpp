// Rows of a state don't meet: a task takes a head's, one after the other, through all tokens of a sequence.
#include "state_space.h"

#include <algorithm>
#include <cmath>

#include "../gated_delta/convolve.h"
#include "../rms_norm/norm_row.h"

namespace baton {
namespace {

struct Token {
  float dt, fade;
};

struct Columns {
  const StateSpace& op;
  int64_t inner() const { return int64_t(op.heads) * op.head_dim; }
  int64_t channels() const { return inner() + 2 * int64_t(op.groups) * op.size; }
  int64_t width() const { return inner() + channels() + op.heads; }
};

// One row of a head's state, `size` numbers: x (tokens) at `stride`, b and c at `stride`, too.
void advance(const StateSpace& op, int64_t tokens, const Token* each, const float* x, const float* b, const float* c, int64_t stride,
             float skip, float* state, float* out, int64_t out_stride) {
  for (int64_t t = 0; t < tokens; t++) {
    const float fed = x[t * stride];
    const vf fade = splat(each[t].fade), by = splat(each[t].dt * fed);
    vf read{};
    for (int64_t s = 0; s < op.size; s += LANES) {
      const int n = int(std::min<int64_t>(op.size - s, LANES));
      const vf now = fma(by, load_part(b + t * stride + s, n), fade * load_part(state + s, n));
      store_part(state + s, now, n), read = fma(now, load_part(c + t * stride + s, n), read);
    }
#if defined(BATON_MUTATION_STATE_SKIP)
    out[t * out_stride] = sum(read);
#else
    out[t * out_stride] = std::fma(skip, fed, sum(read));
#endif
  }
}

void head_of(const StateSpace& op, const Columns& columns, const AttentionItem& item, float* state, int64_t head, const float* mixed,
             const float* rows, float* out) {
  const int64_t tokens = item.queries, channels = columns.channels(), inner = columns.inner(), group = head / (op.heads / op.groups);
  Token* each = (Token*)scratch(SCRATCH_TASK, size_t(tokens) * sizeof(Token));
  for (int64_t t = 0; t < tokens; t++) {
    const float dt = softplus(mixed[(item.first + t) * columns.width() + inner + channels + head] + op.dt_bias[head]);
    each[t] = {dt, std::exp(dt * op.fade[head])};
  }
  const float *row = rows + item.first * channels, *b = row + inner + group * op.size, *c = b + int64_t(op.groups) * op.size;
  for (int64_t d = 0; d < op.head_dim; d++)
    advance(op, tokens, each, row + head * op.head_dim + d, b, c, channels, op.skip[head], state + d * op.size,
            out + item.first * op.out_stride + head * op.head_dim + d, op.out_stride);
}

void gate_and_norm(const StateSpace& op, const Columns& columns, const float* mixed, float* out) {
  const int64_t inner = columns.inner(), each = inner / op.groups;
  for (int64_t i = 0; i < inner; i += LANES) {
    const int n = int(std::min<int64_t>(inner - i, LANES));
    store_part(out + i, load_part(out + i, n) * silu(load_part(mixed + i, n)), n);
  }
  for (int64_t g = 0; op.norm && g < op.groups; g++) norm_row(out + g * each, op.norm + g * each, op.eps, int(each), out + g * each);
}

}  // namespace
}  // namespace baton

BATON_API void baton_state_space(const baton::StateSpace* op, const baton::AttentionItem* items, int32_t count, int64_t rows,
                                 const float* mixed, float* out) {
  using namespace baton;
  const Columns columns{*op};
  const int64_t inner = columns.inner(), width = columns.width();
  float* convolved = (float*)scratch(SCRATCH_STEP, size_t(rows * columns.channels()) * 4);
  convolve({op->taps, op->bias, op->tap_count, columns.channels(), columns.channels(), op->places}, items, count,
           [&](int64_t row) { return mixed + row * width + inner; }, *op->states, op->past, convolved);
  const int64_t each = int64_t(op->head_dim) * op->size * 4;  // bytes of a head's state
  parallel_for(count * op->heads, [&](int32_t task) {
    const int32_t item = task / op->heads, head = task % op->heads;
    float* state = op->states->moved(item, op->state + head * each, each);
    head_of(*op, columns, items[item], state, head, mixed, convolved, out);
  });
  parallel_for(int32_t(rows), [&](int32_t row) { gate_and_norm(*op, columns, mixed + row * width, out + row * op->out_stride); });
}

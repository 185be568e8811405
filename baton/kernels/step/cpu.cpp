// The interpreter, in C: what engine/interpreter.py does op by op, with no Python between the ops.
#include "run.h"

BATON_API void baton_step(const baton::Model* model, const baton::Step* step, int32_t from, int32_t to) {
  baton::Run run(*model, *step);
  for (int32_t i = from; i < to; i += run.some(model->ops + i, to - i)) {}
}

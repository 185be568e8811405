// One small pool of threads per process, shared by all ops. Knows nothing of what runs on it.
//
// parallel_for(tasks, f) calls f(0) … f(tasks - 1), each once, and returns when all are done. Tasks are claimed one by one
// in order, so a thread that the machine holds back delays nobody: the caller never waits for a thread that has
// claimed nothing. Make a few tasks per thread. f must give the same bits whoever runs it. Called from inside a
// task, or by a second caller at the same time, it runs serially in its caller.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common.h"

namespace baton {

using Task = void (*)(void* context, int32_t task);

int32_t threads();  // including the caller, and those on cores that other engines have lent

// For a task that takes many pieces of work from a common stock: whether it is to leave the rest to the others, because
// its core was lent and is wanted back. Never so for the caller's own thread.
bool wanted_back();

void run_tasks(int32_t tasks, Task task, void* context);  // tasks < 2^20

template <class F>
inline void parallel_for(int32_t tasks, F&& f) {
  run_tasks(tasks, [](void* context, int32_t task) { (*static_cast<std::remove_reference_t<F>*>(context))(task); }, &f);
}

// [begin, end) of `items` for one of `parts` nearly equal parts, borders at multiples of `grain`.
struct Range {
  int64_t begin, end;
};
inline Range part(int64_t items, int64_t grain, int32_t parts, int32_t which) {
  int64_t grains = (items + grain - 1) / grain, low = grains * which / parts * grain, high = grains * (which + 1) / parts * grain;
  return {low, high < items ? high : items};
}

// Scratch memory of the calling thread, 64-byte aligned, kept between calls; `slot` tells an op's uses apart.
// A second call for the same slot of the same thread gives the same (or a larger, fresh) block.
enum ScratchSlot { SCRATCH_CALLER, SCRATCH_TASK, SCRATCH_ATTENTION, SCRATCH_SAMPLE, SCRATCH_STEP, SCRATCH_GATES, SCRATCH_SLOTS };
void* scratch(ScratchSlot slot, size_t bytes);

}  // namespace baton

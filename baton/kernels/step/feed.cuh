// What a step needs that is planned while the one before it runs: the tokens that this one chose, which the host has yet to
// see, and a way to wait for one step's results alone. Knows nothing of sequences.
#pragma once
#include "../cuda/runtime.cuh"
#include "../lm_head/lm_head.h"

namespace baton {

#ifdef BATON_SIMT
inline int event_wait(const Event&) { return 0; }
#else
inline int event_wait(Event event) { return int(cudaEventSynchronize(event)); }
#endif

namespace {

constexpr int FEED_THREADS = 128;

// Row i takes the token of before[from[i]], or keeps its own where from[i] is negative. A choice without a token (nothing was
// finite) is fed as 0: the host, once it sees that, throws the row away.
__global__ void __launch_bounds__(FEED_THREADS) feed(const Choice* before, const int32_t* from, int32_t rows, int32_t* tokens) {
  const int32_t row = int32_t(blockIdx.x) * FEED_THREADS + int32_t(threadIdx.x);
  if (row >= rows || from[row] < 0) return;
#if defined(BATON_MUTATION_CUDA_STEP_FEED)
  const int32_t token = before[row].token;
#else
  const int32_t token = before[from[row]].token;
#endif
  tokens[row] = token < 0 ? 0 : token;
}

}  // namespace
}  // namespace baton

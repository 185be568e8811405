// What the blocks of one launch tell each other: a phase's end, and work on single rows between two phases. Knows nothing of what is
// computed. All blocks must be resident at once.
//
//   arrive   this block's results of the phase are written
//   serve    rows' work that needs everybody's results: one row by whoever arrived last, several by a block each
//   enter    waits until everybody has arrived and the rows are served
//
// Whoever completes a count sets it back, and OPEN counts phases on from launch to launch; so nothing is reset between replays.
// Every block reads OPEN before it arrives for the first time, and OPEN can't move before all have.
#pragma once

namespace baton {
namespace {

enum GridCount { ARRIVED = 0, GATE = 32, SERVED = 64, OPEN = 96, COUNTS = 128 };  // words, each in a line of its own

struct Grid {
  uint32_t* counts;
  uint32_t phase;  // of OPEN when the next phase may begin; thread 0's
  int* shared;     // a word of the block's, written by thread 0 between barriers

  __device__ Grid(uint32_t* at, int* word) : counts(at), phase(0), shared(word) {
    if (threadIdx.x == 0) phase = load_acquire(counts + OPEN);
  }

  __device__ __forceinline__ void arrive(int rows) {
    __syncthreads();  // the block's results are written
    if (threadIdx.x == 0) {
      phase++;
      __threadfence();
#if defined(BATON_MUTATION_CUDA_MEGA_TARGET)
      const uint32_t before_last = gridDim.x - 2;
#else
      const uint32_t before_last = gridDim.x - 1;
#endif
      const bool last = atomicAdd(counts + ARRIVED, 1u) == before_last;
      __threadfence();
      if (last) {
#if !defined(BATON_MUTATION_CUDA_MEGA_RESET)
        counts[ARRIVED] = 0;
#endif
        if (rows != 1) store_release(counts + (rows ? GATE : OPEN), phase);
      }
      *shared = last;
    }
    __syncthreads();
  }

  // row(r): what the whole block does for row r.
  template <class Row>
  __device__ __forceinline__ void serve(int rows, Row row) {
    if (rows == 0) return;
    if (rows == 1 ? !*shared : int(blockIdx.x) >= rows) return;
    if (rows > 1) await(GATE);
    for (int r = rows == 1 ? 0 : int(blockIdx.x); r < rows; r += rows == 1 ? 1 : int(gridDim.x)) {
      row(r);
      __syncthreads();
    }
    if (threadIdx.x) return;
    __threadfence();
    const uint32_t workers = rows == 1 ? 1 : min(rows, int(gridDim.x));
    if (workers > 1) {
      if (atomicAdd(counts + SERVED, 1u) != workers - 1) return;
      __threadfence();
      counts[SERVED] = 0;
    }
    if (rows == 1) counts[GATE] = phase;  // nobody waits for it, but left 2^31 phases behind it would seem to be ahead
    store_release(counts + OPEN, phase);
  }

  __device__ __forceinline__ void enter() {
#if !defined(BATON_MUTATION_CUDA_MEGA_BARRIER)
    await(OPEN);
#endif
  }

  __device__ __forceinline__ void await(GridCount count) {
    if (threadIdx.x == 0) {
#if defined(BATON_MUTATION_CUDA_MEGA_PHASE)
      while (int(load_acquire(counts + count) - (phase - 1)) < 0) {}
#else
      while (int(load_acquire(counts + count) - phase) < 0) {}
#endif
      __threadfence();
    }
    __syncthreads();
  }
};

}  // namespace
}  // namespace baton

// A matrix against up to eight rows, tile by tile of 32 outputs, with the weights of what comes next always on their way: of the
// block's next tile while this one's slices are added up, and of the next matrix while others still compute, while rows are
// normed and rounded between two matrices, and during attention. The sums are skinny.cuh's, in its order. Knows nothing of layers.
#pragma once
#include "../linear/skinny.cuh"

namespace baton {
namespace {

constexpr int RING_BYTES = 144 * 1024;  // of a block's 227 KB, so that attention's fits beside it

template <int F, int MODE>
struct Stream {
  static constexpr int STAGES = RING_BYTES / (WARPS * Ring<F, MODE, 1>::STAGE);
  using R = Ring<F, MODE, 1, STAGES>;
  static constexpr size_t RING = size_t(WARPS) * STAGES * R::STAGE, RESULTS = 2 * R::RESULTS;

  char* memory;    // RING bytes
  float* results;  // RESULTS bytes, twice a tile's: a tile is written while the next one's are given
  int parity;
  R ring;
  const Call* call;
  int64_t tile;
  bool has;  // a tile of this matrix

  __device__ Stream(const Call* first, char* at, float* to)
      : memory(at), results(to), parity(0), ring(*first, at, 0, 0), call(first), tile(0), has(false) {
    start(first, blockIdx.x);
  }

  // The tile's first weights; nobody has to have computed anything for them.
  __device__ __forceinline__ void start(const Call* matrix, int64_t at) {
    call = matrix, tile = at, has = matrix->covers(at);
    cp_async_wait<0>();  // of what the last tile had behind its end
    __syncwarp();        // all lanes are done with the stages
    if (!has) return;
    ring = R(*matrix, memory, at, 0);
#pragma unroll 1
    for (int s = 0; s < STAGES - 1; s++) ring.load_weights(ring.begin + s * R::STAGE);
  }

  // The rows' part of the stages that have their weights.
  __device__ __forceinline__ void join_rows() {
#pragma unroll 1
    for (int s = 0; s < STAGES - 1; s++) {
      ring.load_rows(ring.begin + s * R::STAGE);
      cp_async_commit();  // the weights of all stages so far are in the first one's
    }
    ring.fill += (STAGES - 1) * R::STAGE;
  }

  __device__ __forceinline__ void multiply(Tile<F, MODE, 1>& sums) {
    sums.clear_sums();
    sums.clear_chain();
    for (int left = ring.blocks; left > 0; left -= R::BLOCKS) {
#if defined(BATON_MUTATION_CUDA_MEGA_PREFETCH)
      cp_async_wait<STAGES - 1>();
#else
      cp_async_wait<STAGES - 2>();
#endif
      __syncwarp();
      ring.load_weights(ring.fill);
      ring.load_rows(ring.fill);
      ring.fill = ring.next(ring.fill);
      cp_async_commit();
      ring.multiply(sums, left);
    }
  }

  // This block's tiles of the matrix that was started, whose rows are there; then `next` (or null) is. written(tile): behind a
  // tile's results.
  template <class Written>
  __device__ __forceinline__ void run(const Call* next, Written written) {
    if (has) join_rows();
    while (has) {
      const Call* mine = call;
      const int64_t at = tile;
      Tile<F, MODE, 1> sums;
      multiply(sums);
      start(mine, at + gridDim.x);
      const bool more = has;
      if (more)
        join_rows();
      else if (next)
        start(next, blockIdx.x);
#if defined(BATON_MUTATION_CUDA_MEGA_RESULTS)
      float* to = results;
#else
      float* to = results + parity * (R::RESULTS / 4);
#endif
      parity ^= 1;
      give(sums, to);
      __syncthreads();
      write<F, MODE, 1>(*mine, to, at, 0);
      written(at);
      if (!more) return;
    }
    if (next) start(next, blockIdx.x);
  }
};

}  // namespace
}  // namespace baton

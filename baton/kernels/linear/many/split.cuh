// A product of few tiles, split along K so that it fills the device (split-K): blocks in z have some slices of K each and leave the
// sums of these in memory, and a second kernel adds the parts up, in order, and finishes them. Knows nothing of how a tile is
// multiplied.
//
// No counter and no flag: the second launch orders them. A part's slices are added in order, then the parts. So with a part to each
// slice floats have the bits of the product in one piece; with two or four parts they have others, always the same.
#pragma once
#include "../../cuda/workspace.cuh"
#include "finish.cuh"

namespace baton {
namespace {

constexpr int MOST_PARTS = SLICES;

// Sums as [part][row][stride]; integers as their bits. `at` null: the product is in one piece.
struct Parts {
  float* at;
  int64_t stride;
  int count, stages;  // parts, and stages of K in each
  bool exact;         // integers
  float unit;         // of a sum of them
};

// A lane's outputs n … n + 3 of a row, what its block's part of K came to.
template <class Sum>
__device__ __forceinline__ void leave_four(const Parts& p, const Call& c, int row, int64_t n, Sum sum) {
  if (row >= c.m || n >= c.w.n) return;
#ifdef BATON_MUTATION_CUDA_LINEAR_SPLIT_PLACE
  const int64_t part = blockIdx.z ? blockIdx.z - 1 : 0;
#else
  const int64_t part = blockIdx.z;
#endif
  store4(p.at + (part * c.m + row) * p.stride + n, make_float4(sum(0), sum(1), sum(2), sum(3)));
}

template <int COUNT>
__device__ __forceinline__ void added_four(const Parts& p, const Call& c, int row, int64_t n, float (&to)[4]) {
  float4 parts[COUNT];
#pragma unroll
  for (int i = 0; i < COUNT; i++) parts[i] = load4(p.at + (int64_t(i) * c.m + row) * p.stride + n);
#ifdef BATON_MUTATION_CUDA_LINEAR_SPLIT_LAST
  constexpr int from = 0, count = COUNT - 1;
#else
  constexpr int from = 0, count = COUNT;
#endif
  float sums[4] = {};
  int whole[4] = {};
#pragma unroll
  for (int i = from; i < count; i++) {
#ifdef BATON_MUTATION_CUDA_LINEAR_SPLIT_ORDER
    const float4 part = parts[count - 1 - i];
#else
    const float4 part = parts[i];
#endif
    const float x[4] = {part.x, part.y, part.z, part.w};
#pragma unroll
    for (int q = 0; q < 4; q++) {
      if (p.exact)
        whole[q] += __float_as_int(x[q]);
      else
        sums[q] = __fadd_rn(sums[q], x[q]);
    }
  }
#pragma unroll
  for (int q = 0; q < 4; q++) to[q] = p.exact ? float(whole[q]) * p.unit : sums[q];
}

// A block to a row and 4 x FINISHERS of its columns.
template <int COUNT>
__global__ void __launch_bounds__(FINISHERS) add_parts(const Call c, const Parts p) {
  grid_wait();
  grid_launch_next();
  const int row = int(blockIdx.x);
  const int64_t columns = c.inner ? c.inner : c.w.n, n = (int64_t(blockIdx.y) * FINISHERS + threadIdx.x) * 4;
  if (n >= columns) return;
  float gates[4], ups[4] = {};
  added_four<COUNT>(p, c, row, n, gates);
  if (c.inner) added_four<COUNT>(p, c, row, n + c.inner, ups);
  finish_four(c, row, n, columns, gates, ups);
}

inline int slices_of(const Call& c) { return (c.padded + c.slice - 1) / c.slice; }

// Into how many parts K falls, for a product of `tiles` blocks: as many as make one wave of blocks that fills seven tenths of the
// device. 1: no number does, or the slices don't fall into so many of whole stages.
inline int splits(const Call& c, int64_t tiles, int stage_inputs) {
  const int64_t device = processors();
  for (int count = MOST_PARTS; count > 1; count /= 2) {
    const bool whole = slices_of(c) % count == 0 && slices_of(c) / count * c.slice % stage_inputs == 0;
    if (whole && tiles * count <= device && tiles * count * 10 >= device * 7) return count;
  }
  return 1;
}

// Where parts go: memory of the head's (lm_head), which holds nothing between two ops. `at` null: there is none.
inline Parts parts_of(const Call& c, int count, int stages, bool exact, float unit, void* stream) {
  const int64_t stride = (c.w.n + 3) / 4 * 4;
  return {(float*)workspace(WORKSPACE_HEAD, size_t(count) * c.m * stride * sizeof(float), stream), stride, count, stages, exact, unit};
}

}  // namespace
}  // namespace baton

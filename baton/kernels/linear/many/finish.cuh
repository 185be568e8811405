// What a product's sums become: scaled, biased, with a gate silu(gate) x up, four neighbouring columns to their place. Knows nothing of
// how they were added.
#pragma once
#include "../../cuda/silu.cuh"
#include "../tile.cuh"

namespace baton {
namespace {

constexpr int FINISHERS = 256;  // threads of a block that finishes sums which lie in memory, four columns each

// Four neighbouring columns of a row.
__device__ __forceinline__ void put_four(const Call& c, int row, int64_t column, int64_t columns, const float x[4]) {
  if (!c.aligned || column + 4 > columns) {
#pragma unroll
    for (int i = 0; i < 4; i++)
      if (column + i < columns) put(c, row, column + i, x[i]);
    return;
  }
  const int64_t at = row * c.out_stride + column;
  if (c.out_dtype == BF16)
    store4(static_cast<bf16*>(c.out) + at, make_float4(x[0], x[1], x[2], x[3]));
  else
    store4(static_cast<float*>(c.out) + at, make_float4(x[0], x[1], x[2], x[3]));
}

// A lane's outputs n … n + 3 of a row: sum(q) to its place. Lanes 4 g … 4 g + 3 have one n. All of the warp come, also those
// whose row or outputs aren't there.
template <class Sum>
__device__ __forceinline__ void write_four(const Call& c, int g, int row, int64_t n, Sum sum) {
  float x[4];
#pragma unroll
  for (int q = 0; q < 4; q++) x[q] = row < c.m && n + q < c.w.n ? finished(c, sum(q), row, n + q) : 0;
  if (!c.inner) {
    if (row < c.m && n < c.w.n) put_four(c, row, n, c.w.n, x);
    return;
  }
#pragma unroll
  for (int q = 0; q < 4; q++) {
    const float up = __shfl_xor_sync(ALL_LANES, x[q], 16);  // places 16 … 31 are the upper lanes'
    x[q] = silu(x[q]) * up;
  }
  if (g < 4 && row < c.m && n < c.inner) put_four(c, row, n, c.inner, x);
}

// A thread's columns n … n + 3 of a row of sums, `ups` of those that a gate is for.
__device__ __forceinline__ void finish_four(const Call& c, int row, int64_t n, int64_t columns, const float (&gates)[4], const float (&ups)[4]) {
  float x[4];
#pragma unroll
  for (int q = 0; q < 4; q++) {
    const int64_t column = n + q < columns ? n + q : columns - 1;  // put_four leaves those behind the last one out
    x[q] = finished(c, gates[q], row, column);
#ifdef BATON_MUTATION_CUDA_LINEAR_ROW_GATE
    if (c.inner) x[q] = x[q] * finished(c, ups[q], row, column + c.inner);
#else
    if (c.inner) x[q] = silu(x[q]) * finished(c, ups[q], row, column + c.inner);
#endif
  }
  if (c.aligned && n + 4 <= columns && c.out_dtype == F32)  // as one store, which the compiler else takes apart
    __stcg(reinterpret_cast<float4*>(static_cast<float*>(c.out) + row * c.out_stride + n), make_float4(x[0], x[1], x[2], x[3]));
  else
    put_four(c, row, n, columns, x);
}

}  // namespace
}  // namespace baton

// float32 layers on a GPU, with the bits of the CPU's: a result is its bias plus chains of fused multiply-adds, each chain in
// order of its inputs, the chains in order. So no tensor cores. Chains don't depend on each other: with few rows they run side
// by side. Knows nothing of models; other kinds of weights go to linear.
#include "../cuda/device.cuh"
#include "dense.h"

extern "C" int baton_linear(const baton::PackedLinear* w, const void* x, int32_t x_dtype, int64_t x_stride, int64_t m,
                            const float* bias, void* out, int32_t out_dtype, int64_t out_stride, void* stream);

namespace baton {
namespace {

constexpr int THREADS = 256, PLACES = 32, CHAINS = THREADS / 8, BATCH = 8;  // outputs of a block, chains at once, inputs at once
constexpr int TILE_ROWS = 128, DEPTH = 16, STAGES = 3, X_LINE = DEPTH + 4;
constexpr int64_t LONGEST = 192, FEW = 32;

struct Call {
  const float *w, *x, *bias;
  float* out;
  int64_t n, m, x_stride, out_stride;
  int k, chain;  // chain: inputs of each but the last
  bool aligned;  // x takes 16 bytes at multiples of four inputs, chains begin there
};

__device__ __forceinline__ void add(float4& sum, float x, float4 w) {
  sum.x = __fmaf_rn(x, w.x, sum.x), sum.y = __fmaf_rn(x, w.y, sum.y);
  sum.z = __fmaf_rn(x, w.z, sum.z), sum.w = __fmaf_rn(x, w.w, sum.w);
}

// Inputs k … k + BATCH - 1 of a row, zeros from `end` on.
__device__ __forceinline__ void load_inputs(const Call& c, const float* row, int k, int end, float (&v)[BATCH]) {
  if (c.aligned && k + BATCH <= end) {
#pragma unroll
    for (int i = 0; i < BATCH; i += 4) {
      const float4 four = load4(row + k + i);
      v[i] = four.x, v[i + 1] = four.y, v[i + 2] = four.z, v[i + 3] = four.w;
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < BATCH; i++) v[i] = k + i < end ? row[k + i] : 0;
}

__device__ __forceinline__ void load_weights(const float* column, int k, int end, float4 (&v)[BATCH]) {
#pragma unroll
  for (int i = 0; i < BATCH; i++)
    v[i] = k + i < end ? load4(column + (k + i) * 64) : make_float4(0, 0, 0, 0);
}

// R rows by 32 outputs; eight lanes to a chain, four outputs to a lane.
template <int R>
__global__ void __launch_bounds__(THREADS) few(const Call c) {
  static_assert(R * PLACES <= THREADS);
  BATON_STATIC_SHARED(float, results, CHAINS * R * PLACES);
  const int lane = threadIdx.x % 8, mine = threadIdx.x / 8;
  const int64_t first_row = int64_t(blockIdx.y) * R, first = int64_t(blockIdx.x) * PLACES;
  const float* column = c.w + first / 64 * c.k * 64 + first % 64 + 4 * lane;
  const int count = (c.k + c.chain - 1) / c.chain;
  const int64_t row = first_row + threadIdx.x / PLACES, n = first + threadIdx.x % PLACES;  // that this thread adds up
  const bool adds = threadIdx.x < R * PLACES;
  float4 next[BATCH];
  load_weights(column, mine * c.chain, min(c.k, (mine + 1) * c.chain), next);
  grid_wait();
  grid_launch_next();
  float total = adds && c.bias && n < c.n ? c.bias[n] : 0;
  for (int pass = 0; pass < count; pass += CHAINS) {
    const int begin = (pass + mine) * c.chain, end = min(c.k, begin + c.chain);
    if (pass) load_weights(column, begin, end, next);
    float4 sums[R];
#pragma unroll
    for (int r = 0; r < R; r++) sums[r] = make_float4(0, 0, 0, 0);
    for (int k = begin; k < end; k += BATCH) {
      float4 w[BATCH];
#pragma unroll
      for (int i = 0; i < BATCH; i++) w[i] = next[i];
      load_weights(column, k + BATCH, end, next);
#pragma unroll
      for (int r = 0; r < R; r++) {
        float x[BATCH];
        load_inputs(c, c.x + min(first_row + r, c.m - 1) * c.x_stride, k, end, x);
#pragma unroll
        for (int i = 0; i < BATCH; i++) add(sums[r], x[i], w[i]);
      }
    }
#pragma unroll
    for (int r = 0; r < R; r++) store4(results + (mine * R + r) * PLACES + 4 * lane, sums[r]);
#ifndef BATON_MUTATION_CUDA_DENSE_BARRIER
    __syncthreads();
#endif
    for (int chain = 0; adds && chain < CHAINS && pass + chain < count; chain++)
      total = __fadd_rn(total, results[chain * R * PLACES + threadIdx.x]);
#ifndef BATON_MUTATION_CUDA_DENSE_REUSE
    __syncthreads();
#endif
  }
  if (adds && row < c.m && n < c.n) c.out[row * c.out_stride + n] = total;
}

// Where along K the next step is: it never crosses the end of a chain.
struct Cursor {
  int k = 0, begin = 0, end = 0;

  __device__ __forceinline__ int next(const Call& c) {
    const int from = k;
    end = min(c.k, begin + c.chain);
    k += DEPTH;
    if (k >= begin + c.chain) begin += c.chain, k = begin;
    return from;
  }
};

// 16 inputs of 128 rows and of a panel, on their way to shared memory, step by step; zeros behind the last.
struct Steps {
  const Call& c;
  float* memory;
  int64_t row;
  const float* panel;
  int per_chain, count;
  Cursor of_rows, of_weights;

  static constexpr int X = TILE_ROWS * X_LINE, FLOATS = X + DEPTH * 64;

  __device__ Steps(const Call& call, float* at)
      : c(call), memory(at), row(int64_t(blockIdx.x) * TILE_ROWS), panel(c.w + int64_t(blockIdx.y) * c.k * 64),
        per_chain((c.chain + DEPTH - 1) / DEPTH), count((c.k + c.chain - 1) / c.chain * per_chain) {}

  __device__ __forceinline__ float* x(int step) const { return memory + step % STAGES * FLOATS; }
  __device__ __forceinline__ float* w(int step) const { return x(step) + X; }

  __device__ __forceinline__ void load_weights(int step) {
    const int i = threadIdx.x / 16, at = threadIdx.x % 16 * 4, k = of_weights.next(c) + i;
    const bool filled = k < of_weights.end;
    cp_async_16(w(step) + i * 64 + at, filled ? panel + int64_t(k) * 64 + at : panel, filled);
  }

  __device__ __forceinline__ void load_rows(int step) {
    const int k = of_rows.next(c), end = of_rows.end;
    if (c.aligned) {
      for (int i = threadIdx.x; i < TILE_ROWS * DEPTH / 4; i += THREADS) {
        const int r = i / (DEPTH / 4), at = i % (DEPTH / 4) * 4;
        const bool filled = row + r < c.m && k + at < end;
        cp_async_16(x(step) + r * X_LINE + at, filled ? c.x + (row + r) * c.x_stride + k + at : c.x, filled);
      }
      return;
    }
    for (int i = threadIdx.x; i < TILE_ROWS * DEPTH; i += THREADS) {
      const int r = i / DEPTH, at = i % DEPTH;
      const bool filled = row + r < c.m && k + at < end;
      cp_async_4(x(step) + r * X_LINE + at, filled ? c.x + (row + r) * c.x_stride + k + at : c.x, filled);
    }
  }
};

// 128 rows by a panel; a thread has eight rows by four outputs.
__global__ void __launch_bounds__(THREADS) many(const Call c) {
  constexpr int R = TILE_ROWS / 16;
  BATON_STATIC_SHARED(float, memory, STAGES * Steps::FLOATS);
  Steps steps(c, memory);
  const int column = threadIdx.x % 16 * 4, first = threadIdx.x / 16;
  for (int s = 0; s < STAGES - 1; s++) steps.load_weights(s);
  grid_wait();
  grid_launch_next();
  for (int s = 0; s < STAGES - 1; s++) {
    steps.load_rows(s);
    cp_async_commit();  // the weights of all stages so far are in the first one's
  }
  float4 totals[R], sums[R];
  const int64_t n = int64_t(blockIdx.y) * 64 + column;
  float bias[4];
#pragma unroll
  for (int i = 0; i < 4; i++) bias[i] = c.bias && n + i < c.n ? c.bias[n + i] : 0;
#pragma unroll
  for (int r = 0; r < R; r++) totals[r] = make_float4(bias[0], bias[1], bias[2], bias[3]), sums[r] = make_float4(0, 0, 0, 0);
  int left = steps.per_chain;
  for (int s = 0; s < steps.count; s++) {
    cp_async_wait<STAGES - 2>();
#ifndef BATON_MUTATION_CUDA_DENSE_STAGE
    __syncthreads();
#endif
    steps.load_weights(s + STAGES - 1);
    steps.load_rows(s + STAGES - 1);
    cp_async_commit();
#pragma unroll
    for (int k = 0; k < DEPTH; k += 4) {
      float4 w[4];
#pragma unroll
      for (int i = 0; i < 4; i++) w[i] = load4(steps.w(s) + (k + i) * 64 + column);
#pragma unroll
      for (int r = 0; r < R; r++) {
        const float4 x = load4(steps.x(s) + (first + 16 * r) * X_LINE + k);
        add(sums[r], x.x, w[0]), add(sums[r], x.y, w[1]), add(sums[r], x.z, w[2]), add(sums[r], x.w, w[3]);
      }
    }
#ifdef BATON_MUTATION_CUDA_DENSE_CHAIN
    if (s + 1 < steps.count) continue;
#else
    if (--left) continue;
#endif
    left = steps.per_chain;
#pragma unroll
    for (int r = 0; r < R; r++) {
      totals[r].x = __fadd_rn(totals[r].x, sums[r].x), totals[r].y = __fadd_rn(totals[r].y, sums[r].y);
      totals[r].z = __fadd_rn(totals[r].z, sums[r].z), totals[r].w = __fadd_rn(totals[r].w, sums[r].w);
      sums[r] = make_float4(0, 0, 0, 0);
    }
  }
  cp_async_wait<0>();
#pragma unroll
  for (int r = 0; r < R; r++) {
    const int64_t row = steps.row + first + 16 * r;
    if (row >= c.m) continue;
    float* to = c.out + row * c.out_stride + n;
    const float four[4] = {totals[r].x, totals[r].y, totals[r].z, totals[r].w};
#pragma unroll
    for (int i = 0; i < 4; i++)
#ifdef BATON_MUTATION_CUDA_DENSE_GUARD
      if (n + i < c.n + 1) to[i] = four[i];
#else
      if (n + i < c.n) to[i] = four[i];
#endif
  }
}

template <int R>
int run_few(const Call& c, void* stream) {
  const dim3 grid(unsigned((c.n + PLACES - 1) / PLACES), unsigned((c.m + R - 1) / R));
  return BATON_LAUNCH_PDL((few<R>), grid, dim3(THREADS), 0, stream, c);
}

int run(const Call& c, void* stream) {
  if (c.m == 1) return run_few<1>(c, stream);
  if (c.m <= 4) return run_few<4>(c, stream);
  if (c.m <= FEW) return run_few<8>(c, stream);
  const dim3 grid(unsigned((c.m + TILE_ROWS - 1) / TILE_ROWS), unsigned((c.n + 63) / 64));
  return BATON_LAUNCH_PDL(many, grid, dim3(THREADS), 0, stream, c);
}

}  // namespace
}  // namespace baton

BATON_API int baton_dense(const baton::PackedLinear* w, const float* x, int64_t x_stride, int64_t m, const float* bias, float* out,
                          int64_t out_stride, void* stream) {
  using namespace baton;
  if (m <= 0) return 0;
  if (w->kind != LINEAR_F32) return baton_linear(w, x, F32, x_stride, m, bias, out, F32, out_stride, stream);
  if (w->k < 1 || w->n < 1 || w->k > 1 << 30) return int(cudaErrorInvalidValue);
  // dense/cpu.cpp: the cuts of MKL's sgemm.
  const int64_t chain = w->k <= LONGEST || w->k >= 2 * LONGEST ? LONGEST : w->k / 2;
  const bool aligned = (uintptr_t(x) | size_t(x_stride) * 4) % 16 == 0 && chain % 4 == 0 && w->k % 4 == 0;
  return run({(const float*)w->data, x, bias, out, w->n, m, x_stride, out_stride, int(w->k), int(chain), aligned}, stream);
}

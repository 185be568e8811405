// Work on single rows between two matrices, by a whole block: embedding, residual and norm, rounding. The bits are those of the ops
// embedding, rms_norm and linear's rounding. Knows nothing of who has which row.
#pragma once
#include "../linear/round.cuh"
#include "../rms_norm/row.cuh"

namespace baton {
namespace {

// Where rounded rows lie for the matrix that comes next.
struct Rounded {
  char* rows;
  float* scales;
};

template <int F>
constexpr int rounding_of = F == FORM_BF16 ? TO_BF16 : TO_INT8;

__host__ __device__ inline int rounded_width(int k) { return (k + 15) / 16 * 16; }
template <int F>
__host__ __device__ constexpr int rounded_size() {
  return F == FORM_BF16 ? 2 : 1;
}

// k floats, of shared memory or of a register, to their place among the rounded.
template <int F>
__device__ __forceinline__ void round_to_place(const float* from, int k, int row, const Rounded& to, uint32_t* scratch) {
  const int width = rounded_width(k);
  char* place = to.rows + int64_t(row) * width * rounded_size<F>();
  round_row<rounding_of<F>>(from, k, width, true, to.scales + row, scratch, [=](int at, int&) { return place + at * rounded_size<F>(); });
}

// x += delta (unless null), and the norm of it to `held`. `partial`: 32 floats.
__device__ __forceinline__ void norm_to(float* held, float* x, const float* delta, const float* weight, float eps, int n, float* partial) {
  using namespace norm_row;
  const Order order(n);
  const int lane = threadIdx.x % 32;
  for (int t = threadIdx.x; t < order.threads; t += ROUNDERS) {  // whole warps: both are multiples of 32
    float squares = 0;
    for (int k = 0; k < order.per; k++) {
      const int i = QUAD * (k * order.threads + t);
      float4 v = read(x, i, n, true);
      if (delta) {
        v = sum_of(v, read(delta, i, n, true));
        write(x, i, n, true, v);
      }
      write(held, i, n, true, v);
      squares += squares_of(v);
    }
    squares = warp_sum(squares);
    if (lane == 0) partial[t / 32] = squares;
  }
#if !defined(BATON_MUTATION_CUDA_MEGA_NORM)
  __syncthreads();
#endif
  const float scale = scale_of(warp_sum(lane < order.threads / 32 ? partial[lane] : 0), n, eps);
  for (int i = QUAD * int(threadIdx.x); i < n; i += QUAD * ROUNDERS) store4(held + i, normed(load4(held + i), scale, load4(weight + i)));
  __syncthreads();
}

__device__ __forceinline__ void embed(const void* table, int dtype, int token, int n, float* x) {
  for (int i = norm_row::QUAD * int(threadIdx.x); i < n; i += norm_row::QUAD * ROUNDERS) {
    const int64_t at = int64_t(token) * n + i;
    store4(x + i, dtype == BF16 ? load4(static_cast<const bf16*>(table) + at) : load4(static_cast<const float*>(table) + at));
  }
  __syncthreads();
}

}  // namespace
}  // namespace baton
